"""Paged caches for tests of attention: random where a query may look, poison everywhere else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aioengine.errors import InternalError

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
FLOAT8 = torch.float8_e4m3fn
# float32 is a few units in the last place of sums of some hundred products; the others round weights and results, too.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
NO_BLOCK = 2**31 - 1
"""In a table: far outside any cache, so that reading it ends the process."""


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """Arguments of an attention. Row i may look at positions ``spans[i]``: the others' slots are NaN, or `NO_BLOCK`.

    Attributes:
        keys, values: what a row's span holds, [end - begin, g, d] each, float64, in units of the caches.
        out: NaN.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    out: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k_cache, self.v_cache, self.block_tables


def paged_case(
    seed: int,
    spans: list[tuple[int, int]],
    *,
    num_tokens: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> PagedCase:
    generator = torch.Generator().manual_seed(seed)
    cache_dtype = cache_dtype or dtype
    num_blocks = sum(-(-end // block_size) for _, end in spans) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    caches = torch.full((2, num_blocks, block_size, kv_heads, head_dim), float("nan")).to(cache_dtype)
    tables = torch.full((len(spans), max(-(-end // block_size) for _, end in spans) + 1), NO_BLOCK, dtype=torch.int32)
    dense = []
    for row, (begin, end) in enumerate(spans):
        kv = torch.randn((2, end - begin, kv_heads, head_dim), generator=generator).to(cache_dtype)
        for index in range(begin // block_size, -(-end // block_size)):
            tables[row, index] = free.pop()
        positions = torch.arange(begin, end)
        caches[:, tables[row, positions // block_size].long(), positions % block_size] = kv
        dense.append(kv.double().to(DEVICE))
    caches = caches.to(DEVICE)
    q = torch.randn((num_tokens, heads, head_dim), generator=generator).to(DEVICE, dtype)
    return PagedCase(
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        block_tables=tables.to(DEVICE),
        keys=[each[0] for each in dense],
        values=[each[1] for each in dense],
        out=torch.full_like(q, float("nan")),
    )


def assert_close(computed: Tensor, expected: Tensor) -> None:
    """With NaN where there is to be NaN: on lines that are not written."""
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_refused(attend: Any, case: PagedCase, lines: Tensor, keywords: dict[str, Any]) -> None:
    """That wrong tensors among the five first arguments and the output are refused, and by what is wrong."""
    right = {
        **{"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache},
        **{"block_tables": case.block_tables, "lines": lines, "out": case.out},
    }
    head_dim = case.q.shape[2]
    wrong: list[tuple[str, Tensor, str]] = [
        ("q", case.q.double(), "q is torch.float64"),
        ("q", case.q[:, :1].repeat(1, 3, 1), "3 query heads cannot share 2"),
        ("q", case.q.transpose(0, 1).contiguous().transpose(0, 1), "strides"),
        ("q", case.q[..., :-1].contiguous(), f"heads of {head_dim - 1}"),
        ("k_cache", case.k_cache.half(), "k_cache is torch.float16"),
        ("k_cache", case.k_cache[..., :-8].contiguous(), "k_cache has shape"),
        ("k_cache", case.k_cache.transpose(1, 2).contiguous().transpose(1, 2), "strides"),
        ("v_cache", case.v_cache[:-1], "v_cache has shape"),
        ("v_cache", case.v_cache.to(FLOAT8), "v_cache is torch.float8"),
        ("v_cache", case.v_cache.to("meta"), "v_cache is on meta"),
        ("block_tables", case.block_tables.long(), "block_tables is torch.int64"),
        ("block_tables", case.block_tables[:, ::2], "strides"),
        ("lines", lines.long(), "is torch.int64"),
        ("lines", lines[:, :2].contiguous(), "has shape"),
        ("out", case.out.half(), "out is torch.float16"),
        ("out", case.out[:-1], "out has shape"),
    ]
    for name, tensor, message in wrong:
        with pytest.raises(InternalError, match=message):
            attend(*{**right, name: tensor}.values(), **keywords)
    with pytest.raises(InternalError, match="window is 0"):
        attend(*right.values(), **{**keywords, "window": 0})
    assert case.out.isnan().all()


def make_bfloat16_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bfloat16 as if they were integers, and cuts it off instead of rounding."""
    if DEVICE != "cpu":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float8e4nv: FLOAT8}
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(data).view(f"i{source.primitive_bitwidth // 8}"))
        converted = values.view(dtypes[source]).to(dtypes[target])
        return converted.view(words[converted.itemsize]).numpy().view(f"u{converted.itemsize}")

    def multiply(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        a, b = (convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32) for x in (a, b))
        return interpreter.TensorHandle(a @ b + total.data, tl.float32)

    def dot(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        return (multiply if a.dtype.scalar == tl.bfloat16 else as_it_was)(builder, a, b, total, *options)

    as_it_was = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
