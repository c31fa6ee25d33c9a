"""Logits to tokens on a GPU, by the kernels' operations; what `aioengine.sampler.sample` is on a CPU.

Rules change the logits in place; where log-probabilities are wanted, too, those are of a copy from before. Everything
has a fixed place in memory and depends on `Features` and sizes alone, so that a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.kernels.operations import Operations
from aioengine.kernels.sampling.sample_rows import SampleFlag, SampleRow
from aioengine.kernels.zeros import lazy_zeros
from aioengine.sampler.outputs import DeviceOutputs
from aioengine.sampler.rule_table import RuleSizes, RuleTensors


class Features(NamedTuple):
    """What the sampling of a step needs: one graph for each combination.

    Attributes:
        has_filters: a row has a top-k, top-p or min-p.
        is_greedy: all rows are.
        has_masks: a row has a bitmask.
        is_penalised: a row has penalties.
        rules: the tables' sizes; all 0 where none applies.
        num_top: likeliest tokens to report; -1: no log-probabilities.
    """

    has_filters: bool = False
    is_greedy: bool = False
    has_masks: bool = False
    is_penalised: bool = False
    rules: RuleSizes = RuleSizes()
    num_top: int = -1

    @property
    def has_tables(self) -> bool:
        """Whether memory is read that grows with the requests' rules."""
        return self.has_masks or self.rules.num_edits > 0


class SampleTensors(NamedTuple):
    """A step's samples on the device.

    Attributes:
        samples: int32 [s, SAMPLE_WORDS]. sample_of_row: int32 [rows].
    """

    samples: Tensor
    sample_of_row: Tensor


class DeviceSampler:
    """Owns the sampler's memory on the device.

    Args:
        history: int32 [rows, any], the rows' tokens.

    Attributes:
        masks: int32 [masks, ⌈vocab / 32⌉], to be filled by `Operations.put_spans`.
    """

    def __init__(self, operations: Operations, history: Tensor, vocab_size: int) -> None:
        num_rows, device = len(history), history.device
        self._operations = operations
        self._history = history
        self._counters = lazy_zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
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
    ) -> Tensor:
        """Choose the samples' tokens, score them, and put them behind their rows' histories.

        Args:
            logits: float32 [n, vocab]; rules change them.
            out: ``sampled`` is filled where ``features.num_top`` is 0 or more.
            process: changes logits in place by what is no kernel.
        Returns:
            float32 [n, vocab], the logits as the model gave them, where ``features.num_top`` is 0 or more.
        """
        ops, samples, scored = self._operations, at.samples, out.sampled
        is_scored = features.num_top >= 0
        has_edits = features.rules.num_edits > 0
        raw = logits
        if is_scored:
            ops.top_logprobs(logits, samples, scored.log_mass, scored.top_ids, scored.top_logprobs)
            if has_edits or features.is_penalised or process is not None:
                raw = logits.clone()
        if has_edits:
            self._edit(logits, at, features.rules)
        if process is not None:
            process(logits)
        if features.is_penalised:
            ops.penalise(logits, samples, self._history, self._counters_of(samples))
        masks = self.masks if features.has_masks else None
        ops.draw(
            logits, samples, masks, out.token_ids, out.status,
            has_filters=features.has_filters, is_greedy=features.is_greedy,
        )  # fmt: skip
        if is_scored:
            is_wanted = samples[:, SampleRow.FLAGS].bitwise_and(int(SampleFlag.LOGPROBS)).bool()
            logits_rows = torch.where(is_wanted, samples[:, SampleRow.LOGITS_ROW], -1)
            ops.look_up(raw, logits_rows, out.token_ids, scored.log_mass, scored.logprobs, scored.ranks)
        ops.append_tokens(self._history, samples, out.token_ids)
        return raw

    def _edit(self, logits: Tensor, at: SampleTensors, sizes: RuleSizes) -> None:
        ops, samples, sample_of_row = self._operations, at.samples, at.sample_of_row
        rules = RuleTensors.of(self._tables, sizes)
        if sizes.num_words:
            ops.ends_of_bad_words(
                samples, sample_of_row, self._history, rules.word_rows, rules.word_offsets, rules.word_ids,
                rules.edit_values[: sizes.num_words],
            )  # fmt: skip
        ops.edit_logits(
            logits, samples, sample_of_row, rules.edit_rows, rules.edit_tokens, rules.edit_values, rules.edit_until
        )

    def _counters_of(self, samples: Tensor) -> Tensor:
        """Zeros, a row a sample; more than there are rows where several choices begin, in a step with prompts."""
        kept = self._counters
        return kept if len(samples) <= len(kept) else kept.new_zeros(len(samples), kept.shape[1])
