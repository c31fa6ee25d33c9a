"""The gated activation against its oracle, and the oracle against the formulas in float64."""

import math
from typing import get_args

import pytest
import torch
from kernels.harness import DEVICE, TOLERANCES, assert_close, normal, quiet_numpy
from nightly import nightly

from aioengine.kernels.operations import Activation
from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.triton.gated_activation import BLOCK, FEW_ROWS, FEW_ROWS_BLOCK, gated_activation

pytestmark = quiet_numpy

ACTIVATIONS = pytest.mark.parametrize("activation", get_args(Activation))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [1, FEW_ROWS_BLOCK + 1, *nightly(7, 123, FEW_ROWS_BLOCK)])
@pytest.mark.parametrize("num_rows", [*nightly(1), 7])
@ACTIVATIONS
def test_activates_the_gate_and_multiplies(
    num_rows: int, width: int, dtype: torch.dtype, activation: Activation
) -> None:
    gate_up = normal(num_rows, 2 * width, dtype=dtype, seed=width, scale=4.0)
    before = gate_up.clone()
    computed = gated_activation(gate_up, activation)
    assert computed.is_contiguous()
    assert torch.equal(gate_up, before)
    assert_close(computed, reference.gated_activation(gate_up, activation))


@pytest.mark.parametrize("width", [5, BLOCK + 3])
def test_many_rows_go_in_larger_parts(width: int) -> None:
    gate_up = normal(FEW_ROWS + 1, 2 * width, scale=4.0)
    assert_close(gated_activation(gate_up), reference.gated_activation(gate_up))


def test_the_oracle_is_the_formula() -> None:
    gate_up = normal(3, 100, seed=1, scale=4.0)
    gate, up = gate_up.double().split(50, dim=1)
    assert_close(reference.gated_activation(gate_up), (gate / (1 + torch.exp(-gate)) * up).float())
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    assert_close(reference.gated_activation(gate_up, "gelu_tanh"), (gate / 2 * (1 + tanh) * up).float())
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    in_turn = torch.stack(gate_up.split(50, dim=1), dim=-1).flatten(1)
    expected = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    assert_close(reference.gated_activation(in_turn, "clamped_silu"), expected.float())


@ACTIVATIONS
def test_large_gates_neither_overflow_nor_spread(activation: Activation) -> None:
    gate = torch.tensor([-1e38, -1e4, -100.0, 0.0, 100.0, 1e4, torch.inf, torch.nan])
    gate_up = torch.cat((gate, torch.ones(8)))
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0, 1e4, torch.inf, torch.nan])
    if activation == "clamped_silu":
        gate_up, expected = torch.stack((gate, torch.ones(8)), dim=1).flatten(), expected.clamp(max=7.0) * 2.0
    computed = gated_activation(gate_up[None].to(DEVICE), activation)[0].cpu()
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
