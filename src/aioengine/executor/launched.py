"""A step on its way through a device: the host's memory that it uses, and its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import InvalidRequest
from aioengine.executor.accelerator import Accelerator, DeviceEvent, HostWords
from aioengine.executor.batch import Step, spans
from aioengine.executor.device_thread import DeferredResult
from aioengine.executor.step_words import ExtraWords, FixedWords, num_fixed_words
from aioengine.kernels.sample_rows import Status
from aioengine.sampler.outputs import DeviceOutputs, Scored
from aioengine.scheduler.plan import NothingAllowed, PromptLogprobs, RowFailure, StepLogprobs, StepResult, int32
from aioengine.structured.rows import GrammarRows

SAMPLED = int(Status.SAMPLED)


class PinnedBuffers:
    """Page-locked memory of one step in flight."""

    def __init__(self, accelerator: Accelerator, max_num_seqs: int, num_groups: int) -> None:
        self._accelerator = accelerator
        self.fixed = accelerator.host_words(num_fixed_words(max_num_seqs, num_groups))
        self._sections = FixedWords.of(self.fixed.array, max_num_seqs, num_groups)
        self.extra = accelerator.host_words(1)
        self.out = accelerator.host_words(1)
        self.late = accelerator.host_words(1)
        """Words that a step's sampling needs, written when its forward pass has been launched."""

    @property
    def sections(self) -> FixedWords[NDArray[Any]]:
        """Sections of the fixed words, to be written.

        Raises:
            InternalError: the device has them.
        """
        self.fixed.take_back()
        return self._sections

    def write_extra(self, extra: ExtraWords) -> None:
        self.extra = self._grown(self.extra, extra.num_words)
        extra.write(self.extra.array)

    def late_words(self, num_words: int) -> NDArray[np.int32]:
        """So many of ``late``, to be written."""
        self.late = self._grown(self.late, num_words)
        return self.late.array[:num_words]

    def make_room(self, num_words: int) -> None:
        """Make room for the words that come back."""
        self.out = self._grown(self.out, num_words)

    def _grown(self, words: HostWords, size: int) -> HostWords:
        return words if size <= len(words) else self._accelerator.host_words(1 << (size - 1).bit_length())

    def lend(self, until: DeviceEvent) -> None:
        self.fixed.lend(until)
        self.extra.lend(until)
        self.late.lend(until)


class LaunchedStep(DeferredResult[StepResult]):
    """A step on its way: what a job of the device thread leaves to the completion thread.

    Args:
        grammar_rows: those of the step's that have grammars are among them.
        keep: what the device still needs.
    """

    def __init__(
        self,
        step: Step,
        words: HostWords,
        events: tuple[DeviceEvent, DeviceEvent],
        failures: dict[int, Exception],
        grammar_rows: GrammarRows,
        keep: object,
    ) -> None:
        self.step = step
        self._words = words
        self._started, self._done = events
        self._failures = failures
        self._grammar_rows = grammar_rows
        self._keep = keep
        self._num_words = step.sizes.num_words
        self._learning = threading.Lock()
        self._is_learned = not (step.learning or step.grammars)
        self._forced: dict[int, list[int]] = {}

    @property
    def is_done(self) -> bool:
        return self._done.is_done()

    def learn(self) -> None:
        """Take in the tokens that the host must know, in the order of launches: the first of its threads that asks
        waits for them and does it."""
        with self._learning:
            if self._is_learned:
                return
            self._done.wait()
            out = DeviceOutputs(self._words.array[: self._num_words], self.step.sizes)
            token_ids = out.token_ids.tolist()
            for sample, known in self.step.learning:
                known.append(token_ids[sample])
            if self.step.grammars:
                good = [one for one in self.step.grammars if out.status[one.sample] == SAMPLED]
                all_forced = self._grammar_rows.learn([(one.row, one.position, token_ids[one.sample]) for one in good])
                self._forced = {one.sample: forced for one, forced in zip(good, all_forced, strict=True) if forced}
            self._is_learned = True

    def wait(self) -> StepResult:
        """Block until the device is done, without the GIL.

        Raises:
            DeviceLost: the device failed.
        """
        try:
            self._done.wait()
            self.learn()
            seconds = self._done.seconds_since(self._started)
        except Exception as error:
            raise DeviceLost(f"the device failed: {error}") from error
        ended_at_s = time.monotonic()
        words = self._words.array[: self._num_words].copy()
        self._keep = None
        return make_result(
            self.step, words, self._failures, forced=self._forced, seconds=seconds, ended_at_s=ended_at_s
        )


def make_result(
    step: Step,
    words: NDArray[np.int32],
    failed_logits_rows: Mapping[int, Exception],
    *,
    forced: Mapping[int, list[int]] = {},
    seconds: float,
    ended_at_s: float,
) -> StepResult:
    """Read a step's words.

    Args:
        words: int32, of ``step.sizes``; the result keeps views of it.
        failed_logits_rows: what the logits processors of a row of logits raised.
        forced: by sample, the tokens that follow its own by a grammar.
        seconds: how long the step held the device. ended_at_s: as in `StepResult`.
    """
    out = DeviceOutputs(words, step.sizes)
    num_samples, num_rows = len(step.row_of_sample), len(step.plan.rows)
    token_ids, status = out.token_ids[:num_samples], out.status[:num_samples]
    is_good = status == SAMPLED
    prompt_logprobs = None
    if step.prompt_tokens is not None:
        index, positions = step.prompt_tokens
        prompt_logprobs = PromptLogprobs(index=index, positions=positions, **_scores(out.prompt, slice(None)))
    failures: tuple[RowFailure, ...] = ()
    if step.failures or failed_logits_rows or not is_good.all():
        failures = _failures(step, status, failed_logits_rows)
        is_good &= ~np.isin(step.row_of_sample, [failure.index for failure in failures])
        token_ids = token_ids[is_good]
    if forced:
        nth = np.cumsum(is_good) - 1
        forced = {int(nth[sample]): token_ids for sample, token_ids in forced.items() if is_good[sample]}
    counts = np.bincount(step.row_of_sample[is_good], minlength=num_rows)
    return StepResult(
        step=step.plan.step,
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        token_ids=token_ids,
        logprobs=_step_logprobs(step, out, is_good) if step.features.num_top >= 0 else None,
        prompt_logprobs=prompt_logprobs,
        failures=failures,
        forced=forced,
        vectors={
            index: vector
            for index, vector in zip(step.pooled, out.vectors, strict=True)
            if index not in step.failures  # a row that could not be described has none
        }
        if step.pooled
        else {},
        device_time_s=seconds,
        ended_at_s=ended_at_s,
    )


def _failures(
    step: Step, status: NDArray[np.int32], failed_logits_rows: Mapping[int, Exception]
) -> tuple[RowFailure, ...]:
    of_processors = {int(step.sampled[logits_row]): error for logits_row, error in failed_logits_rows.items()}
    errors = of_processors | step.failures
    for _, index, _, row, _ in step.grammars:
        if row.problem and index not in errors:
            problem = f"structured: {row.problem}"
            errors[index] = InvalidRequest(problem, param="structured") if row.is_too_large else NothingAllowed(problem)
    for sample in np.flatnonzero(status != SAMPLED).tolist():
        index = int(step.row_of_sample[sample])
        if index not in errors:
            errors[index] = _why_hopeless(
                is_nan=status[sample] == Status.NOT_A_NUMBER,
                is_ruled=bool(step.is_ruled[sample]),
                has_processors=index in step.sampled[step.processed],
            )
    return tuple(RowFailure(index, errors[index]) for index in sorted(errors))


def _why_hopeless(*, is_nan: bool, is_ruled: bool, has_processors: bool) -> Exception:
    """Why no token can be sampled from logits of which the highest is NaN, else -inf."""
    if is_nan:
        after = "the logits are not numbers after the request's processors"
        return ArithmeticError(after if has_processors else "the model's logits are not numbers")
    if is_ruled:
        return NothingAllowed(
            "no token is left to sample: structured, allowed_token_ids, bad_words, min_tokens or a logits processor "
            "mask all, or do so together"
        )
    return ArithmeticError("the model's logits are all -inf")


def _step_logprobs(step: Step, out: DeviceOutputs[NDArray[Any]], is_good: NDArray[np.bool_]) -> StepLogprobs | None:
    samples = np.flatnonzero(step.wants_logprobs & is_good)
    if not len(samples):
        return None
    index = (np.cumsum(is_good) - 1)[samples].astype(np.int32)
    result = StepLogprobs(index=index, **_scores(out.sampled, samples))
    if step.extra_counts is None or step.extra_ids is None:
        return result
    extra = out.extra
    counts = step.extra_counts[samples]
    starts = np.cumsum(step.extra_counts) - step.extra_counts
    entries = spans(starts[samples], counts)
    return msgspec.structs.replace(
        result,
        extra_offsets=int32(np.concatenate(([0], np.cumsum(counts)))),
        extra_ids=step.extra_ids[entries],
        extra_logprobs=extra.logprobs[entries],
        extra_ranks=extra.ranks[entries],
    )


def _scores(scored: Scored[NDArray[Any]], at: Any) -> dict[str, NDArray[Any]]:
    """The columns that `StepLogprobs` and `PromptLogprobs` have in common, of some of the lines."""
    return {name: getattr(scored, name)[at] for name in ("logprobs", "ranks", "top_ids", "top_logprobs")}
