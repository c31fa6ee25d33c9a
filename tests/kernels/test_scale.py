"""Scaling in place against its oracle, and the oracle against the formula in float64."""

import pytest
import torch
from kernels.harness import TOLERANCES, assert_close, normal, quiet_numpy

from aioengine.kernels.layers.scale import BLOCK, scale
from aioengine.kernels.torch import layers as reference

pytestmark = quiet_numpy


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("size", [(1, 1), (3, 41), (1, BLOCK), (5, BLOCK // 2 + 1)])
def test_scales_and_caps(size: tuple[int, int], soft_cap: float | None, dtype: torch.dtype) -> None:
    x = normal(*size, dtype=dtype, seed=size[1], scale=50.0)
    expected = x.clone()
    reference.scale(expected, 0.7, soft_cap)
    scale(x, 0.7, soft_cap)
    assert_close(x, expected, factor=4)


def test_the_oracle_is_the_formula() -> None:
    x = normal(3, 50, scale=50.0)
    exact = 30 * torch.tanh(x.double() * 0.7 / 30)
    reference.scale(x, 0.7, 30.0)
    assert_close(x, exact.float())


def test_what_is_large_is_capped_and_what_is_no_number_stays() -> None:
    x = torch.tensor([[-1e38, torch.inf, torch.nan, 0.0]])
    for operation in (scale, reference.scale):
        capped = x.clone().to(normal(1).device)
        operation(capped, 1.0, 30.0)
        torch.testing.assert_close(capped.cpu(), torch.tensor([[-30.0, 30.0, torch.nan, 0.0]]), equal_nan=True)
