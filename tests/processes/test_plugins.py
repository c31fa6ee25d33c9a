"""Plugins: entry points of installed packages, called once before a model is loaded."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aioengine import ConfigError, Engine
from aioengine.processes import plugins
from aioengine.testing import FakeExecutor

Install = Callable[..., Path]

MODULE = """
calls = []
def register(): calls.append("register")
def other(): calls.append("other")
def fail(): raise RuntimeError("no plug fits")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with these plugins, ``name="function"``, into a folder of its own."""
    monkeypatch.setattr(plugins, "_called", set())
    monkeypatch.delenv(plugins.ALLOWED, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugged_in", raising=False)

    def install(**functions: str) -> Path:
        (tmp_path / "plugged_in.py").write_text(MODULE)
        about = tmp_path / "plugged_in-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-in\nVersion: 1.0\n")
        points = "\n".join(f"{name} = plugged_in:{function}" for name, function in functions.items())
        (about / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{points}\n")
        return tmp_path

    return install


def calls() -> list[str]:
    module = sys.modules.get("plugged_in")
    return [] if module is None else module.calls


async def test_each_is_called_once_a_process_however_many_engines_start(install: Install) -> None:
    install(one="register", two="other")
    for _ in range(2):
        async with Engine(executor=FakeExecutor()) as engine:
            assert sorted(calls()) == ["other", "register"]
            assert (await engine.generate([1, 2], max_tokens=1)).finished


@pytest.mark.parametrize(("allowed", "called"), [("one", ["register"]), (" two ,", ["other"]), ("", [])])
async def test_the_environment_says_which(
    install: Install, monkeypatch: pytest.MonkeyPatch, allowed: str, called: list[str]
) -> None:
    install(one="register", two="other", three="fail")
    monkeypatch.setenv(plugins.ALLOWED, allowed)
    async with Engine(executor=FakeExecutor()):
        assert calls() == called


async def test_one_that_fails_is_logged_and_stops_nothing(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(bad="fail", gone="missing", good="register")
    with caplog.at_level(logging.ERROR, "aioengine"):
        for _ in range(2):
            async with Engine(executor=FakeExecutor()):
                assert calls() == ["register"]
    told = [record.getMessage() for record in caplog.records if "plugin" in record.getMessage()]
    assert [("bad" in line, "gone" in line) for line in told] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("allowed", "told"), [("bad", "no plug fits"), ("one,lost", "lost, which no package has .there are: bad, one")]
)
async def test_one_that_is_named_stops_the_start(
    install: Install, monkeypatch: pytest.MonkeyPatch, allowed: str, told: str
) -> None:
    install(one="register", bad="fail")
    monkeypatch.setenv(plugins.ALLOWED, allowed)
    with pytest.raises(ConfigError, match=told):
        await Engine.start(executor=FakeExecutor())


def test_they_are_called_in_the_process_that_computes_before_its_model_is_loaded(install: Install) -> None:
    folder = install(marks="mark")
    (folder / "plugged_in.py").write_text(
        "import os, pathlib, sys\n"
        "def mark():\n"
        "    pathlib.Path(__file__).with_name(f'called-{os.getpid()}-{\"torch\" in sys.modules}').touch()\n"
    )
    program = (
        "import asyncio, os\nfrom aioengine import Engine\n"
        "async def main():\n"
        "    async with Engine(process=True, log_stats_interval_s=0): print(os.getpid())\n"
        "if __name__ == '__main__': asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=_with(folder)
    )
    assert done.returncode == 0, done.stderr
    (mark,) = (path.name for path in folder.glob("called-*"))
    assert mark.endswith("-False")
    assert done.stdout.strip() not in mark


def _with(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
