"""Attention of single tokens over paged keys, whole and in splits, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.harness import DEVICE, FLOAT8, int32, make_conversions_right, quiet_numpy
from kernels.paged_cases import WITH_EXTRAS, PagedCase, assert_close, attend, decode_case, extras_of
from nightly import nightly
from torch import Tensor

from aioengine.kernels.attention_launches import choose_num_splits
from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.triton.attend_decode import attend_decode

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KEYWORDS: dict[str, Any] = {**{"scale": 0.11, "window": None, "num_splits": 1, "max_context": 256}}
CONTEXTS = [123, 1, 7, 64, 65]


pytestmark = quiet_numpy


@pytest.fixture(autouse=True)
def right_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    make_conversions_right(monkeypatch)


def assert_is_the_oracles(case: PagedCase, decodes: Tensor, **keywords: Any) -> None:
    keywords = {**KEYWORDS, **keywords}
    expected = case.out.clone()
    attend(reference.attend_decode, case, decodes, expected, **keywords)
    computed = case.out.clone()
    attend(attend_decode, case, decodes, computed, **keywords)
    assert computed[[0, -1, -2]].isnan().all()
    assert not computed[decodes[:, 1].long()].isnan().any()
    assert_close(computed, expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype", "num_splits"),
    [
        (4, 2, 64, 16, FP32, 1),
        (3, 1, 80, 7, FP32, 2),
        (5, 1, 128, 256, FP16, 1),
        (2, 1, 128, 16, BF16, 3),
        *nightly(
            (4, 2, 64, 16, FP32, 3),
            (2, 2, 96, 1, FP16, 1),
            (2, 1, 96, 48, FP16, 2),
            (4, 2, 128, 16, BF16, 1),
            (17, 1, 64, 24, FP16, 1),
            (2, 1, 256, 32, FP32, 1),
            (1, 1, 256, 100, FP16, 2),
            (71, 1, 64, 64, BF16, 1),
        ),
    ],
    ids=str,
)
def test_attends_to_all_keys(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, num_splits: int
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    case, decodes = decode_case(heads, CONTEXTS[:3] if dtype == FP32 else CONTEXTS, **sizes)
    assert_is_the_oracles(case, decodes, num_splits=num_splits)


@pytest.mark.parametrize("window", [1, 33, 64, 200, 1 << 40])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_nothing_before_the_window_is_read(num_splits: int, window: int) -> None:
    case, decodes = decode_case(window, [200, 31], window, heads=2, kv_heads=1, block_size=8, dtype=FP16)
    assert_is_the_oracles(case, decodes, window=window, num_splits=num_splits)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_float8_caches(num_splits: int, dtype: torch.dtype) -> None:
    case, decodes = decode_case(6, [140, 17], heads=2, kv_heads=1, head_dim=80, dtype=dtype, cache_dtype=FLOAT8)
    assert_is_the_oracles(case, decodes, num_splits=num_splits)


def test_every_float8_is_read_as_what_it_is() -> None:
    case, _ = decode_case(0, [1], cache_dtype=FLOAT8, kv_heads=1, head_dim=256)
    codes = torch.arange(256).to(torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    slot = case.block_tables[0, 0]
    case.v_cache[slot, 0, 0] = codes.view(FLOAT8).to(DEVICE)
    decodes = int32([[0, 1, 1]])
    attend(attend_decode, case, decodes, case.out, **KEYWORDS)
    assert torch.equal(case.out[1].cpu(), codes.view(FLOAT8).float().expand(4, 256))


@pytest.mark.parametrize("num_splits", [*nightly(2), 5, *nightly(40)])
def test_any_number_of_splits_serves_any_context(num_splits: int) -> None:
    """As in a CUDA graph, where it is fixed: contexts shorter than the splits leave some empty."""
    case, decodes = decode_case(num_splits, [1, 33, 600], heads=1, kv_heads=1, head_dim=128)
    assert_is_the_oracles(case, decodes, num_splits=num_splits, max_context=2048)


@pytest.mark.nightly
def test_the_highest_score_may_be_in_any_split() -> None:
    """More splits than are combined at once, and one key that outweighs the others: in the last, and in the first."""
    case, decodes = decode_case(9, [600, 600], heads=1, kv_heads=1, head_dim=128)
    for row, position in ((0, 599), (1, 0)):
        token = int(decodes[decodes[:, 0] == row][0, 1])
        case.k_cache[case.block_tables[row, position // 16], position % 16, 0] = case.q[token, 0]
    assert_is_the_oracles(case, decodes, num_splits=64, max_context=1024)


def test_scores_may_be_large() -> None:
    case, decodes = decode_case(8, [90, 40], heads=2, kv_heads=1)
    for num_splits in (1, 3):
        assert_is_the_oracles(case, decodes, scale=300.0, num_splits=num_splits)


def test_a_cache_may_have_more_than_2_31_values() -> None:
    blocks = 2**31 // (256 * 256) + 2
    # Only the pages that are written to are ever there.
    cache = torch.empty((blocks, 256, 1, 256), dtype=FLOAT8, device=DEVICE)
    values = torch.randn((2, 3, 256), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    cache[blocks - 1, :3, 0] = values[0].to(FLOAT8)
    case, _ = decode_case(0, [3], head_dim=256, kv_heads=1)
    tables = int32([[blocks - 1]])
    decodes = int32([[0, 1, 3]])
    expected = case.out.clone()
    case = replace(case, k_cache=cache, v_cache=cache, block_tables=tables)
    attend(reference.attend_decode, case, decodes, expected, **KEYWORDS)
    attend(attend_decode, case, decodes, case.out, **KEYWORDS)
    assert_close(case.out, expected)


@WITH_EXTRAS
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("num_splits", [*nightly(1), 3])
def test_scores_are_capped_and_summed_with_sinks(num_splits: int, window: int | None, extras: tuple[str, ...]) -> None:
    sizes: dict[str, Any] = {"heads": 6, "kv_heads": 2, "block_size": 8}
    case, decodes = decode_case(5, [200, 1, 40], window, **sizes, dtype=FP32 if window else FP16)
    assert_is_the_oracles(case, decodes, window=window, num_splits=num_splits, **extras_of(6, *extras))


@pytest.mark.parametrize("num_splits", [*nightly(1), 3])
@pytest.mark.parametrize("sink", [-1e4, 200.0, -torch.inf])
def test_a_sink_may_be_far_from_all_scores(num_splits: int, sink: float) -> None:
    case, decodes = decode_case(5, [200, 1])
    sinks = torch.full((4,), sink, device=DEVICE)
    assert_is_the_oracles(case, decodes, num_splits=num_splits, sinks=sinks)


@pytest.mark.parametrize(("num_splits", "max_context"), [(1, 256), (2, 256), (2, 0)])
def test_padding_alone_becomes_zeros(num_splits: int, max_context: int) -> None:
    case, _ = decode_case(1, [5], dtype=BF16)
    decodes = int32([[-1, 2, 0], [-1, 0, 77]])
    keywords = {**KEYWORDS, "num_splits": num_splits, "max_context": max_context}
    attend(attend_decode, case, decodes, case.out, **keywords)
    assert case.out[[0, 2]].eq(0).all()
    assert case.out[[1, 3]].isnan().all()


@pytest.mark.parametrize(
    ("num_rows", "num_kv_heads", "max_context", "expected"),
    [
        (1, 8, 131072, 33),  # 264 programs on 132 multiprocessors
        (1, 8, 1024, 16),  # a tile each
        (1, 1, 131072, 64),  # as many as there may be
        (8, 8, 8192, 4),
        (64, 8, 8192, 1),  # rows enough
        (256, 8, 131072, 1),
        (1, 8, 5, 1),
        (0, 8, 0, 1),
    ],
)
def test_splits_fill_a_gpu_and_no_more(num_rows: int, num_kv_heads: int, max_context: int, expected: int) -> None:
    assert choose_num_splits(num_rows, num_kv_heads, max_context, 132) == expected
