"""What came back of a step from a GPU, as a `StepResult`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioengine.executor.gpu_batch import GpuStep
from aioengine.kernels.sampling.sample_rows import Status
from aioengine.sampler import spans
from aioengine.sampler.outputs import Outputs, Scored
from aioengine.scheduler.plan import PromptLogprobs, RowFailure, StepLogprobs, StepResult, int32


def make_result(
    step: GpuStep,
    words: NDArray[np.int32],
    failed_logits_rows: Mapping[int, Exception],
    *,
    seconds: float,
    ended_at_s: float,
) -> StepResult:
    """Read a step's words.

    Args:
        words: int32, of ``step.sizes``; the result keeps views of it.
        failed_logits_rows: what the logits processors of a row of logits raised.
        seconds: how long the step held the device. ended_at_s: as in `StepResult`.
    """
    out = Outputs.of(words, step.sizes)
    num_samples, num_rows = len(step.row_of_sample), len(step.plan.rows)
    token_ids, status = out.token_ids[:num_samples], out.status[:num_samples]
    is_good = status == Status.SAMPLED
    failures = _failures(step, status, failed_logits_rows)
    if failures:
        is_good &= ~np.isin(step.row_of_sample, [failure.index for failure in failures])
        token_ids = token_ids[is_good]
    counts = np.bincount(step.row_of_sample[is_good], minlength=num_rows)
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
    step: GpuStep, status: NDArray[np.int32], failed_logits_rows: Mapping[int, Exception]
) -> tuple[RowFailure, ...]:
    errors = {int(step.sampled[logits_row]): error for logits_row, error in failed_logits_rows.items()}
    for sample in np.flatnonzero(status != Status.SAMPLED).tolist():
        index = int(step.row_of_sample[sample])
        if index not in errors:
            errors[index] = _why(int(status[sample]), step, sample)
    return tuple(RowFailure(index, errors[index]) for index in sorted(errors))


def _why(status: int, step: GpuStep, sample: int) -> Exception:
    if status == Status.NOT_A_NUMBER:
        is_processed = any(step.sampled[logits_row] == step.row_of_sample[sample] for logits_row in step.processed)
        after = "the logits are not numbers after the request's processors"
        return ArithmeticError(after if is_processed else "the model's logits are not numbers")
    if step.is_ruled[sample]:
        return ValueError(
            "no token is left to sample: allowed_token_ids, bad_words, min_tokens or a logits processor mask all"
        )
    return ArithmeticError("the model's logits are all -inf")


def _step_logprobs(step: GpuStep, out: Outputs[NDArray[Any]], is_good: NDArray[np.bool_]) -> StepLogprobs | None:
    samples = np.flatnonzero(step.wants_logprobs & is_good)
    if not len(samples):
        return None
    scored = out.sampled
    result = StepLogprobs(
        index=(np.cumsum(is_good) - 1)[samples].astype(np.int32),
        logprobs=scored.logprobs[samples],
        ranks=scored.ranks[samples],
        top_ids=scored.top_ids[samples],
        top_logprobs=scored.top_logprobs[samples],
    )
    return result if step.extra_counts is None else _with_extra(result, step, out.extra, samples)


def _with_extra(
    result: StepLogprobs, step: GpuStep, extra: Scored[NDArray[Any]], samples: NDArray[np.int64]
) -> StepLogprobs:
    assert step.extra_counts is not None
    assert step.extra_ids is not None
    counts = step.extra_counts[samples]
    starts = np.cumsum(step.extra_counts) - step.extra_counts
    entries = spans(starts[samples], counts)
    return StepLogprobs(
        index=result.index,
        logprobs=result.logprobs,
        ranks=result.ranks,
        top_ids=result.top_ids,
        top_logprobs=result.top_logprobs,
        extra_offsets=int32(np.concatenate(([0], np.cumsum(counts)))),
        extra_ids=step.extra_ids[entries],
        extra_logprobs=extra.logprobs[entries],
        extra_ranks=extra.ranks[entries],
    )


def _prompt_logprobs(step: GpuStep, scored: Scored[NDArray[Any]]) -> PromptLogprobs | None:
    prompt = step.prompt_tokens
    if prompt is None:
        return None
    return PromptLogprobs(
        index=prompt.index,
        positions=prompt.positions,
        logprobs=scored.logprobs,
        ranks=scored.ranks,
        top_ids=scored.top_ids,
        top_logprobs=scored.top_logprobs,
    )
