"""Norms, activations, and rotation with the cache write: kernels against plain torch, and that against formulas."""

import math
from typing import Any, get_args

import pytest
import torch
from kernels import harness
from kernels.harness import (
    ALL,
    COMPILED,
    DEVICE,
    FLOAT8,
    TOLERANCES,
    make_conversions_right,
    normal,
    quiet_numpy,
    triton,
)
from nightly import few, nightly
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from aioengine.kernels.operations import Activation
from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.triton.gated_activation import BLOCK, FEW_ROWS, FEW_ROWS_BLOCK
from aioengine.kernels.triton.rms_norm import MAX_WIDTH, num_warps

pytestmark = quiet_numpy
POISON = 0x7F
"""In each byte: NaN in float8 and bfloat16 caches, and a number that nothing computes in the others."""

DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
WIDTHS = pytest.mark.parametrize("width", [1, 7, 64, 123, 1024, *nightly(9000)])
NUM_ROWS = pytest.mark.parametrize("num_rows", [1, 7, *nightly(123)])
ACTIVATIONS = pytest.mark.parametrize("activation", get_args(Activation))


@pytest.fixture(autouse=True)
def right_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    make_conversions_right(monkeypatch)


# Norms


@COMPILED
@DTYPES
@WIDTHS
@NUM_ROWS
def test_norms_each_row_and_what_is_added_to_a_residual(
    ops: Any, num_rows: int, width: int, dtype: torch.dtype
) -> None:
    if width > MAX_WIDTH and ops is triton:
        return
    x, residual = (normal(num_rows, width, dtype=dtype, seed=num_rows + n, scale=3.0) for n in (1, 2))
    weight, before = normal(width, dtype=dtype, seed=3), x.clone()
    for offset in (0.0, 1.0):
        assert_close(ops.rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset))
    for scale in (1.0, 0.22):
        total, expected = residual.clone(), residual.clone()
        made = ops.add_rms_norm(x, total, weight, 1e-6, 1.0, scale)
        reference.add_rms_norm(x, expected, weight, 1e-6, 1.0, scale)
        assert_close(total, expected)
        assert_close(made, reference.rms_norm(total, weight, 1e-6, 1.0))
    total, expected = residual.clone(), residual.clone()
    ops.rms_norm_add(x, total, weight, 1e-6, 1.0)
    reference.rms_norm_add(x, expected, weight, 1e-6, 1.0)
    assert_close(total, expected)
    assert torch.equal(x, before)


@DTYPES
def test_the_plain_norm_is_torchs_own(dtype: torch.dtype) -> None:
    x, weight = normal(5, 96, dtype=dtype, seed=0), normal(96, dtype=dtype, seed=1)
    exact = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-2)
    assert_close(reference.rms_norm(x, weight, 1e-2), exact.to(dtype))
    residual = normal(5, 96, dtype=dtype, seed=2)
    total = x + residual
    normed = reference.add_rms_norm(x, residual, weight, 1e-2)
    assert torch.equal(residual, total)
    assert_close(normed, torch.nn.functional.rms_norm(total.double(), (96,), weight.double(), 1e-2).to(dtype))
    reference.rms_norm_add(x, total, weight, 1e-2, 1.0)
    exact = torch.nn.functional.rms_norm(x.double(), (96,), weight.double() + 1, 1e-2)
    harness.assert_close(total, (residual.double() + exact).to(dtype), factor=2)


@COMPILED
def test_rows_lie_apart(ops: Any) -> None:
    """A row of NaN or of infinities is its own affair; a row of zeros gives zeros."""
    x = normal(4, 33, seed=0)
    x[1], x[2, 5], x[3] = torch.nan, torch.inf, 0.0
    weight = normal(33, seed=1)
    computed = ops.rms_norm(x, weight, 1e-6)
    assert_close(computed[:1], reference.rms_norm(x[:1], weight, 1e-6))
    assert computed[1].isnan().all()
    assert computed[2, 5].isnan()
    assert not computed[3].any()


def test_a_thread_holds_no_more_than_it_has_registers_for() -> None:
    assert [num_warps(width) for width in (64, 1024, 2048, 4096, 5120, 8192)] == [4, 4, 4, 8, 16, 16]
    assert MAX_WIDTH // (32 * num_warps(MAX_WIDTH)) <= 64


# Activations


@COMPILED
@DTYPES
@pytest.mark.parametrize("width", [1, FEW_ROWS_BLOCK + 1, *nightly(7, 123, FEW_ROWS_BLOCK, 9000)])
@ACTIVATIONS
def test_activates_the_gate_and_multiplies(ops: Any, width: int, dtype: torch.dtype, activation: Activation) -> None:
    gate_up = normal(7, 2 * width, dtype=dtype, seed=width, scale=4.0)
    before = gate_up.clone()
    computed = ops.gated_activation(gate_up, activation)
    assert computed.is_contiguous()
    assert torch.equal(gate_up, before)
    assert_close(computed, reference.gated_activation(gate_up, activation))


@pytest.mark.parametrize("width", [5, BLOCK + 3])
def test_many_rows_go_in_larger_parts(width: int) -> None:
    gate_up = normal(FEW_ROWS + 1, 2 * width, scale=4.0)
    assert_close(triton.gated_activation(gate_up), reference.gated_activation(gate_up))


def test_plain_activations_are_the_formulas() -> None:
    gate_up = normal(3, 100, seed=1, scale=4.0)
    gate, up = gate_up.double().split(50, dim=1)
    assert_close(reference.gated_activation(gate_up), (gate / (1 + torch.exp(-gate)) * up).float())
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    assert_close(reference.gated_activation(gate_up, "gelu_tanh"), (gate / 2 * (1 + tanh) * up).float())
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    in_turn = torch.stack(gate_up.split(50, dim=1), dim=-1).flatten(1)
    expected = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    assert_close(reference.gated_activation(in_turn, "clamped_silu"), expected.float())


@ALL
@ACTIVATIONS
def test_large_gates_neither_overflow_nor_spread(ops: Any, activation: Activation) -> None:
    gate = torch.tensor([-1e38, -1e4, -100.0, 0.0, 100.0, 1e4, torch.inf, torch.nan])
    gate_up = torch.cat((gate, torch.ones(8)))
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0, 1e4, torch.inf, torch.nan])
    if activation == "clamped_silu":
        gate_up, expected = torch.stack((gate, torch.ones(8)), dim=1).flatten(), expected.clamp(max=7.0) * 2.0
    computed = ops.gated_activation(gate_up[None].to(DEVICE), activation)[0].cpu()
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


# Rotation, with norm and cache write


class Case:
    """Random arguments of a launch, and caches full of poison."""

    def __init__(
        self,
        *,
        num_tokens: int = 5,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        table_dtype: torch.dtype | None = None,
        has_norm: bool = False,
        has_table: bool = True,
        norm_offset: float = 0.0,
        is_norm_wide: bool = False,
        seed: int = 0,
    ) -> None:
        self.norm = {"qk_offset": norm_offset, "is_qk_norm_wide": is_norm_wide}
        generator = torch.Generator().manual_seed(seed)
        max_positions, num_blocks = 300, num_tokens // block_size + 2
        num_qk = num_heads + num_kv_heads

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, dtype)

        self.qkv = random(num_tokens, (num_qk + num_kv_heads) * head_dim)
        self.positions = torch.randint(0, max_positions, (num_tokens,), generator=generator).int().to(DEVICE)
        self.slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].int().to(DEVICE)
        table = rope_table(max_positions, head_dim).to(DEVICE, table_dtype or dtype)
        self.rope_table = table if has_table else None
        self.qk_weight = random(num_qk, head_dim) if has_norm else None
        self.shape = (num_blocks, block_size, num_kv_heads, head_dim + 4 * (cache_dtype == torch.int8))
        self.cache_dtype = cache_dtype or dtype

    def run(self, operation: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        caches = [poisoned(self.shape, self.cache_dtype) for _ in range(2)]
        q = operation(self.qkv, self.positions, self.slots, self.rope_table, self.qk_weight, 1e-6, *caches, **self.norm)
        return q.clone(), *caches

    def check(self, ops: Any = triton) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compare a kernel with plain torch; what the kernel gave."""
        before = self.qkv.clone()
        computed, expected = self.run(ops.rotate_and_write), self.run(reference.rotate_and_write)
        assert torch.equal(as_bytes(self.qkv), as_bytes(before))
        assert computed[0].shape == expected[0].shape
        for ours, theirs in zip(computed, expected, strict=True):
            assert_close(ours, theirs)
        return computed


def rope_table(num_positions: int, head_dim: int) -> torch.Tensor:
    frequencies = 1000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    return torch.cat((angles.cos(), angles.cos(), -angles.sin(), angles.sin()), dim=1)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), POISON, dtype=torch.uint8, device=DEVICE).view(dtype)


def assert_close(computed: torch.Tensor, expected: torch.Tensor) -> None:
    assert computed.dtype == expected.dtype
    if expected.dtype != FLOAT8:
        harness.assert_close(computed, expected, factor=2)
        return
    # Neighbours, where float32's last bit decides about the rounding. But for the sign, order is that of the bytes.
    ours, theirs = as_bytes(computed).int(), as_bytes(expected).int()
    assert (ours - theirs).abs().max() <= 1
    assert ((ours != theirs).sum() <= 1 + ours.numel() // 200).item()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


SIZES: list[dict[str, Any]] = [
    *({"num_tokens": count, "dtype": dtype, "seed": count} for count in (1, 13) for dtype in TOLERANCES),
    *({"num_heads": h, "num_kv_heads": g, "num_tokens": 3} for h, g in ((1, 1), (3, 3), (14, 2), (8, 1), (40, 5))),
    # With 13 lines of heads of 256 a program has heads of all three kinds, and there is more than one.
    *({"head_dim": size, "num_heads": 9, "num_tokens": 2} for size in (2, 6, 64, 80, 128, 256)),
    *({"block_size": size, "dtype": torch.bfloat16, "table_dtype": torch.float32} for size in (1, 3, 16)),
    {"dtype": torch.float16, "table_dtype": torch.float32},
    *({"dtype": dtype, "has_table": False, "num_heads": 9} for dtype in TOLERANCES),
    *({"dtype": dtype, "norm_offset": 1.0} for dtype in TOLERANCES),
    *({"num_heads": h, "num_kv_heads": g, "head_dim": 80, "is_norm_wide": True} for h, g in ((1, 1), (9, 3), (14, 2))),
]


@COMPILED
@pytest.mark.parametrize("has_norm", [*nightly(False), True])
@pytest.mark.parametrize("sizes", few(SIZES[::3], of=SIZES), ids=str)
def test_rotates_and_writes_each_token(ops: Any, sizes: dict[str, Any], has_norm: bool) -> None:
    Case(**sizes, has_norm=has_norm).check(ops)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_float8_cache_holds_the_nearest_values(dtype: torch.dtype, has_norm: bool) -> None:
    case = Case(dtype=dtype, cache_dtype=FLOAT8, has_norm=has_norm, num_tokens=9)
    exact = Case(dtype=dtype, has_norm=has_norm, num_tokens=9).run(reference.rotate_and_write)
    lines = case.slots.long()
    for cache, values in zip(case.check()[1:], exact[1:], strict=True):
        restored, wanted = (x.float().view(-1, 2, 16)[lines] for x in (cache, values))
        # Half a unit of three bits, and half the smallest number.
        torch.testing.assert_close(restored, wanted, rtol=0.07, atol=2**-9)


def test_float8_saturates_and_keeps_what_is_not_a_number() -> None:
    case = Case(num_tokens=3, cache_dtype=FLOAT8)
    case.qkv *= 1000
    case.qkv[1] = torch.nan
    case.qkv[2, -1], case.qkv[2, -2] = torch.inf, -torch.inf
    _, k_cache, v_cache = case.check()
    keys, values = (cache.float().view(-1, 2 * 16)[case.slots.long()] for cache in (k_cache, v_cache))
    assert values[0].abs().max() == 448
    assert values[1].isnan().all()
    assert values[2, -2:].tolist() == [-448, 448]
    assert keys[1].isnan().all()


@pytest.mark.parametrize("cache_dtype", [torch.float32, FLOAT8], ids=str)
def test_padding_writes_nowhere_and_other_slots_stay_as_they_are(cache_dtype: torch.dtype) -> None:
    case = Case(num_tokens=7, cache_dtype=cache_dtype)
    case.slots[2] = case.slots[5] = -1
    q, k_cache, v_cache = case.check()
    assert q.isfinite().all()
    written = case.slots[case.slots >= 0].long()
    for cache in (k_cache, v_cache):
        lines = as_bytes(cache).view(-1, 2 * 16 * cache_dtype.itemsize)
        is_written = torch.zeros(len(lines), dtype=torch.bool, device=DEVICE).index_fill_(0, written, True)
        assert (lines[~is_written] == POISON).all()
        assert (lines[is_written] != POISON).any(1).all()


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_table", [False, True])
def test_the_plain_rotation_is_what_transformers_does(has_table: bool, has_norm: bool) -> None:
    case = Case(num_tokens=9, has_norm=has_norm, has_table=has_table)
    q, k_cache, v_cache = case.run(reference.rotate_and_write)
    heads = case.qkv.view(9, 8, 16)
    qk = heads[:, :6]
    if case.qk_weight is not None:
        qk = torch.nn.functional.rms_norm(qk, (16,), eps=1e-6) * case.qk_weight
    expected_q, expected_k = qk[:, :4], qk[:, 4:]
    if case.rope_table is not None:
        cos, sin = case.rope_table[case.positions.long()].chunk(2, dim=-1)
        sin = sin * torch.tensor([-1.0] * 8 + [1.0] * 8, device=DEVICE)  # theirs has no signs
        expected_q, expected_k = apply_rotary_pos_emb(expected_q, expected_k, cos, sin, unsqueeze_dim=1)
    assert_close(q, expected_q)
    assert_close(k_cache.view(-1, 2, 16)[case.slots.long()], expected_k)
    assert_close(v_cache.view(-1, 2, 16)[case.slots.long()], heads[:, 6:])
