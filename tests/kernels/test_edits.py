"""Edits of single logits against loops over them: which are made, and what they add up to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kernels.harness import SMALL, assert_same
from kernels.rule_batch import FOREVER, PADDING, Places, edits_of, make_samples, random_places, run, strange_logits
from torch import Tensor

from aioengine.kernels.sample_rows import SampleFlag, SampleRow


def random_edits(seed: int, num_edits: int, num_rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, tokens, values, until: a few tokens, so that edits meet. Sums of these values are exact in any order."""
    random = np.random.default_rng(seed)
    values = random.choice([-math.inf, -3.0, 0.0, 0.5, 100.0], num_edits, p=[0.2, 0.2, 0.2, 0.2, 0.2])
    return (
        torch.from_numpy(random.integers(-1, num_rows, num_edits).astype(np.int32)),
        torch.from_numpy(random.integers(0, min(vocab, 9) + 2, num_edits).astype(np.int32)),
        torch.from_numpy(values.astype(np.float32)),
        torch.from_numpy(random.choice([0, 5, FOREVER], num_edits).astype(np.int32)),
    )


def edited(logits: Tensor, places: Places, rows: Tensor, tokens: Tensor, values: Tensor, until: Tensor) -> Tensor:
    """One edit after the other, masks last."""
    made = logits.clone()
    for is_mask in (False, True):
        for row, token, value, end in zip(*(x.tolist() for x in (rows, tokens, values, until)), strict=True):
            sample = int(places.sample_of_row[row]) if row >= 0 else -1
            if sample < 0 or token >= logits.shape[1] or (value == -math.inf) != is_mask:
                continue
            logits_row, position = places.samples[sample, [SampleRow.LOGITS_ROW, SampleRow.OUTPUT_POSITION]].tolist()
            if position < end:
                made[logits_row, token] = -math.inf if is_mask else made[logits_row, token] + value
    return made


@SMALL
@pytest.mark.parametrize(("num_edits", "vocab", "seed"), [(1, 7, 0), (7, 1, 1), (123, 123, 2), (300, 50, 3)])
def test_edits_are_what_a_loop_makes(ops: Any, num_edits: int, vocab: int, seed: int) -> None:
    places = random_places(seed)
    logits = strange_logits(4, vocab, seed=seed).round()
    logits[0, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf])[:vocab]
    rows, tokens, values, until = random_edits(seed, num_edits, len(places.sample_of_row), vocab)
    made = logits.clone()
    run(ops.edit_logits, made, places.samples, places.sample_of_row, edits_of(rows, tokens, values, until))
    assert_same(made, edited(logits, places, rows, tokens, values, until))


@SMALL
@pytest.mark.parametrize("is_mask_first", [False, True])
@pytest.mark.parametrize("apart", [1, 200])
def test_a_mask_wins_over_anything(ops: Any, is_mask_first: bool, apart: int) -> None:
    """In one program or in two, whichever comes first."""
    places = Places(make_samples({SampleRow.LOGITS_ROW: 0}), torch.tensor([0], dtype=torch.int32), torch.empty(0))
    was = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, 3e38]])
    tokens = torch.zeros(5 * apart, 2, dtype=torch.int32)
    tokens[::apart] = torch.arange(5)[:, None]
    rows = torch.full_like(tokens, -1)
    rows[::apart] = 0
    values = torch.tensor([-torch.inf, 3e38] if is_mask_first else [3e38, -torch.inf]).repeat(len(rows), 1)
    lists = [x.T.contiguous().view(-1) for x in (rows, tokens, values, torch.full_like(rows, FOREVER))]
    logits = was.clone()
    run(ops.edit_logits, logits, places.samples, places.sample_of_row, edits_of(*lists))
    assert logits.tolist() == [[-math.inf] * 5]


@SMALL
def test_only_first_samples_of_lines_count(ops: Any) -> None:
    samples = make_samples(
        {SampleRow.LOGITS_ROW: 0, SampleRow.FLAGS: SampleFlag.LOGPROBS}, PADDING, {SampleRow.LOGITS_ROW: 1}
    )
    sample_of_row = torch.tensor([0, 1, 2], dtype=torch.int32)
    rows, tokens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    logits = torch.zeros(2, 3)
    until = torch.full((3,), FOREVER, dtype=torch.int32)
    run(ops.edit_logits, logits, samples, sample_of_row, edits_of(rows, tokens, torch.ones(3), until))
    assert logits.tolist() == [[0, 0, 0], [1, 0, 0]]
