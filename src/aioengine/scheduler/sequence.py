"""One sequence of tokens on its way through the scheduler: waiting reasons, and what is rare about it.

What every step touches (lengths, limits, epochs) lives in the scheduler's columns while the sequence has a row; this
object holds the rest, and the lengths while it has none.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from aioengine.outputs import FinishReason
from aioengine.sampling_params import MAX_SEED, MIN_SEED, SamplingParams
from aioengine.scheduler.plan import GrammarHandle, Int32, ProcessorHandle, Purpose, RowAdded, RowSampling, int32
from aioengine.scheduler.prefix_cache import PrefixKey
from aioengine.structured.grammar import Thinking

MAX_PRIORITY = 2**31 - 1
MAX_SALT_CHARS = 1024
MAX_TENANT_CHARS = 256
MAX_SESSION_CHARS = 256
MAX_ID_CHARS = 1024
MAX_TRACEPARENT_CHARS = 64
MAX_TRACESTATE_CHARS = 32 * (256 + 1 + 256 + 1)
"""W3C's Trace Context has 32 entries, of a key and a value of 256 characters each."""

Product = Literal["tokens", "vector"]
StructT = TypeVar("StructT", bound=msgspec.Struct)


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One prompt and what to do with it.

    It travels to other processes as it is, and is checked against these bounds when it is read there. New fields are
    appended, with defaults.

    Attributes:
        request_id: the caller's name for it; it may repeat, so nothing is looked up by it inside the core.
        prompt_token_ids: int32 [prompt tokens], at least one, below the model's vocabulary size.
        params: checked against the engine's limits.
        seed: ``params.seed``, or the one drawn for this request.
        max_total_tokens: prompt and output together; more than the prompt, at most ``max_model_len``.
        bad_words: ``params.bad_words`` as token ids.
        priority: smaller goes first, whenever it came.
        cache_salt: requests share cached prefixes only with those of the same salt.
        tenant: whose it is, for the policy "fair".
        session: requests of one session go to one replica; a single engine ignores it.
        thinking: the reasoning that comes before what ``params.structured`` asks for; None: there is none.
        product: "vector": the last hidden state of the prompt's last token, float32 [hidden_size], and no tokens. It is
            of one choice; ``params`` and ``max_total_tokens`` have no effect then.
        traceparent, tracestate: W3C's Trace Context of the caller's span; empty: there is none.
    """

    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARS)]
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams
    seed: Annotated[int, Meta(ge=MIN_SEED, le=MAX_SEED)]
    max_total_tokens: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] = ""
    thinking: Thinking | None = None
    tenant: Annotated[str, Meta(max_length=MAX_TENANT_CHARS)] = ""
    session: Annotated[str, Meta(max_length=MAX_SESSION_CHARS)] = ""
    product: Product = "tokens"
    traceparent: Annotated[str, Meta(max_length=MAX_TRACEPARENT_CHARS)] = ""
    tracestate: Annotated[str, Meta(max_length=MAX_TRACESTATE_CHARS)] = ""

    @property
    def prefix_key(self) -> PrefixKey:
        """By which its cached blocks are found."""
        return PrefixKey(salt=self.cache_salt)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar is to be compiled before it can run."""
        has_one = self.params.structured is not None or (self.thinking is not None and self.thinking.max_tokens >= 0)
        return has_one and self.product == "tokens"


@functools.cache
def make_copier(source: type[msgspec.Struct], kind: type[StructT], *given: str) -> Callable[..., StructT]:
    """A function ``copy(struct, *, given...)``: a ``kind`` of the fields of the same names, and of those given.

    A field that is None gets the default of ``kind``. The function is compiled, as dataclasses compiles ``__init__``:
    looking the names up at each call takes a microsecond and more.

    Args:
        given: the fields of ``kind`` that the caller always gives.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    names: dict[str, Any] = {"kind": kind}
    copies = [f"{name}={name}" for name in given]
    for name in [name for name in source.__struct_fields__ if name in defaults and name not in given]:
        copies.append(f"{name}=struct.{name}")
        if defaults[name] is not msgspec.NODEFAULT:
            names[f"_{name}"] = defaults[name]
            copies[-1] += f" if struct.{name} is not None else _{name}"
    copy: Callable[..., StructT] = eval(f"lambda struct, *, {', '.join(given)}: kind({', '.join(copies)})", names)
    return copy


class Reason(enum.IntFlag):
    """Why a sequence may not be scheduled; only zero is schedulable."""

    NONE = 0
    BACKPRESSURE = 1
    """Its reader is behind."""
    PENDING_PREFIX = 2
    """Another sequence is computing the blocks that this one begins with."""
    PAUSED = 4
    """It was added while the engine is paused or asleep."""
    FORK = 8
    """The prompt that it shares with the request's other choices is not computed yet."""
    GRAMMAR = 16
    """Its grammar is not compiled yet."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Sequence:
    """One choice of a request in the core. It runs while it has a row, and ends with a finish reason."""

    request: Request
    sampling: RowSampling
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of its first full blocks, made as they are needed."""
    children: tuple[Sequence, ...] = ()
    """The request's other choices, until the first tokens of all are sampled from this one's logits."""
    prompt: Int32 = field(init=False)
    limit: int = field(init=False)
    """Prompt and output tokens may not be more than this."""
    stop_token_ids: frozenset[int] = field(init=False)
    order: int = -1
    """Counts the sequences in the order in which they came; unique."""
    precedence: tuple[float, float, int] = (0, 0, -1)
    """(level, rank, order), the first two by the policy: the smaller goes first and is preempted last."""
    output_ids: list[int] = field(default_factory=list)
    """The tokens sampled so far, as applied."""
    reasons: Reason = Reason.NONE
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    row: int = -1
    """Its row, or -1."""
    has_run: bool = False
    """Whether it ever had a row."""
    block_ids: list[list[int]] = field(default_factory=list)
    """Its block table in each group of layers, -1 for what the group's window has passed. Empty: it holds no blocks."""
    num_passed_blocks: tuple[int, ...] = ()
    """How many blocks the window has passed, by group."""
    num_ready_blocks: int = 0
    """Leading full blocks whose KV is computed, where prefixes are cached."""
    shares_last_block: bool = False
    """Its last block is another's, too, and not full: it takes a copy when it is admitted."""
    is_cacheable: bool = True
    """Whether its full blocks go into the prefix cache."""
    num_computed_tokens: int = 0
    """Kept here only while it has no row."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache gave it, when it first ran."""
    num_scored_tokens: int = 0
    """Prompt tokens whose log-probabilities have been handed out."""
    num_preemptions: int = 0
    arrived_at: float = math.nan
    """When its request was made, by the clock of `Scheduler.add_sequence`'s caller; NaN if unknown."""
    admitted_at: float = math.nan
    """When it first took a row, by the ``now`` of the scheduler's methods; NaN before, as the next two."""
    first_token_at: float = math.nan
    last_token_at: float = math.nan
    """When its newest token was applied; kept here only while it has no row."""
    listener: Any = None
    """Follows it; the scheduler does not look at it."""
    is_moved: bool = False
    """It comes from another engine, with the tokens of that in ``output_ids``."""
    tenant: str = ""
    """The tenant that it counts for, by the policy, and that tenant's weight."""
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt_token_ids
        self.limit = self.request.max_total_tokens
        if self.request.product == "vector":
            self.limit = len(self.prompt) + 1  # the prompt's last token is computed
        self.stop_token_ids = frozenset(self.request.params.stop_token_ids)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.request_id!r} order={self.order} row={self.row} "
            f"tokens={len(self.prompt)}+{len(self.output_ids)}/{self.limit} blocks={self.num_blocks} "
            f"reasons={self.reasons!r} finish_reason={self.finish_reason}>"
        )

    @property
    def purpose(self) -> Purpose:
        """The purpose of computing the last known token."""
        return Purpose.POOL if self.request.product == "vector" else Purpose.SAMPLE

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: the prompt and what was applied."""
        return len(self.prompt) + len(self.output_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        return sum(map(len, self.block_ids)) - sum(self.num_passed_blocks)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not all there: it computes the whole prompt then."""
        return self.sampling.prompt_logprobs >= 0 and self.num_scored_tokens < len(self.prompt) - 1

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

    def introduce(self) -> RowAdded:
        """Make the entry of a plan by which a device learns of it when it takes its row."""
        sampling = self.sampling
        if sampling.prompt_logprobs >= 0 and not self.needs_prompt_logprobs:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        return RowAdded(
            row=self.row,
            token_ids=self.token_ids(),
            num_prompt_tokens=len(self.prompt),
            block_ids=tuple(map(int32, self.block_ids)),
            sampling=sampling,
        )

    def check_stop(self, token_id: int, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
        """Why it ends with ``token_id``, its newest token, if it does: (finish reason, stop reason).

        The order is vLLM's: nothing before ``min_tokens`` but the length; then EOS, then the request's stop tokens (the
        stop reason is the id), then the length. The sampler masks stop tokens until then. Where a grammar leaves no
        other token than EOS the text is complete, and ends.
        """
        params = self.request.params
        has_min, has_grammar = len(self.output_ids) >= params.min_tokens, self.sampling.grammar is not None
        if token_id in eos_token_ids and (has_grammar or (has_min and not params.ignore_eos)):
            return "stop", None
        if has_min and token_id in self.stop_token_ids:
            return "stop", token_id
        if self.num_tokens >= self.limit:
            return "length", None
        return None, None


by_precedence = attrgetter("precedence")
"""To sort by."""


def make_choices(
    request: Request,
    *,
    eos_token_ids: tuple[int, ...] = (),
    block_hashes: list[bytes] | None = None,
    processors: tuple[ProcessorHandle, ...] = (),
) -> Sequence:
    """The first choice of a request, with the others as its children; they share ``block_hashes`` when they fork.

    Args:
        processors: the request's own, then those made of ``extra_args``.
    """
    sampling = _row_sampling(request, eos_token_ids, processors)
    children = []
    for choice in range(1, sampling.num_choices):
        # The prompt is scored once, by the first one, and not by others that have to compute it again.
        of_child = msgspec.structs.replace(sampling, choice=choice, num_choices=1, prompt_logprobs=-1)
        children.append(Sequence(request, of_child))
    return Sequence(request, sampling, block_hashes or [], tuple(children))


def resume_choice(sequence: Sequence, choice: int, output_ids: list[int]) -> Sequence:
    """One choice of a new request as if it had been preempted behind these tokens, which another engine has sampled.

    Args:
        sequence: as made by `make_choices`; not to be used any more.
        choice: which of its choices.
    """
    resumed = (sequence, *sequence.children)[choice]
    resumed.children = ()
    resumed.block_hashes = sequence.block_hashes
    resumed.sampling = msgspec.structs.replace(resumed.sampling, num_choices=1)
    resumed.output_ids = output_ids
    resumed.is_moved = True
    if output_ids:  # the log-probabilities of its prompt came before them
        resumed.num_scored_tokens = len(resumed.prompt) - 1
    return resumed


def _row_sampling(
    request: Request, eos_token_ids: tuple[int, ...], processors: tuple[ProcessorHandle, ...]
) -> RowSampling:
    """How a row is sampled: fields of the parameters by the same names, and what is made of others."""
    if request.product == "vector":
        return RowSampling()
    params = request.params
    stop_ids = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
    has_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
    return _copy_to_row(
        params,
        top_k=max(params.top_k, 0),  # -1 is off, too
        seed=request.seed,
        num_choices=params.num_sequences,
        ignores_end=params.ignore_eos,
        stop_ids=stop_ids if params.min_tokens else (),
        logit_bias=tuple(params.logit_bias.items()) if params.logit_bias else (),
        bad_words=request.bad_words,
        logits_processors=processors,
        grammar=GrammarHandle(params.structured, request.thinking) if request.has_grammar else None,
        logprobs=(params.logprobs or 0) if has_logprobs else -1,
    )


_copy_to_row: Callable[..., RowSampling] = make_copier(
    SamplingParams,
    RowSampling,
    *("top_k", "seed", "num_choices", "ignores_end", "stop_ids", "logit_bias", "bad_words", "logits_processors"),
    *("grammar", "logprobs"),
)
