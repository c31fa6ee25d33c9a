"""The noise of draws: uniform, uncorrelated, within its bound, and a function of its arguments alone."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampler.batch import chi_square_is_plausible, make_rows

from aioengine.sampler.blocks import BLOCK, Scratch
from aioengine.sampler.noise import NOISE_SPAN, NoiseKeys, gumbel, noise_keys


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
