"""Paged attention of a step over a device's operations, against the oracle."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from kernels.harness import BOTH, DEVICE, TOLERANCES, assert_same, int32, make_conversions_right, quiet_numpy
from kernels.paged_cases import assert_close, paged_case
from nightly import few, nightly
from torch import Tensor

from aioengine.executor.paged_attention import PagedAttention
from aioengine.kernels.operations import LayerAttention, PagedKV
from aioengine.kernels.operations import plain_torch as reference
from aioengine.scheduler.cache_layout import AttentionSpec, CacheLayout, StateSpec, attention_specs, make_layout

pytestmark = quiet_numpy
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 4
DECODES = [(0, 1), (6, 1), (63, 1), (200, 1)]
CHUNKS = [(0, 1), (0, 7), (0, 33), (5, 2), (100, 30)]


@pytest.fixture(autouse=True)
def right_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    make_conversions_right(monkeypatch)


class Case:
    """Rows given as (start, num_tokens), those of ``decodes`` first: a cache of their past, with NaN everywhere else,
    and q, k and v of their tokens, not rotated: the table is of angles of 0. Two layers, in one or two groups.

    Attributes:
        full: the caches with this step's keys and values in their slots.
    """

    def __init__(
        self,
        ops: ModuleType,
        decodes: list[tuple[int, int]],
        chunks: list[tuple[int, int]],
        dtype: torch.dtype,
        num_groups: int,
    ) -> None:
        rows = decodes + chunks
        counts = [count for _, count in rows]
        firsts = [sum(counts[:row]) for row in range(len(rows))]
        case = paged_case(
            0, [(0, start + count) for start, count in rows], num_tokens=sum(counts), dtype=dtype,
            heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE,
        )  # fmt: skip
        positions = torch.cat([torch.arange(start, start + count) for start, count in rows]).to(DEVICE)
        row_of_token = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts)).to(DEVICE)
        blocks = case.block_tables[row_of_token, positions // BLOCK_SIZE].long()
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        layout = make_layout(attention_specs((None, None) if num_groups == 1 else (None, 5), KV_HEADS, HEAD_DIM))
        self.attention = PagedAttention(
            ops,
            layout,
            (num_groups * len(case.k_cache),),
            block_size=BLOCK_SIZE,
            dtype=dtype,
            block_tables=torch.stack([case.block_tables + group * len(case.k_cache) for group in range(num_groups)]),
            num_multiprocessors=100,
        )
        table = torch.cat((torch.ones(201, HEAD_DIM), torch.zeros(201, HEAD_DIM)), dim=1)
        self.rope_table = table.to(DEVICE, dtype)
        self.full = torch.stack((case.k_cache, case.v_cache)).repeat(2 // num_groups, num_groups, 1, 1, 1)
        self.attention.caches[0].copy_(self.full)
        k, v = (cache.view(-1, KV_HEADS, HEAD_DIM)[slots] for cache in (case.k_cache, case.v_cache))
        slots = torch.stack([slots + group * len(case.k_cache) * BLOCK_SIZE for group in range(num_groups)])
        for cache in self.attention.caches[0]:
            cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = torch.nan
        self.qkv = torch.cat((case.q, k, v), dim=1).flatten(1)
        self.case = case
        self.tiles = int32([[row, firsts[row], *rows[row][::-1]] for row in range(len(rows))])
        seen = [[row, firsts[row], start + 1] for row, (start, _) in enumerate(decodes)]
        tiles = int32([[row, firsts[row], *rows[row][::-1]] for row in range(len(decodes), len(rows))])
        self.step: dict[str, Any] = {
            "positions": positions.int(),
            "slots": slots.int(),
            "decodes": int32(seen) if decodes else None,
            "tiles": tiles if chunks else None,
            "num_splits": self.attention.num_splits(len(decodes), 201),
            "max_context": 201,
        }

    def layer(self, index: int, window: int | None) -> LayerAttention:
        return LayerAttention(
            index=index, rope_table=self.rope_table, qk_weight=None, eps=0.0, scale=HEAD_DIM**-0.5, window=window
        )

    def oracle(self, window: int | None = None) -> Tensor:
        out = torch.empty_like(self.case.q)
        kv = PagedKV(self.full[0], self.full[1], self.case.block_tables, HEAD_DIM**-0.5, window)
        reference.attend_prefill(self.case.q, kv, self.tiles, out)
        return out.flatten(1)


@BOTH
@pytest.mark.parametrize("dtype", few([torch.bfloat16], of=TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("decodes", "chunks", "num_groups"),
    [*nightly((DECODES, [], 1), ([], CHUNKS, 1), (DECODES, CHUNKS, 1)), (DECODES, CHUNKS, 2)],
    ids=["decodes", "chunks", "mixed", "two groups"],
)
def test_a_step_is_the_oracles_in_layers_of_any_window_and_leaves_its_keys_in_their_slots(
    ops: ModuleType, decodes: list[tuple[int, int]], chunks: list[tuple[int, int]], num_groups: int, dtype: torch.dtype
) -> None:
    case = Case(ops, decodes, chunks, dtype, num_groups)
    step = case.attention.begin(**case.step)
    for index, window in enumerate((None, 5)):
        assert_close(step.attend(case.qkv.clone(), case.layer(index, window)), case.oracle(window))
    assert_same(case.attention.caches[0], case.full)


@BOTH
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_copied_blocks_are_their_sources_in_every_layer_and_the_others_stay(
    ops: ModuleType, dtype: torch.dtype
) -> None:
    layout = make_layout(attention_specs((None,) * 3, 2, 8))
    attention = paged_attention(ops, layout, (8,), dtype)
    [cache] = attention.caches
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.clone()
    attention.copy_blocks(int32([5, 2, 5, -1, 0]), int32([1, 7, 3, 6, 4]))
    assert torch.equal(cache, before[:, [0, 5, 2, 5, 0, 5, 6, 2]])


@pytest.mark.skipif(not sys.platform.startswith("linux") or DEVICE != "cpu", reason="reads /proc")
def test_a_fresh_cache_is_zeros_in_memory_that_nothing_has_touched() -> None:
    layout = make_layout(attention_specs((None, None), 8, 64), 16, element_bytes=2)
    [pool] = layout.pools
    assert pool.block_bytes == 2 * 2 * 16 * 8 * 64 * 2
    resident = resident_bytes()
    [cache] = paged_attention(reference, layout, (2**14,), torch.bfloat16, block_size=16).caches
    assert cache.nbytes == 2**14 * pool.block_bytes > 10**9
    assert resident_bytes() - resident < 10**7
    assert cache.shape == (4, 2**14, 16, 8, 64)
    assert not cache[3, -1].any()


@BOTH
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_layers_of_other_sizes_and_states_have_caches_of_their_own(ops: ModuleType, dtype: torch.dtype) -> None:
    latent = AttentionSpec(num_kv_heads=1, key_size=24, value_size=16)
    layout = make_layout([latent, AttentionSpec(num_kv_heads=2, key_size=8, value_size=8), StateSpec(num_bytes=100)])
    attention = paged_attention(ops, layout, (5, 4, 3), dtype)
    keys, values, heads, states = attention.caches
    assert (keys.shape, values.shape, heads.shape) == ((1, 5, 4, 1, 24), (1, 5, 4, 1, 16), (2, 4, 4, 2, 8))
    assert (states.shape, states.dtype) == ((1, 3, 100), torch.uint8)
    assert [group for group, _, _ in attention.layers] == [0, 1, 2]
    assert attention.first_blocks is not None
    assert attention.first_blocks.tolist() == [0, 5, 9]
    for cache in attention.caches:
        cache.copy_(torch.arange(len(cache[0])).view(1, -1, *[1] * (cache.dim() - 2)).expand_as(cache))
    attention.copy_blocks(int32([4, 5]), int32([1, 8]))
    for cache, ids in ((keys, [0, 4, 2, 3, 4]), (values, [0, 4, 2, 3, 4]), (heads, [0, 1, 2, 0]), (states, [0, 1, 2])):
        assert cache.flatten(2).float().mean((0, 2)).tolist() == ids


def paged_attention(
    ops: Any, layout: CacheLayout, num_blocks: tuple[int, ...], dtype: torch.dtype, block_size: int = 4
) -> PagedAttention:
    return PagedAttention(
        ops, layout, num_blocks, block_size=block_size, dtype=dtype, block_tables=int32([[[0]]]), num_multiprocessors=1
    )


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * 4096
