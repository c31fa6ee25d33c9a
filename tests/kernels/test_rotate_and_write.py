"""Norm, rotation and cache write in one pass, against the oracle; and the oracle against transformers."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from aioengine.errors import InternalError
from aioengine.kernels.layers.rotate_and_write import MAX_HEAD_DIM, rotate_and_write
from aioengine.kernels.torch import layers as reference_decoder

# numpy's, in the interpreter, where infinities are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
FLOAT8 = torch.float8_e4m3fn
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
POISON = 0x7F
"""In each byte: NaN in float8 and bfloat16 caches, and a number that nothing computes in the others."""


@pytest.fixture(autouse=True)
def right_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's conversions cut bfloat16 off, and lose carries and NaN on the way to float8: torch does it."""
    if not os.environ.get("TRITON_INTERPRET"):
        return
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float8e4nv: FLOAT8}
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(data).view(f"i{source.primitive_bitwidth // 8}"))
        values = values.view(dtypes[source])
        if dtypes[target] == FLOAT8:
            # Some versions of torch saturate. What the kernel leaves to its compiler must show.
            values = torch.where(values.abs() > 448, torch.nan, values)
        converted = values.to(dtypes[target])
        return converted.view(words[converted.itemsize]).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


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
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        max_positions, num_blocks = 300, num_tokens // block_size + 2
        num_qk = num_heads + num_kv_heads

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, dtype)

        self.qkv = random(num_tokens, (num_qk + num_kv_heads) * head_dim)
        self.positions = torch.randint(0, max_positions, (num_tokens,), generator=generator).int().to(DEVICE)
        self.slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].int().to(DEVICE)
        self.rope_table = rope_table(max_positions, head_dim).to(DEVICE, table_dtype or dtype)
        self.qk_weight = random(num_qk, head_dim) if has_norm else None
        self.shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.cache_dtype = cache_dtype or dtype
        self.k_scale, self.v_scale = k_scale, v_scale

    def run(self, operation: Any, **changed: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = {
            "qkv": self.qkv,
            "positions": self.positions,
            "slots": self.slots,
            "rope_table": self.rope_table,
            "qk_weight": self.qk_weight,
            "eps": 1e-6,
            "k_cache": poisoned(self.shape, self.cache_dtype),
            "v_cache": poisoned(self.shape, self.cache_dtype),
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        } | changed
        q = operation(**arguments)
        return q, arguments["k_cache"], arguments["v_cache"]

    def check(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compare the kernel with the oracle; what the kernel gave."""
        before = self.qkv.clone()
        computed, expected = self.run(rotate_and_write), self.run(reference_decoder.rotate_and_write)
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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def assert_close(computed: torch.Tensor, expected: torch.Tensor) -> None:
    assert computed.dtype == expected.dtype
    if expected.dtype != FLOAT8:
        tolerance = TOLERANCES[expected.dtype]
        # Poison is NaN in some dtypes, and must be where it is in the oracle's.
        torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        return
    # Neighbours, where float32's last bit decides about the rounding. But for the sign, order is that of the bytes.
    ours, theirs = as_bytes(computed).int(), as_bytes(expected).int()
    assert (ours - theirs).abs().max() <= 1
    assert ((ours != theirs).sum() <= 1 + ours.numel() // 200).item()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_rotates_and_writes_each_token(num_tokens: int, has_norm: bool, dtype: torch.dtype) -> None:
    Case(num_tokens=num_tokens, has_norm=has_norm, dtype=dtype, seed=num_tokens).check()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (14, 2), (8, 1), (40, 5)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_of_any_number(num_heads: int, num_kv_heads: int, has_norm: bool) -> None:
    Case(num_heads=num_heads, num_kv_heads=num_kv_heads, has_norm=has_norm, num_tokens=3).check()


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128, 256])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_of_any_size(head_dim: int, has_norm: bool) -> None:
    # With 13 lines of heads of 256 a program has heads of all three kinds, and there is more than one.
    Case(head_dim=head_dim, num_heads=9, num_kv_heads=2, has_norm=has_norm, num_tokens=2).check()


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_table_may_be_float32(block_size: int, dtype: torch.dtype) -> None:
    Case(block_size=block_size, dtype=dtype, table_dtype=torch.float32).check()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_float8_cache_holds_values_over_its_scale(dtype: torch.dtype, has_norm: bool) -> None:
    case = Case(dtype=dtype, cache_dtype=FLOAT8, has_norm=has_norm, num_tokens=9, k_scale=0.3, v_scale=0.02)
    _, k_cache, v_cache = case.check()
    exact = Case(dtype=dtype, has_norm=has_norm, num_tokens=9).run(reference_decoder.rotate_and_write)
    lines = case.slots.long()
    for cache, scale, values in ((k_cache, 0.3, exact[1]), (v_cache, 0.02, exact[2])):
        restored = cache.float().view(-1, 2, 16)[lines] * scale
        # Half a unit of three bits, and half the smallest number.
        torch.testing.assert_close(restored, values.float().view(-1, 2, 16)[lines], rtol=0.07, atol=scale * 2**-9)


def test_float8_saturates_and_keeps_what_is_not_a_number() -> None:
    case = Case(num_tokens=3, cache_dtype=FLOAT8, k_scale=0.001, v_scale=0.001)
    case.qkv[1] = torch.nan
    case.qkv[2, -1], case.qkv[2, -2] = torch.inf, -torch.inf
    _, k_cache, v_cache = case.check()
    values = v_cache.float().view(-1, 2 * 16)[case.slots.long()]
    assert values[0].abs().max() == 448
    assert values[1].isnan().all()
    assert values[2, -2:].tolist() == [-448, 448]
    assert k_cache.float().view(-1, 2 * 16)[case.slots.long()][1].isnan().all()


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
def test_the_oracle_is_what_transformers_does(has_norm: bool) -> None:
    case = Case(num_tokens=9, has_norm=has_norm)
    q, k_cache, v_cache = case.run(reference_decoder.rotate_and_write)
    heads = case.qkv.view(9, 8, 16)
    qk = heads[:, :6]
    if case.qk_weight is not None:
        qk = torch.nn.functional.rms_norm(qk, (16,), eps=1e-6) * case.qk_weight
    cos, sin = case.rope_table[case.positions.long()].chunk(2, dim=-1)
    sin = sin * torch.tensor([-1.0] * 8 + [1.0] * 8, device=DEVICE)  # theirs has no signs
    expected_q, expected_k = apply_rotary_pos_emb(qk[:, :4], qk[:, 4:], cos, sin, unsqueeze_dim=1)
    assert_close(q, expected_q)
    assert_close(k_cache.view(-1, 2, 16)[case.slots.long()], expected_k)
    assert_close(v_cache.view(-1, 2, 16)[case.slots.long()], heads[:, 6:])


@pytest.mark.parametrize("operation", [rotate_and_write, reference_decoder.rotate_and_write])
def test_no_tokens_change_nothing(operation: Any) -> None:
    q, k_cache, v_cache = Case(num_tokens=0).run(operation)
    assert q.shape == (0, 4, 16)
    assert (as_bytes(k_cache) == POISON).all()
    assert (as_bytes(v_cache) == POISON).all()


def test_what_does_not_fit_is_refused() -> None:
    case = Case(num_tokens=3, has_norm=True)
    cache, wide = poisoned(case.shape, torch.float32), poisoned((2, 4, 2, MAX_HEAD_DIM + 2), torch.float32)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("qkv", {"qkv": case.qkv[0]}),
        ("qkv is torch.float64", {"qkv": case.qkv.double()}),
        ("qkv has strides", {"qkv": torch.ones(3, 256, device=DEVICE)[:, :128]}),
        ("qkv is 120 wide", {"qkv": case.qkv[:, :120].contiguous()}),
        ("qkv is 64 wide", {"qkv": case.qkv[:, :64].contiguous()}),
        ("positions", {"positions": case.positions[:2]}),
        ("positions is torch.int64", {"positions": case.positions.long()}),
        ("slots is torch.int64", {"slots": case.slots.long()}),
        ("slots has strides", {"slots": torch.zeros(6, dtype=torch.int32, device=DEVICE)[::2]}),
        ("rope_table", {"rope_table": case.rope_table[:, :16]}),
        ("rope_table is torch.float16", {"rope_table": case.rope_table.half()}),
        ("qk_weight", {"qk_weight": case.qk_weight[:4] if case.qk_weight is not None else None}),
        ("k_cache is torch.float16", {"k_cache": cache.half()}),
        ("k_cache has shape", {"k_cache": cache[0]}),
        ("v_cache has shape", {"v_cache": cache[:1]}),
        ("v_cache is torch.float8", {"v_cache": cache.to(FLOAT8)}),
        ("v_cache has strides", {"v_cache": cache.transpose(0, 1).contiguous().transpose(0, 1)}),
        (f"heads of {MAX_HEAD_DIM + 2}", {"k_cache": wide, "v_cache": wide}),
        ("heads of 15", {"k_cache": cache[..., :15].contiguous(), "v_cache": cache[..., :15].contiguous()}),
    ]
    for message, changed in refused:
        with pytest.raises(InternalError, match=message):
            case.run(rotate_and_write, **changed)
