"""Paged attention on a CPU against the oracle."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from kernels.harness import TOLERANCES, assert_same, int32
from kernels.paged_cases import assert_close, paged_case

from aioengine.kernels.attention.kv_cache import KVCache, KVCacheShape
from aioengine.kernels.attention.torch_paged import (
    QUERY_TILE,
    AttentionMetadata,
    TorchPagedAttention,
    decode_groups,
    dot_in_float32,
    padded_length,
)
from aioengine.kernels.torch import attention as reference


class Case:
    """Rows given as (start, num_tokens): their tokens' q, k and v, and a cache of their past, with NaN everywhere else.

    Attributes:
        full: the caches with this step's keys and values in their slots.
    """

    def __init__(self, rows: list[tuple[int, int]], seed: int = 0, block_size: int = 4, **sizes: Any) -> None:
        starts, counts = np.array(rows, np.int32).T
        ends, first_tokens = starts + counts, np.cumsum(counts) - counts
        spans = [(0, int(end)) for end in ends]
        sizes = {"head_dim": 16, "block_size": block_size, **sizes}
        case = paged_case(seed, spans, num_tokens=int(counts.sum()), **sizes)
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        positions = torch.from_numpy(np.arange(counts.sum()) + (starts - first_tokens)[row_of_token])
        blocks = case.block_tables[torch.from_numpy(row_of_token), positions // block_size].long()
        self.meta = AttentionMetadata(
            query_offsets=np.append(first_tokens, counts.sum()).astype(np.int32),
            starts=starts,
            context_lens=ends,
            block_tables=case.block_tables.long(),
            slot_mapping=blocks * block_size + positions % block_size,
            block_size=block_size,
        )
        self.q, self.full, self._tables = case.q, (case.k_cache, case.v_cache), case.block_tables
        self._tiles = int32(np.stack((np.arange(len(rows)), first_tokens, counts, starts), axis=1))
        self.cache = KVCache(k=[case.k_cache.clone()], v=[case.v_cache.clone()])
        self.k, self.v = (cache.view(-1, *cache.shape[2:])[self.meta.slot_mapping] for cache in self.full)
        for cache in (self.cache.k[0], self.cache.v[0]):
            cache.view(-1, *cache.shape[2:])[self.meta.slot_mapping] = torch.nan

    def oracle(self, window: int | None = None) -> torch.Tensor:
        out = torch.empty_like(self.q)
        keywords: dict[str, Any] = {"scale": self.q.shape[2] ** -0.5, "window": window}
        reference.attend_prefill(self.q, *self.full, self._tables, self._tiles, out, **keywords)
        return out

    def computed(self, window: int | None = None) -> torch.Tensor:
        step = TorchPagedAttention(self.cache).begin_step(self.meta)
        return step(0, self.q, self.k, self.v, window=window)


DECODES = [(0, 1), (6, 1), (7, 1), (62, 1), (63, 1), (64, 1), (200, 1)]
CHUNKS = [(0, 1), (0, 7), (0, 123), (5, 2), (8, 8), (100, 30)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 7, 64, 1000])
@pytest.mark.parametrize("rows", [DECODES, CHUNKS, CHUNKS + DECODES], ids=["decodes", "chunks", "mixed"])
def test_matches_the_oracle(rows: list[tuple[int, int]], window: int | None, dtype: torch.dtype) -> None:
    case = Case(rows, dtype=dtype)
    expected = case.oracle(window)
    assert_close(case.computed(window), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_matches_the_oracle_for_any_grouping_of_heads_and_block_size(
    heads: int, kv_heads: int, block_size: int
) -> None:
    case = Case([(3, 1), (0, 5), (9, 4), (20, 1)], heads=heads, kv_heads=kv_heads, head_dim=24, block_size=block_size)
    expected = case.oracle()
    assert_close(case.computed(), expected)


@pytest.mark.parametrize("window", [None, 100])
def test_a_chunk_longer_than_a_tile_matches_the_oracle(window: int | None) -> None:
    case = Case([(70, QUERY_TILE + 40)], heads=2, kv_heads=1, head_dim=8, block_size=16)
    expected = case.oracle(window)
    assert_close(case.computed(window), expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_this_steps_keys_and_values_are_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    case = Case([(5, 3), (9, 1)], dtype=dtype)
    case.computed()
    assert_same(case.cache.k[0], case.full[0])
    assert_same(case.cache.v[0], case.full[1])


def test_layers_with_different_windows_share_a_step() -> None:
    case = Case(DECODES + CHUNKS)
    expected = {window: case.oracle(window) for window in (None, 5)}
    step = TorchPagedAttention(case.cache).begin_step(case.meta)
    for window in (None, 5, None, 5):
        assert_close(step(0, case.q, case.k, case.v, window=window), expected[window])


def test_q_k_and_v_may_be_slices_of_one_tensor() -> None:
    case = Case([(5, 3), (9, 1)], heads=2, kv_heads=2)
    expected = case.oracle()
    case.q, case.k, case.v = torch.cat([case.q, case.k, case.v], dim=1).split(2, dim=1)
    assert not case.q.is_contiguous()
    assert_close(case.computed(), expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_decode_row_gets_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    together = Case(DECODES, dtype=dtype)
    outputs = together.computed()
    for row, (start, _) in enumerate(DECODES):
        meta = together.meta
        alone = AttentionMetadata(
            query_offsets=np.array([0, 1], np.int32),
            starts=meta.starts[row : row + 1],
            context_lens=meta.context_lens[row : row + 1],
            block_tables=meta.block_tables[row : row + 1],
            slot_mapping=meta.slot_mapping[row : row + 1],
            block_size=meta.block_size,
        )
        step = TorchPagedAttention(together.cache).begin_step(alone)
        one = slice(row, row + 1)
        output = step(0, together.q[one], together.k[one], together.v[one], window=None)
        assert torch.equal(output, outputs[one]), f"row of {start + 1} tokens"


def test_a_group_larger_than_the_workspace_is_split() -> None:
    case = Case([(10, 1)] * 7)
    groups = decode_groups(case.meta, None, num_kv_heads=2, max_lanes=3 * 64)
    assert [len(group.tokens) for group in groups] == [3, 3, 1]
    assert torch.cat([group.tokens for group in groups]).tolist() == list(range(7))
    assert len(decode_groups(case.meta, None, num_kv_heads=2, max_lanes=1)) == 7


def test_padding_wastes_at_most_an_eighth_or_63_keys() -> None:
    lengths = np.arange(1, 5000)
    padded = padded_length(lengths)
    assert (padded >= lengths).all()
    assert (padded - lengths <= np.maximum(63, lengths / 8)).all()
    assert (np.diff(padded) >= 0).all()
    assert padded_length(np.array([1, 64, 65, 192, 1024, 1025])).tolist() == [64, 64, 128, 192, 1024, 1152]


def test_bf16_scores_keep_float32_accuracy() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = (4 * torch.randn(3, n, 128, generator=generator).bfloat16() for n in (2, 50))
    exact = torch.bmm(queries.double(), keys.double().transpose(1, 2))
    rounded = torch.bmm(queries, keys.transpose(1, 2))
    assert (rounded - exact).abs().max() > 0.1
    assert (dot_in_float32(queries, keys) - exact).abs().max() < 0.005


def numbered_cache(num_layers: int, num_blocks: int, dtype: torch.dtype) -> KVCache:
    """A cache each of whose blocks holds other numbers, in each layer, for keys and for values."""
    shape = KVCacheShape(num_layers=num_layers, block_size=4, num_kv_heads=2, head_dim=3, dtype=dtype)
    cache = KVCache.allocate(shape, num_blocks)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.k, *cache.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_copied_blocks_are_their_sources_in_every_layer_and_the_others_stay(dtype: torch.dtype) -> None:
    cache = numbered_cache(3, 8, dtype)
    before = [tensor.clone() for tensor in (*cache.k, *cache.v)]
    copied_from, copied_to = np.array([5, 2, 5, 0], np.int32), np.array([1, 7, 3, 4], np.int32)
    TorchPagedAttention(cache).copy_blocks(copied_from, copied_to)
    for tensor, was in zip((*cache.k, *cache.v), before, strict=True):
        expected = [*range(8)]
        for source, target in zip(copied_from.tolist(), copied_to.tolist(), strict=True):
            expected[target] = source
        assert torch.equal(tensor, was[expected])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_fresh_cache_is_zeros_in_memory_that_nobody_has_touched() -> None:
    shape = KVCacheShape(num_layers=2, block_size=16, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)
    assert shape.bytes_per_block == 2 * 2 * 16 * 8 * 64 * 2
    resident = resident_bytes()
    cache = KVCache.allocate(shape, 2**14)
    assert sum(tensor.nbytes for tensor in cache.k + cache.v) == 2**14 * shape.bytes_per_block > 10**9
    assert resident_bytes() - resident < 10**7
    assert cache.k[1].shape == (2**14, 16, 8, 64)
    assert not cache.k[1][-1].any()


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * 4096
