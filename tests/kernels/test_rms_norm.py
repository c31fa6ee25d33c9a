"""RMSNorm against its oracle, and the oracle against torch's own."""

import pytest
import torch
from kernels.harness import TOLERANCES, assert_close, normal, quiet_numpy

from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.triton.rms_norm import MAX_WIDTH, add_rms_norm, num_warps, rms_norm, rms_norm_add

pytestmark = quiet_numpy

WIDTHS = [1, 7, 64, 123, 1024]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("num_rows", "seed"), [(1, 0), (7, 1)])
def test_norms_each_row(num_rows: int, seed: int, width: int, dtype: torch.dtype) -> None:
    x = normal(num_rows, width, dtype=dtype, seed=seed, scale=10.0**seed)
    weight = normal(width, dtype=dtype, seed=seed + 100)
    for offset in (0.0, 1.0):
        assert_close(rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("num_rows", "seed"), [(1, 0), (7, 1)])
def test_adds_to_the_residual_and_norms_what_is_kept(num_rows: int, seed: int, width: int, dtype: torch.dtype) -> None:
    x, residual = (normal(num_rows, width, dtype=dtype, seed=seed + n, scale=3.0) for n in (1, 2))
    weight = normal(width, dtype=dtype, seed=seed + 100)
    expected_sum = residual.clone()
    expected = reference.add_rms_norm(x, expected_sum, weight, 1e-6)
    x_before = x.clone()
    computed = add_rms_norm(x, residual, weight, 1e-6)
    # The interpreter cuts bfloat16 off instead of rounding it.
    assert_close(residual, expected_sum)
    assert dtype == torch.bfloat16 or torch.equal(residual, expected_sum)
    assert torch.equal(x, x_before)
    assert_close(computed, expected if dtype != torch.bfloat16 else reference.rms_norm(residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_adds_a_part_of_it_or_adds_its_norm(width: int, dtype: torch.dtype) -> None:
    x, residual = (normal(7, width, dtype=dtype, seed=n, scale=3.0) for n in (1, 2))
    weight, total, normed = normal(width, dtype=dtype, seed=3), residual.clone(), residual.clone()
    reference.add_rms_norm(x, total, weight, 1e-6, 1.0, 0.22)
    reference.rms_norm_add(x, normed, weight, 1e-6, 1.0)
    scaled, added = residual.clone(), residual.clone()
    computed = add_rms_norm(x, scaled, weight, 1e-6, 1.0, 0.22)
    assert_close(scaled, total)
    assert_close(computed, reference.rms_norm(scaled, weight, 1e-6, 1.0))
    rms_norm_add(x, added, weight, 1e-6, 1.0)
    assert_close(added, normed)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_oracle_is_torchs_own(dtype: torch.dtype) -> None:
    x, weight = normal(5, 96, dtype=dtype, seed=0), normal(96, dtype=dtype, seed=1)
    exact = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-2)
    assert_close(reference.rms_norm(x, weight, 1e-2), exact.to(dtype))
    residual = normal(5, 96, dtype=dtype, seed=2)
    total = x + residual
    normed = reference.add_rms_norm(x, residual, weight, 1e-2)
    assert torch.equal(residual, total)
    assert_close(normed, torch.nn.functional.rms_norm(total.double(), (96,), weight.double(), 1e-2).to(dtype))
    reference.rms_norm_add(x, total, weight, 1e-2, 1.0)
    exact = torch.nn.functional.rms_norm(x.double(), (96,), weight.double() + 1, 1e-2)
    assert_close(total, (residual.double() + exact).to(dtype), factor=2)


def test_rows_lie_apart() -> None:
    """A row of NaN or of infinities is its own affair; a row of zeros gives zeros."""
    x = normal(4, 33, seed=0)
    x[1], x[2, 5], x[3] = torch.nan, torch.inf, 0.0
    weight = normal(33, seed=1)
    computed = rms_norm(x, weight, 1e-6)
    assert_close(computed[:1], reference.rms_norm(x[:1], weight, 1e-6))
    assert computed[1].isnan().all()
    assert computed[2, 5].isnan()
    assert not computed[3].any()


def test_a_thread_holds_no_more_than_it_has_registers_for() -> None:
    assert [num_warps(width) for width in (64, 1024, 2048, 4096, 5120, 8192)] == [4, 4, 4, 8, 16, 16]
    assert MAX_WIDTH // (32 * num_warps(MAX_WIDTH)) <= 64
