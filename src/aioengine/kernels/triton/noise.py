"""Device functions: the noise of `aioengine.kernels.torch.draws`, its hash to the bit, logarithms to the last one.

Uniform numbers of 23 bits and a half are made without a conversion, which runs at a quarter of the rate of the rest:
the bits become the mantissa of a float from 1 to 2.

They stay with `draw`.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOISE_SPAN = tl.constexpr(19.5)
"""`aioengine.kernels.torch.draws.NOISE_SPAN`: the highest noise less the lowest."""

HIGHEST_NOISE = tl.constexpr(16.7)
"""A bit more than -log(-log(1 - 2⁻²⁴)) = 16.64."""

_LN2_OF_BITS = tl.constexpr(0.6931471805599453 / 2**23)
_BITS_OF_ONE = tl.constexpr(0x3F800000)


@triton.jit
def mix64(x):
    """SplitMix64's step, uint64 (Steele, Lea & Flood, OOPSLA 2014)."""
    x += tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def noise_keys(seed_low, seed_high, choice, position):
    """Mix all that a sample's noise depends on: two uint32, of four int32."""
    seed = (seed_high.to(tl.uint32).to(tl.uint64) << 32) | seed_low.to(tl.uint32).to(tl.uint64)
    key = mix64(seed)
    key = mix64(key ^ choice.to(tl.int64).to(tl.uint64))
    key = mix64(key ^ position.to(tl.int64).to(tl.uint64))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def hash_tokens(tokens, key_low, key_high):
    """Token ids, int32, to 32 hashed bits: "triple32" of Wellons' hash-prospector, with the key's words mixed in."""
    x = tokens.to(tl.uint32) + key_low
    x = (x ^ (x >> 17)) * tl.full((), 0xED5AD4BB, tl.uint32)
    x = (x ^ (x >> 11)) * tl.full((), 0xAC4C1B51, tl.uint32)
    x += key_high
    x = (x ^ (x >> 15)) * tl.full((), 0x31848BAB, tl.uint32)
    return x ^ (x >> 14)


@triton.jit
def uniform(bits):
    """Float32 strictly between 0 and 1, of the highest 23 of 32 bits and a half, exactly."""
    from_one = ((bits >> 9) | _BITS_OF_ONE).to(tl.float32, bitcast=True)
    return from_one - (1.0 - 2.0**-24)


@triton.jit
def gumbel(u):
    """Standard Gumbel noise of a uniform number."""
    return -tl.log(-tl.log(u))


@triton.jit
def gumbel_bound(u):
    """An upper bound of `gumbel`, for 4 operations instead of 50: -log(1 - u), by a float's bits for its logarithm.

    -log(u) ≥ 1 - u; and the bits of a float are, but for scale and offset, a line below its log2 that meets it at each
    power of two. At most 0.06 above -log(1 - u), which is what counts where the noise is high. Rounding apart: allow
    for some 1e-5.
    """
    bits = (1.0 - u).to(tl.int32, bitcast=True)
    return (bits - _BITS_OF_ONE).to(tl.float32) * -_LN2_OF_BITS
