"""Exponential and hyperbolic tangent of vectors, by the polynomials of Cephes (Moshier, expf.c and tanhf.c)."""

from __future__ import annotations

import numpy as np

from aioengine.kernels.native.compiler import inlined
from aioengine.kernels.native.vectors import (
    absolute,
    bits_to_float,
    float_to_bits,
    fma,
    is_above,
    minimum,
    select,
    shift_left,
    splat,
    zeros,
)

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""ln 2, the first part with so few bits that its multiples are exact."""
E0, E1, E2, E3, E4, E5 = map(
    np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
B1, B2, B3, B4, B5 = map(
    np.float32, (6.9314697760e-1, 2.4022242085e-1, 5.5507337439e-2, 9.6715126542e-3, 1.3264726996e-3)
)
"""Coefficients of 2ʳ, by least squares with weights that make the largest relative error for |r| ≤ 0.5 small: 2⁻²³."""
T0, T1, T2, T3, T4 = map(
    np.float32, (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
)
TO_EXPONENT = np.float32(1.5 * 2**23 + 127)
"""A float of this size has no fraction: to add it rounds, and the lowest bits of the sum are 2ⁿ's exponent."""
LOWEST, HIGHEST, LOWEST_POWER = np.float32(-87.33), np.float32(88.73), np.float32(-126)
ONE, TWO, SMALL = np.float32(1), np.float32(2), np.float32(0.625)


@inlined
def exp(x):
    """eˣ of 16 lanes, with a relative error below 2⁻²²: 0 below -87.33, infinity above 88.37; of NaN, NaN.

    With n = round(x / ln 2) and r = x - n · ln 2: 2ⁿ · (1 + r + r² · E(r)).
    """
    bounded = minimum(splat(HIGHEST), x)
    shifted = fma(bounded, splat(LOG2_E), splat(TO_EXPONENT))
    n = shifted - splat(TO_EXPONENT)
    r = fma(n, splat(-LN2_LOW), fma(n, splat(-LN2_HIGH), bounded))
    square = r * r  # the polynomial by pairs of its terms, which wait for each other less (Estrin)
    y = fma(fma(splat(E0), r, splat(E1)), square, fma(splat(E2), r, splat(E3)))
    y = fma(y, square, fma(splat(E4), r, splat(E5)))
    y = fma(y, square, r) + splat(ONE)
    power = bits_to_float(shift_left(float_to_bits(shifted), 23))
    return select(is_above(splat(LOWEST), x), zeros(), y * power)


@inlined
def exp2(x):
    """2ˣ of 16 lanes that are at most 127, with a relative error below 2⁻²²: 0 below -126; of NaN, NaN."""
    shifted = x + splat(TO_EXPONENT)
    r = x - (shifted - splat(TO_EXPONENT))
    square = r * r
    y = fma(fma(splat(B5), r, splat(B4)), square, fma(splat(B3), r, splat(B2)))
    y = fma(y, square, fma(splat(B1), r, splat(ONE)))
    power = bits_to_float(shift_left(float_to_bits(shifted), 23))
    return select(is_above(splat(LOWEST_POWER), x), zeros(), y * power)


@inlined
def tanh(x):
    """tanh of 16 lanes, with a relative error below 2⁻²¹: x + x³ · T(x²) near 0, else 1 - 2 / (e²ˣ + 1)."""
    square = x * x
    y = fma(splat(T0), square, splat(T1))
    y = fma(y, square, splat(T2))
    y = fma(y, square, splat(T3))
    y = fma(y, square, splat(T4))
    near = fma(y * square, x, x)
    far = splat(ONE) - splat(TWO) / (exp(x + x) + splat(ONE))
    return select(is_above(absolute(x), splat(SMALL)), far, near)
