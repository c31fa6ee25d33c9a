"""Steps as the scheduler sends them to the device, and their results: plain, immutable, numbered data.

A `StepPlan` is a delta over stable rows. A row is a place in the executor's persistent buffers; a running sequence
keeps its row until it leaves. The executor owns the token history and the block tables, so that a steady decode step
carries a few small arrays and no token ids: sampled tokens are already on the device when the next step reads them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.sampling_params import LogprobsMode, RowParams
from aioengine.scheduler.handles import GrammarHandle, ProcessorHandle
from aioengine.structured.grammar import CompiledGrammar, Mask
from aioengine.structured.rows import GrammarRow, GrammarRows

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


MAX_DESCRIBED_ITEMS = 32


def _describe_sampling(sampling: RowSampling) -> dict[str, Any]:
    """The fields; a number in place of long ones, and of ids that would reveal a prompt or a secret word."""
    fields = msgspec.structs.asdict(sampling)
    fields["logits_processors"] = f"<{len(sampling.logits_processors)} functions>"
    fields["bad_words"] = f"<{len(sampling.bad_words)} sequences>"
    if (grammar := sampling.grammar) is not None:
        fields["grammar"] = type(grammar.constraint or grammar.thinking).__name__
    return {
        name: f"<{len(value)} items>" if isinstance(value, tuple) and len(value) > MAX_DESCRIBED_ITEMS else value
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
