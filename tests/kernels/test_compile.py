"""Every kernel becomes machine code for sm_80 and sm_90, on a machine without a GPU, and none spills registers.

``python -m benchmarks.gpu.compile`` takes all cases; here it is the first one of each kernel.
"""

from __future__ import annotations

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


@pytest.mark.nightly
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
