"""What README and `docs/from-vllm.md` say runs as it stands, on the bundled model in place of a downloaded one."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioengine
from aioengine.testing import FakeExecutor

README = Path(__file__).parents[1] / "README.md"
FROM_VLLM = README.with_name("docs") / "from-vllm.md"


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


BLOCKS = blocks_of(README)
PROGRAMS = [block for block in BLOCKS if "import" in block] + blocks_of(FROM_VLLM)
"""Those that stand for themselves; the others go on where the one before has stopped, as cells of a notebook do."""
CELLS = [block for block in BLOCKS if block not in PROGRAMS]


IM_END = 2
"""A token that ends the demo model's output."""


async def run_cells(cells: list[str], names: dict[str, Any]) -> None:
    """Run cells one after the other; ``await`` may stand outside functions."""
    for cell in cells:
        code = compile(cell, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result


def test_there_are_programs_and_cells() -> None:
    assert len(PROGRAMS) == 7 + 2
    assert len(CELLS) >= 6


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where ``aioengine serve`` serves, as the README says."""
    command = [sys.executable, "-m", "aioengine", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            match = re.fullmatch(r"serving demo at (http://127.0.0.1:\d+)\n", line)
            assert match is not None, line
            yield match[1]
        finally:
            server.terminate()


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs(number: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program = PROGRAMS[number]
    if "http://127.0.0.1:8000" in program:
        program = program.replace("http://127.0.0.1:8000", request.getfixturevalue("url"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=dict(os.environ),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    if "What is 8 + 7?" in program:
        assert "15" in done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_line_with_curl_brings_an_answer(url: str) -> None:
    (command,) = re.findall(r"^\$ (curl .*\n.*)$", README.read_text(), flags=re.MULTILINE)
    command = command.replace("http://127.0.0.1:8000", url).replace("curl ", "curl --silent --fail ", 1)
    command = command.replace('"messages"', '"temperature": 0, "messages"')  # no token drawn by chance
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert "15" in json.loads(done.stdout)["choices"][0]["message"]["content"], done.stderr


def test_the_program_about_testing_runs_whatever_tokens_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyEnds(FakeExecutor):
        def __init__(self, **options: Any) -> None:
            super().__init__(sampler=lambda token_ids, sampling: IM_END, **options)

    monkeypatch.setattr("aioengine.testing.FakeExecutor", OnlyEnds)
    (program,) = (program for program in PROGRAMS if "FakeExecutor" in program)
    exec(compile(program, "README.md", "exec"), {})


def test_prose_fits_its_lines() -> None:
    prose = re.sub(r"^```.*?^```", "", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 120] == []


def rows_of(page: Path, section: str) -> list[tuple[str, str]]:
    """The two columns of the table in a section."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| (`.*?) \| (.*) \|$", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("section", "make"),
    [
        ("Sampling parameters", aioengine.SamplingParams),
        ("Engine arguments", lambda **given: aioengine.Engine(**given)),
    ],
)
def test_what_is_said_of_vllms_arguments_is_so(section: str, make: Any) -> None:
    rows = rows_of(FROM_VLLM, section)
    told = [(code, here) for vllm, here in rows for code in re.findall(r"`(\w+=.*?)`", vllm)]
    assert len(told) > 15
    for code, here in told:
        given = eval(f"dict({code})")
        if here.startswith("taken"):
            make(**given)
        else:
            assert here.startswith("refused: ")
            with pytest.raises((aioengine.InvalidRequest, aioengine.ConfigError), match=next(iter(given))):
                make(**given)


async def test_the_cells_run_one_after_the_other(tmp_path: Path) -> None:
    replaced = {
        '"Qwen/Qwen3-0.6B", max_model_len=4096, max_num_seqs=64': "max_num_seqs=64, kv_cache_memory_bytes=2**24",
        "await engine.aclose()": "pass",
        '"trace.json"': repr(str(tmp_path / "trace.json")),
        '"./checkpoint"': repr(str(tmp_path / "checkpoint")),
        ', or tensors={"model.norm.weight": tensor, ...}': "",
    }
    cells = CELLS
    for old, new in replaced.items():
        cells = [cell.replace(old, new) for cell in cells]
    names: dict[str, Any] = {
        "asyncio": asyncio,
        "Engine": aioengine.Engine,
        "prompts": ["Once upon a time", "Hello"],
        "digit_ids": [15, 16],
    }
    try:
        await run_cells(cells, names)
        assert (tmp_path / "trace.json").stat().st_size > 1000
        assert len(names["out"].outputs) == 3
    finally:
        await names["engine"].aclose()
