"""What the launchers of rules and log-probabilities check of logits and slots, beside `launch_checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.launch_checks import check_tensor
from aioengine.kernels.sampling.slots import SLOT_WORDS


def check_logits(logits: Tensor) -> torch.device:
    """Float32 [n, V], V at least 1; returns the device, on which all else has to be."""
    check_tensor("logits", logits, (None, None), torch.float32, logits.device)
    if not logits.shape[1]:
        raise InternalError("logits have no vocabulary")
    return logits.device


def check_slots(slots: Tensor, device: torch.device) -> None:
    check_tensor("slots", slots, (None, SLOT_WORDS), torch.int32, device)
