"""Serving compiles nothing: whatever the sizes, alignments and widths, what a start has compiled serves them all.

Triton compiles a kernel anew where an integer is 1 or a multiple of 16, or a tensor begins at a multiple of 16 bytes,
when it was not so before, unless the kernel says that it does not look at that. A compilation takes a second or more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.harness import KERNELS

STORM = Path(__file__).with_name("launch_storm.py")
TIMEOUT_S = 300


@pytest.mark.nightly
def test_nothing_is_compiled_after_the_start_and_variants_differ_in_constants_alone() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, STORM], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert len(told["careless"]["_specialised"]["later"]) == 4, "it would be seen"
    for model in ("8B", "odd"):
        assert set(told[model]) == KERNELS
        assert {name: found["later"] for name, found in told[model].items() if found["later"]} == {}
        assert {name for name, found in told[model].items() if found["started"] != found["by_constants"]} == set()
