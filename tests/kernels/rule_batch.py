"""Slots for the kernels of rules and log-probabilities: of words, at random, or of requests as the CPU's sampler has
them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from sampler.batch import Asking, rows_of
from torch import Tensor

from aioengine.kernels.sampling.slots import SLOT_WORDS, Slot, SlotFlag
from aioengine.sampler.rows import RuledRows

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
FOREVER = 2**31 - 1
FLOATS = (Slot.TEMPERATURE, Slot.TOP_P, Slot.MIN_P, Slot.REPETITION, Slot.FREQUENCY, Slot.PRESENCE)
NEUTRAL = {Slot.TOP_P: 1.0, Slot.REPETITION: 1.0, Slot.MASK: -1, Slot.FLAGS: SlotFlag.FIRST}
PADDING = {Slot.LINE: -1, Slot.ROW: -1, Slot.REPETITION: 2.0, Slot.FLAGS: 3}


def run(operation: Callable[..., None], *arguments: Tensor | None) -> None:
    """Call an operation where kernels run, with tensors of the CPU, and bring back what it has made of them."""
    moved = [None if given is None else given.to(DEVICE) for given in arguments]
    operation(*moved)
    for given, made in zip(arguments, moved, strict=True):
        if given is not None and made is not None and given is not made:
            given.copy_(made)


def make_slots(*slots: dict[Slot, float]) -> Tensor:
    """int32 [s, 16]; words that are not given change nothing."""
    made = torch.zeros(len(slots), SLOT_WORDS, dtype=torch.int32)
    for line, words in zip(made, slots, strict=True):
        for word, value in (NEUTRAL | words).items():
            (line.view(torch.float32) if word in FLOATS else line)[word] = value
    return made


class Places(NamedTuple):
    """Rows of the executor, those that sample with a slot each, in no particular order."""

    slots: Tensor
    slot_of_row: Tensor
    history: Tensor


def random_places(seed: int, num_rows: int = 6, num_lines: int = 4, longest: int = 40, vocab: int = 50) -> Places:
    """Lines in any order; a slot of padding, and one that is not its line's first; ids up to 3 above the vocabulary."""
    random = np.random.default_rng(seed)
    rows, lines = random.permutation(num_rows)[:num_lines], random.permutation(num_lines)
    slot_of_row = torch.full((num_rows,), -1, dtype=torch.int32)
    slots: list[dict[Slot, float]] = []
    for row, line in zip(rows.tolist(), lines.tolist(), strict=True):
        slot_of_row[row] = len(slots)
        end = int(random.integers(1, longest + 1))
        words = {Slot.LINE: line, Slot.ROW: row, Slot.END: end, Slot.OUTPUT_POSITION: int(random.integers(0, end + 1))}
        slots.append(words)
        if random.random() < 0.3:
            slots.append(words | {Slot.FLAGS: SlotFlag.LOGPROBS, Slot.REPETITION: 3.0})
    slots.append(PADDING)
    history = torch.from_numpy(random.integers(0, vocab + 3, (num_rows, longest + 1)).astype(np.int32))
    return Places(make_slots(*slots), slot_of_row, history)


class OnCpu(NamedTuple):
    """Requests for the kernels, and the same for the CPU's sampler."""

    places: Places
    ruled: RuledRows


def places_of(requests: Sequence[Asking], seed: int = 0) -> OnCpu:
    """One line a request, in order. All of them must have rules."""
    ruled = rows_of(requests, seed).ruled
    assert ruled is not None
    assert ruled.places.tolist() == list(range(len(requests)))
    slot_of_row = torch.full((len(ruled.history),), -1, dtype=torch.int32)
    slots: list[dict[Slot, float]] = []
    for line, request in enumerate(requests):
        row = int(ruled.history_rows[line])
        slot_of_row[row] = line
        slots.append(
            {
                Slot.LINE: line,
                Slot.ROW: row,
                Slot.END: int(ruled.num_tokens[line]),
                Slot.OUTPUT_POSITION: len(request.output),
                Slot.REPETITION: request.sampling.repetition_penalty,
                Slot.FREQUENCY: request.sampling.frequency_penalty,
                Slot.PRESENCE: request.sampling.presence_penalty,
            }
        )
    return OnCpu(Places(make_slots(*slots), slot_of_row, torch.from_numpy(ruled.history.copy())), ruled)


def assert_same(made: Tensor, expected: Tensor) -> None:
    """To the last bit, NaN where NaN is."""
    torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)


def strange_logits(*shape: int, seed: int) -> Tensor:
    """With NaN, infinities and many equal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(*shape, generator=generator)).round(decimals=1)
    kind = torch.randint(0, 40, shape, generator=generator)
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 0.0)):
        logits[kind == number] = value
    return logits
