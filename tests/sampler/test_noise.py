"""The noise of draws: uniform, uncorrelated, within its bound, and a function of its arguments alone."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampler.batch import chi_square_is_plausible, make_rows

from aioengine.kernels.torch.draws import NOISE_SPAN, gumbel, hash_tokens, noise_keys


def test_noise_is_within_the_bound_that_pruning_relies_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def extremes(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0, -1]], dtype=torch.int32)  # no bit set and all: the lowest and the highest noise

    monkeypatch.setattr("aioengine.kernels.torch.draws.hash_tokens", extremes)
    low, high = noise_of(num_tokens=2).tolist()
    assert math.isfinite(low)
    assert NOISE_SPAN - 0.1 < high - low < NOISE_SPAN


def noise_of(seed: Any = 0, choice: Any = 0, position: Any = 0, num_tokens: int = 4096, n: int = 1) -> torch.Tensor:
    """Noise of the first tokens, a line for each of n draws; flat for one."""
    keys = noise_keys(make_rows(n, seed=seed, choice=choice, positions=position))
    noise = gumbel(keys[:, None], torch.arange(num_tokens))
    return noise if n > 1 else noise[0]


@pytest.mark.parametrize(("seed", "choice", "position"), [(0, 0, 0), (-5, 3, 7), (2**63 - 1, 1, 2**31 - 1), (17, 0, 1)])
def test_the_hash_is_that_of_unsigned_numbers(seed: int, choice: int, position: int) -> None:
    """As its sources write it."""

    def mixed(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    key = mixed(mixed(mixed(seed % 2**64) ^ choice) ^ position)
    token_ids = torch.tensor([0, 1, 63, 64, 151_935, 2**31 - 1])
    made = hash_tokens(noise_keys(make_rows(1, seed=seed, choice=choice, positions=position))[:, None], token_ids)
    for token_id, bits in zip(token_ids.tolist(), made[0].tolist(), strict=True):
        x = (token_id + key) % 2**32
        x = (x ^ x >> 17) * 0xED5AD4BB % 2**32
        x = (x ^ x >> 11) * 0xAC4C1B51 % 2**32
        x = (x + (key >> 32)) % 2**32
        x = (x ^ x >> 15) * 0x31848BAB % 2**32
        assert bits % 2**32 == x ^ x >> 14


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
        noise = noise_of(**columns, num_tokens=210, n=20_000)[:, 209]
        uniform = torch.exp(-torch.exp(-noise.double())).numpy()
        counts = np.bincount((uniform * 64).astype(int), minlength=64)
        assert chi_square_is_plausible(counts, np.full(64, 1 / 64))
        assert abs(np.corrcoef(uniform[1:], uniform[:-1])[0, 1]) < 4.5 / math.sqrt(20_000)
