"""How queries and keys turn with their positions: from a config's ``rope_parameters`` to frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

RopeParameters = dict[str, Any]


class Rope(msgspec.Struct, frozen=True):
    """A rotation of queries and keys by their positions (Su et al., 2021, arXiv:2104.09864).

    Attributes:
        inv_freq: [head_dim / 2], radians a position, float32 values; at 0 a pair of numbers stays as it is.
        scale: cos and sin of the pairs that turn are multiplied by this (1 but for yarn and longrope).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


class Lengths(NamedTuple):
    """In tokens: the config's ``max_position_embeddings``, and the longest sequence that there may be."""

    positions: int
    of_sequence: int


def read_rope(parameters: RopeParameters, head_dim: int, lengths: Lengths) -> Rope:
    """
    Args:
        parameters: with a ``rope_type`` of `ROPE_TYPES` and ``rope_theta``; ``partial_rotary_factor``: how much of a
            head turns.
    Raises:
        ValueError, TypeError, KeyError: they give no frequencies.
    """
    rotary_dim = rotated_size(parameters, head_dim)
    periods = parameters["rope_theta"] ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    inv_freq, scale = ROPE_TYPES[parameters["rope_type"]](parameters, periods, lengths)
    values, scale = tuple(inv_freq.tolist()), float(scale)
    if len(values) != rotary_dim // 2:
        raise ValueError(f"they give {len(values)} frequencies, not {rotary_dim // 2}")
    if not all(0 < value < math.inf for value in [*values, scale]):
        raise ValueError(f"not all frequencies are between 0 and infinity; rope_theta={parameters['rope_theta']}")
    return Rope(values + (0.0,) * ((head_dim - rotary_dim) // 2), scale)


def rotated_size(parameters: RopeParameters, head_dim: int) -> int:
    """How many of a head's numbers turn.

    Raises:
        ValueError: it is no even number of 2 to ``head_dim``.
    """
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if size % 2 or not 2 <= size <= head_dim:
        raise ValueError(f"partial_rotary_factor makes {size} of {head_dim} numbers of a head turn")
    return size


def head_order(head_dim: int, rotary_dim: int, *, is_interleaved: bool) -> tuple[int, ...] | None:
    """Where a checkpoint has each number of a head, for pairs that turn to lie half a head apart, as ours do.

    In a checkpoint the first ``rotary_dim`` turn: neighbours together where it is interleaved, else those that are half
    of ``rotary_dim`` apart. The product of query and key is the same in any order.

    Returns:
        [head_dim]; None: as it is.
    """
    half = rotary_dim // 2
    first = [*range(0, rotary_dim, 2)] if is_interleaved else [*range(half)]
    second = [index + (1 if is_interleaved else half) for index in first]
    middle = (rotary_dim + head_dim) // 2
    order = (*first, *range(rotary_dim, middle), *second, *range(middle, head_dim))
    return None if order == tuple(range(head_dim)) else order


def _linear_rope(parameters: RopeParameters, periods: Tensor, lengths: Lengths) -> tuple[Tensor, float]:
    """Positions ``factor`` times closer (Chen et al., 2023, arXiv:2306.15595)."""
    return 1.0 / periods / parameters["factor"], 1.0


def _llama3_rope(parameters: RopeParameters, periods: Tensor, lengths: Lengths) -> tuple[Tensor, float]:
    """Llama 3.1's: slow rotations become ``factor`` times slower, fast ones stay, and a ramp lies between them."""
    inv_freq = 1.0 / periods
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    length = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / inv_freq
    is_slow, is_fast = wavelengths > length / low, wavelengths < length / high
    ramp = (length / wavelengths - low) / (high - low)
    between = (1 - ramp) * inv_freq / factor + ramp * inv_freq
    return torch.where(is_slow, inv_freq / factor, torch.where(is_fast, inv_freq, between)), 1.0


def _yarn_rope(parameters: RopeParameters, periods: Tensor, lengths: Lengths) -> tuple[Tensor, float]:
    """YaRN's (Peng et al., 2023, arXiv:2309.00071): as Llama 3.1's, with the ramp over dims; cos and sin are scaled."""
    rope, rotary_dim = parameters, 2 * len(periods)
    factor, length = rope["factor"], rope["original_max_position_embeddings"]
    if factor is None:
        factor = lengths.positions / length

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    def dim_that_turns(times: float) -> float:
        return rotary_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    scale, mscale, mscale_all = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if scale is None:
        scale = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    low, high = dim_that_turns(rope.get("beta_fast") or 32), dim_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(len(periods), dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, scale


def _longrope(parameters: RopeParameters, periods: Tensor, lengths: Lengths) -> tuple[Tensor, float]:
    """LongRoPE's (Ding et al., 2024, arXiv:2402.13753): a factor for each frequency, of two lists.

    Which list is by the longest sequence that there may be, for all sequences, so that keys that are cached stay right:
    the short one up to the length that the model was first trained for.
    """
    length, scale = parameters["original_max_position_embeddings"], parameters.get("attention_factor")
    factors = parameters["long_factor" if lengths.of_sequence > length else "short_factor"]
    stretch = parameters.get("factor") or lengths.positions / length
    if scale is None:
        scale = math.sqrt(1 + math.log(stretch) / math.log(length)) if stretch > 1 else 1.0
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods), scale


ROPE_TYPES: dict[str, Callable[[RopeParameters, Tensor, Lengths], tuple[Tensor, float]]] = {
    "default": lambda _, periods, __: (1.0 / periods, 1.0),
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "longrope": _longrope,
    "yarn": _yarn_rope,
}
"""How the plain rotation is changed: from its periods / 2π [pairs that turn], in positions, to their frequencies, in
radians a position, and the factor on cos and sin."""
