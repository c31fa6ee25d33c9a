"""The samples of a step: a row of 32-bit words for each token to sample, packed by the host.

A row of the executor that begins several choices has several samples of one row of logits. Floats lie in their words as
they are (`Tensor.view(torch.float32)`); the two words of a seed are those of an int64.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING

from aioengine.sampling_params import ROW_PARAMS

if TYPE_CHECKING:  # the compiler of native kernels needs none of it
    from torch import Tensor


class SampleRow(IntEnum):
    """The words of a sample that say which it is: int32."""

    LOGITS_ROW = 0
    """Which row of the step's logits; -1: padding, to be passed over."""
    ROW = 1
    """The executor's row, whose history the token goes on."""
    END = 2
    """How many tokens that history has, which is where the new one goes."""
    OUTPUT_POSITION = 3
    """How many of them are output; END - OUTPUT_POSITION are the prompt."""
    FLAGS = 4
    """Bits of `SampleFlag`."""
    CHOICE = 5
    SEED_LOW = 6
    SEED_HIGH = 7
    MASK = 8
    """Which bitmask of allowed tokens; -1: none."""


PARAM_WORDS = {name: len(SampleRow) + place for place, name in enumerate(ROW_PARAMS)}
"""The words behind those, one for each of `RowParams`."""

SAMPLE_WORDS = len(SampleRow) + len(PARAM_WORDS)


def param_of(samples: Tensor, name: str) -> Tensor:
    """One of `RowParams` of each sample: float32 or int32 [s], a view of int32 [s, SAMPLE_WORDS]."""
    import torch

    words = samples[..., PARAM_WORDS[name]]
    return words.view(torch.float32) if ROW_PARAMS[name] is float else words


class SampleFlag(IntFlag):
    FIRST = 1
    """The first sample of its row of logits: rules are applied for it, and its token is what the row goes on with."""
    LOGPROBS = 2
    """Log-probabilities are wanted."""


class Status(IntEnum):
    """The outcome of a sample."""

    SAMPLED = 0
    NOT_A_NUMBER = 1
    """The highest logit is NaN. The token is 0."""
    NOTHING_LEFT = 2
    """The highest logit is -inf: all tokens are masked. The token is 0."""
