"""The gated activation against its oracle, and the oracle against the formulas in float64."""

import math
import os

import pytest
import torch

from aioengine.errors import InternalError
from aioengine.kernels.layers.gated_activation import BLOCK, FEW_ROWS, FEW_ROWS_BLOCK, KINDS, gated_activation
from aioengine.kernels.torch import layers as reference_decoder

# numpy's, in the interpreter: σ overflows on its way to 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, 2 * width, generator=generator) * 4).to(DEVICE, dtype)


def assert_close(computed: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 123, FEW_ROWS_BLOCK, FEW_ROWS_BLOCK + 1])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_activates_the_gate_and_multiplies(num_rows: int, width: int, dtype: torch.dtype, kind: str) -> None:
    gate_up = random(num_rows, width, dtype, seed=width)
    before = gate_up.clone()
    computed = gated_activation(gate_up, kind)
    assert computed.is_contiguous()
    assert torch.equal(gate_up, before)
    assert_close(computed, reference_decoder.gated_activation(gate_up, kind))


@pytest.mark.parametrize("width", [5, BLOCK + 3])
def test_many_rows_go_in_larger_parts(width: int) -> None:
    gate_up = random(FEW_ROWS + 1, width, torch.float32, seed=0)
    assert_close(gated_activation(gate_up, "silu"), reference_decoder.gated_activation(gate_up, "silu"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_is_the_formula(kind: str) -> None:
    gate_up = random(3, 50, torch.float32, seed=1)
    gate, up = gate_up.double().split(50, dim=1)
    if kind == "silu":
        activated = gate / (1 + torch.exp(-gate))
    else:
        activated = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    assert_close(reference_decoder.gated_activation(gate_up, kind), (activated * up).float())


@pytest.mark.parametrize("kind", KINDS)
def test_large_gates_neither_overflow_nor_spread(kind: str) -> None:
    gate = torch.tensor([-1e38, -1e4, -100.0, 0.0, 100.0, 1e4, torch.inf, torch.nan])
    gate_up = torch.cat((gate, torch.ones(8)))[None].to(DEVICE)
    computed = gated_activation(gate_up, kind)[0].cpu()
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0, 1e4, torch.inf, torch.nan])
    torch.testing.assert_close(computed, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_is_no_launch(shape: tuple[int, int]) -> None:
    assert gated_activation(torch.empty(shape, device=DEVICE), "silu").shape == (shape[0], shape[1] // 2)


def test_what_does_not_fit_is_refused() -> None:
    fine = torch.ones(2, 8, device=DEVICE)
    for message, gate_up, kind in [
        ("shape", fine[0], "silu"),
        ("not equally wide", torch.ones(2, 7, device=DEVICE), "silu"),
        ("float64", fine.double(), "silu"),
        ("strides", torch.ones(2, 16, device=DEVICE)[:, :8], "silu"),
        ("no kind 'relu'", fine, "relu"),
    ]:
        with pytest.raises(InternalError, match=message):
            gated_activation(gate_up, kind)
