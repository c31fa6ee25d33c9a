"""Native norms, activation, rotation and cache write against their oracle: any shape, rows and threads apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.harness import TOLERANCES, assert_close, assert_same, normal
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.native import layers
from aioengine.kernels.native.team import Team
from aioengine.kernels.torch import layers as reference

DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
WIDTHS = pytest.mark.parametrize("width", [1, 7, 16, 123, 1024, 9000])
NUM_ROWS = [1, 7, 123]


def nans(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@DTYPES
@WIDTHS
def test_norms_each_row_alone(teams: list[Team], width: int, dtype: torch.dtype) -> None:
    for num_rows in NUM_ROWS:
        x = normal(num_rows, width, dtype=dtype, seed=num_rows, scale=num_rows)
        weight = normal(width, dtype=dtype, seed=1)
        made = []
        for team in teams:
            made.append(nans(num_rows, width, dtype=dtype))
            layers.rms_norm(team, x, weight, 1e-5, made[-1])
        assert_close(made[0], reference.rms_norm(x, weight, 1e-5))
        assert_same(made[1], made[0])
        last = nans(1, width, dtype=dtype)
        layers.rms_norm(teams[0], x[-1:], weight, 1e-5, last)
        assert_same(last, made[0][-1:])


@DTYPES
@WIDTHS
def test_adds_to_the_residual_and_norms_what_is_kept(teams: list[Team], width: int, dtype: torch.dtype) -> None:
    for num_rows in NUM_ROWS:
        x, residual = (normal(num_rows, width, dtype=dtype, seed=num_rows + n, scale=3.0) for n in (1, 2))
        weight, x_before = normal(width, dtype=dtype, seed=1), x.clone()
        expected_sum = residual.clone()
        expected = reference.add_rms_norm(x, expected_sum, weight, 1e-6)
        made = []
        for team in teams:
            total, out = residual.clone(), nans(num_rows, width, dtype=dtype)
            layers.add_rms_norm(team, x, total, weight, 1e-6, out)
            assert_same(total, expected_sum)
            made.append(out)
        assert_same(x, x_before)
        assert_close(made[0], expected)
        assert_same(made[1], made[0])


@DTYPES
@WIDTHS
def test_activates_each_column(teams: list[Team], width: int, dtype: torch.dtype) -> None:
    for num_rows in NUM_ROWS:
        gate_up = normal(num_rows, 2 * width, dtype=dtype, seed=width, scale=5.0)
        made = []
        for team in teams:
            made.append(nans(num_rows, width, dtype=dtype))
            layers.gated_activation(team, gate_up, made[-1])
        assert_close(made[0], reference.gated_activation(gate_up))
        assert_same(made[1], made[0])


def test_activates_what_is_large_or_not_a_number(team: Team) -> None:
    gate = [0.0, -0.0, 200.0, -200.0, 88.5, -88.5, 1e-30, torch.inf, torch.nan, -87.4]
    gate_up, out = torch.tensor([gate + [2.0] * len(gate)]), torch.full((1, len(gate)), 7.0)
    layers.gated_activation(team, gate_up, out)
    assert_close(out, reference.gated_activation(gate_up))


class Case:
    """Random arguments of `rotate_and_write`, and caches full of NaN."""

    def __init__(
        self,
        *,
        num_tokens: int = 5,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        table_dtype: torch.dtype | None = None,
        has_norm: bool = True,
        seed: int = 0,
    ) -> None:
        num_blocks, num_qk = num_tokens // block_size + 2, num_heads + num_kv_heads
        generator = torch.Generator().manual_seed(seed)
        self.qkv = normal(num_tokens, (num_qk + num_kv_heads) * head_dim, dtype=dtype, seed=seed)
        self.positions = torch.randint(0, 300, (num_tokens,), generator=generator).int()
        self.slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].int()
        self.slots[1::4] = -1
        self.table = normal(300, 2 * head_dim, dtype=table_dtype or dtype, seed=seed + 1)
        self.qk_weight = normal(num_qk, head_dim, dtype=dtype, seed=seed + 2) if has_norm else None
        self.caches = [nans(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        self.out = nans(num_tokens, num_heads, head_dim, dtype=dtype)

    def expected(self) -> tuple[Tensor, ...]:
        arguments = self.qkv, self.positions, self.slots, self.table, self.qk_weight, 1e-6
        caches = [cache.clone() for cache in self.caches]
        return reference.rotate_and_write(*arguments, *caches), *caches

    def computed(self, team: Team) -> tuple[Tensor, ...]:
        arguments = self.qkv, self.positions, self.slots, self.table, self.qk_weight, 1e-6
        caches, q = [cache.clone() for cache in self.caches], self.out.clone()
        layers.rotate_and_write(team, *arguments, *caches, q)
        return q, *caches


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        *({"num_tokens": count, "dtype": dtype, "seed": count} for count in (1, 7, 123) for dtype in TOLERANCES),
        *({"num_heads": h, "num_kv_heads": g, "num_tokens": 3} for h, g in ((1, 1), (3, 3), (14, 2), (40, 5))),
        *({"head_dim": size, "num_heads": 9, "dtype": torch.bfloat16} for size in (2, 6, 64, 80, 96, 128, 256)),
        *({"dtype": dtype, "table_dtype": torch.float32} for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_rotates_and_writes_each_token(teams: list[Team], sizes: dict[str, Any], has_norm: bool) -> None:
    case = Case(**sizes, has_norm=has_norm)
    made = [case.computed(team) for team in teams]
    for computed, expected in zip(made[0], case.expected(), strict=True):
        assert_close(computed, expected, factor=4)
    for one, two in zip(*made, strict=True):
        assert_same(two, one)


def test_a_cache_of_another_dtype_is_refused(team: Team) -> None:
    case = Case()
    case.caches = [cache.half() for cache in case.caches]
    with pytest.raises(InternalError, match="float16"):
        case.computed(team)
