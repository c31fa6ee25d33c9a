"""One sequence of tokens on its way through the scheduler: states, waiting reasons, and what is rare about it.

What every step touches (lengths, limits, epochs) lives in the scheduler's columns while the sequence has a row; this
object holds the rest, and the lengths while it has none.
"""

from __future__ import annotations

import enum
from typing import Literal

import numpy as np

from aioengine.core.plan import Int32, RowSampling
from aioengine.request import Request

FinishReason = Literal["stop", "length", "abort", "error"]


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"

    __hash__ = object.__hash__  # Enum's own is Python code; a table of transitions is looked up per sequence


class Event(enum.Enum):
    ADMITTED = "admitted"
    """It takes a row."""
    PREEMPTED = "preempted"
    """It loses its row and its blocks, and will compute them again."""
    PARKED = "parked"
    """It leaves its row and keeps its blocks, until what blocks it is over."""
    ENDED = "ended"

    __hash__ = object.__hash__


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.WAITING: {Event.ADMITTED: State.RUNNING, Event.PREEMPTED: State.WAITING, Event.ENDED: State.FINISHED},
    State.RUNNING: {Event.PREEMPTED: State.WAITING, Event.PARKED: State.WAITING, Event.ENDED: State.FINISHED},
    State.FINISHED: {},
}


class Reason(enum.IntFlag):
    """Why a sequence may not be scheduled; only zero is schedulable."""

    NONE = 0
    FLOW = 1
    """Its reader is behind."""
    PENDING_PREFIX = 2
    """Another sequence is computing the blocks that this one begins with."""
    GRAMMAR = 4
    REMOTE_KV = 8
    ENCODER = 16
    ADAPTER = 32
    PAUSED = 64


class Sequence:
    """A request in the core.

    Attributes:
        order: its place in the queue, unique; smaller goes first and is preempted last.
        prompt: int32 [prompt tokens].
        output_ids: the tokens sampled so far, as applied.
        limit: prompt and output tokens may not be more than this.
        block_ids: its block table.
        block_hashes: chained hashes of its first full blocks, made as they are needed.
        num_settled_blocks: leading blocks whose KV is computed and whose hash is in the prefix cache.
        num_computed_tokens: kept here only while it has no row.
        num_cached_tokens: prompt tokens that the prefix cache gave it, when it first ran.
        row: its row, or -1.
        has_run: whether it ever had one.
        listener: whoever follows it; the core does not look at it.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "finish_reason",
        "has_run",
        "limit",
        "listener",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_settled_blocks",
        "order",
        "output_ids",
        "prompt",
        "reasons",
        "request",
        "row",
        "sampling",
        "state",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        request: Request,
        *,
        eos_token_ids: tuple[int, ...] = (),
        block_hashes: list[bytes] | None = None,
        choice: int = 0,
    ) -> None:
        params = request.params
        self.request = request
        self.order = -1
        self.prompt: Int32 = request.prompt_token_ids
        self.output_ids: list[int] = []
        self.limit = request.max_total_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.sampling = _row_sampling(request, eos_token_ids, choice)
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = [] if block_hashes is None else block_hashes
        self.num_settled_blocks = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.row = -1
        self.has_run = False
        self.reasons = Reason.NONE
        self.state = State.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.listener: object = None

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.request_id!r} {self.state.value} order={self.order} row={self.row} "
            f"tokens={len(self.prompt)}+{len(self.output_ids)}/{self.limit} blocks={len(self.block_ids)} "
            f"reasons={self.reasons!r}>"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: the prompt and what was applied."""
        return len(self.prompt) + len(self.output_ids)

    def token_ids(self) -> Int32:
        """All known tokens, int32 [num_tokens], read-only."""
        if not self.output_ids:
            return self.prompt
        ids = np.concatenate([self.prompt, np.array(self.output_ids, dtype=np.int32)])
        ids.flags.writeable = False
        return ids

    def slice_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens ``start`` to ``stop``."""
        n = len(self.prompt)
        if start >= n:
            return self.output_ids[start - n : stop - n]
        ids: list[int] = self.prompt[start:stop].tolist()
        return ids + self.output_ids[: max(stop - n, 0)]

    def advance(self, event: Event) -> None:
        """Change state.

        Raises:
            KeyError: the event does not belong to this state; a bug.
        """
        self.state = TRANSITIONS[self.state][event]


def _row_sampling(request: Request, eos_token_ids: tuple[int, ...], choice: int) -> RowSampling:
    params = request.params
    stop_ids = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
    has_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
    return RowSampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        choice=choice,
        min_tokens=params.min_tokens,
        stop_ids=stop_ids if params.min_tokens else (),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(params.logit_bias.items()) if params.logit_bias else (),
        allowed_token_ids=params.allowed_token_ids or (),
        bad_words=request.bad_words,
        logits_processors=params.logits_processors,
        logprobs=(params.logprobs or 0) if has_logprobs else -1,
        logprob_token_ids=params.logprob_token_ids or (),
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )
