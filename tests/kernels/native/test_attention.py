"""Native paged attention against its oracle: any heads, blocks, windows; rows, splits and threads apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from kernels import paged_cases
from kernels.harness import assert_same, int32, native
from kernels.paged_cases import WITH_EXTRAS, PagedCase, assert_close, attend, decode_case, extras_of
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.executor.host import HostAccelerator
from aioengine.kernels.attention_launches import choose_num_splits
from aioengine.kernels.native.library import Library
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import plain_torch as reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KEYWORDS: dict[str, Any] = {"scale": 0.11, "window": None, "num_splits": 1, "max_context": 2048}
CONTEXTS = [123, 1, 7, 64, 65]


prefill_case = partial(paged_cases.prefill_case, prefill_tile=lambda *sizes: native.prefill_tile(*sizes))


def attend_decode(team: Team, case: PagedCase, decodes: Tensor, **keywords: Any) -> Tensor:
    out = case.out.clone()
    attend(NativeOperations(team).attend_decode, case, decodes, out, **{**KEYWORDS, **keywords})
    return out


def assert_decodes(teams: list[Team], case: PagedCase, decodes: Tensor, **keywords: Any) -> None:
    """Like the oracle; and, to the last bit, with any number of threads and splits, and each row alone."""
    keywords = {**KEYWORDS, **keywords}
    expected, computed = case.out.clone(), attend_decode(teams[0], case, decodes, **keywords)
    attend(reference.attend_decode, case, decodes, expected, **keywords)
    assert computed[[0, -1, -2]].isnan().all()
    assert not computed[decodes[:, 1].long()].isnan().any()
    assert_close(computed, expected)
    assert_same(attend_decode(teams[1], case, decodes, **{**keywords, "num_splits": 3}), computed)
    for decode in decodes:
        alone = attend_decode(teams[1], case, decode[None], **keywords)
        assert_same(alone[decode[1]], computed[decode[1]])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        *((4, 2, 64, 16, dtype) for dtype in (FP32, BF16, FP16)),
        *((16, 8, 128, 16, dtype) for dtype in (FP32, BF16, FP16)),
        *((3, 1, 80, 7, dtype) for dtype in (FP32, BF16, FP16)),
        *((7, 1, 72, 5, dtype) for dtype in (FP32, BF16, FP16)),
        (2, 2, 96, 1, FP16),
        (5, 1, 128, 256, FP16),
        (8, 1, 256, 32, BF16),
        (71, 1, 64, 64, BF16),
        (3, 3, 2, 3, FP32),
        (8, 8, 128, 16, BF16),
        (24, 8, 136, 7, BF16),
        (24, 8, 72, 16, FP32),
        (64, 8, 128, 16, BF16),
    ],
    ids=str,
)
def test_a_decode_attends_to_all_keys(
    teams: list[Team], heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    case, decodes = decode_case(heads, CONTEXTS, **sizes)
    assert_decodes(teams, case, decodes)


@pytest.mark.parametrize("window", [1, 33, 64, 200, 1 << 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 1, 64), (16, 8, 128), (24, 8, 136)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_decode_reads_nothing_before_the_window(
    teams: list[Team], window: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": 8, "dtype": dtype}
    case, decodes = decode_case(window, [200, 31, 1300, 5], window, **sizes)
    assert_decodes(teams, case, decodes, window=window)


@pytest.mark.parametrize("soft_cap", [0.5, 3.0, 50.0])
def test_a_decode_caps_scores(teams: list[Team], soft_cap: float) -> None:
    case, decodes = decode_case(3, [90, 600], heads=6, kv_heads=2)
    assert_decodes(teams, case, decodes, scale=1.0, soft_cap=soft_cap)


@WITH_EXTRAS
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("cache", [FP32, BF16, torch.int8], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 80), (32, 8, 128)])
def test_scores_of_a_decode_are_capped_and_summed_with_sinks(
    teams: list[Team],
    heads: int,
    kv_heads: int,
    head_dim: int,
    cache: torch.dtype,
    window: int | None,
    extras: tuple[str, ...],
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": 8, "cache_dtype": cache}
    dtype = FP32 if cache == torch.int8 else cache
    case, decodes = decode_case(5, [600, 1, 1300, 40], window, **sizes, dtype=dtype)
    assert_decodes(teams, case, decodes, window=window, **extras_of(heads, *extras))


@pytest.mark.parametrize("sink", [-1e4, 200.0, -torch.inf])
def test_a_sink_may_be_far_from_all_scores(teams: list[Team], sink: float) -> None:
    sinks = torch.full((4,), sink)
    case, decodes = decode_case(5, [600, 1], 40)
    assert_decodes(teams, case, decodes, window=40, sinks=sinks)
    case, tiles = prefill_case(5, [(150, 9)], 40, heads=4)
    assert_prefills(teams, case, tiles, window=40, sinks=sinks)


def test_a_long_context_is_cut_for_the_threads_that_there_are_with_one_result(library: Library) -> None:
    case, decodes = decode_case(4, [1900], heads=4, kv_heads=2)
    computed, splits = [], []
    for num_threads in (1, 2, 8):
        accelerator, team = HostAccelerator(num_threads=num_threads), Team(library, num_threads)
        splits.append(choose_num_splits(1, 2, 1900, accelerator.num_multiprocessors))
        computed.append(attend_decode(team, case, decodes, num_splits=splits[-1]))
        accelerator.close()
        team.close()
    assert splits == [1, 1, 4]
    assert_same(computed[1], computed[0])
    assert_same(computed[2], computed[0])


def test_scores_of_a_decode_may_be_large_and_contexts_long(teams: list[Team]) -> None:
    case, decodes = decode_case(8, [513, 2000], heads=2, kv_heads=1)
    assert_decodes(teams, case, decodes, scale=300.0)


INT8_SIZES = pytest.mark.parametrize(
    "sizes",
    [
        {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
        for dtype in (FP32, BF16, FP16)
        for heads, kv_heads, head_dim, block_size in (
            (16, 8, 128, 16),
            (3, 1, 80, 7),
            (7, 1, 72, 5),
            (4, 1, 256, 32),
            (3, 3, 2, 1),
            (1, 1, 512, 16),
            (16, 8, 264, 16),
        )
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())),
)


@INT8_SIZES
@pytest.mark.parametrize("window", [None, 33, 200])
def test_a_decode_reads_an_int8_cache(teams: list[Team], sizes: dict[str, Any], window: int | None) -> None:
    case, decodes = decode_case(sizes["heads"], [600, *CONTEXTS], window, **sizes, cache_dtype=torch.int8)
    assert_decodes(teams, case, decodes, window=window, soft_cap=None if window is None else 3.0)


def assert_prefills(teams: list[Team], case: PagedCase, tiles: Tensor, **keywords: Any) -> None:
    """Like the oracle; and, to the last bit, with any number of threads, and in tiles of one token."""
    keywords = {"scale": 0.11, "window": None, **keywords}
    expected = case.out.clone()
    attend(reference.attend_prefill, case, tiles, expected, **keywords)
    single = [
        [row, first + nth, 1, position + nth] for row, first, count, position in tiles.tolist() for nth in range(count)
    ]
    made = []
    for team, cut in ((teams[0], tiles), (teams[1], tiles), (teams[1], int32(single))):
        out = case.out.clone()
        attend(NativeOperations(team).attend_prefill, case, cut, out, **keywords)
        made.append(out)
    assert made[0][[0, 1, -1]].isnan().all()
    assert not made[0][2:-1].isnan().any()
    assert_close(made[0], expected)
    assert_same(made[1], made[0])
    assert_same(made[2], made[0])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "chunks"),
    [
        (4, 2, 64, 16, [(0, 7), (20, 1)]),
        (16, 8, 128, 16, [(0, 200), (123, 7), (0, 1)]),
        (3, 1, 80, 7, [(30, 75), (64, 1)]),
        (7, 1, 72, 5, [(63, 50)]),
        (2, 2, 2, 1, [(0, 123), (64, 1)]),
        (2, 1, 256, 24, [(33, 140)]),
        (1, 1, 512, 16, [(10, 120)]),
        (200, 1, 64, 16, [(10, 2)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_a_tile_attends_to_the_keys_before(
    teams: list[Team],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    chunks: list[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    case, tiles = prefill_case(heads, chunks, **sizes)
    assert_prefills(teams, case, tiles)


@pytest.mark.parametrize("window", [1, 16, 33, 64, 150, 500])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_tile_reads_nothing_before_the_window(teams: list[Team], window: int, dtype: torch.dtype) -> None:
    case, tiles = prefill_case(window, [(190, 80), (0, 66), (40, 2)], window, kv_heads=1, block_size=8, dtype=dtype)
    assert_prefills(teams, case, tiles, window=window)


@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_a_tile_caps_scores(teams: list[Team], soft_cap: float) -> None:
    case, tiles = prefill_case(4, [(70, 70), (0, 3)], heads=6, kv_heads=2)
    assert_prefills(teams, case, tiles, scale=1.0, soft_cap=soft_cap)


@WITH_EXTRAS
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("cache", [FP32, BF16, torch.int8], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 80), (32, 8, 128)])
def test_scores_of_a_tile_are_capped_and_summed_with_sinks(
    teams: list[Team],
    heads: int,
    kv_heads: int,
    head_dim: int,
    cache: torch.dtype,
    window: int | None,
    extras: tuple[str, ...],
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": 8, "cache_dtype": cache}
    dtype = FP32 if cache == torch.int8 else cache
    case, tiles = prefill_case(5, [(70, 50), (0, 3)], window, **sizes, dtype=dtype)
    assert_prefills(teams, case, tiles, window=window, **extras_of(heads, *extras))


@pytest.mark.parametrize(("scale", "dtype"), [(0.11, FP32), (0.3, FP32), (0.11, BF16), (1.0, BF16), (30.0, BF16)])
def test_scores_of_a_tile_may_rise_from_segment_to_segment(teams: list[Team], scale: float, dtype: torch.dtype) -> None:
    """By less than what needs new sums and by more, to several hundred."""
    case, tiles = prefill_case(9, [(0, 400), (300, 9)], dtype=dtype)
    for row, (begin, end) in enumerate(((0, 400), (0, 309))):
        for position in range(begin, end):
            case.k_cache[case.block_tables[row, position // 16], position % 16] *= 0.1 + position / 100
    assert_prefills(teams, case, tiles, scale=scale)


@INT8_SIZES
@pytest.mark.parametrize("window", [None, 33])
def test_a_tile_reads_an_int8_cache(teams: list[Team], sizes: dict[str, Any], window: int | None) -> None:
    chunks = [(123, 7), (0, 70), (0, 1)]
    case, tiles = prefill_case(sizes["heads"], chunks, window, **sizes, cache_dtype=torch.int8)
    assert_prefills(teams, case, tiles, window=window, soft_cap=None if window is None else 3.0)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_an_int8_cache_changes_what_is_attended_to_by_its_rounding(teams: list[Team], dtype: torch.dtype) -> None:
    """Of normal keys and values the error of a number is 0.6 % of their spread, at these heads."""
    sizes = {"heads": 16, "kv_heads": 8, "head_dim": 128, "dtype": dtype}
    (plain, decodes), (kept, _) = (decode_case(5, [600], **sizes, cache_dtype=cache) for cache in (FP32, torch.int8))
    exact = plain.out.float()
    attend(reference.attend_decode, replace(plain, q=plain.q.float()), decodes, exact, **KEYWORDS)
    errors = attend_decode(teams[0], kept, decodes)[1].float() - exact[1]
    assert 1e-4 < errors.norm() / exact[1].norm() < 0.02


def test_what_is_read_by_no_kernel_is_refused(teams: list[Team]) -> None:
    case, decodes = decode_case(1, [5], dtype=BF16, cache_dtype=torch.float8_e4m3fn)
    with pytest.raises(InternalError, match="float8"):
        attend_decode(teams[0], case, decodes)
    case, decodes = decode_case(1, [5], head_dim=514, kv_heads=1, cache_dtype=torch.int8)
    with pytest.raises(InternalError, match="heads of 514 are too large"):
        attend_decode(teams[0], case, decodes)
    case, decodes = decode_case(1, [5], head_dim=64)
    with pytest.raises(InternalError, match="k_cache has shape"):
        attend_decode(teams[0], replace(case, k_cache=case.k_cache.to(torch.int8)), decodes)
    case, tiles = prefill_case(1, [(0, 5)], dtype=BF16, head_dim=3)
    with pytest.raises(InternalError, match="heads of 3"):
        attend(NativeOperations(teams[0]).attend_prefill, case, tiles, case.out)
    case, decodes = decode_case(1, [5])
    with pytest.raises(InternalError, match="sinks has shape"):
        attend_decode(teams[0], case, decodes, sinks=torch.zeros(2))
    case, decodes = decode_case(1, [5], heads=129, kv_heads=1)
    with pytest.raises(InternalError, match="too many"):
        attend_decode(teams[0], case, decodes)
    case, tiles = prefill_case(1, [(0, 5)], head_dim=513)
    with pytest.raises(InternalError, match="too large"):
        attend(NativeOperations(teams[0]).attend_prefill, case, tiles, case.out)
