"""Paged caches for tests of attention: random where a query may look, poison everywhere else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernels import harness
from kernels.harness import DEVICE, int32
from torch import Tensor

from aioengine.kernels.operations import PagedKV
from aioengine.kernels.torch.quantized import quantize_lines, read_lines

NO_BLOCK = 2**31 - 1
"""In a table: far outside any cache, so that reading it ends the process."""


PrefillTile = Callable[[int, int, int], int]


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
    caches = as_cached(torch.full((2, num_blocks, block_size, kv_heads, head_dim), float("nan")), cache_dtype)
    tables = torch.full((len(spans), max(-(-end // block_size) for _, end in spans) + 1), NO_BLOCK, dtype=torch.int32)
    dense = []
    for row, (begin, end) in enumerate(spans):
        kv = as_cached(torch.randn((2, end - begin, kv_heads, head_dim), generator=generator), cache_dtype)
        for index in range(begin // block_size, -(-end // block_size)):
            tables[row, index] = free.pop()
        positions = torch.arange(begin, end)
        caches[:, tables[row, positions // block_size].long(), positions % block_size] = kv
        dense.append(read_lines(kv, torch.float64).to(DEVICE))
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


def decode_case(seed: int, contexts: list[int], window: int | None = None, **sizes: Any) -> tuple[PagedCase, Tensor]:
    """Rows in reverse, padding in their midst; a token before those of the decodes, and two after, are no decode's."""
    spans = [(0 if window is None else max(context - window, 0), context) for context in contexts]
    case = paged_case(seed, spans, num_tokens=len(contexts) + 4, **sizes)
    lines = [[row, 0, context] for row, context in enumerate(contexts)][::-1]
    lines.insert(1, [-1, 0, 77])
    for token, line in enumerate(lines, 1):
        line[1] = token
    return case, int32(lines)


def prefill_case(
    seed: int,
    chunks: list[tuple[int, int]],
    window: int | None = None,
    *,
    prefill_tile: PrefillTile,
    heads: int = 2,
    **sizes: Any,
) -> tuple[PagedCase, Tensor]:
    """Rows with chunks of their prompts: position of the first token, number of tokens. Tiles in any order, with one of
    padding; two tokens before the rows', and one after, are no row's."""
    spans = [(0 if window is None else max(first + 1 - window, 0), first + count) for first, count in chunks]
    case = paged_case(seed, spans, num_tokens=sum(count for _, count in chunks) + 3, heads=heads, **sizes)
    longest = prefill_tile(heads, case.k_cache.shape[2], case.q.shape[2])
    tiles, token = [[-1, 0, 5, 0]], 2
    for row, (first, count) in enumerate(chunks):
        for begin in range(0, count, longest):
            tiles.append([row, token + begin, min(longest, count - begin), first + begin])
        token += count
    random.Random(seed).shuffle(tiles)
    return case, int32(tiles)


def attend(
    operation: Callable[..., None],
    case: PagedCase,
    entries: Tensor,
    out: Tensor,
    *,
    scale: float = 0.11,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    **keywords: Any,
) -> None:
    """Call `Operations.attend_decode` or `Operations.attend_prefill`."""
    kv = PagedKV(case.k_cache, case.v_cache, case.block_tables, scale, window, soft_cap, sinks)
    operation(case.q, kv, entries, out, **keywords)


EXTRAS = ("soft_cap", "sinks")
"""What changes scores, or their sum, in some models alone."""


def extras_of(heads: int, *names: str) -> dict[str, Any]:
    """Of `attend`'s keywords these: sinks below and above most scores."""
    values = {
        "soft_cap": 2.0,
        "sinks": torch.linspace(-3.0, 6.0, heads, device=DEVICE),
    }
    return {name: values[name] for name in names}


WITH_EXTRAS = pytest.mark.parametrize(
    "extras", [*(pytest.param((name,), marks=pytest.mark.nightly) for name in EXTRAS), EXTRAS], ids="-".join
)
"""All at once, and at night each alone."""


def as_cached(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [..., d] as a cache of this dtype keeps them; of an int8 one of NaN the scales are NaN."""
    return quantize_lines(x.flatten(0, -2)).unflatten(0, x.shape[:-1]) if dtype == torch.int8 else x.to(dtype)


def assert_close(computed: Tensor, expected: Tensor) -> None:
    """Of sums of some hundred products, with weights and results rounded."""
    harness.assert_close(computed, expected, factor=2)
