"""Draws against plain definitions: distributions, filters, independence of the batch."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from nightly import nightly
from sampler.batch import (
    asking,
    chi_square_is_plausible,
    drawn,
    expected_probabilities,
    make_rows,
    random_logits,
    sample_for,
    tokens_of,
)

from aioengine.kernels.torch.draws import threshold


def draws(logits: torch.Tensor, n: int, **columns: Any) -> np.ndarray:
    """How often each token came in n draws at the positions 0 to n - 1."""
    rows = make_rows(n, positions=np.arange(n), **columns)
    return np.bincount(drawn(logits.expand(n, -1), rows), minlength=len(logits))


FILTERS = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 1.9},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "top-p of many": {"temperature": 2.0, "top_p": 0.97},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "top-k before top-p": {"temperature": 1.5, "top_k": 4, "top_p": 0.8},
    "min-p before top-p": {"temperature": 1.5, "min_p": 0.2, "top_p": 0.8},
}


@pytest.mark.parametrize("seed", [2**62 + 17, *nightly(0, -5)])
@pytest.mark.parametrize("vocab", [*nightly(7, 64), 300])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_tokens_are_drawn_from_the_filtered_distribution(filters: dict[str, Any], vocab: int, seed: int) -> None:
    logits = random_logits(vocab, seed=vocab)
    counts = draws(logits, 20_000, seed=seed, **filters)
    probabilities = expected_probabilities(logits.double().numpy(), **filters)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(probabilities))
    assert chi_square_is_plausible(counts, probabilities)


def test_the_chi_square_sees_a_distribution_that_is_a_little_off() -> None:
    logits = random_logits(64, seed=64)
    counts = draws(logits, 20_000, temperature=1.0)
    assert not chi_square_is_plausible(counts, expected_probabilities(logits.double().numpy(), 1.1))
    for counts, probabilities in (
        *(([5000, 1, 5000, 0], [0.5, 0, 0.5, 0]), ([5000, 0, 5000, 1], [0.5, 0, 0.5, 0])),
        ([100, 1], [1.0, 0]),
    ):
        assert not chi_square_is_plausible(np.array(counts), np.array(probabilities)), "one of what is impossible"


def test_a_seed_gives_the_tokens_that_it_always_gave() -> None:
    """Written down once: who keeps a seed keeps its tokens, from one version to the next."""
    logits = ((torch.arange(1009) * 7919) % 1009).float() / 100
    columns = {
        "seed": [0, 1, -5, 2**62 + 17] * 2,
        "choice": [0, 0, 0, 0, 1, 1, 2, 3],
        "positions": [0, 1, 2, 3, 0, 7, 100_000, 5],
    }
    for filters, tokens in (
        ({}, [258, 522, 231, 350, 653, 132, 924, 106]),
        ({"temperature": 1.7}, [279, 522, 231, 350, 653, 132, 924, 106]),
        ({"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02}, [554, 99, 231, 554, 653, 132, 653, 864]),
    ):
        assert drawn(logits.expand(8, -1), make_rows(8, **columns, **filters)) == tokens


@pytest.mark.parametrize("vocab", [100, 1000])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(vocab)
    n = 40
    logits = 3 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab))
    requests = [
        asking(
            output=[1] * int(random.integers(0, 100)),
            temperature=float(random.choice([0.0, 0.5, 1.0, 2.0])),
            top_k=int(random.choice([0, 1, 20, 500])),
            top_p=float(random.choice([1.0, 0.5, 0.95])),
            min_p=float(random.choice([0.0, 0.1])),
            seed=int(random.integers(-(2**63), 2**63)),
            choice=int(random.integers(0, 4)),
            logprobs=3,
        )
        for _ in range(n)
    ]
    together = sample_for(requests, logits)
    logprobs = together.logprobs
    assert logprobs is not None
    for index in range(n):
        alone = sample_for(requests[index : index + 1], logits[index : index + 1])
        own = alone.logprobs
        assert alone.token_ids[0] == together.token_ids[index], f"row {index}"
        assert own is not None
        np.testing.assert_allclose(own.logprobs[0], logprobs.logprobs[index], rtol=1e-6)
        assert own.ranks[0] == logprobs.ranks[index]
    for elements in (1, 7 * vocab):
        monkeypatch.setattr("aioengine.kernels.torch.draws.CHUNK_ELEMENTS", elements)
        monkeypatch.setattr("aioengine.kernels.torch.draws.NOISE_ELEMENTS", elements)
        assert tokens_of(sample_for(requests, logits)) == tokens_of(together)


def test_a_token_that_cannot_win_is_left_out_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(5000, seed=5, spread=6.0).expand(50, -1)
    for filters in ({}, {"top_p": 0.999}, {"top_k": 4000, "top_p": 0.9999}):
        rows = make_rows(50, temperature=0.8, positions=np.arange(50), **filters)
        with monkeypatch.context() as patch:
            patch.setattr("aioengine.kernels.torch.draws.NOISE_SPAN", torch.inf)
            unpruned = drawn(logits, rows)
        assert drawn(logits, rows) == unpruned


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, 200)
    logits[1, [70, 130, 199]] = 1.0
    logits[2, 199] = 1.0
    sampled = sample_for([asking()] * 3, logits)
    assert sampled.token_ids.tolist() == sampled.next_ids.tolist() == [0, 70, 199]
    assert sampled.counts.tolist() == [1, 1, 1]
    assert sampled.logprobs is None


def test_equal_logits_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0, 0.0])
    for filters in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}):
        counts = draws(logits, 500, **filters)
        assert np.flatnonzero(counts).tolist() == [0, 1, 2, 3], filters


def test_top_k_of_one_is_greedy_whatever_the_temperature() -> None:
    logits = random_logits(1000, seed=2)
    assert np.flatnonzero(draws(logits, 100, temperature=2.0, top_k=1)).tolist() == [int(logits.argmax())]


def test_a_top_k_of_the_vocabulary_or_more_keeps_all() -> None:
    logits = torch.zeros(70)
    for top_k in (70, 71, 128, 2**31 - 1):
        assert (draws(logits, 2000, top_k=top_k) > 0).all()


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = random_logits(1000, seed=4, spread=10)
    for filters in ({}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.5}):
        counts = draws(logits, 50, temperature=temperature, **filters)
        assert np.flatnonzero(counts).tolist() == [int(logits.argmax())]


WARPERS = {
    "top-k": ({"top_k": 7}, lambda: transformers.TopKLogitsWarper(7)),
    "top-p": ({"top_p": 0.6}, lambda: transformers.TopPLogitsWarper(0.6)),
    "top-p of nearly all": ({"top_p": 0.99}, lambda: transformers.TopPLogitsWarper(0.99)),
    "min-p": ({"min_p": 0.05}, lambda: transformers.MinPLogitsWarper(0.05)),
}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
@pytest.mark.parametrize("vocab", [7, 123, 1000, 5003])
@pytest.mark.parametrize("name", WARPERS)
def test_a_filter_keeps_the_tokens_that_it_keeps_in_transformers(name: str, vocab: int, temperature: float) -> None:
    filters, make_warper = WARPERS[name]
    logits = random_logits(20, vocab, seed=vocab, spread=2.5)
    warped = make_warper()(torch.zeros(20, 1), transformers.TemperatureLogitsWarper(temperature)(None, logits))
    rows = make_rows(20, temperature=temperature, **filters)
    everything = torch.full((20,), -torch.inf)
    lowest = threshold(logits, everything, logits.amax(dim=-1), torch.full((20,), temperature), rows)[:, None]
    for row, is_other in zip(logits, (logits >= lowest) != (warped > -torch.inf), strict=True):
        # Where float32 sums decide differently, the token is right on the edge.
        probabilities = torch.softmax(row.double() / temperature, dim=-1)
        for probability in probabilities[is_other]:
            mass_before = float(probabilities[probabilities > probability].sum())
            assert mass_before == pytest.approx(filters.get("top_p"), abs=1e-5)
