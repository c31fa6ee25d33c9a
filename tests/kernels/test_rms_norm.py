"""RMSNorm against its oracle, and the oracle against torch's own."""

import os

import pytest
import torch

from aioengine.errors import InternalError
from aioengine.kernels.layers.rms_norm import MAX_WIDTH, add_rms_norm, num_warps, rms_norm
from aioengine.kernels.torch import layers as reference_decoder

# numpy's, in the interpreter, where infinities are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
# A unit in the last place of a value near 1, about: both compute in float32.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
WIDTHS = [1, 7, 64, 123, 1024]


def random(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def assert_close(computed: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("num_rows", "seed"), [(1, 0), (7, 1)])
def test_norms_each_row(num_rows: int, seed: int, width: int, dtype: torch.dtype) -> None:
    x = random(num_rows, width, dtype=dtype, seed=seed, scale=10.0**seed)
    weight = random(width, dtype=dtype, seed=seed + 100)
    assert_close(rms_norm(x, weight, 1e-5), reference_decoder.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("num_rows", "seed"), [(1, 0), (7, 1)])
def test_adds_to_the_residual_and_norms_what_is_kept(num_rows: int, seed: int, width: int, dtype: torch.dtype) -> None:
    x, residual = (random(num_rows, width, dtype=dtype, seed=seed + n, scale=3.0) for n in (1, 2))
    weight = random(width, dtype=dtype, seed=seed + 100)
    expected_sum = residual.clone()
    expected = reference_decoder.add_rms_norm(x, expected_sum, weight, 1e-6)
    x_before = x.clone()
    computed = add_rms_norm(x, residual, weight, 1e-6)
    # The interpreter cuts bfloat16 off instead of rounding it.
    assert_close(residual, expected_sum)
    assert dtype == torch.bfloat16 or torch.equal(residual, expected_sum)
    assert torch.equal(x, x_before)
    assert_close(computed, expected if dtype != torch.bfloat16 else reference_decoder.rms_norm(residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_oracle_is_torchs_own(dtype: torch.dtype) -> None:
    x, weight = random(5, 96, dtype=dtype, seed=0), random(96, dtype=dtype, seed=1)
    exact = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-2)
    assert_close(reference_decoder.rms_norm(x, weight, 1e-2), exact.to(dtype))
    residual = random(5, 96, dtype=dtype, seed=2)
    total = x + residual
    normed = reference_decoder.add_rms_norm(x, residual, weight, 1e-2)
    assert torch.equal(residual, total)
    assert_close(normed, torch.nn.functional.rms_norm(total.double(), (96,), weight.double(), 1e-2).to(dtype))


def test_rows_lie_apart() -> None:
    """A row of NaN or of infinities is its own affair; a row of zeros gives zeros."""
    x = random(4, 33, dtype=torch.float32, seed=0)
    x[1], x[2, 5], x[3] = torch.nan, torch.inf, 0.0
    weight = random(33, dtype=torch.float32, seed=1)
    computed = rms_norm(x, weight, 1e-6)
    assert_close(computed[:1], reference_decoder.rms_norm(x[:1], weight, 1e-6))
    assert computed[1].isnan().all()
    assert computed[2, 5].isnan()
    assert not computed[3].any()


def test_no_rows_are_no_launch() -> None:
    x, weight = torch.empty(0, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    assert rms_norm(x, weight, 1e-6).shape == (0, 8)
    assert add_rms_norm(x, x.clone(), weight, 1e-6).shape == (0, 8)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.ones(4, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    refused = [
        ("shape", (x[0], weight)),
        ("shape", (x, weight[:4])),
        ("float64", (x.double(), weight)),
        ("is needed", (x, weight.half())),
        ("strides", (torch.ones(4, 16, device=DEVICE)[:, ::2], weight)),
        ("strides", (torch.ones(8, 4, device=DEVICE).T, weight)),
        ("1 to", (torch.ones(1, 0, device=DEVICE), weight[:0])),
        ("1 to", (torch.ones(1, MAX_WIDTH + 1, device=DEVICE), torch.ones(MAX_WIDTH + 1, device=DEVICE))),
        ("meta", (x, weight.to("meta"))),
    ]
    for message, arguments in refused:
        with pytest.raises(InternalError, match=message):
            rms_norm(*arguments, 1e-6)
        with pytest.raises(InternalError, match=message):
            add_rms_norm(arguments[0], arguments[0], arguments[1], 1e-6)
    for residual in (x[:3], x.half(), torch.ones(4, 16, device=DEVICE)[:, :8]):
        with pytest.raises(InternalError, match="residual"):
            add_rms_norm(x, residual, weight, 1e-6)


def test_a_thread_holds_no_more_than_it_has_registers_for() -> None:
    assert [num_warps(width) for width in (64, 1024, 2048, 4096, 5120, 8192)] == [4, 4, 4, 8, 16, 16]
    assert MAX_WIDTH // (32 * num_warps(MAX_WIDTH)) <= 64
