"""Every kernel becomes machine code for sm_80 and sm_90, on a machine without a GPU, and none spills registers.

``python -m benchmarks.gpu.compile`` takes all cases; here it is the first one of each kernel.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.harness import KERNELS

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300
"""A hundred compilations; many times what they take where nothing else runs."""


def test_every_kernel_is_compiled_for_both_capabilities_and_none_spills_or_takes_too_much(tmp_path: Path) -> None:
    """The first case of a kernel is one that each of them runs."""
    file = tmp_path / "compiled.json"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compile", "--jobs", "2", "--json", str(file), "--quick"],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1"},  # to be ignored
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert file.exists(), ended.stdout + ended.stderr
    lines = json.loads(file.read_text())["kernels"]
    assert {f"{line['name']}, sm_{line['capability']}": line["fault"] for line in lines if line["fault"]} == {}
    for capability in (80, 90):
        assert {line["kernel"] for line in lines if line["capability"] == capability} >= KERNELS
    assert all(line["registers"] > 0 for line in lines)


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
