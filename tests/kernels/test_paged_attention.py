"""Paged attention against the plain oracle, and the oracle against torch's own attention."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aioengine.errors import InternalError
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
from aioengine.scheduler.plan import EMPTY, int32

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata, *, window: int | None = None
) -> torch.Tensor:
    """Each query token attends to its sequence's cached keys, in float64; the caches hold this step's tokens already.

    [tokens, heads, head_dim], as ``q``.
    """
    keys, values = (cache.double().view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
    out = torch.empty_like(q)
    for row, end in enumerate(meta.context_lens.tolist()):
        tokens = slice(*meta.query_offsets[row : row + 2].tolist())
        slots = meta.slots(torch.tensor([row]), torch.arange(end)[None])[0]
        seen = reference.attend(q[tokens], keys[slots], values[slots], q.shape[2] ** -0.5, window, 0.0)
        out[tokens] = seen.to(q.dtype)
    return out


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
) -> None:
    """Put this step's k and v, each [tokens, kv_heads, head_dim], into their slots of the caches."""
    for token, slot in enumerate(meta.slot_mapping.tolist()):
        block, offset = divmod(slot, meta.block_size)
        k_cache[block, offset] = k[token]
        v_cache[block, offset] = v[token]


def make_meta(
    rows: list[tuple[int, int]], block_size: int, num_blocks: int, generator: torch.Generator
) -> AttentionMetadata:
    """Metadata of rows given as (start, num_tokens), their blocks scattered over the cache."""
    starts, counts = np.array(rows, np.int32).T
    ends = starts + counts
    widths = -(-ends // block_size)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(rows), int(widths.max())), -(2**40))  # what lies behind a row's end must not be read
    for row, width in enumerate(widths.tolist()):
        tables[row, :width] = torch.tensor([free.pop() for _ in range(width)])
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, (start, count) in enumerate(rows)
        for position in range(start, start + count)
    ]
    return AttentionMetadata(
        query_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        starts=starts,
        context_lens=ends,
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        block_size=block_size,
    )


class Case:
    """Random q, k, v and a cache that holds the rows' past and NaN everywhere else."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_blocks = sum(-(-(start + count) // block_size) for start, count in rows) + 3
        self.meta = make_meta(rows, block_size, num_blocks, generator)
        shape = KVCacheShape(num_layers=1, block_size=block_size, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        self.cache = KVCache.allocate(shape, num_blocks)
        for cache in (self.cache.k[0], self.cache.v[0]):
            cache.fill_(torch.nan)
            for row, (start, _) in enumerate(rows):
                past = self.meta.slots(torch.tensor([row]), torch.arange(start)[None])[0]
                lines = torch.randn(start, kv_heads, head_dim, generator=generator)
                cache.view(-1, kv_heads, head_dim)[past] = lines.to(dtype)
        num_tokens = sum(count for _, count in rows)
        self.q, self.k, self.v = (
            torch.randn(num_tokens, n, head_dim, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)
        )

    def oracle(self, window: int | None = None) -> torch.Tensor:
        k_cache, v_cache = self.cache.k[0].clone(), self.cache.v[0].clone()
        write_kv(self.k, self.v, k_cache, v_cache, self.meta)
        return paged_attention(self.q, k_cache, v_cache, self.meta, window=window)

    def computed(self, window: int | None = None) -> torch.Tensor:
        step = TorchPagedAttention(self.cache).begin_step(self.meta)
        return step(0, self.q, self.k, self.v, window=window)


def assert_close(computed: torch.Tensor, expected: torch.Tensor) -> None:
    assert computed.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance)


DECODES = [(0, 1), (6, 1), (7, 1), (62, 1), (63, 1), (64, 1), (200, 1)]
CHUNKS = [(0, 1), (0, 7), (0, 123), (5, 2), (8, 8), (100, 30)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
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


def test_the_oracle_is_causal_attention() -> None:
    case = Case([(0, 9)], heads=4, kv_heads=2)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (case.q, case.k, case.v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    assert_close(case.oracle(), expected)


def test_the_oracle_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(InternalError, match="3 query heads cannot share 2 KV heads"):
        Case([(0, 2)], heads=3, kv_heads=2).oracle()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_this_steps_keys_and_values_are_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    case = Case([(5, 3), (9, 1)], dtype=dtype)
    k_cache, v_cache = case.cache.k[0].clone(), case.cache.v[0].clone()
    write_kv(case.k, case.v, k_cache, v_cache, case.meta)
    case.computed()
    torch.testing.assert_close(case.cache.k[0], k_cache, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(case.cache.v[0], v_cache, rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_copied_blocks_are_their_sources_in_every_layer_and_the_others_stay(dtype: torch.dtype) -> None:
    cache = numbered_cache(3, 8, dtype)
    before = [tensor.clone() for tensor in (*cache.k, *cache.v)]
    copied_from, copied_to = int32([5, 2, 5, 0]), int32([1, 7, 3, 4])
    TorchPagedAttention(cache).copy_blocks(copied_from, copied_to)
    for tensor, was in zip((*cache.k, *cache.v), before, strict=True):
        expected = [*range(8)]
        for source, target in zip(copied_from.tolist(), copied_to.tolist(), strict=True):
            expected[target] = source
        assert torch.equal(tensor, was[expected])


def test_copying_no_blocks_changes_nothing() -> None:
    cache = numbered_cache(1, 2, torch.float32)
    before = cache.k[0].clone()
    cache.copy_blocks(EMPTY, EMPTY)
    assert torch.equal(cache.k[0], before)


@pytest.mark.parametrize(("source", "target"), [(8, 0), (0, 8)])
def test_a_block_that_is_not_there_cannot_be_copied(source: int, target: int) -> None:
    with pytest.raises(IndexError):
        numbered_cache(1, 8, torch.float32).copy_blocks(int32([source]), int32([target]))


def test_a_copied_block_is_attended_to_as_its_source() -> None:
    case = Case([(6, 1)])
    expected = case.oracle()
    table = case.meta.block_tables[0]
    free = int32([block for block in range(len(case.cache.k[0])) if block not in table.tolist()][:1])
    TorchPagedAttention(case.cache).copy_blocks(int32(table[:1].tolist()), free)
    case.cache.k[0][table[0]] = case.cache.v[0][table[0]] = torch.nan
    table[0] = int(free[0])
    assert_close(case.computed(), expected)


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
