"""What came back of a step from a GPU, as a `StepResult`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioengine.executor.gpu_batch import GpuStep
from aioengine.kernels.sampling.slots import Status
from aioengine.sampler import spans
from aioengine.sampler.outputs import Outputs, Scored
from aioengine.scheduler.plan import PromptLogprobs, RowFailure, StepLogprobs, StepResult, int32


def make_result(
    step: GpuStep, words: NDArray[np.int32], failed_lines: Mapping[int, Exception], *, seconds: float, ended_at_s: float
) -> StepResult:
    """Read a step's words.

    Args:
        words: int32, of ``step.sizes``; the result keeps views of it.
        failed_lines: what went wrong with a line's logits processors.
        seconds: how long the step held the device. ended_at_s: as in `StepResult`.
    """
    out = Outputs.of(words, step.sizes)
    num_slots, num_rows = len(step.slot_rows), len(step.plan.rows)
    token_ids, status = out.token_ids[:num_slots], out.status[:num_slots]
    is_good = status == Status.SAMPLED
    failures = _failures(step, status, failed_lines)
    if failures:
        is_good &= ~np.isin(step.slot_rows, [failure.index for failure in failures])
        token_ids = token_ids[is_good]
    counts = np.bincount(step.slot_rows[is_good], minlength=num_rows)
    return StepResult(
        step=step.plan.step,
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        token_ids=token_ids,
        logprobs=_step_logprobs(step, out, is_good) if step.features.num_top >= 0 else None,
        prompt_logprobs=_prompt_logprobs(step, out.prompt),
        failures=failures,
        device_time_s=seconds,
        ended_at_s=ended_at_s,
    )


def _failures(
    step: GpuStep, status: NDArray[np.int32], failed_lines: Mapping[int, Exception]
) -> tuple[RowFailure, ...]:
    errors = {int(step.sampled[line]): error for line, error in failed_lines.items()}
    for slot in np.flatnonzero(status != Status.SAMPLED).tolist():
        index = int(step.slot_rows[slot])
        if index not in errors:
            errors[index] = _why(int(status[slot]), step, slot)
    return tuple(RowFailure(index, errors[index]) for index in sorted(errors))


def _why(status: int, step: GpuStep, slot: int) -> Exception:
    if status == Status.NOT_A_NUMBER:
        is_processed = any(step.sampled[line] == step.slot_rows[slot] for line in step.processed)
        after = "the logits are not numbers after the request's processors"
        return ArithmeticError(after if is_processed else "the model's logits are not numbers")
    if step.is_ruled[slot]:
        return ValueError(
            "no token is left to sample: allowed_token_ids, bad_words, min_tokens or a logits processor mask all"
        )
    return ArithmeticError("the model's logits are all -inf")


def _step_logprobs(step: GpuStep, out: Outputs[NDArray[Any]], is_good: NDArray[np.bool_]) -> StepLogprobs | None:
    slots = np.flatnonzero(step.wants_logprobs & is_good)
    if not len(slots):
        return None
    scored = out.sampled
    result = StepLogprobs(
        index=(np.cumsum(is_good) - 1)[slots].astype(np.int32),
        logprobs=scored.logprobs[slots],
        ranks=scored.ranks[slots],
        top_ids=scored.top_ids[slots],
        top_logprobs=scored.top_logprobs[slots],
    )
    return result if step.extra_counts is None else _with_extra(result, step, out.extra, slots)


def _with_extra(
    result: StepLogprobs, step: GpuStep, extra: Scored[NDArray[Any]], slots: NDArray[np.int64]
) -> StepLogprobs:
    assert step.extra_counts is not None
    assert step.extra_ids is not None
    counts = step.extra_counts[slots]
    starts = np.cumsum(step.extra_counts) - step.extra_counts
    lines = spans(starts[slots], counts)
    return StepLogprobs(
        index=result.index,
        logprobs=result.logprobs,
        ranks=result.ranks,
        top_ids=result.top_ids,
        top_logprobs=result.top_logprobs,
        extra_offsets=int32(np.concatenate(([0], np.cumsum(counts)))),
        extra_ids=step.extra_ids[lines],
        extra_logprobs=extra.logprobs[lines],
        extra_ranks=extra.ranks[lines],
    )


def _prompt_logprobs(step: GpuStep, scored: Scored[NDArray[Any]]) -> PromptLogprobs | None:
    lines = step.prompt_lines
    if lines is None:
        return None
    return PromptLogprobs(
        index=lines.index,
        positions=lines.positions,
        logprobs=scored.logprobs,
        ranks=scored.ranks,
        top_ids=scored.top_ids,
        top_logprobs=scored.top_logprobs,
    )
