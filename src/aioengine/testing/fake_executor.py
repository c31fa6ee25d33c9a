"""A device that computes nothing and checks everything.

`FakeExecutor` keeps the rows, block tables and KV blocks that a real device would, with the token ids themselves as the
"KV". What it samples is a hash of all the tokens that it reads *through the block table*, so that a block freed too
early, shared wrongly or not yet written changes the output. It refuses plans that a device could not run.
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Callable

import msgspec
import numpy as np

from aioengine.core.plan import Int32, RowAdded, RowSampling, StepLogprobs, StepPlan, StepResult, Want, int32
from aioengine.executor.protocol import DeviceLost, ExecutorInfo, ExecutorStats

Sampler = Callable[[list[int], RowSampling], int]
"""(all tokens of the sequence, as read from the KV; the row's sampling) -> the next token."""


def sample_hash(token_ids: list[int], sampling: RowSampling, *, vocab_size: int) -> int:
    """A token that depends on every token before it and on the seed, and on nothing else."""
    return zlib.crc32(np.array([sampling.seed & 0x7FFFFFFF, *token_ids], np.int32).tobytes()) % vocab_size


_MEANINGLESS = 0


class _Row(msgspec.Struct):
    added: RowAdded
    tokens: list[int]
    blocks: list[int]


class FakeStep:
    """A launched step of a `FakeExecutor`."""

    def __init__(self, executor: FakeExecutor, step: int, outcome: StepResult | Exception) -> None:
        self.step = step
        self._executor = executor
        self._outcome = outcome
        self._done = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def complete(self) -> None:
        """Let `finish` return."""
        self._done.set()

    def lose(self, cause: Exception) -> None:
        """Make `finish` raise ``cause``, unless the step is done."""
        if not self._done.is_set():
            self._outcome = cause
            self._done.set()

    async def finish(self) -> StepResult:
        await self._done.wait()
        self._executor.events.append(("finish", self.step))
        self._executor.unfinished.remove(self)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class FakeExecutor:
    """An `Executor` for tests, of the engine's and of your own apps.

    Args:
        num_blocks, block_size, max_model_len, vocab_size, max_in_flight: as in `ExecutorInfo`.
        sampler: makes the next token; `sample_hash` unless given.
        step_time_s: loop time from when the device gets to a step until it ends; nothing under a virtual clock.
        is_manual: steps end when `complete` is called, and not by themselves.

    Attributes:
        events: ("launch", n) and ("finish", n), in the order in which they happened.
        plans: every plan launched.
        unfinished: launched steps, the oldest first.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 256,
        vocab_size: int = 1000,
        max_in_flight: int = 1,
        sampler: Sampler | None = None,
        step_time_s: float = 0.0,
        is_manual: bool = False,
    ) -> None:
        self.info = ExecutorInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_in_flight=max_in_flight,
            device="fake",
        )
        self.stats = ExecutorStats()
        self.events: list[tuple[str, int]] = []
        self.plans: list[StepPlan] = []
        self.unfinished: list[FakeStep] = []
        self.is_closed = False
        self.is_manual = is_manual
        self.step_time_s = step_time_s
        self._sampler = sampler or functools.partial(sample_hash, vocab_size=vocab_size)
        self._rows: dict[int, _Row] = {}
        self._kv = np.full((num_blocks, block_size), -1, np.int64)
        self._failures: dict[int, Exception] = {}
        self._lost: Exception | None = None
        self._busy_until = 0.0

    def make_step_fail(self, step: int, error: Exception) -> None:
        """When step number ``step`` is launched it writes no KV, and its `finish` raises ``error``.

        Rows that were to sample get a meaningless token, on which later launched steps go on.
        A `DeviceLost` loses the device: no later step succeeds.
        """
        self._failures[step] = error

    def complete(self) -> None:
        """End the oldest step that runs (for ``is_manual``)."""
        next(step for step in self.unfinished if not step.is_done).complete()

    def launch(self, plan: StepPlan) -> FakeStep:
        assert len(self.unfinished) < self.info.max_in_flight, "more steps in flight than the executor takes"
        self.events.append(("launch", plan.step))
        self.plans.append(plan)
        self.stats.num_steps += 1
        step = FakeStep(self, plan.step, self._run(plan))
        self.unfinished.append(step)
        if self.is_closed:
            step.complete()
        elif not self.is_manual:
            self._complete_later(step)
        return step

    async def aclose(self) -> None:
        self.is_closed = True
        self._rows.clear()
        for step in self.unfinished:
            step.lose(DeviceLost("the executor was closed"))

    def _complete_later(self, step: FakeStep) -> None:
        loop = asyncio.get_running_loop()
        self._busy_until = max(self._busy_until, loop.time()) + self.step_time_s
        if self.step_time_s:
            loop.call_at(self._busy_until, step.complete)
        else:
            loop.call_soon(step.complete)

    def _run(self, plan: StepPlan) -> StepResult | Exception:
        if self.is_closed:
            return DeviceLost("the executor was closed")
        if self._lost is not None:
            return self._lost
        self.apply(plan)
        failure = self._failures.pop(plan.step, None)
        if failure is None:
            return self._compute(plan)
        if isinstance(failure, DeviceLost):
            self._lost = failure
        for number in plan.rows[plan.wants == Want.LOGITS].tolist():
            self._rows[number].tokens.append(_MEANINGLESS)
        return failure

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's deltas, as a device does before it computes.

        A removed row may be one that it never held: `Scheduler.snapshot` leaves out those that are on their way out.
        """
        for row in plan.removed.tolist():
            self._rows.pop(row, None)
        for added in plan.added:
            assert added.row not in self._rows, f"row {added.row} is taken"
            self._rows[added.row] = _Row(added, added.token_ids.tolist(), added.block_ids.tolist())
        for row, block_id in zip(plan.grown_rows.tolist(), plan.grown_blocks.tolist(), strict=True):
            self._rows[row].blocks.append(block_id)

    def rows(self) -> dict[int, tuple[list[int], list[int]]]:
        """What the device holds: {row: (token ids, block table)}."""
        return {number: (list(row.tokens), list(row.blocks)) for number, row in sorted(self._rows.items())}

    def _compute(self, plan: StepPlan) -> StepResult:
        lines = list(zip(*(a.tolist() for a in (plan.rows, plan.starts, plan.num_tokens, plan.wants)), strict=True))
        assert len({number for number, *_ in lines}) == len(lines), "a row stands twice in a plan"
        for number, start, num_tokens, _ in lines:
            self._write(self._rows[number], start, num_tokens)
        sampled = [
            self._sample(self._rows[n], start + count) if w == Want.LOGITS else None for n, start, count, w in lines
        ]
        self.stats.num_computed_tokens += int(plan.num_tokens.sum())
        token_ids = [token for token in sampled if token is not None]
        self.stats.num_sampled_tokens += len(token_ids)
        asking = [
            self._rows[n].added.sampling.logprobs for (n, *_), t in zip(lines, sampled, strict=True) if t is not None
        ]
        return StepResult(
            step=plan.step,
            offsets=int32(np.cumsum([0, *(token is not None for token in sampled)])),
            token_ids=int32(token_ids),
            logprobs=_fake_logprobs(token_ids, asking),
            device_time_s=self.step_time_s,
        )

    def _write(self, row: _Row, start: int, num_tokens: int) -> None:
        size = self.info.block_size
        assert num_tokens > 0, "a row computes at least one token"
        assert start + num_tokens <= len(row.tokens), "a token is computed before it is known"
        assert start + num_tokens <= len(row.blocks) * size, "a token has no block to go to"
        for position in range(start, start + num_tokens):
            self._kv[row.blocks[position // size], position % size] = row.tokens[position]

    def _sample(self, row: _Row, end: int) -> int:
        """The next token, from what the KV holds up to ``end``; it joins the row's history."""
        assert end == len(row.tokens), "a token is sampled after the last known one"
        assert end < self.info.max_model_len, "the sequence is as long as the model allows"
        held: list[int] = self._kv[row.blocks].reshape(-1)[:end].tolist()
        sampling = row.added.sampling
        token = self._sampler(held, sampling)
        if end - row.added.num_prompt_tokens < sampling.min_tokens:
            token = _besides(sampling.stop_ids, token, self.info.vocab_size)
        row.tokens.append(token)
        return token


def _besides(masked: tuple[int, ...], token: int, vocab_size: int) -> int:
    """``token``, or the next one that is not masked; ``token`` again where all are."""
    candidates = ((token + i) % vocab_size for i in range(vocab_size))
    return next((candidate for candidate in candidates if candidate not in masked), token)


def _fake_logprobs(token_ids: list[int], asking: list[int]) -> StepLogprobs | None:
    index = [i for i, wanted in enumerate(asking) if wanted >= 0]
    if not index:
        return None
    width = max(asking)
    chosen: Int32 = int32([token_ids[i] for i in index])
    return StepLogprobs(
        index=int32(index),
        logprobs=np.full(len(index), -0.5, np.float32),
        ranks=np.ones(len(index), np.int32),
        top_ids=chosen[:, None] + np.arange(width, dtype=np.int32)[None, :],
        top_logprobs=np.tile(-0.5 - np.arange(width, dtype=np.float32), (len(index), 1)),
    )
