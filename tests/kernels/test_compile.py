"""Every kernel becomes machine code for sm_80 and sm_90, on a machine without a GPU, and none spills registers.

``python -m benchmarks.gpu.compile`` takes all cases; here it is the first one of each kernel.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aioengine.kernels

pytest.importorskip("triton")

REPOSITORY = Path(__file__).parents[2]
KERNELS_FOLDER = Path(aioengine.kernels.__file__).parent
KERNELS = {
    name
    for file in KERNELS_FOLDER.rglob("*.py")
    for name in re.findall(r"^def (_\w+_kernel)\(", file.read_text(), re.MULTILINE)
}
TIMEOUT_S = 300
"""A hundred compilations; many times what they take where nothing else runs."""


def compile_kernels(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    file = folder / "compiled.json"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compile", "--jobs", "2", "--json", str(file), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1"},  # to be ignored
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    lines = json.loads(file.read_text())["kernels"] if file.exists() else []
    return ended.returncode, lines, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    _, lines, shown = compile_kernels(tmp_path_factory.mktemp("compiled"), "--quick")
    assert lines, shown
    return lines


def test_every_kernel_has_a_case(compiled: list[dict[str, Any]]) -> None:
    assert KERNELS
    assert {line["kernel"] for line in compiled} >= KERNELS


def test_all_are_compiled_for_both_capabilities(compiled: list[dict[str, Any]]) -> None:
    """The first case of a kernel is one that each of them runs."""
    for capability in (80, 90):
        assert {line["kernel"] for line in compiled if line["capability"] == capability} >= KERNELS
    assert all(line["registers"] > 0 for line in compiled)


def test_none_fails_spills_or_takes_too_much(compiled: list[dict[str, Any]]) -> None:
    assert {f"{line['name']}, sm_{line['capability']}": line["fault"] for line in compiled if line["fault"]} == {}


@pytest.mark.parametrize(
    ("capability", "is_default", "kib", "passes"),
    [
        *((80, True, 99, True), (80, True, 100, False), (80, False, 163, True), (80, False, 164, False)),
        *((89, True, 100, False), (89, False, 227, True), (120, True, 100, False), (120, False, 227, True)),
        *((90, True, 227, True), (90, True, 228, False), (90, False, 228, False), (110, True, 999, True)),
    ],
)
def test_defaults_must_fit_into_every_gpu_of_their_kind(
    monkeypatch: pytest.MonkeyPatch, capability: int, is_default: bool, kib: int, passes: bool
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    module = importlib.import_module("benchmarks.gpu.compile")
    compiled = module.Compiled(
        name="", kernel="", capability=capability, shared_bytes=kib * 1024, is_default=is_default
    )
    assert (compiled.fault() == "") is passes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--only nosuchkernel", "no case matches 'nosuchkernel' for 80, 90"),
        ("--capability 75", "a capability of 8.0 or newer is needed, such as --capability 80, not 75"),
        ("--capability 80 999", "there is no capability 999; known are 80, "),
        ("--jobs -3", "a positive number is needed, not '-3'"),
        ("--json {folder}/none/file", "/none/file cannot be written: No such file or directory"),
    ],
)
def test_where_nothing_can_be_compiled_that_is_said_at_once(tmp_path: Path, arguments: str, message: str) -> None:
    code, lines, shown = compile_kernels(tmp_path, *arguments.format(folder=tmp_path).split())
    assert (code, lines) == (2, [])
    assert message in shown.splitlines()[-1]


def test_without_triton_the_command_says_what_to_install() -> None:
    script = (
        "import sys, runpy; sys.modules['triton'] = None; runpy.run_module('benchmarks.gpu.compile', None, '__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, "Triton is not installed: pip install triton, or '.[dev]'\n")


def test_ctrl_c_ends_the_workers_and_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.compile", "--jobs", "2"],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]  # two of them say what is coming
    os.killpg(process.pid, signal.SIGINT)
    _, shown = process.communicate(timeout=TIMEOUT_S)  # workers hold stderr: they have ended, too
    assert (process.returncode, shown) == (130, "interrupted\n"), lines
    assert list(tmp_path.iterdir()) == []
