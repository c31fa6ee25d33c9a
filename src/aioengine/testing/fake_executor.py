"""A device that computes nothing and checks everything.

`FakeExecutor` keeps the rows, block tables and KV blocks that a real device would, with the token ids themselves as the
"KV". What it samples is a hash of all the tokens that it reads *through the block table*, so that a block freed too
early, shared wrongly, not copied or not yet written changes the output. It refuses plans that a device could not run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import (
    DeviceLost,
    ExecutorInfo,
    ExecutorStats,
    Part,
    WeightPiece,
    already_recording,
    not_recording,
    weights_asleep,
)
from aioengine.core.worker_functions import Worker, registered
from aioengine.scheduler.plan import (
    PromptLogprobs,
    RowAdded,
    RowFailure,
    RowSampling,
    StepPlan,
    StepResult,
    Want,
    int32,
)
from aioengine.testing.fake_logprobs import prompt_logprobs, step_logprobs

T = TypeVar("T")

Sampler = Callable[[list[int], RowSampling], int]
"""(all tokens of the sequence, as read from the KV; the row's sampling, with the choice that is wanted) -> the next
token."""


def sample_hash(token_ids: list[int], sampling: RowSampling, *, vocab_size: int) -> int:
    """A token that depends on every token before it, on the seed and the choice, and on nothing else."""
    seeded = np.array([sampling.seed & 0x7FFFFFFF, *token_ids], np.int32)
    # The checksum's first value is as good as XORed to the first bytes: a small one would only be another seed.
    of_choice = sampling.choice * 0x9E3779B1 & 0xFFFFFFFF
    return zlib.crc32(seeded.tobytes(), of_choice) % vocab_size


_MEANINGLESS = 0


class _Row(msgspec.Struct):
    added: RowAdded
    tokens: list[int]
    blocks: list[int]


class _RowWork(NamedTuple):
    """What a plan computes of one row: its tokens from ``start`` up to ``end``."""

    number: int
    row: _Row
    start: int
    end: int
    samples: bool


class FakeStep:
    """A launched step of a `FakeExecutor`."""

    def __init__(self, executor: FakeExecutor, plan: StepPlan, outcome: StepResult | Exception) -> None:
        self.step = plan.step
        self._plan = plan
        self._executor = executor
        self._outcome = outcome
        self._done = asyncio.Event()
        self._launched_at_s = _loop_time()
        self._ended_at_s = 0.0

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def complete(self) -> None:
        """Let `finish` return."""
        self._ended_at_s = _loop_time()
        self._done.set()

    async def wait(self) -> None:
        """Wait until it has ended, one way or another."""
        await self._done.wait()

    def lose(self, cause: Exception) -> None:
        """Make `finish` raise ``cause``, unless the step is done."""
        if not self._done.is_set():
            self._outcome = cause
            self._done.set()

    def span(self) -> dict[str, Any]:
        """The step's event in a Chrome trace, from its launch to its end."""
        name = f"step {self.step} ({len(self._plan.rows)} rows, {int(self._plan.num_tokens.sum())} tokens)"
        times = {"ts": self._launched_at_s * 1e6, "dur": (self._ended_at_s - self._launched_at_s) * 1e6}
        return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 0, "tid": 0, **times}

    async def finish(self) -> StepResult:
        await self._done.wait()
        self._executor.events.append(("finish", self.step))
        self._executor.unfinished.remove(self)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return msgspec.structs.replace(self._outcome, ended_at_s=self._ended_at_s)


class FakeExecutor:
    """An `Executor` for tests, of the engine's and of your own apps.

    Of a row's `RowSampling` it heeds what chooses tokens outright (``seed``, ``choice``, ``num_choices``,
    ``allowed_token_ids``, ``bad_words``, ``min_tokens`` with ``stop_ids``) and what is to be reported. It has no logits
    that temperature, filters, penalties, ``logit_bias`` or ``logits_processors`` could change. Its log-probabilities
    are made up: the likeliest token has -0.5, and each next id 1 less.

    It has no weights: calls about them are noted in ``events``, and change nothing. Functions that are called with its
    model get the executor itself, and are called on the loop.

    Args:
        num_blocks, block_size, max_model_len, vocab_size, max_in_flight: as in `ExecutorInfo`.
        sampler: makes the next token; `sample_hash` unless given.
        step_time_s: loop time from when the device gets to a step until it ends; nothing under a virtual clock.
        is_manual: steps end when `complete` is called, and not by themselves.

    Attributes:
        events: ("launch", n) and ("finish", n), and the names of control calls, each with what it was about, in the
            order in which they happened.
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
        self.events: list[tuple[str, Any]] = []
        self.plans: list[StepPlan] = []
        self.unfinished: list[FakeStep] = []
        self.is_closed = False
        self.is_manual = is_manual
        self.step_time_s = step_time_s
        self._sampler = sampler or (lambda token_ids, sampling: sample_hash(token_ids, sampling, vocab_size=vocab_size))
        self._asleep: frozenset[Part] = frozenset()
        self._is_discarded = False
        self._rows: dict[int, _Row] = {}
        self._kv = np.full((num_blocks, block_size), -1, np.int64)
        self._failures: dict[int, Exception] = {}
        self._row_failures: dict[tuple[int, int], Exception] = {}
        self._lost: Exception | None = None
        self._busy_until = 0.0
        self._profile: list[FakeStep] | None = None
        self._max_profiled_steps = 0

    def make_step_fail(self, step: int, error: Exception) -> None:
        """When step number ``step`` is launched it writes no KV, and its `finish` raises ``error``.

        Rows that were to sample get a meaningless token, on which later launched steps go on.
        A `DeviceLost` loses the device: no later step succeeds.
        """
        self._failures[step] = error

    def make_row_fail(self, step: int, row: int, error: Exception) -> None:
        """When step number ``step`` computes ``row``, it brings a `RowFailure` with ``error``, and no token of the row.

        If the row was to sample it gets a meaningless token, on which later launched steps go on.
        """
        self._row_failures[step, row] = error

    def complete(self) -> None:
        """End the oldest step that runs (for ``is_manual``)."""
        next(step for step in self.unfinished if not step.is_done).complete()

    def launch(self, plan: StepPlan) -> FakeStep:
        assert len(self.unfinished) < self.info.max_in_flight, "more steps in flight than the executor takes"
        assert not self._asleep, f"a plan was launched while these were asleep: {sorted(self._asleep)}"
        self.events.append(("launch", plan.step))
        self.plans.append(plan)
        self.stats.num_steps += 1
        step = FakeStep(self, plan, self._run(plan))
        self.unfinished.append(step)
        if self._profile is not None and len(self._profile) < self._max_profiled_steps:
            self._profile.append(step)
        if self.is_closed:
            step.complete()
        elif not self.is_manual:
            self._complete_later(step)
        return step

    async def start_profile(self, *, max_steps: int) -> None:
        self._check_open()
        if self._profile is not None:
            raise already_recording()
        self._profile, self._max_profiled_steps = [], max_steps

    async def stop_profile(self, path: Path) -> None:
        """Write a Chrome trace of the steps that were launched and have ended since the start."""
        self._check_open()
        profile, self._profile = self._profile, None
        if profile is None:
            raise not_recording()
        spans = [step.span() for step in profile if step.is_done]
        await asyncio.to_thread(path.write_text, json.dumps({"traceEvents": spans}))

    # Plans are computed when they are launched: what a control call changes at once is behind all that were launched
    # before it, and all that is left is to wait for those.

    def _note(self, call: str, argument: object) -> None:
        self._check_open()
        self.events.append((call, argument))

    async def _launched_steps_end(self) -> None:
        for step in list(self.unfinished):
            await step.wait()
        self._check_open()

    async def _control(self, call: str, argument: object) -> None:
        self._note(call, argument)
        await self._launched_steps_end()

    async def sleep(self, level: Literal[1, 2]) -> None:
        self._note("sleep", level)
        self._is_discarded = self._is_discarded or level == 2
        self._kv[:] = -1
        self._asleep = frozenset(("weights", "kv_cache"))
        await self._launched_steps_end()

    async def wake_up(self, parts: frozenset[Part]) -> None:
        self._note("wake_up", parts)
        self._asleep -= parts
        self._is_discarded = self._is_discarded and "weights" in self._asleep
        await self._launched_steps_end()

    async def update_weights(self, folder: Path) -> None:
        await self._control("update_weights", folder)

    async def stage_weights(self, piece: WeightPiece) -> None:
        await self._control("stage_weights", piece.name)

    async def commit_weights(self, transfer: str) -> None:
        await self._control("commit_weights", transfer)

    async def drop_weights(self, transfer: str) -> None:
        await self._control("drop_weights", transfer)

    async def save_sharded_state(self, folder: Path, max_shard_bytes: int) -> list[str]:
        await self._control("save_sharded_state", folder)
        return []

    async def collective_rpc(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        self._note("collective_rpc", name)
        function = registered(name)
        await self._launched_steps_end()
        config = EngineConfig(max_model_len=self.info.max_model_len, block_size=self.info.block_size)
        return [function(Worker(rank=0, world_size=1, model=self.model, config=config), *args, **kwargs)]

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        await self._control("apply_model", function)
        if self.model is None:
            raise weights_asleep("apply_model")
        return [function(self)]

    async def execute_dummy_batch(self) -> None:
        self._note("execute_dummy_batch", None)
        if "weights" in self._asleep:
            raise weights_asleep("execute_dummy_batch")
        await self._launched_steps_end()

    @property
    def model(self) -> Any:
        """What functions get that are called with the model: the executor itself; None while it sleeps at level 2."""
        return None if self._is_discarded else self

    def _check_open(self) -> None:
        if self.is_closed:
            raise DeviceLost("the executor was closed")

    async def aclose(self) -> None:
        self.is_closed = True
        self._profile = None
        self._rows.clear()
        self._lost = DeviceLost("the executor was closed")
        for step in self.unfinished:
            step.lose(self._lost)

    def _complete_later(self, step: FakeStep) -> None:
        loop = asyncio.get_running_loop()
        self._busy_until = max(self._busy_until, loop.time()) + self.step_time_s
        if self.step_time_s:
            loop.call_at(self._busy_until, step.complete)
        else:
            loop.call_soon(step.complete)

    def _run(self, plan: StepPlan) -> StepResult | Exception:
        if self._lost is not None:
            return self._lost
        self.apply(plan)
        if (failure := self._failures.pop(plan.step, None)) is None:
            return self._compute(plan)
        if isinstance(failure, DeviceLost):
            self._lost = failure
        for number in plan.rows[plan.wants == Want.LOGITS].tolist():
            self._rows[number].tokens.append(_MEANINGLESS)
        return failure

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's deltas, as a device does before it computes."""
        for row in plan.removed.tolist():
            self._rows.pop(row)
        copied_from, copied_to = plan.copied_from.tolist(), plan.copied_to.tolist()
        assert len(set(copied_to)) == len(copied_to), "a block is copied to twice"
        assert not set(copied_from) & set(copied_to), "a block is copied from and to"
        self._kv[copied_to] = self._kv[copied_from]
        for added in plan.added:
            assert added.row not in self._rows, f"row {added.row} is taken"
            self._rows[added.row] = _Row(added, added.token_ids.tolist(), added.block_ids.tolist())
        for row, block_id in zip(plan.grown_rows.tolist(), plan.grown_blocks.tolist(), strict=True):
            self._rows[row].blocks.append(block_id)

    def rows(self) -> dict[int, tuple[list[int], list[int]]]:
        """What the device holds: {row: (token ids, block table)}."""
        return {number: (list(row.tokens), list(row.blocks)) for number, row in sorted(self._rows.items())}

    def _compute(self, plan: StepPlan) -> StepResult:
        works = self._works(plan)
        for work in works:
            self._write(work)
        sampled: list[list[int]] = []
        failures = []
        for index, work in enumerate(works):
            tokens, error = self._sample(work, self._row_failures.pop((plan.step, work.number), None))
            sampled.append(tokens)
            if error is not None:
                failures.append(RowFailure(index, error))
        self.stats.num_computed_tokens += int(plan.num_tokens.sum())
        self.stats.num_sampled_tokens += sum(map(len, sampled))
        lines = [(work.row.added.sampling, token) for work, of in zip(works, sampled, strict=True) for token in of]
        return StepResult(
            step=plan.step,
            offsets=int32(np.cumsum([0, *map(len, sampled)])),
            token_ids=int32([token for _, token in lines]),
            logprobs=step_logprobs(lines, self.info.vocab_size),
            prompt_logprobs=self._prompt_logprobs(works),
            failures=tuple(failures),
            device_time_s=self.step_time_s,
        )

    def _works(self, plan: StepPlan) -> list[_RowWork]:
        columns = (plan.rows, plan.starts, plan.num_tokens, plan.wants)
        works = [
            _RowWork(number, self._rows[number], start, start + num_tokens, want == Want.LOGITS)
            for number, start, num_tokens, want in zip(*(column.tolist() for column in columns), strict=True)
        ]
        assert len({work.number for work in works}) == len(works), "a row stands twice in a plan"
        return works

    def _write(self, work: _RowWork) -> None:
        size, tokens, blocks = self.info.block_size, work.row.tokens, work.row.blocks
        assert work.end > work.start, "a row computes at least one token"
        assert work.end <= len(tokens), "a token is computed before it is known"
        assert work.end <= len(blocks) * size, "a token has no block to go to"
        for position in range(work.start, work.end):
            self._kv[blocks[position // size], position % size] = tokens[position]

    def _read(self, work: _RowWork) -> list[int]:
        """What the KV holds of a row up to the end of what is computed."""
        return list(map(int, self._kv[work.row.blocks].reshape(-1)[: work.end]))

    def _sample(self, work: _RowWork, error: Exception | None) -> tuple[list[int], Exception | None]:
        """The row's next tokens, one for each choice that is wanted, the first of which joins its history.

        None, where ``error`` or its rules let the row fail, and why.
        """
        if not work.samples:
            return [], error
        assert work.end == len(work.row.tokens), "a token is sampled after the last known one"
        assert work.end < self.info.max_model_len, "the sequence is as long as the model allows"
        tokens = [] if error is not None else self._choose_all(self._read(work), work.row.added)
        if not tokens and error is None:
            error = ValueError("no token may be sampled: allowed_token_ids, bad_words and min_tokens leave none")
        work.row.tokens.append(tokens[0] if tokens else _MEANINGLESS)
        return tokens, error

    def _choose_all(self, held: list[int], added: RowAdded) -> list[int]:
        """A token for each choice at output position 0, and for the row's own one later; none where rules leave none.

        It is what the sampler says, or the next higher id that may be sampled.
        """
        sampling, output, vocab_size = added.sampling, held[added.num_prompt_tokens :], self.info.vocab_size
        allowed, masked = sampling.allowed_token_ids or range(vocab_size), _masked(output, sampling)
        tokens: list[int] = []
        for choice in range(sampling.choice, sampling.choice + (1 if output else sampling.num_choices)):
            token = self._sampler(held, msgspec.structs.replace(sampling, choice=choice))
            nearest = (at % vocab_size for at in range(token, token + vocab_size))
            tokens += itertools.islice((one for one in nearest if one in allowed and one not in masked), 1)
        return tokens

    def _prompt_logprobs(self, works: list[_RowWork]) -> PromptLogprobs | None:
        """Of the prompt tokens behind those that are computed, for the rows that ask."""
        asked = []
        for index, work in enumerate(works):
            width, num_prompt_tokens = work.row.added.sampling.prompt_logprobs, work.row.added.num_prompt_tokens
            if width >= 0 and work.start + 1 < num_prompt_tokens:
                last = min(work.end, num_prompt_tokens - 1)
                known = [*self._read(work)[:last], work.row.tokens[last]]
                asked.append((index, known, work.start + 1, width))
        return prompt_logprobs(asked, self.info.vocab_size) if asked else None


def _loop_time() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # stepped by hand, without a loop
        return 0.0


def _masked(output: list[int], sampling: RowSampling) -> set[int]:
    """The ids that ``bad_words`` and ``min_tokens`` forbid behind this output."""
    masked = {word[-1] for word in sampling.bad_words if output[len(output) - len(word) + 1 :] == list(word[:-1])}
    return masked.union(sampling.stop_ids) if len(output) < sampling.min_tokens else masked
