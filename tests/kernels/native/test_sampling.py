"""What native kernels of sampling promise beyond their operations: threads, company and recording change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernels.harness import POISON
from kernels.test_draw import mixed_rows
from sampler.batch import Rows, make_rows, random_logits, sample_for
from sampler.test_sampler import of_all_kinds
from torch import Tensor

from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import plain_torch as reference_sampling
from aioengine.kernels.sample_rows import SampleFlag, SampleRow
from aioengine.sampler.outputs import DeviceOutputs


@pytest.mark.parametrize(("vocab", "spread"), [(300, 0.01), (300, 1.0), (4099, 3.0)])
def test_filters_keep_what_the_oracle_keeps(teams: list[Team], vocab: int, spread: float) -> None:
    """So many draws, of any filters, that tokens at the thresholds come up."""
    samples = mixed_rows(500, seed=vocab)
    samples[:, SampleRow.LOGITS_ROW] = torch.arange(500) % 5
    logits = random_logits(5, vocab, seed=vocab, spread=spread).round(decimals=2) - 0.5
    expected = drawn(reference_sampling, logits, samples)
    assert drawn(NativeOperations(teams[1]), logits, samples) == expected


def test_flat_logits_are_drawn_by_the_highest_noise_and_ties_by_the_lowest_id(teams: list[Team]) -> None:
    """Noise above 12, which one token of 160,000 has, still wins over noise found before."""
    samples = make_rows(24, logits_row=0, seed=list(range(24)))
    logits = random_logits(1, 151_936, seed=0, spread=0.01)
    ops = NativeOperations(teams[1])
    assert drawn(ops, logits, samples) == drawn(reference_sampling, logits, samples)
    # Of this seed's noise two tokens have the highest.
    assert drawn(ops, torch.zeros(1, 4000), make_rows(1, seed=251)) == [1767]


def test_the_likeliest_are_found_beside_a_nan(teams: list[Team]) -> None:
    """It hides the maxima of its lane."""
    logits = random_logits(1, 600, seed=1)
    logits[0, 5::16] += 20
    logits[0, 5] = torch.nan
    samples = make_rows(1)
    samples[:, SampleRow.FLAGS] = int(SampleFlag.LOGPROBS)
    ids = torch.full((1, 7), POISON, dtype=torch.int32)
    NativeOperations(teams[1]).top_logprobs(logits, samples, torch.empty(1), ids, torch.empty(1, 7))
    assert ids[0].tolist() == logits[0].sort(descending=True, stable=True).indices[:7].tolist()


def drawn(ops: Any, logits: Tensor, samples: Tensor) -> list[int]:
    token_ids, status = torch.full((2, len(samples)), POISON, dtype=torch.int32)
    ops.draw(logits, samples, None, token_ids, status, has_filters=True, is_greedy=False)
    assert not status.any()
    return token_ids.tolist()


@pytest.mark.parametrize("vocab", [7, 257, 40_000])
def test_a_sample_is_the_same_alone_in_company_and_with_more_threads(teams: list[Team], vocab: int) -> None:
    logits, samples = random_logits(23, vocab, seed=vocab, spread=1.0), mixed_rows(23, seed=vocab)
    one, two = (NativeOperations(team) for team in teams)
    together = drawn(one, logits, samples)
    assert drawn(two, logits, samples) == together
    assert [drawn(one, logits, samples[[nth]])[0] for nth in range(23)] == together


@pytest.mark.parametrize("members", [(0, 1, 2, 3, 4), (2,), (1, 2), (3,), (0,)], ids=str)
@torch.inference_mode()
def test_a_program_of_a_step_samples_what_the_oracle_samples(teams: list[Team], members: tuple[int, ...]) -> None:
    requests = [of_all_kinds()[member] for member in members]
    raw = random_logits(len(members), 5003, seed=1)
    rows, logits = Rows(requests, 5003, operations=NativeOperations(teams[1])), torch.full_like(raw, torch.nan)
    words = torch.zeros(rows.step.sizes.num_words, dtype=torch.int32)
    out = DeviceOutputs(words, rows.step.sizes)
    program = teams[1].capture(lambda: rows.launch(logits, out))
    expected = sample_for(requests, raw)
    for _ in range(2):
        logits.copy_(raw)
        program.replay()
        made = rows.read(logits, words, {})
        assert made.token_ids.tolist() == made.next_ids.tolist() == expected.token_ids.tolist()
        assert made.logprobs is None or expected.logprobs is not None
        if made.logprobs is not None and expected.logprobs is not None:
            np.testing.assert_allclose(made.logprobs.logprobs, expected.logprobs.logprobs, atol=1e-5)
            assert made.logprobs.ranks.tolist() == expected.logprobs.ranks.tolist()
