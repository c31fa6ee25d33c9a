"""Serving compiles nothing: whatever the sizes, alignments and widths, what a start has compiled serves them all.

Triton compiles a kernel anew where an integer is 1 or a multiple of 16, or a tensor begins at a multiple of 16 bytes,
when it was not so before, unless the kernel says that it does not look at that. A compilation takes a second or more.
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

STORM = Path(__file__).with_name("launch_storm.py")
KERNELS = {
    name
    for file in Path(aioengine.kernels.__file__).parent.rglob("*.py")
    for name in re.findall(r"^def (_\w+_kernel)\(", file.read_text(), re.MULTILINE)
}
TIMEOUT_S = 300
MODELS = ("8B", "odd")


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, dict[str, Any]]]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, STORM], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_every_kernel_is_launched(told: dict[str, dict[str, dict[str, Any]]], model: str) -> None:
    assert KERNELS
    assert set(told[model]) == KERNELS


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_compiled_after_the_start(told: dict[str, dict[str, dict[str, Any]]], model: str) -> None:
    assert {name: found["later"] for name, found in told[model].items() if found["later"]} == {}


@pytest.mark.parametrize("model", MODELS)
def test_variants_differ_in_constants_alone(told: dict[str, dict[str, dict[str, Any]]], model: str) -> None:
    assert {name for name, found in told[model].items() if found["started"] != found["by_constants"]} == set()


def test_specialisation_would_be_seen(told: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert len(told["careless"]["_specialised"]["later"]) == 4
