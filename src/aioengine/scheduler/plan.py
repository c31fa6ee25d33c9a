"""Steps as the scheduler sends them to the device, and their results: plain, immutable, numbered data.

A `StepPlan` is a delta over stable rows. A row is a place in the executor's persistent buffers; a running sequence
keeps its row until it leaves. The executor owns the token history and the block tables, so that a steady decode step
carries a few small arrays and no token ids: sampled tokens are already on the device when the next step reads them.

For executors in other processes a plan is one msgpack message, in which an array is an extension of its own: its bytes
as they are, which the decoded plan shares with the message. A handle stands for what cannot leave its process, a
compiled grammar or a logits processor, and travels as the plain data that it is.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from aioengine.errors import InvalidRequest, WireError
from aioengine.sampling_params import LogprobsMode, RowParams
from aioengine.structured.constraints import Constraint
from aioengine.structured.grammar import CompiledGrammar, Mask, Thinking
from aioengine.structured.rows import GrammarRow, GrammarRows

LogitsProcessor = Callable[[Any, list["LogitsRow"]], Any]
"""Changes logits: (float32 tensor [rows, vocab], the rows) → logits of the same shape, or None if changed in place.

It runs in the device thread before penalties and temperature, once a step, with all the rows of that step whose
requests were given this same object. In this process only: a function cannot be sent to another one. An exception that
it raises ends those rows' requests (`StepFailed`), and no others.
"""


class LogitsRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One row of the logits that a `LogitsProcessor` is given; equal to itself alone.

    Attributes:
        prompt_token_ids, output_token_ids: int32 [tokens] each, read-only; the next output token is being chosen.
        choice: which of the request's ``n`` choices; 0 where the first tokens of several are drawn from these logits,
            and for greedy choices, which are all alike and one row.
    """

    prompt_token_ids: NDArray[np.int32]
    output_token_ids: NDArray[np.int32]
    choice: int


class GrammarHandle(msgspec.Struct, frozen=True, eq=False, weakref=True, array_like=True):
    """A grammar, by all that it is compiled from; equal to itself alone.

    Attributes:
        constraint: on the text; None: any text.
        thinking: the reasoning before that text; None: there is none.
    """

    constraint: Constraint | None
    thinking: Thinking | None = None


class ProcessorHandle(msgspec.Struct, frozen=True, eq=False, weakref=True, array_like=True):
    """A logits processor; equal to itself alone.

    Attributes:
        number: means nothing in another process.
    """

    number: int


class Handles:
    """The grammars and logits processors of one executor, by their handles. Any thread may use it.

    The core fills it. An entry lasts as long as its handle, and so as long as a sequence or a plan has that.

    Attributes:
        compile_grammar: compiles a grammar whose handle came from another process; not called on the loop. None: plans
            come from this process alone.
    """

    compile_grammar: Callable[[GrammarHandle], CompiledGrammar] | None = None

    def __init__(self) -> None:
        self._grammars: WeakKeyDictionary[GrammarHandle, CompiledGrammar] = WeakKeyDictionary()
        self._processors: WeakKeyDictionary[ProcessorHandle, LogitsProcessor] = WeakKeyDictionary()
        self._numbers = itertools.count()

    def put_grammar(self, handle: GrammarHandle, grammar: CompiledGrammar) -> None:
        self._grammars[handle] = grammar

    def add_processors(self, processors: Iterable[LogitsProcessor]) -> tuple[ProcessorHandle, ...]:
        """Make a handle for each; a processor may have several."""
        handles = []
        for processor in processors:
            handles.append(ProcessorHandle(next(self._numbers)))
            self._processors[handles[-1]] = processor
        return tuple(handles)

    def get_grammar(self, handle: GrammarHandle) -> CompiledGrammar:
        """Return the grammar, which is compiled first if its handle came from another process.

        Raises:
            InvalidRequest: as the compiler.
        """
        grammar = self._grammars.get(handle)
        if grammar is None:
            assert self.compile_grammar is not None, "the plan's grammar is in another process"
            grammar = self._grammars[handle] = self.compile_grammar(handle)
        return grammar

    def get_processors(self, handles: Iterable[ProcessorHandle]) -> tuple[LogitsProcessor, ...]:
        """Return the processors.

        Raises:
            InvalidRequest: a handle came from another process.
        """
        try:
            return tuple(self._processors[handle] for handle in handles)
        except KeyError:
            message = "logits_processors are functions, and the device is in another process"
            raise InvalidRequest(message, param="logits_processors") from None


Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]


def int32(values: Any) -> Int32:
    """An immutable int32 array, owning its data."""
    array = np.array(values, dtype=np.int32)
    array.setflags(write=False)
    return array


EMPTY = int32([])
NO_PURPOSES: Int8 = np.zeros(0, np.int8)
EMPTY_FLOATS: Float32 = np.zeros(0, np.float32)


class Purpose(enum.IntEnum):
    """The purpose of the last token that a row computes in a step.

    Verifying a draft would be another one: `StepResult` has room for several tokens of a row.
    """

    NOTHING = 0
    """A prefill chunk that ends before the last known token: only its KV is wanted."""
    SAMPLE = 1
    """The next token is sampled, or the first token of each choice."""
    POOL = 2
    """Its last hidden state is the row's product."""


class RowSampling(RowParams, frozen=True, kw_only=True, gc=False):
    """A row's sampling parameters for the sampler; already validated.

    A draw depends on (``seed``, ``choice``, output position) only, where the first output token has position 0.
    The logits are changed in this order, after raw log-probabilities were taken: ``allowed_token_ids``, ``bad_words``,
    ``stop_ids``, ``logit_bias``, ``logits_processors``, penalties (repetition, frequency, presence), the grammar's
    mask, temperature, then the filters.
    """

    seed: int = 0
    choice: int = 0
    num_choices: int = 1
    """At output position 0 a token is sampled for each choice from ``choice`` on; the row itself goes on with the first
    one's."""
    min_tokens: int = 0
    """``stop_ids`` cannot be sampled at output positions below this, unless a grammar leaves no other."""
    stop_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number to add to its logit) each."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not come up in the output: the last token of one is masked behind the others."""
    logits_processors: tuple[ProcessorHandle, ...] = ()
    """Applied in this order."""
    grammar: GrammarHandle | None = None
    """The constraint on the output's text."""
    ignores_end: bool = False
    """Tokens that end the output may be sampled only where the grammar leaves no other."""
    logprobs: int = -1
    """Likeliest tokens to report beside the sampled one; -1: no log-probabilities at all."""
    logprobs_mode: LogprobsMode = "raw"
    """Whether to report those of the model's logits, or of the logits that tokens are drawn by, after all changes."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens to report always, where ``logprobs`` is 0 or more."""
    prompt_logprobs: int = -1
    """How many likeliest tokens to report for each prompt token that is computed, the token itself aside; -1: none."""


class RowAdded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sequence that takes a row, with all that the executor needs.

    Attributes:
        row: free until now (``StepPlan.removed`` comes first).
        token_ids: int32 [known tokens], the prompt and what was generated before a preemption.
        num_prompt_tokens: how many of them are the prompt; output position = index - num_prompt_tokens.
        block_ids: for each group of layers int32 [blocks], the sequence's block table so far; -1 for blocks before the
            window of the group. One without a window has enough for all of ``token_ids``.
    """

    row: int
    token_ids: Int32
    num_prompt_tokens: int
    block_ids: tuple[Int32, ...]
    sampling: RowSampling

    def add_grammar(self, rows: GrammarRows, grammar: CompiledGrammar, allowed: Mask | None = None) -> GrammarRow:
        """Add this row to ``rows``, advanced by the tokens of its output that are known.

        Args:
            grammar: ``sampling.grammar``, compiled.
            allowed: mask of the only tokens that its other rules admit; None: all.
        """
        sampling = self.sampling
        has_rules = sampling.allowed_token_ids or sampling.bad_words or sampling.logits_processors or sampling.stop_ids
        row = GrammarRow(
            grammar,
            self.num_prompt_tokens,
            jumps=sampling.logprobs < 0,
            is_forcing=not (has_rules or sampling.ignores_end),
            ignores_end=sampling.ignores_end,
            late_ids=sampling.stop_ids,
            num_late=sampling.min_tokens if sampling.stop_ids else 0,
            allowed=allowed,
        )
        return rows.add(row, self.token_ids[self.num_prompt_tokens :].tolist())


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One device step, as a delta to the step before. All arrays are read-only and owned by the plan.

    An executor applies, in this order: ``removed``, ``copied``, ``added``, ``grown``; then computes ``rows``:
    ``rows[i]`` computes the tokens at positions ``starts[i]`` up to ``starts[i] + num_tokens[i]`` of its history,
    writing their KV, and brings the product of ``purposes[i]``. A token that is sampled after them is appended to the
    row's history on the device.

    Attributes:
        removed: int32 [r], rows that became free.
        copied_from, copied_to: int32 [c] each, all KV of block ``copied_from[i]`` is copied to ``copied_to[i]``; no
            block is in both, and none twice in the second.
        grown_rows, grown_groups, grown_blocks: int32 [g] each, row ``grown_rows[i]`` gets block ``grown_blocks[i]`` in
            its table of group ``grown_groups[i]``.
        rows: int32 [b], rows with tokens in this step; no row twice.
        epochs: int32 [b], the epoch of each row's occupant; a result is matched by (row, epoch).
        starts: int32 [b], first position to compute.
        num_tokens: int32 [b], at least 1 each.
        purposes: int8 [b], a `Purpose` each.
    """

    step: int
    removed: Int32 = EMPTY
    added: tuple[RowAdded, ...] = ()
    grown_rows: Int32 = EMPTY
    grown_groups: Int32 = EMPTY
    grown_blocks: Int32 = EMPTY
    rows: Int32 = EMPTY
    epochs: Int32 = EMPTY
    starts: Int32 = EMPTY
    num_tokens: Int32 = EMPTY
    purposes: Int8 = NO_PURPOSES
    copied_from: Int32 = EMPTY
    copied_to: Int32 = EMPTY

    def describe(self) -> dict[str, Any]:
        """The plan as plain data for a person to read: no token ids, so no prompt text."""
        added = [
            {
                "row": row.row,
                "num_tokens": len(row.token_ids),
                "num_prompt_tokens": row.num_prompt_tokens,
                "num_blocks": [len(block_ids) for block_ids in row.block_ids],
                "sampling": _describe_sampling(row.sampling),
            }
            for row in self.added
        ]
        columns = [name for name in self.__struct_fields__ if name not in ("step", "added")]
        return {"step": self.step, "added": added} | {name: getattr(self, name).tolist() for name in columns}


def _describe_sampling(sampling: RowSampling) -> dict[str, Any]:
    """The fields; a number in place of long ones, and of ids that would reveal a prompt or a secret word."""
    fields = msgspec.structs.asdict(sampling)
    fields["logits_processors"] = f"<{len(sampling.logits_processors)} functions>"
    fields["bad_words"] = f"<{len(sampling.bad_words)} sequences>"
    if (grammar := sampling.grammar) is not None:
        fields["grammar"] = type(grammar.constraint or grammar.thinking).__name__
    return {
        name: f"<{len(value)} items>" if isinstance(value, tuple) and len(value) > 32 else value
        for name, value in fields.items()
    }


class StepLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log-probabilities of the tokens whose rows asked for them, by each row's ``logprobs_mode``.

    Attributes:
        index: int32 [m], the index in ``StepResult.token_ids`` of each line's token, ascending.
        logprobs: float32 [m], of the sampled token.
        ranks: int32 [m], 1 for the likeliest token.
        top_ids: int32 [m, k], the likeliest first; k is the most that any row asked for, a row reads its own first few.
        top_logprobs: float32 [m, k].
        extra_offsets: int32 [m + 1], which of the following belong to each line: the row's ``logprob_token_ids``, in
            their order. Empty, as they are, where no row has any.
        extra_ids: int32 [e]. extra_logprobs: float32 [e]. extra_ranks: int32 [e].
    """

    index: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32
    extra_offsets: Int32 = EMPTY
    extra_ids: Int32 = EMPTY
    extra_logprobs: Float32 = EMPTY_FLOATS
    extra_ranks: Int32 = EMPTY


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Raw log-probabilities of prompt tokens, each given the tokens before it.

    Attributes:
        index: int32 [m], the index in the plan's rows of each line's row, ascending.
        positions: int32 [m], the place of the token in the prompt, at least 1; ascending within a row. A row that asks
            brings the lines of all prompt tokens that follow one which this step computes.
        logprobs: float32 [m], of that prompt token.
        ranks: int32 [m].
        top_ids, top_logprobs: int32 and float32 [m, k], as in `StepLogprobs`.
    """

    index: Int32
    positions: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32


class NothingAllowed(ValueError):
    """A row's own rules leave no token to sample."""


class RowFailure(msgspec.Struct, frozen=True, gc=False):
    """The failure of one row's part of a step: its logits are no numbers, or a processor of its own raised.

    The row gets no token; a plan that was launched meanwhile goes on with a meaningless one.
    """

    index: int
    """Index in the plan's rows."""
    error: Exception


class StepResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The products of a step's rows: tokens and vectors.

    Tokens are flat: ``token_ids[offsets[i]:offsets[i + 1]]`` belong to ``plan.rows[i]``.

    A row has no token (another purpose, or it failed), one, or several (``num_choices``).

    Attributes:
        offsets: int32 [b + 1].
        token_ids: int32 [tokens sampled].
        logprobs, prompt_logprobs: None where no row asked.
        failures: of single rows, ascending.
        forced: by the index of a token in ``token_ids``, the tokens that the row's grammar forces after it. They are
            in the row's history from the next plan on, without KV. Steps in flight sample the first of them.
        vectors: by index in ``plan.rows``, float32 [hidden_size] of each row whose purpose is `Purpose.POOL` and which
            did not fail: the hidden state of its last token after the final norm.
        device_time_s: how long the step held the device.
        ended_at_s: when it ended, by ``time.monotonic`` or the clock of a virtual loop; 0.0 if unknown.
    """

    step: int
    offsets: Int32
    token_ids: Int32
    logprobs: StepLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    failures: tuple[RowFailure, ...] = ()
    forced: Mapping[int, Sequence[int]] = {}
    vectors: Mapping[int, Float32] = {}
    device_time_s: float = 0.0
    ended_at_s: float = 0.0


MAX_PLAN_BYTES = 256 * 2**20
"""Bytes of a plan: every row of an engine added at once, each with a long prompt."""

DTYPES = (np.dtype("<i4"), np.dtype("i1"))
"""By the code of the extension."""


def encode_plan(plan: StepPlan) -> bytes:
    """Raises WireError: the plan is larger than `MAX_PLAN_BYTES`."""
    message = _encoder.encode(plan)
    if len(message) > MAX_PLAN_BYTES:
        raise WireError(f"a plan of {len(message):,} bytes; {MAX_PLAN_BYTES:,} are allowed")
    return message


def decode_plan(message: bytes) -> StepPlan:
    """The plan of `encode_plan`; its arrays are read-only views of ``message``.

    Raises:
        WireError: the message is malformed, truncated or too large, or a value in it fits no plan.
    """
    if len(message) > MAX_PLAN_BYTES:
        raise WireError(f"a plan of {len(message):,} bytes; {MAX_PLAN_BYTES:,} are allowed")
    try:
        plan = _decoder.decode(message)
        _check(plan)
    except Exception as error:  # msgspec's own, and what a constraint's __post_init__ finds wrong with its values
        raise WireError(f"a malformed plan: {error}") from None
    return plan


def _check(plan: StepPlan) -> None:
    tables = (
        (plan.rows, plan.epochs, plan.starts, plan.num_tokens, plan.purposes),
        (plan.grown_rows, plan.grown_groups, plan.grown_blocks),
        (plan.copied_from, plan.copied_to),
    )
    if any(len({len(column) for column in columns}) > 1 for columns in tables):
        raise ValueError("columns of one table differ in length")
    if len(plan.rows) and (plan.starts.min() < 0 or plan.num_tokens.min() < 1):
        raise ValueError("a row computes no tokens")
    if not np.isin(plan.purposes, list(Purpose)).all():
        raise ValueError("a purpose is unknown")
    if any(not 0 < row.num_prompt_tokens <= len(row.token_ids) for row in plan.added):
        raise ValueError("a row has no prompt")


def _encode_array(value: Any) -> Ext:
    if isinstance(value, np.ndarray) and value.dtype in DTYPES:
        return Ext(DTYPES.index(value.dtype), np.ascontiguousarray(value).data)
    raise TypeError(f"a {type(value).__name__} is no plain data")


def _decode_array(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, DTYPES[code])


def _check_array(kind: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype != get_args(get_args(kind)[1])[0]:
        raise TypeError(f"an array of {kind} is needed")
    return value


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(StepPlan, ext_hook=_decode_array, dec_hook=_check_array)
