"""A plan as the words that a device needs, out of what the host keeps of the rows.

The token history and the block tables are the device's. The host has words for each row, as the sampling kernels
take them, so that a steady decode step takes a few array operations, whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.executor.step_words import ExtraWords, FixedWords, Span, TableSpans
from aioengine.kernels.sample_rows import PARAM_WORDS, SAMPLE_WORDS, SampleFlag, SampleRow
from aioengine.sampler.outputs import OutputSizes
from aioengine.sampler.processors import ProcessedRow
from aioengine.sampler.rules import RuleSizes, RuleTable, pack_bits
from aioengine.sampler.sampler import Features
from aioengine.sampling_params import FILTERS, PENALTIES, ROW_PARAMS, is_any_on
from aioengine.scheduler.plan import (
    EMPTY,
    Handles,
    Int32,
    LogitsProcessor,
    LogitsRow,
    Purpose,
    RowAdded,
    RowSampling,
    StepPlan,
    int32,
)
from aioengine.structured.rows import GrammarRow, GrammarRows

NUM_TOP_SIZES = (0, 5, 20)
"""Numbers of likeliest tokens for which there are graphs; others are rounded up."""

PADDING_SAMPLE = np.zeros(SAMPLE_WORDS, np.int32)
PADDING_SAMPLE[[SampleRow.LOGITS_ROW, SampleRow.MASK]] = -1

Int64 = NDArray[np.int64]

NO_IDS = np.zeros(0, np.int64)

IS_RANDOM, HAS_FILTERS, HAS_MASK, HAS_GRAMMAR, IS_PENALISED, HAS_EDITS, HAS_RULES = (1 << bit for bit in range(7))
HAS_MIN_TOKENS, WANTS_LOGPROBS, IS_PROCESSED, HAS_CHOICES, HAS_PROCESSORS = (1 << bit for bit in range(7, 12))
HAS_NAMED_LOGPROBS, SCORES_PROMPT = 1 << 12, 1 << 13
"""Properties of a row that each step needs, as bits of one number: a step reads those of all its rows at once."""

LOGITS_ROW, END, OUTPUT_POSITION, CHOICE, FLAGS = map(
    int, (SampleRow.LOGITS_ROW, SampleRow.END, SampleRow.OUTPUT_POSITION, SampleRow.CHOICE, SampleRow.FLAGS)
)
"""Words of a sample, as numbers: a member of an enumeration is looked up by a function of Python's."""
SAMPLE, POOL = int(Purpose.SAMPLE), int(Purpose.POOL)
FIRST, LOGPROBS = int(SampleFlag.FIRST), int(SampleFlag.LOGPROBS)


def spans(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> Int64:
    """int64 [sum of counts]: ``starts[i]``, ``starts[i] + 1``, … ``counts[i]`` of them, one span after the other."""
    ends = np.cumsum(counts)
    positions: Int64 = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts - starts, counts)
    return positions


@dataclass(slots=True)
class RareProperties:
    """Properties that few rows have, and the flags of most do not name.

    Attributes:
        processors: of logits. allowed: int64 [any], the only ids that are allowed to them; None: all.
        known: tokens of a row about which the host must know them.
        grammar: the row's place in its grammar.
        logprob_token_ids: int64 [any], the tokens that are always reported.
    """

    processors: tuple[LogitsProcessor, ...] = ()
    allowed: Tensor | None = None
    known: list[int] = field(default_factory=list)
    grammar: GrammarRow | None = None
    logprob_token_ids: Int64 = field(default_factory=lambda: NO_IDS)


@dataclass(slots=True)
class Deltas:
    """Changes that a step makes before it computes; each a `Span` of the step's extra words, or None.

    Attributes:
        tokens, blocks, masks: spans for the history, the block tables, the bitmasks.
        copies: copied_from, then copied_to.
        rules: `RuleTable.words`.
    """

    tokens: Span | None = None
    blocks: Span | None = None
    masks: Span | None = None
    copies: Span | None = None
    rules: Span | None = None


class GrammarSample(NamedTuple):
    """A token that a row with a grammar brings.

    Attributes:
        sample: the row's own, of several choices the first one's.
        plan_index: which of the plan's rows it is.
        position: of the token, in prompt and output.
        mask: its row of the bitmasks.
    """

    sample: int
    plan_index: int
    position: int
    row: GrammarRow
    mask: int


@dataclass(slots=True, kw_only=True)
class Step:
    """A step, as the host knows it.

    Attributes:
        num_tokens: T.
        num_decodes: rows of one token, which come in the fixed section.
        max_context: the longest row's tokens.
        features: of the sampling.
        sampled: int64 [n], which of the plan's rows want a token.
        pooled: which of them want a vector, ascending.
        row_of_sample: int64 [s], which of the plan's rows each sample is of, ascending.
        wants_logprobs: bool [s].
        is_ruled: bool [s], whether rules may mask all its tokens.
        sizes: of what comes back.
        is_plain: each row one token and one sample, nothing that only the host can do: a graph may run it.
        extra: the words beside the fixed ones; empty in a steady step.
        tiles, logits_tokens, pooled_tokens, samples, scored_rows, extra_pairs, prompt: `Span`s of those.
            ``logits_tokens``: int32 [n], which tokens' logits are wanted, where not all are.
            ``pooled_tokens``: int32 [p], which tokens' hidden states are wanted.
            ``samples``, ``scored_rows``: where there are too many for the fixed sections.
            ``extra_pairs``: samples, their rows of logits, and token ids, of tokens that are reported always.
            ``prompt``: indices of tokens, then the token ids behind them.
        prompt_tokens: int32 [m] each, of the prompt tokens whose log-probabilities are asked for: which of the plan's
            rows each belongs to, ascending; its position in the prompt.
        extra_counts, extra_ids: int64 [s], how many of those each sample has, and which; None: no sample has any.
        grammars: the samples whose rows have grammars.
        processed: which rows of logits have logits processors.
        learning: first sample, and the tokens to which its own is to be added once it is known.
        failures: by index among the plan's rows, why one that was added has failed: it computes its tokens as a row
            that asks for nothing.
    """

    plan: StepPlan
    num_tokens: int
    num_decodes: int
    max_context: int
    features: Features
    sampled: Int64
    row_of_sample: Int64
    wants_logprobs: NDArray[np.bool_]
    is_ruled: NDArray[np.bool_]
    sizes: OutputSizes
    is_plain: bool
    extra: ExtraWords
    deltas: Deltas = field(default_factory=Deltas)
    tiles: Span | None = None
    logits_tokens: Span | None = None
    pooled: tuple[int, ...] = ()
    pooled_tokens: Span | None = None
    samples: Span | None = None
    scored_rows: Span | None = None
    extra_pairs: Span | None = None
    extra_counts: Int64 | None = None
    extra_ids: Int32 | None = None
    prompt: Span | None = None
    prompt_tokens: tuple[Int32, Int32] | None = None
    grammars: list[GrammarSample] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)
    learning: list[tuple[int, list[int]]] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)


class Batch:
    """The rows of an executor, on the host.

    Args:
        max_tokens: that the history of a row holds.
        tile: the most query tokens of an attention tile.
        num_groups: of layers, each with block tables of its own: group · max_num_seqs + row is the number of one.
        hidden_size: numbers of a vector.

    Attributes:
        first_blocks: int32 [num_groups], the id of the first block in the group's pool, from which the device counts;
            None: all groups share one pool.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        max_tokens: int,
        tile: int,
        num_groups: int = 1,
        hidden_size: int = 0,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_tables = num_groups * max_num_seqs
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self.tile = tile
        self.handles = Handles()
        self.rules = RuleTable(vocab_size)
        self.first_blocks: Int32 | None = None
        self._num_blocks = np.zeros(self._num_tables, np.int32)
        """By number of block table."""
        self._words = np.zeros((max_num_seqs, SAMPLE_WORDS), np.int32)
        """Words of each row, as kernels take a sample's; the following are views of them."""
        self._params: dict[str, NDArray[Any]] = {
            name: self._words.view(np.float32 if ROW_PARAMS[name] is float else np.int32)[:, word]
            for name, word in PARAM_WORDS.items()
        }
        self._seed: Int64 = self._words[:, SampleRow.SEED_LOW : SampleRow.SEED_HIGH + 1].view(np.int64)[:, 0]
        self._choice = self._words[:, SampleRow.CHOICE]
        columns = np.zeros((5, max_num_seqs), np.int32)
        self._num_prompt_tokens, self._logprobs, self._min_tokens, self._prompt_logprobs, self._num_choices = columns
        self._flags = np.zeros(max_num_seqs, np.int32)
        """`IS_RANDOM` and the following."""
        self._rare: dict[int, RareProperties] = {}
        self.grammar_rows = GrammarRows(-(-vocab_size // 32))
        self._failed: dict[int, Exception] = {}
        """Rows of the step that is being written which could not be described."""
        self._free_masks: list[int] = []
        self.num_masks = 0

    # What changes

    def apply(self, plan: StepPlan, fixed: FixedWords[NDArray[Any]], extra: ExtraWords) -> Deltas:
        """Take in a plan's deltas.

        Raises:
            Exception: the plan does not fit the rows, whose state is unknown from now on.
        """
        deltas = Deltas()
        for row in plan.removed.tolist():
            self._remove(row)
        self._failed.clear()
        fixed.grown[:, 0] = -1
        if len(plan.copied_from):
            deltas.copies = extra.add(np.concatenate((plan.copied_from, plan.copied_to)))
        if plan.added or self._rare or len(plan.grown_rows):
            blocks = TableSpans(extra)
            if plan.added or self._rare:
                self._add_all(plan.added, blocks, deltas, extra)
            if len(plan.grown_rows):
                self._grow(plan, blocks, fixed)
            deltas.blocks = blocks.end()
        if self.rules.is_changed:
            deltas.rules = extra.add(self.rules.words())
        return deltas

    def _remove(self, row: int) -> None:
        self.rules.remove(row)
        rare = self._rare.pop(row, None)
        if rare is not None and rare.grammar is not None:
            self.grammar_rows.remove(rare.grammar)
        if self._flags[row] & HAS_MASK:
            self._free_masks.append(int(self._words[row, SampleRow.MASK]))
        self._flags[row] = 0

    def _add_all(self, added: tuple[RowAdded, ...], blocks: TableSpans, deltas: Deltas, extra: ExtraWords) -> None:
        tokens, masks = TableSpans(extra), TableSpans(extra)
        for row in added:
            for group, block_ids in enumerate(row.block_ids):
                table = group * self._max_num_seqs + row.row
                self._num_blocks[table] = len(block_ids)
                # The others were passed by a window, or hold no state: none is read.
                if self.first_blocks is not None:
                    block_ids = block_ids - self.first_blocks[group]
                blocks.add(table, 0, np.maximum(block_ids, 0))
            tokens.add(row.row, 0, row.token_ids)
            try:
                self._describe(row, masks)
            except Exception as error:  # a value that no check has seen is its own request's end
                self._failed[row.row] = error
                self._remove(row.row)
                self._describe(msgspec.structs.replace(row, sampling=RowSampling()), masks)
        for number, rare in self._rare.items():
            while rare.grammar is not None and rare.grammar.unsent:
                position, token_ids = rare.grammar.unsent.popleft()
                tokens.add(number, position, np.array(token_ids[: self._max_tokens - position], np.int32))
        deltas.tokens, deltas.masks = tokens.end(), masks.end()

    def _describe(self, added: RowAdded, masks: TableSpans) -> None:
        """Keep what is to be known of how a row is sampled."""
        row, sampling, rare = added.row, added.sampling, RareProperties()
        self._num_prompt_tokens[row] = added.num_prompt_tokens
        for name, column in self._params.items():
            column[row] = getattr(sampling, name)
        self._seed[row], self._choice[row] = sampling.seed, sampling.choice
        self._logprobs[row], self._prompt_logprobs[row] = sampling.logprobs, sampling.prompt_logprobs
        has_late = sampling.stop_ids and sampling.grammar is None
        self._min_tokens[row] = sampling.min_tokens if has_late else 0  # else nothing to mask until then
        self._num_choices[row] = sampling.num_choices
        allowed = np.array(sampling.allowed_token_ids, np.int64)
        flags = (
            (sampling.num_choices > 1) * HAS_CHOICES
            | bool(sampling.logits_processors) * HAS_PROCESSORS
            | bool(sampling.logprob_token_ids) * HAS_NAMED_LOGPROBS
            | (sampling.prompt_logprobs >= 0) * SCORES_PROMPT
            | (sampling.grammar is not None) * HAS_GRAMMAR
        )
        if flags & ~HAS_CHOICES:
            self._rare[row] = rare
            named = np.array(sampling.logprob_token_ids, np.int64)
            rare.logprob_token_ids = named[named < self._vocab_size]
            if flags & (HAS_PROCESSORS | SCORES_PROMPT):
                rare.known = added.token_ids.tolist()
            if flags & HAS_PROCESSORS:
                rare.processors = self.handles.get_processors(sampling.logits_processors)
                rare.allowed = torch.from_numpy(allowed) if len(allowed) else None
        is_random, is_penalised = sampling.temperature > 0, is_any_on(sampling, PENALTIES)
        has_edits = self.rules.add(row, sampling)
        # With processors the allowed ids are kept before these, which may change that.
        has_mask = len(allowed) > 0 and not sampling.logits_processors
        has_rules = has_edits or is_penalised or len(allowed) > 0 or bool(sampling.logits_processors)
        bits = pack_bits(allowed, self._vocab_size) if has_mask or sampling.grammar is not None else EMPTY
        if sampling.grammar is not None:
            grammar = self.handles.get_grammar(sampling.grammar)
            rare.grammar = added.add_grammar(self.grammar_rows, grammar, bits if has_mask else None)
            has_mask = has_rules = True
        self._flags[row] = (
            flags
            | is_random * IS_RANDOM
            | (is_random and is_any_on(sampling, FILTERS)) * HAS_FILTERS
            | has_mask * HAS_MASK
            | is_penalised * IS_PENALISED
            | has_edits * HAS_EDITS
            | has_rules * HAS_RULES
            | (self._min_tokens[row] > 0) * HAS_MIN_TOKENS
            | (sampling.logprobs >= 0) * WANTS_LOGPROBS
            | (sampling.logprobs >= 0 and sampling.logprobs_mode == "processed") * IS_PROCESSED
        )
        self._words[row, SampleRow.ROW] = row
        mask = -1
        if has_mask:
            if not self._free_masks:
                self._free_masks.append(self.num_masks)
                self.num_masks += 1
            mask = self._free_masks.pop()
            masks.add(mask, 0, bits)
        self._words[row, SampleRow.MASK] = mask

    def _grow(self, plan: StepPlan, blocks: TableSpans, fixed: FixedWords[NDArray[Any]]) -> None:
        """Append the plan's blocks to their tables, in the fixed section as far as it has room."""
        block_ids = plan.grown_blocks
        if self.first_blocks is not None:
            block_ids = np.maximum(block_ids - self.first_blocks[plan.grown_groups], 0)
        tables = plan.grown_groups * np.int32(self._max_num_seqs) + plan.grown_rows
        order = np.argsort(tables, kind="stable")
        tables, block_ids = tables[order], block_ids[order]
        columns = self._num_blocks[tables] + np.arange(len(tables)) - np.searchsorted(tables, tables)
        np.add.at(self._num_blocks, tables, 1)
        num_fixed = self._num_tables
        if len(tables) > num_fixed:
            blocks.add_each(tables[num_fixed:], columns[num_fixed:], block_ids[num_fixed:])
            tables, columns, block_ids = tables[:num_fixed], columns[:num_fixed], block_ids[:num_fixed]
        count = len(tables)
        grown = fixed.grown[:count]
        grown[:, 0], grown[:, 1], grown[:, 2], grown[:, 3] = tables, columns, np.arange(count), 1
        fixed.grown_blocks[:count] = block_ids

    # What is computed

    def step(
        self, plan: StepPlan, fixed: FixedWords[NDArray[Any]], extra: ExtraWords, size_for: dict[int, int]
    ) -> tuple[Step, int | None]:
        """Write what the plan's rows compute.

        Args:
            size_for: by number of rows, the size of the graph that could run them.
        Returns:
            the step, and that size, to which it is padded; None: it is to be run as it is.
        """
        ends = plan.starts + plan.num_tokens
        sampled = np.flatnonzero(plan.purposes == SAMPLE)
        rows, end = plan.rows[sampled], ends[sampled]
        positions = end - self._num_prompt_tokens[rows]
        flags = self._flags[rows]
        any_flags = int(np.bitwise_or.reduce(flags))
        num_choices = None
        logits_row_of_sample = np.arange(len(rows))
        if any_flags & HAS_CHOICES:
            # A row brings several tokens at output position 0 alone, and is not asked again from then on.
            counts = np.where(positions == 0, self._num_choices[rows], 1)
            self._flags[rows[positions > 0]] &= ~HAS_CHOICES
            if (counts > 1).any():
                num_choices = counts
                logits_row_of_sample = np.repeat(logits_row_of_sample, num_choices)
        is_ruled, has_edits = flags & HAS_RULES > 0, any_flags & HAS_EDITS > 0
        if any_flags & HAS_MIN_TOKENS:
            is_below = positions < self._min_tokens[rows]
            is_ruled |= is_below
            has_edits |= bool(is_below.any())
        features = self._features(rows, any_flags, has_edits=has_edits)
        num_rows, num_tokens = len(plan.rows), int(plan.num_tokens.sum())
        step = Step(
            plan=plan,
            num_tokens=num_tokens,
            num_decodes=0,
            max_context=int(ends.max(initial=0)),
            features=features,
            sampled=sampled,
            row_of_sample=sampled[logits_row_of_sample],
            wants_logprobs=(flags & WANTS_LOGPROBS > 0)[logits_row_of_sample],
            is_ruled=is_ruled[logits_row_of_sample],
            sizes=OutputSizes(len(logits_row_of_sample), features.num_top),
            is_plain=num_tokens == num_rows and num_choices is None and features.num_top in (-1, *NUM_TOP_SIZES),
            extra=extra,
        )
        if self._failed:
            step.failures = {i: self._failed[row] for i, row in enumerate(plan.rows.tolist()) if row in self._failed}
        if any_flags & HAS_GRAMMAR:
            logits_rows = np.flatnonzero(flags & HAS_GRAMMAR)
            first_samples = np.searchsorted(logits_row_of_sample, logits_rows).tolist()
            for logits_row, sample in zip(logits_rows.tolist(), first_samples, strict=True):
                row = int(rows[logits_row])
                grammar, mask = self._rare[row].grammar, int(self._words[row, SampleRow.MASK])
                assert grammar is not None
                index, position = int(sampled[logits_row]), int(end[logits_row])
                step.grammars.append(GrammarSample(sample, index, position, grammar, mask))
        self._ask_for_more(step, rows, flags, any_flags, logits_row_of_sample)
        size = size_for.get(num_rows) if step.is_plain and len(sampled) else None
        self._write_rows(step, ends, fixed, size)
        self._write_samples(step, (rows, end, positions), (logits_row_of_sample, num_choices), fixed, size)
        return step, size

    def _features(self, rows: Int32, any_flags: int, *, has_edits: bool) -> Features:
        most = int(self._logprobs[rows].max()) if any_flags & WANTS_LOGPROBS else -1
        num_processed = 0
        if any_flags & IS_PROCESSED:
            num_processed = int((self._flags[rows] & IS_PROCESSED > 0).sum())
            num_processed = min(1 << (num_processed - 1).bit_length(), self._max_num_seqs)
        return Features(
            has_filters=any_flags & HAS_FILTERS > 0,
            is_greedy=any_flags & IS_RANDOM == 0,
            has_masks=any_flags & HAS_MASK > 0,
            is_penalised=any_flags & IS_PENALISED > 0,
            rules=self.rules.sizes if has_edits else RuleSizes(),
            num_top=min(next((size for size in NUM_TOP_SIZES if size >= most), most), self._vocab_size)
            if most >= 0
            else -1,
            num_processed=num_processed,
        )

    def _ask_for_more(self, step: Step, rows: Int32, flags: Int32, any_flags: int, logits_row_of_sample: Int64) -> None:
        """Write what few steps need: vectors, scored prompt tokens, tokens that are reported always, processors."""
        if np.count_nonzero(step.plan.purposes) > len(step.sampled):
            pooled = np.flatnonzero(step.plan.purposes == POOL)
            tokens = np.cumsum(step.plan.num_tokens)[pooled] - 1
            step.pooled = tuple(pooled.tolist())
            step.pooled_tokens = step.extra.add(tokens.astype(np.int32))
            step.sizes = step.sizes._replace(num_vectors=len(tokens), vector_size=self._hidden_size)
            step.is_plain = False
        if self._rare:
            asking = np.flatnonzero(self._flags[step.plan.rows] & SCORES_PROMPT)
            if len(asking):
                self._score_prompts(step, asking)
        if any_flags & HAS_NAMED_LOGPROBS and step.features.num_top >= 0:
            is_named = (flags & HAS_NAMED_LOGPROBS > 0).tolist()
            of_rows = [
                self._rare[row].logprob_token_ids if is_one else NO_IDS
                for row, is_one in zip(rows.tolist(), is_named, strict=True)
            ]
            of_samples = [of_rows[logits_row] for logits_row in logits_row_of_sample.tolist()]
            step.extra_counts = np.array([len(ids) for ids in of_samples], np.int64)
            if step.extra_counts.any():
                step.is_plain = False
                samples = np.repeat(np.arange(len(of_samples)), step.extra_counts)
                step.extra_ids = np.concatenate(of_samples).astype(np.int32)
                pairs = np.concatenate((samples, logits_row_of_sample[samples], step.extra_ids))
                step.extra_pairs = step.extra.add(pairs.astype(np.int32))
                step.sizes = step.sizes._replace(num_extra=len(samples))
            else:
                step.extra_counts = None
        if any_flags & HAS_PROCESSORS:
            step.processed = np.flatnonzero(flags & HAS_PROCESSORS).tolist()
            step.is_plain = False
            first_samples = np.searchsorted(logits_row_of_sample, step.processed)
            step.learning = [
                (sample, self._rare[int(rows[logits_row])].known)
                for sample, logits_row in zip(first_samples.tolist(), step.processed, strict=True)
            ]

    def _score_prompts(self, step: Step, asking: Int64) -> None:
        """Score each prompt token that follows one which the plan computes, of the plan's rows ``asking``."""
        plan = step.plan
        rows, starts = plan.rows[asking], plan.starts[asking]
        # The prompt's last token predicts an output token.
        counts = np.minimum(plan.num_tokens[asking], self._num_prompt_tokens[rows] - 1 - starts).clip(min=0)
        if not counts.any():
            return
        positions = spans(starts + 1, counts)
        token_ids = [
            self._rare[row].known[position]
            for row, position in zip(np.repeat(rows, counts).tolist(), positions.tolist(), strict=True)
        ]
        first_tokens = np.cumsum(plan.num_tokens) - plan.num_tokens
        predicted_at = spans(first_tokens[asking], counts)
        step.is_plain = False
        step.prompt_tokens = np.repeat(asking, counts).astype(np.int32), positions.astype(np.int32)
        step.prompt = step.extra.add(np.concatenate((predicted_at, token_ids)).astype(np.int32))
        num_top_asked = min(int(self._prompt_logprobs[rows].max()), self._vocab_size)
        step.sizes = step.sizes._replace(num_prompt=len(token_ids), num_prompt_top=num_top_asked)

    def _write_rows(self, step: Step, ends: Int32, fixed: FixedWords[NDArray[Any]], size: int | None) -> None:
        plan, count = step.plan, len(step.plan.rows)
        first_tokens = np.cumsum(plan.num_tokens) - plan.num_tokens
        rows = fixed.rows
        rows[:count, 0], rows[:count, 1] = plan.rows, plan.starts
        rows[:count, 2], rows[:count, 3] = first_tokens, plan.num_tokens
        is_decode = plan.num_tokens == 1
        members = slice(None) if step.num_tokens == count else is_decode
        step.num_decodes = count if step.num_tokens == count else int(is_decode.sum())
        decodes = fixed.decodes[: step.num_decodes]
        decodes[:, 0], decodes[:, 1], decodes[:, 2] = plan.rows[members], first_tokens[members], ends[members]
        if step.num_decodes < count:
            step.tiles = step.extra.add(self._tiles(plan, first_tokens, ~is_decode))
        if size is not None and size > count:
            padding = np.arange(count, size)
            rows[count:size] = np.stack((np.full_like(padding, -1), padding * 0, padding, padding * 0 + 1), axis=1)
            fixed.decodes[count:size] = np.stack((np.full_like(padding, -1), padding, padding * 0), axis=1)

    def _tiles(self, plan: StepPlan, first_tokens: Int32, members: NDArray[np.bool_]) -> Int32:
        """Query tiles by their positions: a kernel starts with the last, so that the last ones to run are short."""
        rows, starts, firsts, counts = (c[members] for c in (plan.rows, plan.starts, first_tokens, plan.num_tokens))
        num_tiles = -(-counts // self.tile)
        of_row = np.repeat(np.arange(len(rows)), num_tiles)
        offsets = spans(np.zeros_like(num_tiles), num_tiles) * self.tile
        positions = starts[of_row] + offsets
        tiles = np.stack(
            (rows[of_row], firsts[of_row] + offsets, np.minimum(counts[of_row] - offsets, self.tile), positions),
            axis=1,
        ).astype(np.int32)
        by_position: Int32 = tiles[np.argsort(positions, kind="stable")]
        return by_position

    def _write_samples(
        self,
        step: Step,
        of_logits_rows: tuple[Int32, Int32, Int32],
        samples_of_logits_rows: tuple[Int64, NDArray[np.integer] | None],
        fixed: FixedWords[NDArray[Any]],
        size: int | None,
    ) -> None:
        rows, ends, positions = of_logits_rows
        logits_row_of_sample, num_choices = samples_of_logits_rows
        count = len(logits_row_of_sample)
        is_fixed = count <= self._max_num_seqs
        samples = fixed.samples[:count] if is_fixed else np.empty((count, SAMPLE_WORDS), np.int32)
        samples[:] = self._words[rows[logits_row_of_sample]]
        samples[:, LOGITS_ROW] = logits_row_of_sample if size is None else step.sampled
        samples[:, END] = ends[logits_row_of_sample]
        samples[:, OUTPUT_POSITION] = positions[logits_row_of_sample]
        samples[:, FLAGS] = FIRST
        first_samples = logits_row_of_sample
        if num_choices is not None:
            first_samples = np.cumsum(num_choices) - num_choices
            nth = np.arange(count) - first_samples[logits_row_of_sample]
            samples[:, CHOICE] += nth.astype(np.int32)
            samples[:, FLAGS] = (nth == 0) * FIRST
        scored_rows = fixed.scored_rows if is_fixed else np.empty(count, np.int32)
        if step.features.num_top >= 0:
            samples[:, FLAGS] += step.wants_logprobs * LOGPROBS
            scored_rows[:count] = np.where(step.wants_logprobs, samples[:, LOGITS_ROW], -1)
            scored_rows[count:] = -1
            is_kept = step.is_ruled
            if step.features.num_processed:
                is_processed = self._flags[rows] & IS_PROCESSED > 0
                processed = first_samples[is_processed]
                fixed.processed_samples[: len(processed)] = processed
                fixed.processed_samples[len(processed) :] = processed[-1]
                is_kept = is_kept | is_processed[logits_row_of_sample]
            kept = np.unique(scored_rows[:count][step.wants_logprobs & is_kept])
            fixed.kept[: len(kept)], fixed.kept[len(kept) :] = kept, -1
        if size is not None:
            fixed.samples[count:size] = PADDING_SAMPLE
            step.sizes = step.sizes._replace(num_samples=size)
        elif len(step.sampled) < step.num_tokens:
            ends_of_rows = np.cumsum(step.plan.num_tokens)[step.sampled] - 1
            step.logits_tokens = step.extra.add(ends_of_rows.astype(np.int32))
        if not is_fixed:
            step.samples, step.scored_rows = step.extra.add(samples), step.extra.add(scored_rows)
        if step.features.rules.num_edits:
            fixed.sample_of_row[:] = -1
            fixed.sample_of_row[rows] = first_samples

    def processed_rows(self, step: Step) -> list[ProcessedRow]:
        """The rows of a step that have logits processors, once the tokens of all steps before are known."""
        plan, found = step.plan, []
        for logits_row in step.processed:
            index = step.sampled[logits_row]
            row, num_prompt = int(plan.rows[index]), int(self._num_prompt_tokens[plan.rows[index]])
            rare = self._rare[row]
            tokens = int32(rare.known[: int(plan.starts[index] + plan.num_tokens[index])])
            # Also of one choice alone, which has moved here before its first token: it was drawn for all of them there.
            choice = int(self._choice[row]) if len(tokens) > num_prompt else 0
            given = LogitsRow(tokens[:num_prompt], tokens[num_prompt:], choice)
            found.append(ProcessedRow(logits_row, rare.processors, rare.allowed, given))
        return found
