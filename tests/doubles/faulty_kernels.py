"""Launchers that lie, raise, hang and kill their process, in the place of Triton's."""

from __future__ import annotations

import os
import signal
import threading

import torch
from torch import Tensor

from aioengine.kernels.operations import Activation, Operations, PagedKV, plain_torch
from aioengine.kernels.packed_weight import PackedWeight
from aioengine.kernels.triton import replaces


@replaces(Operations.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Lies in one number of the last row."""
    made = plain_torch.rms_norm(x, weight, eps, offset)
    made[-1, -1] += 0.5
    return made


@replaces(Operations.gated_activation)
def gated_activation(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    raise RuntimeError("out of resource: shared memory")


@replaces(Operations.rms_norm_add)
def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
    threading.Event().wait()


@replaces(Operations.attend_decode)
def attend_decode(q: Tensor, kv: PagedKV, decodes: Tensor, out: Tensor, *, num_splits: int, max_context: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@replaces(Operations.linear)
def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Right."""
    return plain_torch.linear(x, packed, bias, out_dtype)
