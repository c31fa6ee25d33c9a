"""The random numbers of draws: a hash of (seed, choice, output position, token id), and no generator's state.

Counter-based, as in Salmon et al., SC 2011: a draw does not depend on the batch, the row, preemption or the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.sampler.blocks import BLOCK, Scratch
from aioengine.scheduler.plan import Int32

NOISE_SPAN = 19.5
"""The highest noise that `gumbel` makes, -log(-log(1 - 2⁻²⁴)) = 16.64, less the lowest, -log(-log(2⁻²⁴)) = -2.81."""


class NoiseKeys(NamedTuple):
    """64 bits a row: two int32 [n]."""

    low: Tensor
    high: Tensor

    def rows(self, index: Tensor) -> NoiseKeys:
        return NoiseKeys(self.low[index], self.high[index])


def noise_keys(seed: NDArray[np.int64], choice: Int32, positions: Int32) -> NoiseKeys:
    """What a row's noise depends on, mixed: [n] each."""
    key = mix64(seed.astype(np.int64).view(np.uint64))
    key = mix64(key ^ choice.astype(np.uint64))
    key = mix64(key ^ positions.astype(np.uint64))
    words = torch.from_numpy(key.view(np.int32).reshape(-1, 2))
    return NoiseKeys(words[:, 0], words[:, 1])


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's step, uint64 [n] (Steele, Lea & Flood, OOPSLA 2014): a bijection that mixes all bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel(keys: NoiseKeys, in_block: Tensor, scratch: Scratch) -> Tensor:
    """Noise of the standard Gumbel distribution for blocks of token ids, a function of key and token id.

    A uniform number of 23 bits plus a half lies strictly between 0 and 1, which float32 holds exactly, so that both
    logarithms are finite. Tokens less likely than 2⁻²⁴ of the likeliest are drawn more rarely than they should be.

    Args:
        keys: [m].
        in_block: int64 [m], which block of the vocabulary.
    Returns:
        float32 [m, BLOCK], in ``scratch``.
    """
    bits = scratch.blocks("bits", len(in_block), torch.int32)
    shifted = scratch.blocks("shifted", len(in_block), torch.int32)
    torch.add((in_block * BLOCK).int()[:, None], torch.arange(BLOCK, dtype=torch.int32), out=bits)
    hash_tokens_(bits, keys, shifted)
    noise = scratch.blocks("noise", len(in_block), torch.float32)
    noise.copy_(shift_right(bits, 9, shifted)).add_(0.5).mul_(2.0**-23)
    return noise.log_().neg_().log_().neg_()


def hash_tokens_(tokens: Tensor, keys: NoiseKeys, shifted: Tensor) -> None:
    """Token ids to 32 hashed bits, in place: "triple32" of Wellons' hash-prospector, with the key's words mixed in.

    int32 products wrap around as uint32 ones do.

    Args:
        tokens: int32 [m, n].
        keys: [m].
        shifted: like ``tokens``, is overwritten.
    """
    x = tokens.add_(keys.low[:, None])
    x.bitwise_xor_(shift_right(x, 17, shifted)).mul_(0xED5AD4BB - 2**32)
    x.bitwise_xor_(shift_right(x, 11, shifted)).mul_(0xAC4C1B51 - 2**32)
    x.add_(keys.high[:, None])
    x.bitwise_xor_(shift_right(x, 15, shifted)).mul_(0x31848BAB)
    x.bitwise_xor_(shift_right(x, 14, shifted))


def shift_right(x: Tensor, bits: int, out: Tensor) -> Tensor:
    """Logical shift of int32, where torch's copies the sign."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (32 - bits)) - 1)
