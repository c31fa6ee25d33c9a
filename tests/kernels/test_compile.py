"""Every kernel becomes machine code for sm_80 and sm_90, on a machine without a GPU, and none spills registers.

``python -m benchmarks.gpu.compile`` takes all specimens; here it is the first one of each kernel.
"""

from __future__ import annotations

import json
import os
import re
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
    for file in KERNELS_FOLDER.glob("*.py")
    for name in re.findall(r"^def (_\w+_kernel)\(", file.read_text(), re.MULTILINE)
}
TIMEOUT_S = 300
"""A hundred compilations; many times what they take where nothing else runs."""


def compile_kernels(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    file = folder / "compiled.json"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compile", "--jobs", "2", "--json", str(file), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1"},  # to be ignored, whoever set it
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


def test_every_kernel_has_a_specimen(compiled: list[dict[str, Any]]) -> None:
    assert KERNELS
    assert {line["kernel"] for line in compiled} >= KERNELS


def test_all_are_compiled_for_both_capabilities(compiled: list[dict[str, Any]]) -> None:
    """The first specimen of a kernel is one that each of them runs."""
    for capability in (80, 90):
        assert {line["kernel"] for line in compiled if line["capability"] == capability} >= KERNELS
    assert all(line["registers"] > 0 for line in compiled)


def test_none_fails_spills_or_takes_too_much(compiled: list[dict[str, Any]]) -> None:
    assert {f"{line['name']}, sm_{line['capability']}": line["fault"] for line in compiled if line["fault"]} == {}


def test_where_nothing_was_compiled_that_is_no_success(tmp_path: Path) -> None:
    code, lines, _ = compile_kernels(tmp_path, "--only", "no kernel has this name")
    assert (code, lines) == (1, [])
