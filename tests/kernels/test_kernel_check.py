"""Kernels are checked at a device's first start: those that lie, raise, hang or crash are left to plain torch."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from equality.conftest import Oracle, random_ids, starting
from executor.late_device import start_late
from kernels.harness import DEVICE, LAUNCHED, native

from aioengine.kernels import kernel_check
from aioengine.kernels.kernel_cases import GROUPS, ODD, Inputs
from aioengine.kernels.kernel_check import TOLERANCES, CheckWork, difference, find_faulty, run_checks
from aioengine.kernels.operations import NAMES, plain_torch
from aioengine.kernels.triton import find_launchers, triton_operations
from doubles.fake_accelerator import FakeAccelerator

MODULES = ("doubles.faulty_kernels",)
FAULTY = {"rms_norm", "gated_activation", "rms_norm_add", "attend_decode"}
DEADLINE_S = 5.0
"""Many times what the right ones take; one hangs for so long."""
GPU = torch.device(DEVICE)


@pytest.fixture
def fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of `find_faulty`: launchers of which four are faulty; what is found is kept in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return {"modules": MODULES, "operations": (*sorted(FAULTY), "linear"), "deadline_s": DEADLINE_S}


async def test_an_engine_serves_without_faulty_kernels_which_one_warning_names_at_each_start(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a device that is late, as a GPU is."""
    assert await asyncio.to_thread(find_faulty, GPU, torch.float32, **fields) == FAULTY
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    for problem in (
        "attend_decode: it ended its process with code -9",
        "gated_activation: RuntimeError: out of resource: shared memory",
        "rms_norm: it differs from plain torch by ",
        "rms_norm_add: it did not end within 5 s",
    ):
        assert problem in warning
    monkeypatch.setattr(kernel_check, "run_checks", None)
    caplog.clear()
    assert await asyncio.to_thread(find_faulty, GPU, torch.float32, **fields) == FAULTY, "what was found is kept"
    assert [record.getMessage() for record in caplog.records] == [warning]

    faulty = FAULTY | find_launchers().keys() - {"linear"}
    operations = await asyncio.to_thread(triton_operations, faulty, MODULES)
    assert not operations.is_capturable
    folder = await asyncio.to_thread(make_checkpoint, tmp_path / "model", "qwen3")
    prompt = random_ids(random.Random(1), 9)
    options: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**24, "cuda_graphs": "off"}
    executor = await start_late(folder, FakeAccelerator(), operations, **options)
    async with starting(folder, executor=executor, **options) as engine:
        output = await engine.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
    oracle = await asyncio.to_thread(Oracle, folder)
    assert output.outputs[0].token_ids == oracle.generate(prompt, 8).token_ids


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("raise SystemExit('no context')", "no context"),
        (
            """print('{"operation": "draw"}', flush=True); raise SystemExit(75)""",
            "too little memory",
        ),
    ],
)
def test_kernels_that_cannot_be_checked_are_used_and_a_warning_says_so(
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    program: str,
    problem: str,
) -> None:
    monkeypatch.setattr(kernel_check, "_CHECK", program)
    assert find_faulty(GPU, torch.float32, **fields) == set()
    assert "the GPU's kernels could not be checked, and are used as they are" in caplog.text
    assert problem in caplog.text


def check_all(work: CheckWork, computed: set[str]) -> None:
    found = list(run_checks(work))
    assert {each.operation: each.problem for each in found if each.problem} == {}
    assert {each.operation for each in found} == computed


@pytest.mark.nightly
def test_all_of_tritons_kernels_pass() -> None:
    """In the interpreter, which multiplies no bfloat16."""
    work = CheckWork(device=DEVICE, dtype="float32", modules=("aioengine.kernels.triton.draw",))
    check_all(work, LAUNCHED | {"linear"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_native_kernels_pass(dtype: str) -> None:
    check_all(CheckWork(device="cpu", dtype=dtype), COMPUTED)


COMPUTED = {*NAMES} - {"prefill_tile", "attention_output", "pack", "unpack", "unpack_codes"}


def test_there_are_cases_of_each_operation_that_computes() -> None:
    inputs = Inputs(ODD, torch.device("cpu"), torch.float32)
    assert {case.operation for make in GROUPS for case in make(inputs)} == COMPUTED
    assert all(native.has_kernel(name) for name in COMPUTED)
    assert not any(plain_torch.has_kernel(name) for name in COMPUTED)


def test_differences_are_shares_of_what_is_tolerated() -> None:
    one = torch.tensor([1.0, math.nan, math.inf])
    assert difference([one], [one.clone()]) == 0
    assert difference([one + 2e-4], [one]) == pytest.approx(1e-4 / TOLERANCES[torch.float32], rel=1e-2)
    for other in (torch.tensor([1.0, 0.0, math.inf]), torch.tensor([1.0, math.nan, -math.inf]), one.double(), one[:2]):
        assert difference([other], [one]) == math.inf
    assert difference([torch.tensor([1])], [torch.tensor([2])]) == math.inf
