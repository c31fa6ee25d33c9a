"""The sampler against plain definitions: distributions, filters, independence, log-probabilities."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.sampler import SamplingRows, Scratch, sample
from aioengine.sampler.blocks import BLOCK, block, largest, likeliest
from aioengine.sampler.filters import apply_top_p
from aioengine.sampler.noise import NOISE_SPAN, NoiseKeys, gumbel, noise_keys

COLUMN_DTYPES = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "seed": np.int64}
DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "choice": 0,
    "logprobs": -1,
    "positions": 0,
}


def make_rows(n: int, **columns: Any) -> SamplingRows:
    """Columns of n rows; a scalar holds for all of them."""
    arrays = {
        name: np.broadcast_to(np.asarray(columns.pop(name, value)), n).astype(COLUMN_DTYPES.get(name, np.int32))
        for name, value in DEFAULTS.items()
    }
    assert not columns, f"no such columns: {columns}"
    return SamplingRows(**arrays)


def row_of(rows: SamplingRows, index: int) -> SamplingRows:
    columns = {name: getattr(rows, name)[index : index + 1] for name in DEFAULTS}
    return SamplingRows(**columns)


def expected_probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution by its definition, in float64, one token after the other."""
    probabilities = np.exp((logits - logits.max()) / temperature)
    probabilities /= probabilities.sum()
    kept = probabilities >= min_p * probabilities.max()
    if top_k > 0:
        kept &= probabilities >= np.sort(probabilities)[::-1][min(top_k, len(logits)) - 1]
    probabilities = np.where(kept, probabilities, 0)
    probabilities /= probabilities.sum()
    mass, last_kept = 0.0, 1.0
    for probability in np.sort(probabilities)[::-1]:
        if mass >= top_p:
            break
        mass += probability
        last_kept = probability
    probabilities = np.where(probabilities >= last_kept, probabilities, 0)
    return probabilities / probabilities.sum()


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether counts could be drawn from probabilities: false for 1 in 30,000 fair ones."""
    total = counts.sum()
    common = probabilities * total >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probabilities[common], probabilities[~common].sum()) * total
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(observed) - 1
    # Wilson and Hilferty: the cube root of a chi-square variable is nearly normal.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return bool(deviation < 4)


def draws(logits: torch.Tensor, n: int, **columns: Any) -> np.ndarray:
    """How often each token came in n draws at the positions 0 to n - 1."""
    rows = make_rows(n, positions=np.arange(n), **columns)
    return np.bincount(sample(logits.expand(n, -1), rows).token_ids, minlength=len(logits))


def random_logits(vocab: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize("seed", [0, 2**62 + 17, -5])
@pytest.mark.parametrize("vocab", [7, 64, 300])
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


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_top_p_finds_its_tokens_in_a_large_vocabulary(top_p: float, spread: float) -> None:
    vocab = 40_001
    logits = random_logits(vocab, seed=3, spread=spread)
    probabilities = expected_probabilities(logits.double().numpy(), 1.0, top_p=top_p)
    ones = torch.ones(1)
    threshold = apply_top_p(
        block(logits[None]), np.array([top_p], np.float32), ones, logits.max()[None], torch.tensor([-torch.inf])
    )
    # float32 sums move the edge by a few of the thousands of tokens there.
    num_kept, expected = int((logits >= threshold).sum()), np.count_nonzero(probabilities)
    assert num_kept == pytest.approx(expected, rel=2e-3, abs=0)


def test_rows_with_and_without_filters_share_a_batch() -> None:
    logits = random_logits(200, seed=1)
    settings = [{"temperature": 0.0}, *FILTERS.values()]
    n = 3000
    columns = {
        name: np.repeat([setting.get(name, DEFAULTS[name]) for setting in settings], n)
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    rows = make_rows(n * len(settings), positions=np.tile(np.arange(n), len(settings)), seed=9, **columns)
    tokens = sample(logits.expand(n * len(settings), -1), rows).token_ids
    for setting, chosen in zip(settings, tokens.reshape(len(settings), n), strict=True):
        if setting["temperature"] == 0:
            assert set(chosen.tolist()) == {int(logits.argmax())}
        else:
            probabilities = expected_probabilities(logits.double().numpy(), **setting)
            assert chi_square_is_plausible(np.bincount(chosen, minlength=200), probabilities)


@pytest.mark.parametrize("vocab", [100, 1000])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(vocab)
    n = 40
    logits = 3 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab))
    rows = make_rows(
        n,
        temperature=generator.choice([0.0, 0.5, 1.0, 2.0], n),
        top_k=generator.choice([0, 1, 20, 500], n),
        top_p=generator.choice([1.0, 0.5, 0.95], n),
        min_p=generator.choice([0.0, 0.1], n),
        seed=generator.integers(-(2**63), 2**63, n),
        choice=generator.integers(0, 4, n),
        positions=generator.integers(0, 1000, n),
        logprobs=3,
    )
    together = sample(logits, rows)
    logprobs = together.logprobs
    assert logprobs is not None
    for index in range(n):
        alone = sample(logits[index : index + 1], row_of(rows, index))
        own = alone.logprobs
        assert alone.token_ids[0] == together.token_ids[index], f"row {index}"
        assert own is not None
        np.testing.assert_allclose(own.logprobs[0], logprobs.logprobs[index], rtol=1e-6)
        assert own.ranks[0] == logprobs.ranks[index]
    for elements in (1, 7 * vocab):
        monkeypatch.setattr("aioengine.sampler.draws.CHUNK_ELEMENTS", elements)
        np.testing.assert_array_equal(sample(logits, rows).token_ids, together.token_ids)


def test_a_token_that_cannot_win_is_left_out_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(5000, seed=5, spread=6.0).expand(50, -1)
    rows = make_rows(50, temperature=0.8, positions=np.arange(50))
    pruned = sample(logits, rows).token_ids
    monkeypatch.setattr("aioengine.sampler.draws.NOISE_SPAN", torch.inf)
    np.testing.assert_array_equal(sample(logits, rows).token_ids, pruned)


def test_noise_is_within_the_bound_that_pruning_relies_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_extremes(tokens: torch.Tensor, keys: NoiseKeys, shifted: torch.Tensor) -> None:
        tokens.copy_(-(torch.arange(BLOCK) % 2))  # no bit set and all: the lowest and the highest noise

    monkeypatch.setattr("aioengine.sampler.noise.hash_tokens_", set_extremes)
    low, high = noise_of()[:2].tolist()
    assert math.isfinite(low)
    assert NOISE_SPAN - 0.1 < high - low < NOISE_SPAN


def noise_of(
    seed: Any = 0, choice: Any = 0, position: Any = 0, blocks: Any = tuple(range(64)), n: int = 1
) -> torch.Tensor:
    """Noise of the tokens in ``blocks`` of the vocabulary, a line for each of n draws; flat for one."""
    columns = make_rows(n, seed=seed, choice=choice, positions=position)
    keys = noise_keys(columns.seed, columns.choice, columns.positions)
    lines = torch.arange(n).repeat_interleave(len(blocks))
    noise = gumbel(keys.rows(lines), torch.tensor(blocks).repeat(n), Scratch())
    return noise.view(n, -1) if n > 1 else noise.flatten()


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": -(2**63)},
        {"choice": 1},
        {"position": 1},
        {"position": 2**20},
        {"seed": 1, "choice": 1},
    ],
    ids=str,
)
def test_noise_of_neighbouring_draws_is_uncorrelated(other: dict[str, int]) -> None:
    one, two = noise_of(), noise_of(**other)
    assert not torch.equal(one, two)
    for lag in range(4):  # nor is the one the other, moved by a few tokens
        correlation = np.corrcoef(one[lag:], two[: len(two) - lag])[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(len(one))


def test_noise_of_one_token_over_positions_and_seeds_is_uniform() -> None:
    for columns in ({"position": np.arange(20_000)}, {"seed": np.arange(20_000)}):
        noise = noise_of(**columns, blocks=(3,), n=20_000)[:, 17]
        uniform = torch.exp(-torch.exp(-noise.double())).numpy()
        counts = np.bincount((uniform * 64).astype(int), minlength=64)
        assert chi_square_is_plausible(counts, np.full(64, 1 / 64))
        assert abs(np.corrcoef(uniform[1:], uniform[:-1])[0, 1]) < 4.5 / math.sqrt(20_000)


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    whole = noise_of(seed=3).view(-1, BLOCK)
    for blocks in ([5], [0, 2, 3, 63], list(range(7, 60, 5))):
        assert torch.equal(noise_of(seed=3, blocks=blocks).view(-1, BLOCK), whole[blocks])


def test_scratch_that_was_used_for_more_changes_nothing() -> None:
    scratch = Scratch()
    logits = random_logits(1000, seed=5).expand(30, -1)
    rows = make_rows(30, positions=np.arange(30), top_p=0.9)
    fresh = sample(logits, rows).token_ids
    for _ in range(2):
        np.testing.assert_array_equal(sample(logits, rows, scratch).token_ids, fresh)
        assert sample(logits[:1], row_of(rows, 0), scratch).token_ids[0] == fresh[0]


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, 200)
    logits[1, [70, 130, 199]] = 1.0
    logits[2, 199] = 1.0
    sampled = sample(logits, make_rows(3, temperature=0.0))
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


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    logits = 3 * torch.randn(6, 500, generator=torch.Generator().manual_seed(8))
    wanted = np.array([2, -1, 0, 5, -1, 3])
    rows = make_rows(6, temperature=[0.0, 1.0, 1.5, 0.3, 0.0, 2.0], top_k=10, logprobs=wanted)
    tokens, _, _, logprobs, _ = sample(logits, rows)
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert logprobs is not None
    assert logprobs.index.tolist() == [0, 2, 3, 5]
    assert logprobs.top_ids.shape == logprobs.top_logprobs.shape == (4, 5)
    for line, row in enumerate(logprobs.index.tolist()):
        token = int(tokens[row])
        assert logprobs.logprobs[line] == pytest.approx(float(expected[row, token]), abs=1e-5)
        ranking = expected[row].argsort(descending=True).tolist()
        assert logprobs.ranks[line] == ranking.index(token) + 1
        assert logprobs.top_ids[line].tolist() == ranking[:5]
        np.testing.assert_allclose(logprobs.top_logprobs[line], expected[row, ranking[:5]], atol=1e-5)


def test_logprobs_may_ask_for_no_token_but_the_sampled_one_or_for_all() -> None:
    logits = random_logits(30, seed=1)[None]
    for wanted, width in ((0, 0), (30, 30), (99, 30)):
        logprobs = sample(logits, make_rows(1, logprobs=wanted)).logprobs
        assert logprobs is not None
        assert logprobs.top_ids.shape == (1, width)


def test_tokens_of_equal_logits_have_equal_ranks() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0]]).repeat(2, 1)
    logprobs = sample(logits, make_rows(2, temperature=0.0, logprobs=0)).logprobs
    assert logprobs is not None
    assert logprobs.ranks.tolist() == [1, 1]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000, 10_000])
def test_the_largest_logits_are_found_through_their_blocks(vocab: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[2] = logits[2].sort(descending=True).values  # all of them in the first blocks
    for k in {1, min(5, vocab), min(70, vocab), vocab}:
        values, ids = largest(block(logits), k)
        expected = logits.topk(k)
        assert torch.equal(values, expected.values)
        assert torch.equal(ids, expected.indices)
    ids, top = likeliest(block(logits))
    assert torch.equal(ids, logits.argmax(dim=-1))
    assert torch.equal(top, logits.amax(dim=-1))
