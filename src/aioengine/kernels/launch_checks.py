"""What launchers check of their tensors: a kernel works on bare addresses, and believes what it is told."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.sample_rows import SAMPLE_WORDS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What decoders compute in: the ``x`` of `aioengine.kernels.operations`."""


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Refuse what the kernel would misread.

    Args:
        name: of the operation and the argument, for the message.
        shape: None: any size.
        dtype: or those that it may have.
    Raises:
        InternalError: another shape, dtype or device, or not contiguous.
    """
    # A step of eager launches checks hundreds of tensors: the message is made where there is one.
    sizes, found = tensor.shape, tensor.dtype
    has_shape = len(sizes) == len(shape)
    if has_shape:
        for has, want in zip(sizes, shape, strict=True):
            if has != want and want is not None:
                has_shape = False
    if not has_shape:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InternalError(f"{name} has shape {list(sizes)}; [{wanted}] is needed")
    if found is not dtype and not (type(dtype) is tuple and found in dtype):
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        raise InternalError(f"{name} is {found}; {' or '.join(map(str, dtypes))} is needed")
    if tensor.device != device:
        raise InternalError(f"{name} is on {tensor.device}, and what goes with it on {device}")
    if not tensor.is_contiguous():
        raise InternalError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")


def check_logits(logits: Tensor) -> torch.device:
    """Float32 [n, V], V at least 1; returns the device, on which all else has to be."""
    check_tensor("logits", logits, (None, None), torch.float32, logits.device)
    if not logits.shape[1]:
        raise InternalError("logits have no vocabulary")
    return logits.device


def check_samples(samples: Tensor, device: torch.device) -> None:
    check_tensor("samples", samples, (None, SAMPLE_WORDS), torch.int32, device)
