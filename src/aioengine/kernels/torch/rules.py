"""Plain torch oracles of the operations on rules and log-probabilities, as in `aioengine.kernels.operations`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from aioengine.kernels.sampling.slots import Slot, SlotFlag


def edit_logits(
    logits: Tensor,
    slots: Tensor,
    slot_of_row: Tensor,
    edit_rows: Tensor,
    edit_tokens: Tensor,
    edit_values: Tensor,
    edit_until: Tensor,
) -> None:
    slot, lines, tokens, edits = _made(logits, slots, slot_of_row, edit_rows, edit_tokens)
    is_now = slots[slot, Slot.OUTPUT_POSITION] < edit_until[edits]
    lines, tokens, values = lines[is_now], tokens[is_now], edit_values[edits][is_now]
    is_mask = values == -torch.inf
    logits.index_put_((lines[~is_mask], tokens[~is_mask]), values[~is_mask], accumulate=True)
    logits[lines[is_mask], tokens[is_mask]] = -torch.inf


def _made(
    logits: Tensor, slots: Tensor, slot_of_row: Tensor, edit_rows: Tensor, edit_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the edits that are not passed over: slot, line and token, and which they are; int64 [any] each."""
    slot = _slots_of_rows(slots, slot_of_row, edit_rows)
    edits = ((slot >= 0) & (edit_tokens >= 0) & (edit_tokens < logits.shape[1])).nonzero()[:, 0]
    return slot[edits], slots[slot[edits], Slot.LINE].long(), edit_tokens[edits].long(), edits


def _slots_of_rows(slots: Tensor, slot_of_row: Tensor, rows: Tensor) -> Tensor:
    """int64 [any]: the first slot of each of ``rows``; -1 for padding, and where the row does not sample."""
    if not len(slots) or not len(slot_of_row):
        return torch.full_like(rows, -1, dtype=torch.int64)
    slot = torch.where(rows >= 0, slot_of_row[rows.clamp(min=0).long()], -1).long()
    words = slots[slot.clamp(min=0)]
    is_wanted = (slot >= 0) & (words[:, Slot.LINE] >= 0) & (words[:, Slot.FLAGS] & SlotFlag.FIRST != 0)
    return torch.where(is_wanted, slot, -1)


def ends_of_bad_words(
    slots: Tensor,
    slot_of_row: Tensor,
    history: Tensor,
    word_rows: Tensor,
    word_offsets: Tensor,
    word_ids: Tensor,
    edit_values: Tensor,
) -> None:
    edit_values.zero_()
    offsets = word_offsets.tolist()
    for word, slot in enumerate(_slots_of_rows(slots, slot_of_row, word_rows).tolist()):
        if slot < 0:
            continue
        begin = word_ids[offsets[word] : offsets[word + 1]]
        row, end, num_outputs = slots[slot, [Slot.ROW, Slot.END, Slot.OUTPUT_POSITION]].tolist()
        output = history[row, end - num_outputs : end]
        if len(begin) <= num_outputs and torch.equal(output[num_outputs - len(begin) :], begin):
            edit_values[word] = -torch.inf


def penalise(logits: Tensor, slots: Tensor, history: Tensor, counters: Tensor) -> None:
    vocab = logits.shape[1]
    for slot, line, tokens, num_outputs in _penalised(slots, history, vocab):
        repetition, frequency, presence = slots[slot, [Slot.REPETITION, Slot.FREQUENCY, Slot.PRESENCE]].view(
            torch.float32
        )
        of_line = logits[line]
        is_known = (tokens >= 0) & (tokens < vocab)
        known = tokens[is_known]
        output = tokens[len(tokens) - num_outputs :]
        counts = torch.bincount(output[(output >= 0) & (output < vocab)], minlength=vocab)
        before = of_line[known]
        of_line[known] = torch.where(before > 0, before / repetition, before * repetition)
        lowered = of_line - frequency * counts - presence
        of_line.copy_(torch.where(counts > 0, lowered, of_line))


def _penalised(slots: Tensor, history: Tensor, vocab: int) -> Iterator[tuple[int, int, Tensor, int]]:
    """Of the slots that have penalties: slot, line, the tokens that count (int64 [any]), and how many of them, the
    last ones, are output."""
    penalties = slots[:, [Slot.REPETITION, Slot.FREQUENCY, Slot.PRESENCE]].view(torch.float32).tolist()
    for slot, (words, (repetition, frequency, presence)) in enumerate(zip(slots.tolist(), penalties, strict=True)):
        if words[Slot.LINE] < 0 or not words[Slot.FLAGS] & SlotFlag.FIRST:
            continue
        if repetition == 1 and frequency == 0 and presence == 0:
            continue
        end, num_outputs = words[Slot.END], words[Slot.OUTPUT_POSITION]
        first = 0 if repetition != 1 else end - num_outputs
        tokens = history[words[Slot.ROW], first:end].long()
        yield slot, words[Slot.LINE], tokens, num_outputs


def top_logprobs(logits: Tensor, slots: Tensor, log_mass: Tensor, ids: Tensor, logprobs: Tensor) -> None:
    is_wanted = (slots[:, Slot.LINE] >= 0) & (slots[:, Slot.FLAGS] & SlotFlag.LOGPROBS != 0)
    of_slots = logits[slots[is_wanted, Slot.LINE].long()]
    mass = torch.logsumexp(of_slots, dim=-1)
    values, tokens = of_slots.sort(dim=-1, descending=True, stable=True)  # stable: of equal ones the lowest id first
    k = ids.shape[1]
    log_mass[is_wanted] = mass
    ids[is_wanted] = tokens[:, :k].int()
    logprobs[is_wanted] = values[:, :k] - mass[:, None]


def look_up(
    logits: Tensor, lines: Tensor, token_ids: Tensor, log_mass: Tensor, logprobs: Tensor, ranks: Tensor
) -> None:
    is_wanted = lines >= 0
    of_pairs = logits[lines[is_wanted].long()]
    values = of_pairs.gather(1, token_ids[is_wanted, None].long())
    logprobs[is_wanted] = values[:, 0] - log_mass[is_wanted]
    ranks[is_wanted] = 1 + (of_pairs > values).sum(dim=-1, dtype=torch.int32)
