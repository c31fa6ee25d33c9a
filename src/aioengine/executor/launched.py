"""A step on its way through a GPU: the host's memory that it uses, what of it is on the device, what comes back."""

from __future__ import annotations

import time

from torch import Tensor

from aioengine.core.executor_protocol import DeviceLost
from aioengine.executor.accelerator import Accelerator, DeviceEvent, HostWords
from aioengine.executor.completion_thread import DeferredResult
from aioengine.executor.gpu_batch import GpuStep
from aioengine.executor.gpu_result import make_result
from aioengine.executor.step_words import WORDS_A_ROW, ExtraWords, Span
from aioengine.scheduler.plan import StepResult


class Uploaded:
    """A step's extra words on the device, once they are there."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self.words: Tensor | None = None

    def get(self, span: Span) -> Tensor:
        assert self.words is not None
        return span.of(self.words)


class Forward:
    """What a forward pass brings, once it has run: [T, hidden], and float32 [n, vocab]."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None


class PinnedBuffers:
    """Page-locked memory of one step in flight."""

    def __init__(self, accelerator: Accelerator, max_num_seqs: int) -> None:
        self._accelerator = accelerator
        self.fixed = accelerator.host_words(max_num_seqs * WORDS_A_ROW)
        self.extra = accelerator.host_words(1)
        self.out = accelerator.host_words(1)

    def write_extra(self, extra: ExtraWords) -> None:
        self.extra = self._grown(self.extra, extra.num_words)
        extra.write(self.extra.array)

    def make_room(self, num_words: int) -> None:
        """For what comes back."""
        self.out = self._grown(self.out, num_words)

    def _grown(self, words: HostWords, size: int) -> HostWords:
        return words if size <= len(words) else self._accelerator.host_words(1 << (size - 1).bit_length())

    def lend(self, until: DeviceEvent) -> None:
        self.fixed.lend(until)
        self.extra.lend(until)


class LaunchedStep(DeferredResult[StepResult]):
    """A step on its way: what a job of the device thread leaves to the waiter.

    Args:
        keep: what the device still needs.
    """

    def __init__(
        self,
        step: GpuStep,
        words: HostWords,
        events: tuple[DeviceEvent, DeviceEvent],
        failures: dict[int, Exception],
        keep: object,
    ) -> None:
        self.step = step
        self._words = words
        self._started, self._done = events
        self._failures = failures
        self._keep = keep
        self._num_words = step.sizes.num_words

    @property
    def is_done(self) -> bool:
        return self._done.is_done()

    def token_ids(self) -> list[int]:
        """The samples' tokens; waits for them."""
        self._done.wait()
        return list(self._words.array[: self.step.sizes.num_samples].tolist())

    def wait(self) -> StepResult:
        """Block until the device is done, without the GIL.

        Raises:
            DeviceLost: the device failed.
        """
        try:
            self._done.wait()
            seconds = self._done.seconds_since(self._started)
        except Exception as error:
            raise DeviceLost(f"the GPU failed: {error}") from error
        ended_at_s = time.monotonic()
        words = self._words.array[: self._num_words].copy()
        self._keep = None
        return make_result(self.step, words, self._failures, seconds=seconds, ended_at_s=ended_at_s)
