"""A device that computes nothing: each token that it samples is a hash of all tokens before it."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from aioengine.config import EngineConfig
from aioengine.core.control import CollectiveRpc, Control, SaveShardedState, StopProfile
from aioengine.core.executor_protocol import DeviceLost, ExecutorInfo, ExecutorStats
from aioengine.core.named_functions import Worker, registered
from aioengine.errors import InvalidRequest
from aioengine.models.folder import ModelFolder
from aioengine.processes.turns import running_loop
from aioengine.scheduler.cache_layout import FULL_ATTENTION, CacheLayout
from aioengine.scheduler.plan import (
    Float32,
    Handles,
    Int32,
    NothingAllowed,
    PromptLogprobs,
    Purpose,
    RowAdded,
    RowFailure,
    RowSampling,
    StepLogprobs,
    StepPlan,
    StepResult,
    int32,
)
from aioengine.structured.grammar import CompiledGrammar
from aioengine.structured.rows import GrammarRow, GrammarRows
from aioengine.testing.answers import Answer, Answers
from aioengine.text.loading import has_tokenizer
from aioengine.text.tokenizer import Tokenizer

T = TypeVar("T")

Sampler = Callable[[list[int], RowSampling], int]
"""(all tokens of the sequence; the row's sampling, with the choice that is wanted) -> the next token."""


def sample_hash(token_ids: list[int], sampling: RowSampling, *, vocab_size: int) -> int:
    """A token that depends on every token before it, on the seed and the choice, and on nothing else."""
    seeded = np.array([sampling.seed & 0x7FFFFFFF, *token_ids], np.int32)
    # The checksum's start value acts as if XORed to the first bytes: a small one would only be another seed.
    of_choice = sampling.choice * 0x9E3779B1 & 0xFFFFFFFF
    return zlib.crc32(seeded.tobytes(), of_choice) % vocab_size


def hash_vector(token_ids: list[int]) -> Float32:
    """A vector, float32 [4], that depends on every token and on nothing else."""
    hashes = [sample_hash(token_ids, RowSampling(seed=seed), vocab_size=2**16) for seed in range(4)]
    return np.array(hashes, np.float32) / np.float32(2**16)


MEANINGLESS = 0
"""The token of a row whose sampling failed."""


class Row(NamedTuple):
    added: RowAdded
    tokens: list[int]
    grammar: GrammarRow | None


class RowWork(NamedTuple):
    """One row's work in step number ``step``: its tokens from ``start`` up to ``end``, for a `Purpose`."""

    step: int
    number: int
    row: Row
    start: int
    end: int
    purpose: int

    @property
    def samples(self) -> bool:
        return self.purpose == Purpose.SAMPLE


class FakeLaunch:
    """A launched dummy or step of a `FakeExecutor`."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.executor = executor
        self.ended_at_s = 0.0
        self._error: Exception | None = None
        self._done = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def complete(self) -> None:
        """Let `finish` return."""
        self.ended_at_s = loop_time()
        self._done.set()

    async def wait(self) -> None:
        """Wait until it has completed or is lost."""
        await self._done.wait()

    def lose(self, cause: Exception) -> None:
        """Make `finish` raise ``cause``, unless the step is done."""
        if not self._done.is_set():
            self._error = cause
            self._done.set()

    async def finish(self) -> Any:
        await self._done.wait()
        self.executor.unfinished.remove(self)
        if self._error is not None:
            raise self._error


class FakeStep(FakeLaunch):
    """A launched step of a `FakeExecutor`."""

    def __init__(self, executor: FakeExecutor, plan: StepPlan, outcome: StepResult | Exception) -> None:
        super().__init__(executor)
        self.step = plan.step
        self.plan = plan
        self._outcome = outcome

    async def finish(self) -> StepResult:
        await super().finish()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return msgspec.structs.replace(self._outcome, ended_at_s=self.ended_at_s)


class FakeExecutor:
    """An `Executor` for tests of your own apps.

    Of a row's `RowSampling` it follows the fields that choose tokens outright (``seed``, ``choice``, ``num_choices``,
    ``grammar``, ``allowed_token_ids``, ``bad_words``, ``min_tokens`` with ``stop_ids``) and those of log-probabilities.
    It has no logits that temperature, filters, penalties, ``logit_bias`` or ``logits_processors`` could change. Its
    log-probabilities are made up: the likeliest token has -0.5, and each next id 1 less.

    It has neither weights nor operations: calls about them change nothing, and profiles are empty. Functions that are
    called with its model get the executor itself, and run on the loop.

    Args:
        num_blocks, block_size, max_model_len, max_in_flight, layout, more_blocks: as in `ExecutorInfo`.
        vocab_size: as in `ExecutorInfo`; absent: the model's.
        answers: answers in place of hashes: a text, an error, or a tuple of a text and the error that cuts it, for each
            request in their order; the last one serves all further requests. Or a function from the text of a prompt to
            one of these. Tool calls and reasoning are texts as the model writes them. An error reaches the caller as
            the cause of `StepFailed`, as does an answer that a request's constraint does not admit; JSON may have any
            spaces.
        sampler: chooses the next token; `sample_hash` unless given.
        step_time_s: loop time from when the device gets to a step until it ends; costs nothing under a virtual clock.

    Attributes:
        unfinished: launched steps, the oldest first.
    """

    step_type = FakeStep

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 256,
        vocab_size: int | None = None,
        max_in_flight: int = 1,
        answers: Sequence[Answer] | Callable[[str], Answer] | None = None,
        sampler: Sampler | None = None,
        step_time_s: float = 0.0,
        layout: CacheLayout = FULL_ATTENTION,
        more_blocks: tuple[int, ...] = (),
    ) -> None:
        self.info = ExecutorInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=vocab_size or 1,
            max_in_flight=max_in_flight,
            device="fake",
            layout=layout,
            more_blocks=more_blocks,
        )
        self.stats = ExecutorStats()
        self.handles = Handles()
        self.unfinished: list[FakeLaunch] = []
        self.is_closed = False
        self.step_time_s = step_time_s
        self._takes_vocabulary = vocab_size is None
        self._answers = Answers(answers) if answers is not None else None
        self._sampler: Sampler = sampler or (lambda ids, row: sample_hash(ids, row, vocab_size=self.info.vocab_size))
        self._rows: dict[int, Row] = {}
        self._grammar_rows = GrammarRows(-(-self.info.vocab_size // 32))
        self._failures: dict[int, Exception] = {}
        self._lost: Exception | None = None
        self._busy_until = 0.0

    def use_model(self, folder: ModelFolder) -> None:
        """Use the vocabulary of the engine's model. Reads files: not for the loop.

        Raises:
            ConfigError: ``answers`` are given, and the model has no tokenizer or no EOS.
        """
        tokenizer = Tokenizer.load(folder.path) if has_tokenizer(folder.path) else None
        if self._takes_vocabulary:
            sizes = tokenizer and tokenizer.vocab_size, folder.config.get("vocab_size")
            vocab_size = max(size for size in (*sizes, 1) if isinstance(size, int))
            self.info = msgspec.structs.replace(self.info, vocab_size=vocab_size)
            self._grammar_rows = GrammarRows(-(-vocab_size // 32))
        if self._answers is not None:
            self._answers.use(tokenizer, next(iter(folder.eos_token_ids), None))

    def make_step_fail(self, step: int, error: Exception) -> None:
        """Make step number ``step`` fail once it is launched: it computes nothing, and its `finish` raises ``error``.

        Its rows that sample get a meaningless token, after which later launched steps go on.
        A `DeviceLost` loses the device: no later step succeeds.
        """
        self._failures[step] = error

    def launch(self, plan: StepPlan) -> FakeStep:
        self.stats.num_steps += 1
        step = self.step_type(self, plan, self._run(plan))
        self._run_later(step)
        return step

    def launch_dummy(self) -> FakeLaunch:
        dummy = FakeLaunch(self)
        if self._lost is not None:
            dummy.lose(self._lost)
        self._run_later(dummy)
        return dummy

    def _run_later(self, launched: FakeLaunch) -> None:
        self.unfinished.append(launched)
        if self.is_closed:
            launched.complete()
        else:
            self._complete_later(launched)

    # Plans are computed when they are launched, so a control call's changes come after all steps launched before it.
    # The call has only to wait for the end of those.

    async def _launched_steps_end(self) -> None:
        for step in list(self.unfinished):
            await step.wait()
        self._check_open()

    async def perform(self, call: Control) -> Any:
        self._check_open()
        function = registered(call.name) if isinstance(call, CollectiveRpc) else None
        await self._launched_steps_end()
        match call:
            case CollectiveRpc() if function is not None:
                config = EngineConfig(max_model_len=self.info.max_model_len, block_size=self.info.block_size)
                worker = Worker(rank=0, world_size=1, model=self.model, config=config)
                return [function(worker, *call.args, **call.kwargs)]
            case StopProfile():
                await asyncio.to_thread(Path(call.path).write_text, '{"traceEvents": []}')
            case SaveShardedState():
                return []
        return None

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        await self._launched_steps_end()
        return [function(self)]

    @property
    def model(self) -> Any:
        """The executor itself, for functions that are called with the model."""
        return self

    def _check_open(self) -> None:
        if self.is_closed:
            raise DeviceLost("the executor was closed")

    async def aclose(self) -> None:
        self.is_closed = True
        self._rows.clear()
        self._lost = DeviceLost("the executor was closed")
        for step in self.unfinished:
            step.lose(self._lost)

    def _complete_later(self, step: FakeLaunch) -> None:
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
        for work in self._works(plan):
            if work.samples and work.end == len(work.row.tokens):  # else its grammar has forced the token
                work.row.tokens.append(MEANINGLESS)
        return failure

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's deltas, as a device does before it computes."""
        for row in plan.removed.tolist():
            gone = self._rows.pop(row)
            if gone.grammar is not None:
                self._grammar_rows.remove(gone.grammar)
        for added in plan.added:
            grammar = self._get_grammar(added)
            row = None if grammar is None else added.add_grammar(self._grammar_rows, grammar)
            self._rows[added.row] = Row(added, added.token_ids.tolist(), row)

    def _get_grammar(self, added: RowAdded) -> CompiledGrammar | None:
        handle = added.sampling.grammar
        return None if handle is None else self.handles.get_grammar(handle)

    def _compute(self, plan: StepPlan) -> StepResult:
        works = self._works(plan)
        results = [self._sample(work) for work in works]
        sampled = [tokens for tokens, _ in results]
        firsts = itertools.accumulate(map(len, sampled), initial=0)
        of_works = zip(firsts, works, sampled, strict=False)
        forced = {first: self._forced(work, tokens) for first, work, tokens in of_works}
        self.stats.num_computed_tokens += int(plan.num_tokens.sum())
        self.stats.num_sampled_tokens += sum(map(len, sampled))
        pooled = [i for i, work in enumerate(works) if work.purpose == Purpose.POOL and results[i][1] is None]
        lines = [(work.row.added.sampling, token) for work, of in zip(works, sampled, strict=True) for token in of]
        return StepResult(
            step=plan.step,
            offsets=int32(np.cumsum([0, *map(len, sampled)])),
            token_ids=int32([token for _, token in lines]),
            logprobs=_made_logprobs(lines, self.info.vocab_size),
            prompt_logprobs=self._prompt_logprobs(works),
            failures=tuple(RowFailure(i, error) for i, (_, error) in enumerate(results) if error is not None),
            forced={first: token_ids for first, token_ids in forced.items() if token_ids},
            vectors={i: hash_vector(self._read(works[i])) for i in pooled},
            device_time_s=self.step_time_s,
        )

    def _forced(self, work: RowWork, sampled: list[int]) -> list[int]:
        """The tokens that the row's grammar forces after the row's own token."""
        row = work.row
        if row.grammar is None or not sampled:
            return []
        (forced,) = self._grammar_rows.learn([(row.grammar, work.end, sampled[0])])
        if forced:
            row.tokens[work.end + 1 :] = forced
        return forced

    def _works(self, plan: StepPlan) -> list[RowWork]:
        columns = (plan.rows, plan.starts, plan.num_tokens, plan.purposes)
        return [
            RowWork(plan.step, number, self._rows[number], start, start + num_tokens, purpose)
            for number, start, num_tokens, purpose in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def _read(self, work: RowWork) -> list[int]:
        """The row's tokens up to the end of what is computed."""
        return work.row.tokens[: work.end]

    def _sample(self, work: RowWork) -> tuple[list[int], Exception | None]:
        """The row's next tokens, one for each choice that is wanted; the first joins the row's history.

        No tokens, and the error, where the row fails.
        """
        if not work.samples:
            return [], None
        row = work.row
        error: Exception | None = None
        tokens: list[int] = []
        try:
            tokens = self._choose_all(self._read(work), row)
        except Exception as failure:  # raised by the answers
            error = failure
        if not tokens and error is None:
            problem = row.grammar.problem if row.grammar is not None else ""
            rules = "structured, allowed_token_ids, bad_words and min_tokens leave none"
            error = NothingAllowed(f"no token may be sampled: {problem or rules}")
            if row.grammar is not None and row.grammar.is_too_large:
                error = InvalidRequest(f"structured: {problem}", param="structured")
        row.tokens[work.end :] = [tokens[0] if tokens else MEANINGLESS, *row.tokens[work.end + 1 :]]
        return tokens, error

    def _choose_all(self, held: list[int], row: Row) -> list[int]:
        """A token for each choice at output position 0, and for the row's own choice later; none if rules leave none.

        It is the answer's or the sampler's token, or the next higher id that may be sampled.
        """
        added, vocab_size = row.added, self.info.vocab_size
        sampling, output = added.sampling, held[added.num_prompt_tokens :]
        masked = _masked(output, sampling)
        allowed: Container[int] = sampling.allowed_token_ids or range(vocab_size)
        if row.grammar is not None:
            bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
            self._grammar_rows.fill([(row.grammar, len(held))], bits)
            ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            allowed = {token for token in ids.tolist() if token in allowed}
        constrained = None if row.grammar is None else allowed
        answer = (
            None
            if self._answers is None
            else self._answers.next_token(added, self._get_grammar(added), output, constrained)
        )
        tokens: list[int] = []
        for choice in range(sampling.choice, sampling.choice + (1 if output else sampling.num_choices)):
            of_choice = msgspec.structs.replace(sampling, choice=choice)
            token = self._sampler(held, of_choice) if answer is None else answer
            nearest = (at % vocab_size for at in range(token, token + vocab_size))
            tokens += itertools.islice((one for one in nearest if one in allowed and one not in masked), 1)
        return tokens

    def _prompt_logprobs(self, works: list[RowWork]) -> PromptLogprobs | None:
        """Log-probabilities of the prompt tokens after those that are computed, for rows that ask.

        A token's rank, 1 to 4, depends on all tokens before it.
        """
        rows, width, vocab_size = [], 0, self.info.vocab_size
        for index, work in enumerate(works):
            added, held = work.row.added, self._read(work)
            if added.sampling.prompt_logprobs >= 0:
                width = max(width, added.sampling.prompt_logprobs)
                data = int32(held)
                checksum = zlib.crc32(data[: work.start].tobytes())
                for position in range(work.start + 1, min(work.end + 1, added.num_prompt_tokens)):
                    checksum = zlib.crc32(data[position - 1 : position].tobytes(), checksum)
                    rows.append((index, position, work.row.tokens[position], checksum % 4))
        if not rows:
            return None
        indices, positions, token_ids, distances = (int32(column) for column in zip(*rows, strict=True))
        top_ids, top_logprobs = _likeliest((token_ids - distances) % vocab_size, width, vocab_size)
        return PromptLogprobs(
            index=indices,
            positions=positions,
            logprobs=_logprobs_of(distances),
            ranks=distances + np.int32(1),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )


def loop_time() -> float:
    loop = running_loop()
    return 0.0 if loop is None else loop.time()  # stepped by hand, without a loop


def _masked(output: list[int], sampling: RowSampling) -> set[int]:
    """The ids that ``bad_words`` and ``min_tokens`` forbid after this output."""
    masked = {word[-1] for word in sampling.bad_words if output[len(output) - len(word) + 1 :] == list(word[:-1])}
    is_late = len(output) < sampling.min_tokens and sampling.grammar is None
    return masked.union(sampling.stop_ids) if is_late else masked


# Made-up log-probabilities


def _made_logprobs(sampled: list[tuple[RowSampling, int]], vocab_size: int) -> StepLogprobs | None:
    """Log-probabilities of (row's sampling, token) pairs, where each token is its position's likeliest one."""
    asking = [(index, sampling, token) for index, (sampling, token) in enumerate(sampled) if sampling.logprobs >= 0]
    if not asking:
        return None
    indices, samplings, tokens = zip(*asking, strict=True)
    chosen = int32(tokens)
    top_ids, top_logprobs = _likeliest(chosen, max(sampling.logprobs for sampling in samplings), vocab_size)
    counts = [len(sampling.logprob_token_ids) for sampling in samplings]
    extra_ids = int32([token for sampling in samplings for token in sampling.logprob_token_ids])
    distances: Int32 = (extra_ids - np.repeat(chosen, counts)) % vocab_size
    return StepLogprobs(
        index=int32(indices),
        logprobs=_logprobs_of(np.zeros_like(chosen)),
        ranks=np.ones_like(chosen),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        extra_offsets=int32(np.cumsum([0, *counts]) if any(counts) else []),
        extra_ids=extra_ids,
        extra_logprobs=_logprobs_of(distances),
        extra_ranks=distances + np.int32(1),
    )


def _logprobs_of(distances: Int32) -> Float32:
    """Log-probabilities of tokens by the distance of their ids from the likeliest one's; a rank is a distance + 1."""
    return np.float32(-0.5) - distances.astype(np.float32)


def _likeliest(first: Int32, width: int, vocab_size: int) -> tuple[Int32, Float32]:
    """[len(first), width] token ids and log-probabilities, or as many as there are."""
    distances = np.arange(min(width, vocab_size), dtype=np.int32)
    ids: Int32 = (first[:, None] + distances) % vocab_size
    return ids, np.tile(_logprobs_of(distances), (len(first), 1))
