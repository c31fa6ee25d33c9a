"""Native norms, activation, rotation and cache write against their oracle: any shape, rows and threads apart."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from kernels.harness import TOLERANCES, assert_close, assert_same, normal
from kernels.paged_cases import as_cached
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import Activation
from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.torch.quantized import quantize_lines, read_lines

DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
WIDTHS = pytest.mark.parametrize("width", [1, 7, 16, 123, 1024, 9000])
NUM_ROWS = [1, 7, 123]
ACTIVATIONS = pytest.mark.parametrize("activation", get_args(Activation))


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@DTYPES
@WIDTHS
def test_norms_each_row_alone(teams: list[Team], width: int, dtype: torch.dtype) -> None:
    for num_rows in NUM_ROWS:
        x = normal(num_rows, width, dtype=dtype, seed=num_rows, scale=num_rows)
        weight = normal(width, dtype=dtype, seed=1)
        for offset in (0.0, 1.0):
            made = []
            for team in teams:
                made.append(NativeOperations(team).rms_norm(x, weight, 1e-5, offset))
            assert_close(made[0], reference.rms_norm(x, weight, 1e-5, offset))
            assert_same(made[1], made[0])
            assert_same(NativeOperations(teams[0]).rms_norm(x[-1:], weight, 1e-5, offset), made[0][-1:])


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
            total = residual.clone()
            made.append(NativeOperations(team).add_rms_norm(x, total, weight, 1e-6))
            assert_same(total, expected_sum)
        assert_same(x, x_before)
        assert_close(made[0], expected)
        assert_same(made[1], made[0])


@DTYPES
@WIDTHS
def test_adds_a_part_of_it_or_adds_its_norm(teams: list[Team], width: int, dtype: torch.dtype) -> None:
    for num_rows in NUM_ROWS:
        x, residual = (normal(num_rows, width, dtype=dtype, seed=num_rows + n, scale=3.0) for n in (1, 2))
        weight = normal(width, dtype=dtype, seed=1)
        scaled, normed = residual.clone(), residual.clone()
        reference.add_rms_norm(x, scaled, weight, 1e-6, 1.0, 0.22)
        reference.rms_norm_add(x, normed, weight, 1e-6, 1.0)
        for team in teams:
            total, operations = residual.clone(), NativeOperations(team)
            assert_close(
                operations.add_rms_norm(x, total, weight, 1e-6, 1.0, 0.22), reference.rms_norm(total, weight, 1e-6, 1.0)
            )
            assert_close(total, scaled)
            total.copy_(residual)
            operations.rms_norm_add(x, total, weight, 1e-6, 1.0)
            assert_close(total, normed)


@DTYPES
@WIDTHS
@ACTIVATIONS
def test_activates_each_column(teams: list[Team], width: int, dtype: torch.dtype, activation: Activation) -> None:
    for num_rows in NUM_ROWS:
        gate_up = normal(num_rows, 2 * width, dtype=dtype, seed=width, scale=5.0)
        made = [NativeOperations(team).gated_activation(gate_up, activation) for team in teams]
        assert_close(made[0], reference.gated_activation(gate_up, activation))
        assert_same(made[1], made[0])


@DTYPES
@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("size", [(1, 1), (3, 41), (7, 2400)])
def test_scales_in_place(teams: list[Team], size: tuple[int, int], soft_cap: float | None, dtype: torch.dtype) -> None:
    x = normal(*size, dtype=dtype, seed=size[0], scale=20.0)
    expected, made = x.clone(), [x.clone() for _ in teams]
    reference.scale(expected, 0.7, soft_cap)
    for scaled, team in zip(made, teams, strict=True):
        NativeOperations(team).scale(scaled, 0.7, soft_cap)
    assert_close(made[0], expected)
    assert_same(made[1], made[0])


@ACTIVATIONS
def test_activates_what_is_large_or_not_a_number(team: Team, activation: Activation) -> None:
    gate = [0.0, -0.0, 200.0, -200.0, 88.5, -88.5, 1e-30, torch.inf, torch.nan, -87.4]
    gate_up = torch.tensor([gate + [2.0] * len(gate)])
    assert_close(
        NativeOperations(team).gated_activation(gate_up, activation), reference.gated_activation(gate_up, activation)
    )


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
        cache_dtype: torch.dtype | None = None,
        has_norm: bool = True,
        has_table: bool = True,
        norm_offset: float = 0.0,
        is_norm_wide: bool = False,
        seed: int = 0,
    ) -> None:
        self.norm = {"qk_offset": norm_offset, "is_qk_norm_wide": is_norm_wide}
        num_blocks, num_qk = num_tokens // block_size + 2, num_heads + num_kv_heads
        generator = torch.Generator().manual_seed(seed)
        self.qkv = normal(num_tokens, (num_qk + num_kv_heads) * head_dim, dtype=dtype, seed=seed)
        self.positions = torch.randint(0, 300, (num_tokens,), generator=generator).int()
        self.slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].int()
        self.slots[1::4] = -1
        table = normal(300, 2 * head_dim, dtype=table_dtype or dtype, seed=seed + 1)
        self.table = table if has_table else None
        self.qk_weight = normal(num_qk, head_dim, dtype=dtype, seed=seed + 2) if has_norm else None
        nothing = nans(num_blocks, block_size, num_kv_heads, head_dim)
        self.caches = [as_cached(nothing, cache_dtype or dtype) for _ in range(2)]

    def expected(self) -> tuple[Tensor, ...]:
        arguments = self.qkv, self.positions, self.slots, self.table, self.qk_weight, 1e-6
        caches = [cache.clone() for cache in self.caches]
        return reference.rotate_and_write(*arguments, *caches, **self.norm), *caches

    def computed(self, team: Team) -> tuple[Tensor, ...]:
        arguments = self.qkv, self.positions, self.slots, self.table, self.qk_weight, 1e-6
        caches = [cache.clone() for cache in self.caches]
        return NativeOperations(team).rotate_and_write(*arguments, *caches, **self.norm), *caches


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        *({"num_tokens": count, "dtype": dtype, "seed": count} for count in (1, 7, 123) for dtype in TOLERANCES),
        *({"num_heads": h, "num_kv_heads": g, "num_tokens": 3} for h, g in ((1, 1), (3, 3), (14, 2), (40, 5))),
        *({"head_dim": size, "num_heads": 9, "dtype": torch.bfloat16} for size in (2, 6, 64, 80, 96, 128, 256)),
        *({"dtype": dtype, "table_dtype": torch.float32} for dtype in (torch.bfloat16, torch.float16)),
        *({"head_dim": 72, "num_tokens": 7, "dtype": dtype, "has_table": False} for dtype in TOLERANCES),
        *({"dtype": dtype, "norm_offset": 1.0, "num_tokens": 7} for dtype in TOLERANCES),
        *({"num_heads": h, "num_kv_heads": g, "is_norm_wide": True} for h, g in ((1, 1), (9, 3), (14, 2))),
        {"dtype": torch.bfloat16, "head_dim": 80, "is_norm_wide": True, "norm_offset": 1.0},
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


@pytest.mark.parametrize(
    "sizes",
    [
        *({"num_tokens": count, "dtype": dtype, "seed": count} for count in (1, 7, 123) for dtype in TOLERANCES),
        *({"head_dim": size, "num_kv_heads": 3, "dtype": torch.bfloat16} for size in (2, 6, 80, 96, 128, 512)),
        {"num_tokens": 7, "dtype": torch.bfloat16, "has_norm": False, "table_dtype": torch.float32},
        *({"num_tokens": 7, "has_norm": has_norm, "has_table": False} for has_norm in (False, True)),
        {"num_tokens": 7, "dtype": torch.bfloat16, "is_norm_wide": True, "norm_offset": 1.0},
    ],
    ids=str,
)
def test_keys_and_values_are_rounded_into_an_int8_cache(teams: list[Team], sizes: dict[str, Any]) -> None:
    case = Case(**sizes, cache_dtype=torch.int8)
    made, (q, *expected) = [case.computed(team) for team in teams], case.expected()
    assert_close(made[0][0], q, factor=4)
    for computed, cache in zip(made[0][1:], expected, strict=True):
        assert_close(*(x[..., -4:].contiguous().view(torch.float32) for x in (computed, cache)), factor=4)
        off = (computed[..., :-4].int() - cache[..., :-4].int()).abs()
        assert off.max() <= 1, "beside the next step"
        assert off.float().mean() < 0.01, "by sums in another order alone"
    for one, two in zip(*made, strict=True):
        assert_same(two, one)


def test_a_head_of_zeros_is_kept_and_what_is_not_finite_stays_so(team: Team) -> None:
    case = Case(num_tokens=9, head_dim=24, has_norm=False, cache_dtype=torch.int8)
    case.slots = torch.arange(9, dtype=torch.int32)
    case.qkv[0], case.qkv[2, -1], case.qkv[3, -7] = 0.0, torch.nan, -torch.inf
    _, k_cache, v_cache = case.computed(team)
    for cache, x in ((k_cache, case.expected()[1]), (v_cache, case.expected()[2])):
        kept, exact = (read_lines(each.flatten(0, 1)[:9], torch.float32) for each in (cache, x))
        assert (kept[0] == 0).all()
        assert (kept.isfinite() == exact.isfinite()).all()
    values = read_lines(v_cache.flatten(0, 1)[:9], torch.float32)
    assert values[2:4].isfinite().all(-1).tolist() == [[True, False]] * 2
    error = (values - case.qkv[:, -48:].view(9, 2, 24)).abs()[4:]
    assert (error <= case.qkv[4:, -48:].view(5, 2, 24).abs().amax(-1, keepdim=True) / 253).all(), "half a step"


def test_a_cache_of_another_dtype_is_refused(team: Team) -> None:
    case = Case()
    case.caches = [cache.half() for cache in case.caches]
    with pytest.raises(InternalError, match="float16"):
        case.computed(team)


@pytest.mark.parametrize("head_dim", [2, 6, 8])
def test_one_int8_line_is_read_wherever_its_scale_lies(head_dim: int) -> None:
    x = torch.linspace(-1, 1, head_dim)[None]
    torch.testing.assert_close(read_lines(quantize_lines(x), torch.float32), x, rtol=0, atol=0.5 / 127)
