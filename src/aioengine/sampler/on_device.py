"""Logits to tokens on a GPU, by the kernels' operations; what `aioengine.sampler.sample` is on a CPU.

Rules change the logits in place and are undone after the draw, so that log-probabilities are of the logits as the model
gave them and no second tensor of that size is needed. Everything has a fixed place in memory and depends on `Features`
and sizes alone: a step's sampling can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.kernels.operations import Operations
from aioengine.kernels.sampling.slots import Slot, SlotFlag
from aioengine.sampler.outputs import Outputs
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


class SlotTensors(NamedTuple):
    """A step's slots on the device.

    Attributes:
        slots: int32 [s, 16]. slot_of_row: int32 [rows].
    """

    slots: Tensor
    slot_of_row: Tensor


class DeviceSampler:
    """Owns the sampler's memory on the device.

    Args:
        history: int32 [rows, any], the rows' tokens.
    """

    def __init__(self, operations: Operations, history: Tensor, vocab_size: int) -> None:
        num_rows, device = len(history), history.device
        self._operations = operations
        self._history = history
        self._counters = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._unpenalised = torch.empty(history.shape, dtype=torch.float32, device=device)
        self._tables = torch.full((RuleSizes(64, 64, 64).total,), -1, dtype=torch.int32, device=device)
        self._unedited = torch.empty(64, dtype=torch.float32, device=device)
        self._masks = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32, device=device)

    @property
    def masks(self) -> Tensor:
        """int32 [masks, ⌈vocab / 32⌉], to be filled by `Operations.put_spans`."""
        return self._masks

    def has_room(self, sizes: RuleSizes, num_masks: int) -> bool:
        """Whether `make_room` would leave its memory where it is."""
        return (
            sizes.total <= len(self._tables)
            and sizes.num_edits <= len(self._unedited)
            and num_masks <= len(self._masks)
        )

    def make_room(self, sizes: RuleSizes, num_masks: int) -> None:
        """Have room for so much, in order with the steps, since bitmasks that are there move along.

        Where there was none, graphs of features that `has_tables` are void.
        """
        if sizes.total > len(self._tables):
            self._tables = self._tables.new_full((1 << (sizes.total - 1).bit_length(),), -1)
        if sizes.num_edits > len(self._unedited):
            self._unedited = self._unedited.new_empty(sizes.num_edits)
        if num_masks > len(self._masks):
            masks = self._masks.new_zeros(1 << (num_masks - 1).bit_length(), self._masks.shape[1])
            masks[: len(self._masks)] = self._masks
            self._masks = masks

    def put_tables(self, words: Tensor) -> None:
        """Take over new tables of rules, `RuleTable.words` on the device."""
        self._tables[: len(words)] = words

    def sample(
        self,
        logits: Tensor,
        at: SlotTensors,
        features: Features,
        out: Outputs[Tensor],
        process: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Choose the slots' tokens, score them, and put them behind their rows' histories.

        Args:
            logits: float32 [n, vocab]; as they were when it is done, where log-probabilities are wanted.
            out: ``sampled`` is filled where ``features.num_top`` is 0 or more.
            process: changes logits in place by what is no kernel.
        """
        ops, slots, scored = self._operations, at.slots, out.sampled
        is_scored = features.num_top >= 0
        if is_scored:
            ops.top_logprobs(logits, slots, scored.log_mass, scored.top_ids, scored.top_logprobs)
        has_edits = features.rules.num_edits > 0
        if has_edits:
            self._edit(logits, at, features.rules, is_undone=is_scored)
        if process is not None:
            process(logits)
        unpenalised = self._room(self._unpenalised, slots) if is_scored and features.is_penalised else None
        if features.is_penalised:
            ops.penalise(logits, slots, self._history, self._room(self._counters, slots), unpenalised)
        masks = self._masks if features.has_masks else None
        ops.draw(
            logits, slots, masks, out.token_ids, out.status,
            has_filters=features.has_filters, is_greedy=features.is_greedy,
        )  # fmt: skip
        if is_scored:
            if unpenalised is not None:
                ops.unpenalise(logits, slots, self._history, unpenalised)
            if has_edits:
                rules = RuleTensors.of(self._tables, features.rules)
                unedited = self._unedited[: features.rules.num_edits]
                ops.restore_edited(logits, slots, at.slot_of_row, rules.edit_rows, rules.edit_tokens, unedited)
            if process is None:
                self.score(logits, slots, out)
        ops.append_tokens(self._history, slots, out.token_ids)

    def score(self, logits: Tensor, slots: Tensor, out: Outputs[Tensor]) -> None:
        """Log-probabilities and ranks of the sampled tokens whose slots want them."""
        is_wanted = slots[:, Slot.FLAGS].bitwise_and(int(SlotFlag.LOGPROBS)).bool()
        lines = torch.where(is_wanted, slots[:, Slot.LINE], -1)
        scored = out.sampled
        self._operations.look_up(logits, lines, out.token_ids, scored.log_mass, scored.logprobs, scored.ranks)

    def _edit(self, logits: Tensor, at: SlotTensors, sizes: RuleSizes, *, is_undone: bool) -> None:
        ops, slots, slot_of_row = self._operations, at.slots, at.slot_of_row
        rules = RuleTensors.of(self._tables, sizes)
        if is_undone:
            unedited = self._unedited[: sizes.num_edits]
            ops.save_edited(logits, slots, slot_of_row, rules.edit_rows, rules.edit_tokens, unedited)
        if sizes.num_words:
            ops.ends_of_bad_words(
                slots, slot_of_row, self._history, rules.word_rows, rules.word_offsets, rules.word_ids,
                rules.edit_values[: sizes.num_words],
            )  # fmt: skip
        ops.edit_logits(
            logits, slots, slot_of_row, rules.edit_rows, rules.edit_tokens, rules.edit_values, rules.edit_until
        )

    def _room(self, buffer: Tensor, slots: Tensor) -> Tensor:
        """``buffer``, or one like it if there are more slots: where several choices begin, in a step with prompts."""
        return buffer if len(slots) <= len(buffer) else buffer.new_zeros(len(slots), buffer.shape[1])
