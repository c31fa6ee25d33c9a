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

from aioengine.kernels.attention.paged import KVCacheShape, PagedAttention
from aioengine.kernels.operations import LayerAttention, PagedKV
from aioengine.kernels.operations import plain_torch as reference

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
        shape = KVCacheShape(
            num_layers=2 // num_groups, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype
        )
        self.attention = PagedAttention(
            ops,
            shape,
            num_groups * len(case.k_cache),
            block_tables=torch.stack([case.block_tables + group * len(case.k_cache) for group in range(num_groups)]),
            places=((0, 0), (num_groups - 1, 2 - num_groups)),
            num_multiprocessors=100,
        )
        table = torch.cat((torch.ones(201, HEAD_DIM), torch.zeros(201, HEAD_DIM)), dim=1)
        self.rope_table = table.to(DEVICE, dtype)
        self.full = torch.stack((case.k_cache, case.v_cache)).repeat(2 // num_groups, num_groups, 1, 1, 1)
        self.attention.cache.copy_(self.full)
        k, v = (cache.view(-1, KV_HEADS, HEAD_DIM)[slots] for cache in (case.k_cache, case.v_cache))
        slots = torch.stack([slots + group * len(case.k_cache) * BLOCK_SIZE for group in range(num_groups)])
        for cache in self.attention.cache:
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
    assert_same(case.attention.cache, case.full)


@BOTH
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_copied_blocks_are_their_sources_in_every_layer_and_the_others_stay(
    ops: ModuleType, dtype: torch.dtype
) -> None:
    shape = KVCacheShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype)
    attention = PagedAttention(ops, shape, 8, block_tables=int32([[[0]]]), places=((0, 0),), num_multiprocessors=1)
    attention.cache.copy_(torch.randn(attention.cache.shape, generator=torch.Generator().manual_seed(0)))
    before = attention.cache.clone()
    attention.copy_blocks(int32([5, 2, 5, -1, 0]), int32([1, 7, 3, 6, 4]))
    assert torch.equal(attention.cache, before[:, [0, 5, 2, 5, 0, 5, 6, 2]])


@pytest.mark.skipif(not sys.platform.startswith("linux") or DEVICE != "cpu", reason="reads /proc")
def test_a_fresh_cache_is_zeros_in_memory_that_nothing_has_touched() -> None:
    shape = KVCacheShape(num_layers=2, block_size=16, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)
    assert shape.bytes_per_block == 2 * 2 * 16 * 8 * 64 * 2
    resident = resident_bytes()
    attention = PagedAttention(
        reference, shape, 2**14, block_tables=int32([[[0]]]), places=((0, 0),), num_multiprocessors=1
    )
    assert attention.cache.nbytes == 2**14 * shape.bytes_per_block > 10**9
    assert resident_bytes() - resident < 10**7
    assert attention.cache.shape == (4, 2**14, 16, 8, 64)
    assert not attention.cache[3, -1].any()


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * 4096
