"""Launch parameters of attention: measured at a GPU's start, never in the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from executor.late_device import start_late
from executor.tiny_decoder import tiny_config

from aioengine.executor import tune
from aioengine.executor.accelerator import Work
from aioengine.executor.tune import tune_attention
from aioengine.kernels.attention.launch_choices import (
    ATTENTION_KERNELS,
    DECODE,
    DECODE_IN_SPLITS,
    PREFILL,
    TUNED,
    AttentionShape,
    LaunchChoice,
    candidates,
    choice_of,
)
from aioengine.kernels.operations import Operations
from aioengine.kernels.operations import plain_torch as reference
from doubles.fake_accelerator import FakeAccelerator

CPU = torch.device("cpu")
MODEL: Any = tiny_config(head_dim=128, max_model_len=8192, dtype=torch.bfloat16)
CACHE = torch.bfloat16, 16
"""Dtype and tokens of its blocks."""
SHAPE = AttentionShape(128, 2, 2, 2, 2, 16)
CANDIDATES = {kernel: candidates(kernel, SHAPE, 90) for kernel in ATTENTION_KERNELS}
DEFAULTS = {kernel: found[0] for kernel, found in CANDIDATES.items()}
MIB = 2**20


class TimedGpu(FakeAccelerator):
    """A GPU whose launches of attention take what a script says; each timing takes a second of ``now``.

    Args:
        script: seconds of a kernel launched by a choice.

    Attributes:
        operations: the oracles, with something to choose.
        computes: attention does; it is timed by the script.
        timed: kernels and choices, in order.
        launched: arguments of what was launched last, by kernel.
    """

    def __init__(self, script: Callable[[str, LaunchChoice], float], **memory: int) -> None:
        super().__init__(**{"free_bytes": 4 * MIB, **memory})
        self.script = script
        self.now = 0.0
        self.computes = False
        self.timed: list[tuple[str, LaunchChoice]] = []
        self.launched: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._last = "", LaunchChoice()
        attend = {"attend_decode": self._attend_decode, "attend_prefill": self._attend_prefill}
        self.operations: Any = Operations()
        for name, operation in {**attend, "is_tunable": True}.items():
            setattr(self.operations, name, operation)

    def _attend_decode(self, *arguments: Any, **keywords: Any) -> None:
        self._note(DECODE_IN_SPLITS if keywords["num_splits"] > 1 else DECODE, arguments, keywords)
        if self.computes:
            reference.attend_decode(*arguments, **keywords)

    def _attend_prefill(self, *arguments: Any) -> None:
        self._note(PREFILL, arguments, {})
        if self.computes:
            reference.attend_prefill(*arguments)

    def _note(self, kernel: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.launched[kernel] = arguments, keywords
        q, kv, *_ = arguments
        self._last = kernel, choice_of(kernel, CPU, AttentionShape.of(q, kv.k_cache))

    def seconds_of(self, work: Work) -> float:
        assert super().seconds_of(work) >= 0
        self.timed.append(self._last)
        self.now += 1.0
        return self.script(*self._last)

    def tune(self, model: Any = MODEL, deadline_s: float = 1e9) -> None:
        tune_attention(self, model, *CACHE, deadline_s=deadline_s, clock=lambda: self.now)


def chosen() -> dict[str, LaunchChoice]:
    return {kernel: choice_of(kernel, CPU, SHAPE) for kernel in ATTENTION_KERNELS}


def last_is_fastest(kernel: str, choice: LaunchChoice) -> float:
    return 1.0 / (1 + CANDIDATES[kernel].index(choice))


@pytest.fixture(autouse=True)
def nothing_is_chosen() -> Iterator[None]:
    TUNED.clear()
    yield
    TUNED.clear()


def test_the_fastest_of_each_kernels_candidates_is_taken_once_in_a_process() -> None:
    gpu = TimedGpu(last_is_fastest)
    gpu.tune()
    assert gpu.timed == [(kernel, choice) for kernel in ATTENTION_KERNELS for choice in CANDIDATES[kernel]]
    assert gpu.num_releases == 1
    second = TimedGpu(lambda kernel, choice: 1.0)
    second.tune()
    assert (second.timed, second.num_enqueued, second.num_releases) == ([], 0, 0)
    assert chosen() == {kernel: found[-1] for kernel, found in CANDIDATES.items()}


def test_after_the_deadline_what_is_not_measured_is_as_by_default() -> None:
    gpu = TimedGpu(last_is_fastest)
    gpu.tune(deadline_s=2.5)
    assert len(gpu.timed) == 3
    assert chosen() == {**DEFAULTS, DECODE: CANDIDATES[DECODE][2]}


def test_candidates_that_cannot_be_launched_are_passed_over() -> None:
    def script(kernel: str, choice: LaunchChoice) -> float:
        if choice.num_stages > 2:
            raise RuntimeError("out of shared memory")
        return 1.0

    TimedGpu(script).tune()
    assert chosen()[DECODE] == next(choice for choice in CANDIDATES[DECODE] if choice.num_stages == 2)


@pytest.mark.parametrize(
    ("memory", "model"),
    [({}, MODEL), ({"free_bytes": 1000}, MODEL), ({}, tiny_config(num_kv_heads=0))],
    ids=["nothing can be launched", "no memory", "a failure of its own"],
)
def test_what_cannot_be_measured_is_as_by_default(
    memory: dict[str, int], model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def script(kernel: str, choice: LaunchChoice) -> float:
        raise RuntimeError("no such launch")

    with caplog.at_level(logging.DEBUG, "aioengine"):
        TimedGpu(script, **memory).tune(model)
    assert "measured" in caplog.text
    assert chosen() == DEFAULTS


def test_operations_with_nothing_to_choose_leave_the_gpu_alone() -> None:
    gpu = FakeAccelerator()
    tune_attention(gpu, MODEL, *CACHE)
    assert (gpu.num_enqueued, gpu.num_releases) == (0, 0)


def test_what_is_measured_is_as_large_as_serving_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "MAX_CACHE_BYTES", 64 * MIB)  # a fourth of the heads, of the bytes
    gpu = TimedGpu(last_is_fastest, free_bytes=2**40)
    gpu.tune(msgspec.structs.replace(MODEL, num_heads=16))
    for kernel, num_rows, num_tokens, context in (
        (DECODE, 64, 64, 1024),
        (DECODE_IN_SPLITS, 1, 1, 4096),
        (PREFILL, 1, 2048, 2048),
    ):
        (q, (k_cache, v_cache, tables, *_), lines, out), keywords = gpu.launched[kernel]
        assert tuple(q.shape) == tuple(out.shape) == (num_tokens, 16, 128)
        assert tuple(tables.shape) == (num_rows, context // 16)
        assert tables.unique().numel() == tables.numel()
        assert 0 <= tables.min() <= tables.max() < len(k_cache)
        assert k_cache.nbytes + v_cache.nbytes <= 64 * MIB
        assert k_cache.isfinite().all()
        if kernel == PREFILL:
            assert lines[:, 2].sum() == num_tokens
        else:
            assert lines.tolist() == [[row, row, context] for row in range(num_rows)]
            assert keywords["max_context"] == context


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_a_start_tunes_unless_told_not_to(is_wanted: bool, checkpoint: Callable[..., Path]) -> None:
    gpu = TimedGpu(lambda kernel, choice: 1.0)
    gpu.computes = True
    folder = checkpoint("llama2", num_hidden_layers=1)
    fields = {"dtype": "bfloat16", "max_model_len": 16, "cuda_graphs": "off"}
    executor = await start_late(folder, gpu, gpu.operations, tune_kernels=is_wanted, **fields)
    await executor.aclose()
    assert bool(gpu.timed) == bool(TUNED) == is_wanted
