"""Logits to tokens, on every device: logits → rules → temperature → filters → draw → log-probabilities.

The last are those of the logits as the model gave them, or of rows that want it so (`aioengine.sampler.processed`) as
the draw saw them.

Everything is done by operations over memory at fixed places, and depends on `Features` and sizes alone, so that a graph
can capture it. What the operations compute is in `aioengine.kernels.operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.kernels.operations import Operations
from aioengine.kernels.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow
from aioengine.kernels.zeros import lazy_zeros
from aioengine.sampler.outputs import DeviceOutputs, Scored
from aioengine.sampler.processed import process_logits
from aioengine.sampler.rules import RuleSizes, RuleTensors

PROMPT_CHUNK_ELEMENTS = 2**23
"""Logits of a prompt that are computed together: 32 MiB."""


class Features(NamedTuple):
    """Features of a step's sampling: one graph for each combination.

    Attributes:
        has_filters: a row has a top-k, top-p or min-p.
        is_greedy: all rows are.
        has_masks: a row has a bitmask.
        is_penalised: a row has penalties.
        rules: the tables' sizes; all 0 where none applies.
        num_top: likeliest tokens to report; -1: no log-probabilities.
        num_processed: rows whose log-probabilities are processed ones, rounded up to a power of 2.
    """

    has_filters: bool = False
    is_greedy: bool = False
    has_masks: bool = False
    is_penalised: bool = False
    rules: RuleSizes = RuleSizes()
    num_top: int = -1
    num_processed: int = 0

    @property
    def has_rules(self) -> bool:
        """Whether logits are changed in place."""
        return self.rules.num_edits > 0 or self.is_penalised

    @property
    def has_tables(self) -> bool:
        """Whether memory is read that grows with the requests' rules."""
        return self.has_masks or self.rules.num_edits > 0


class SampleTensors(NamedTuple):
    """A step's samples on the device.

    Attributes:
        samples: int32 [s, SAMPLE_WORDS].
        sample_of_row: int32 [rows], as in `Operations.edit_logits`.
        scored_rows: int32 [s], the rows of logits of the samples that want log-probabilities; -1: those that do not.
        kept: int32 [n], the rows of logits that want log-probabilities and have rules or are processed; -1: padding.
        processed_samples: int32 [n], the first samples of rows that want processed log-probabilities, the last of them
            repeated.
    """

    samples: Tensor
    sample_of_row: Tensor
    scored_rows: Tensor
    kept: Tensor
    processed_samples: Tensor


class Sampler:
    """Owns the sampler's memory on the device.

    Args:
        history: int32 [rows, any], the rows' tokens.

    Attributes:
        masks: int32 [masks, ⌈vocab / 32⌉], to be filled by `Operations.put_spans`.
    """

    def __init__(self, operations: Operations, history: Tensor, vocab_size: int) -> None:
        num_rows, device = len(history), history.device
        self.operations = operations
        self._history = history
        self._counters = lazy_zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._kept = lazy_zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._tables = torch.full((RuleSizes(64, 64, 64).total,), -1, dtype=torch.int32, device=device)
        self.masks = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32, device=device)

    def has_room(self, sizes: RuleSizes, num_masks: int) -> bool:
        """Whether `make_room` would leave its memory where it is."""
        return sizes.total <= len(self._tables) and num_masks <= len(self.masks)

    def make_room(self, sizes: RuleSizes, num_masks: int) -> None:
        """Have room for so much, in order with the steps, since bitmasks that are there move along.

        Where there was none, graphs of features that `has_tables` are void.
        """
        if sizes.total > len(self._tables):
            self._tables = self._tables.new_full((1 << (sizes.total - 1).bit_length(),), -1)
        if num_masks > len(self.masks):
            masks = self.masks.new_zeros(1 << (num_masks - 1).bit_length(), self.masks.shape[1])
            masks[: len(self.masks)] = self.masks
            self.masks = masks

    def put_tables(self, words: Tensor) -> None:
        """Take over new tables of rules, `RuleTable.words` on the device."""
        self._tables[: len(words)] = words

    def sample(
        self,
        logits: Tensor,
        at: SampleTensors,
        features: Features,
        out: DeviceOutputs[Tensor],
        process: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Choose the samples' tokens, score them, and put them behind their rows' histories.

        Rules change logits in place. Raw log-probabilities are of the logits as given: of rows that need both a copy is
        kept meanwhile. Of processed rows the copy gives way to what the draw saw, before it is put back.

        Args:
            logits: float32 [n, vocab], at most as many rows as there are; left as it is in rows without rules and in
                those of ``at.kept``, if ``features.num_top`` is 0 or more; those of ``at.processed_samples`` become
                what their log-probabilities are the log-softmax of.
            out: ``sampled`` is filled if ``features.num_top`` is 0 or more.
            process: changes logits in place by what is no kernel.
        """
        ops, samples = self.operations, at.samples
        is_scored = features.num_top >= 0
        keeps = is_scored and (features.has_rules or process is not None or features.num_processed > 0)
        words = logits.view(torch.int32)
        if is_scored:
            scored = out.sampled
            if not features.num_processed:
                ops.top_logprobs(logits, samples, scored.log_mass, scored.top_ids, scored.top_logprobs)
        if keeps:
            ops.copy_rows(self._kept, words, at.kept)
        # Rules
        if features.rules.num_edits:
            self._edit(logits, at, features.rules)
        if process is not None:
            process(logits)
        if features.is_penalised:
            ops.penalise(logits, samples, self._history, self._counters_of(samples))
        # Bitmasks, temperature, filters, draw
        masks = self.masks if features.has_masks else None
        ops.draw(
            logits, samples, masks, out.token_ids, out.status,
            has_filters=features.has_filters, is_greedy=features.is_greedy,
        )  # fmt: skip
        # Log-probabilities
        if features.num_processed:
            processed_samples, has_filters = at.processed_samples[: features.num_processed], features.has_filters
            into = self._kept.view(torch.float32)
            process_logits(logits, samples, processed_samples, masks, out.token_ids, into, has_filters=has_filters)
        if keeps:
            ops.copy_rows(words, self._kept, at.kept)
        if features.num_processed:
            ops.top_logprobs(logits, samples, scored.log_mass, scored.top_ids, scored.top_logprobs)
        if is_scored:
            ops.look_up(logits, at.scored_rows, out.token_ids, scored.log_mass, scored.logprobs, scored.ranks)
        ops.append_tokens(self._history, samples, out.token_ids)

    def score_tokens(self, logits: Tensor, pairs: Tensor, out: DeviceOutputs[Tensor]) -> None:
        """Fill ``out.extra``, after `sample`.

        Args:
            logits: as `sample` has left them.
            pairs: int32 [3, m]: samples that want log-probabilities, their rows of logits, token ids.
        """
        samples, logits_rows, token_ids = pairs
        log_mass = out.sampled.log_mass.index_select(0, samples)
        self.operations.look_up(logits, logits_rows, token_ids, log_mass, out.extra.logprobs, out.extra.ranks)

    def score_prompt(self, logits_of: Callable[[Tensor], Tensor], wanted: Tensor, out: Scored[Tensor]) -> None:
        """Log-probabilities of prompt tokens, a bounded number at once.

        Args:
            logits_of: int32 [any], indices of the step's tokens → float32 [any, vocab].
            wanted: int32 [2, m]: which tokens of the step predict the prompt tokens, and what these are.
        """
        size = max(1, PROMPT_CHUNK_ELEMENTS // self._counters.shape[1])
        for first in range(0, wanted.shape[1], size):
            chunk = slice(first, first + size)
            predicted_at, token_ids = wanted[:, chunk]
            logits = logits_of(predicted_at)
            logits_rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
            samples = logits_rows.new_zeros(len(logits), SAMPLE_WORDS)
            samples[:, SampleRow.LOGITS_ROW] = logits_rows
            samples[:, SampleRow.FLAGS] = int(SampleFlag.LOGPROBS)
            log_mass = out.log_mass[chunk]
            self.operations.top_logprobs(logits, samples, log_mass, out.top_ids[chunk], out.top_logprobs[chunk])
            self.operations.look_up(
                logits, logits_rows, token_ids.contiguous(), log_mass, out.logprobs[chunk], out.ranks[chunk]
            )

    def _edit(self, logits: Tensor, at: SampleTensors, sizes: RuleSizes) -> None:
        ops, samples, sample_of_row = self.operations, at.samples, at.sample_of_row
        rules = RuleTensors.of(self._tables, sizes)
        if sizes.num_words:
            ops.ends_of_bad_words(
                samples, sample_of_row, self._history, rules.word_rows, rules.word_offsets, rules.word_ids,
                rules.edits[2, : sizes.num_words].view(torch.float32),
            )  # fmt: skip
        ops.edit_logits(logits, samples, sample_of_row, rules.edits)

    def _counters_of(self, samples: Tensor) -> Tensor:
        """Zeros, a row a sample; more than there are rows where several choices begin, in a step with prompts."""
        kept = self._counters
        return kept if len(samples) <= len(kept) else kept.new_zeros(len(samples), kept.shape[1])
