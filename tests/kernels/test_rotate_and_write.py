"""Norm, rotation and cache write in one pass, against the oracle; and the oracle against transformers."""

from typing import Any

import pytest
import torch
from kernels import harness
from kernels.harness import DEVICE, FLOAT8, TOLERANCES, make_conversions_right, quiet_numpy
from nightly import few, nightly
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.triton.rotate_and_write import rotate_and_write

pytestmark = quiet_numpy
POISON = 0x7F
"""In each byte: NaN in float8 and bfloat16 caches, and a number that nothing computes in the others."""


@pytest.fixture(autouse=True)
def right_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    make_conversions_right(monkeypatch)


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
        self.shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.cache_dtype = cache_dtype or dtype

    def run(self, operation: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        caches = [poisoned(self.shape, self.cache_dtype) for _ in range(2)]
        q = operation(self.qkv, self.positions, self.slots, self.rope_table, self.qk_weight, 1e-6, *caches, **self.norm)
        return q, *caches

    def check(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compare the kernel with the oracle; what the kernel gave."""
        before = self.qkv.clone()
        computed, expected = self.run(rotate_and_write), self.run(reference.rotate_and_write)
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
        harness.assert_close(computed, expected)
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


@pytest.mark.parametrize("has_norm", [*nightly(False), True])
@pytest.mark.parametrize("sizes", few(SIZES[::3], of=SIZES), ids=str)
def test_rotates_and_writes_each_token(sizes: dict[str, Any], has_norm: bool) -> None:
    Case(**sizes, has_norm=has_norm).check()


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
def test_the_oracle_is_what_transformers_does(has_table: bool, has_norm: bool) -> None:
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
