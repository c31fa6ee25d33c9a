"""What native kernels promise beyond their operations: threads change no bit, rows lie apart, int8 caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.harness import TOLERANCES, assert_close, assert_same, native, normal
from kernels.test_layers import Case

from aioengine.kernels.kernel_cases import GROUPS, ODD, CaseSizes, Inputs
from aioengine.kernels.kernel_check import results_of
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import plain_torch
from aioengine.kernels.torch.quantized import quantize_lines, read_lines

WIDE = CaseSizes(
    hidden=1000, intermediate=520, heads=14, kv_heads=2, head_dim=80, vocab=33_000, layers=2, decode=33, prefill=123,
    context=70, long_context=1500,
)  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", [ODD, WIDE], ids=["odd", "wide"])
def test_no_operation_depends_on_the_number_of_threads(teams: list[Team], sizes: CaseSizes, dtype: torch.dtype) -> None:
    one, two = map(NativeOperations, teams)
    inputs = Inputs(sizes, torch.device("cpu"), dtype, one)
    for make in GROUPS:
        for case in make(inputs):
            for alone, together in zip(results_of(case, one), results_of(case, two), strict=True):
                assert_same(together, alone)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 123, 9000])
def test_a_row_does_not_depend_on_the_others(width: int, dtype: torch.dtype) -> None:
    x, weight = normal(123, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    last = native.rms_norm(x, weight, 1e-5)[-1:].clone()
    assert_same(native.rms_norm(x[-1:], weight, 1e-5), last)


@pytest.mark.parametrize(
    "sizes",
    [
        *({"num_tokens": count, "dtype": dtype, "seed": count} for count in (1, 7, 123) for dtype in TOLERANCES),
        *({"head_dim": size, "num_kv_heads": 3, "dtype": torch.bfloat16} for size in (2, 6, 80, 96, 128, 512)),
        {"num_tokens": 7, "dtype": torch.bfloat16, "has_norm": False, "table_dtype": torch.float32},
        *({"num_tokens": 7, "has_norm": has_norm, "has_table": False} for has_norm in (False, True)),
        {"num_tokens": 7, "dtype": torch.bfloat16, "is_norm_wide": True, "norm_offset": 1.0},
    ],
    ids=str,
)
def test_keys_and_values_are_rounded_into_an_int8_cache(sizes: dict[str, Any]) -> None:
    case = Case(**{"has_norm": True, **sizes}, cache_dtype=torch.int8)
    made, expected = case.run(native.rotate_and_write), case.run(plain_torch.rotate_and_write)
    assert_close(made[0], expected[0], factor=4)
    for computed, cache in zip(made[1:], expected[1:], strict=True):
        assert_close(*(x[..., -4:].contiguous().view(torch.float32) for x in (computed, cache)), factor=4)
        off = (computed[..., :-4].int() - cache[..., :-4].int()).abs()
        assert off.max() <= 1, "beside the next step"
        assert off.float().mean() < 0.01, "by sums in another order alone"


def test_a_head_of_zeros_is_kept_and_what_is_not_finite_stays_so() -> None:
    case = Case(num_tokens=9, head_dim=24, cache_dtype=torch.int8)
    case.slots = torch.arange(9, dtype=torch.int32)
    case.qkv[0], case.qkv[2, -1], case.qkv[3, -7] = 0.0, torch.nan, -torch.inf
    caches, exact_ones = case.run(native.rotate_and_write)[1:], case.run(plain_torch.rotate_and_write)[1:]
    for cache, x in zip(caches, exact_ones, strict=True):
        kept, exact = (read_lines(each.flatten(0, 1)[:9], torch.float32) for each in (cache, x))
        assert (kept[0] == 0).all()
        assert (kept.isfinite() == exact.isfinite()).all()
    values = read_lines(caches[1].flatten(0, 1)[:9], torch.float32)
    assert values[2:4].isfinite().all(-1).tolist() == [[True, False]] * 2
    error = (values - case.qkv[:, -48:].view(9, 2, 24)).abs()[4:]
    assert (error <= case.qkv[4:, -48:].view(5, 2, 24).abs().amax(-1, keepdim=True) / 253).all(), "half a step"


@pytest.mark.parametrize("head_dim", [2, 6, 8])
def test_one_int8_line_is_read_wherever_its_scale_lies(head_dim: int) -> None:
    x = torch.linspace(-1, 1, head_dim)[None]
    torch.testing.assert_close(read_lines(quantize_lines(x), torch.float32), x, rtol=0, atol=0.5 / 127)
