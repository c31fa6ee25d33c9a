"""Attention of tiles of tokens over paged keys against the oracle; and the oracle against torch's."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from kernels import paged_cases
from kernels.harness import DEVICE, FLOAT8, make_conversions_right, quiet_numpy
from kernels.paged_cases import EXTRAS, WITH_EXTRAS, PagedCase, assert_close, attend, extras_of
from nightly import nightly
from torch import Tensor

from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.triton.attend_prefill import attend_prefill, prefill_tile

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KEYWORDS: dict[str, Any] = {"scale": 0.11, "window": None}

pytestmark = quiet_numpy


@pytest.fixture(autouse=True)
def right_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    make_conversions_right(monkeypatch)


prefill_case = partial(paged_cases.prefill_case, prefill_tile=prefill_tile)


def assert_is_the_oracles(case: PagedCase, tiles: Tensor, **keywords: Any) -> None:
    keywords = {**KEYWORDS, **keywords}
    expected, computed = case.out.clone(), case.out.clone()
    attend(reference.attend_prefill, case, tiles, expected, **keywords)
    attend(attend_prefill, case, tiles, computed, **keywords)
    assert computed[[0, 1, -1]].isnan().all()
    assert not computed[2:-1].isnan().any()
    assert_close(computed, expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype", "chunks"),
    [
        (4, 2, 64, 16, FP32, [(0, 7), (20, 1)]),
        (3, 1, 80, 7, FP32, [(30, 5)]),
        (4, 2, 64, 16, FP16, [(0, 70), (123, 7), (0, 1)]),
        (4, 1, 128, 16, BF16, [(0, 40), (130, 3)]),
        *nightly(
            (2, 1, 256, 32, FP32, [(9, 3)]),
            (3, 1, 96, 5, FP16, [(63, 50)]),
            (2, 2, 128, 1, FP16, [(0, 123), (64, 1)]),
            (8, 1, 128, 256, FP16, [(250, 20)]),
            (2, 1, 256, 24, FP16, [(33, 40)]),
            (130, 1, 64, 16, BF16, [(10, 2)]),
        ),
    ],
    ids=str,
)
def test_attends_to_the_keys_before(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, chunks: list[tuple[int, int]]
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    case, tiles = prefill_case(heads, chunks, **sizes)
    assert_is_the_oracles(case, tiles)


@pytest.mark.parametrize("window", [1, 33, *nightly(16, 64, 150, 500)])
def test_nothing_before_the_window_is_read(window: int) -> None:
    case, tiles = prefill_case(window, [(190, 80), (0, 66), (40, 2)], window, kv_heads=1, block_size=8, dtype=FP16)
    assert_is_the_oracles(case, tiles, window=window)


def test_a_windows_parts_of_a_tile_are_small_in_float32() -> None:
    case, tiles = prefill_case(3, [(50, 9)], 20, kv_heads=1, block_size=4)
    assert_is_the_oracles(case, tiles, window=20)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_float8_caches(dtype: torch.dtype) -> None:
    case, tiles = prefill_case(6, [(70, 4)], dtype=dtype, cache_dtype=FLOAT8, kv_heads=1, head_dim=80)
    assert_is_the_oracles(case, tiles)


def test_scores_may_be_large() -> None:
    case, tiles = prefill_case(8, [(70, 4)], kv_heads=1)
    assert_is_the_oracles(case, tiles, scale=300.0)


@WITH_EXTRAS
@pytest.mark.parametrize("window", [None, 20])
def test_scores_are_capped_and_summed_with_sinks(window: int | None, extras: tuple[str, ...]) -> None:
    sizes: dict[str, Any] = {"heads": 6, "kv_heads": 2, "block_size": 8}
    case, tiles = prefill_case(5, [(50, 9), (0, 3)], window, **sizes, dtype=FP32 if window else FP16)
    assert_is_the_oracles(case, tiles, window=window, **extras_of(6, *extras))


@pytest.mark.parametrize("sink", [-1e4, 200.0, -torch.inf])
def test_a_sink_may_be_far_from_all_scores(sink: float) -> None:
    case, tiles = prefill_case(5, [(50, 9)], 20)
    assert_is_the_oracles(case, tiles, window=20, sinks=torch.full((2,), sink, device=DEVICE))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"), [(32, 8, 32), (16, 8, 64), (32, 32, 128), (24, 8, 42), (71, 1, 1), (200, 1, 1)]
)
def test_a_tile_times_its_heads_fills_the_matrix_units(heads: int, kv_heads: int, expected: int) -> None:
    assert prefill_tile(heads, kv_heads, 128) == expected


# The oracle


@pytest.mark.parametrize("seed", range(5))
def test_the_oracle_is_torchs_own(seed: int) -> None:
    window, scale, begin = [None, 5][seed % 2], 0.2 + seed, [0, 30][seed // 2 % 2]
    count = 7 + 10 * seed
    case, tiles = prefill_case(seed, [(begin, count)], window, heads=6, kv_heads=2, block_size=3)
    attend(reference.attend_prefill, case, tiles, case.out, **{**KEYWORDS, "scale": scale, "window": window})
    k, v = case.keys[0], case.values[0]
    ages = torch.arange(len(k) - count, len(k))[:, None] - torch.arange(len(k))
    is_seen = ((ages >= 0) & (ages < (window or len(k)))).to(DEVICE)
    q = case.q[2 : 2 + count].double()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=is_seen, scale=scale, enable_gqa=True
    ).transpose(0, 1)
    assert_close(case.out[2 : 2 + count], expected.to(FP32))


@pytest.mark.parametrize("soft_cap", [0.5, 3.0])
def test_the_oracle_caps_scores_by_tanh(soft_cap: float) -> None:
    case, tiles = prefill_case(0, [(0, 2)], heads=1, kv_heads=1)
    attend(reference.attend_prefill, case, tiles, case.out, **KEYWORDS, soft_cap=soft_cap)
    k, v = case.keys[0][:, 0], case.values[0][:, 0]
    scores = k @ case.q[3, 0].double() * KEYWORDS["scale"]
    weights = torch.tensor([math.exp(soft_cap * math.tanh(score / soft_cap)) for score in scores.tolist()]).to(v)
    assert_close(case.out[3, 0], (weights @ v / weights.sum()).to(FP32))


@pytest.mark.parametrize("window", [None, 3])
def test_the_oracles_sinks_are_what_the_paper_writes(window: int | None) -> None:
    """A sink is a share of the sum that goes to no value."""
    case, tiles = prefill_case(0, [(0, 5)], heads=2, kv_heads=1)
    extras = extras_of(2, *EXTRAS)
    attend(reference.attend_prefill, case, tiles, case.out, **{**KEYWORDS, "window": window}, **extras)
    k, v = case.keys[0][:, 0], case.values[0][:, 0]
    for head in range(2):
        products = (k @ case.q[6, head].double() * KEYWORDS["scale"]).tolist()
        sink = extras["sinks"][head].item()
        capped = [extras["soft_cap"] * math.tanh(product / extras["soft_cap"]) for product in products]
        weights = [math.exp(score) for score in capped]
        first = 5 - (window or 5)
        kept = torch.tensor(weights[first:]).to(v)
        assert_close(case.out[6, head], (kept @ v[first:] / (kept.sum() + math.exp(sink))).to(FP32))


@pytest.mark.parametrize("seed", range(3))
def test_the_oracles_decode_is_its_prefill(seed: int) -> None:
    """Of a token at a time, whatever the splits."""
    keywords = {**KEYWORDS, "window": [None, 4][seed % 2], "scale": 0.2 * (1 + seed)}
    keywords |= extras_of(2, *EXTRAS) if seed % 2 else {}
    case, tiles = prefill_case(seed, [(0, 30), (50, 3)], cache_dtype=FLOAT8)
    attend(reference.attend_prefill, case, tiles, case.out, **keywords)
    tokens = [(0, token, token - 1) for token in range(2, 32)] + [
        (1, token, 50 + token - 31) for token in range(32, 35)
    ]
    decodes = torch.tensor([*tokens, (-1, 0, 9)], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(case.out, float("nan"))
    attend(reference.attend_decode, case, decodes, out, **keywords, num_splits=3, max_context=60)
    assert_close(out[1:], case.out[1:])
    assert out[0].eq(0).all()
