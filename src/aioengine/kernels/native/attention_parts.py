"""Shared by decode and prefill attention: cached keys by position, scores, and an online softmax's state.

Softmax in parts (Milakov and Gimelshein, 2018, arXiv:1805.02867): of a part of the keys with scores s the state is
m = max s, l = Σ e^(s - m) and a = Σ e^(s - m) · v; two states are one after both are brought to the larger m. Here the
base is 2: launchers multiply the scale and the soft cap by log₂ e, kernels sinks.

Keys are visited in segments of `SEGMENT` positions, from multiples of it on: what a query is given does not depend on
which queries are beside it.
"""

from __future__ import annotations

import numpy as np

from aioengine.kernels.native.compiler import inlined
from aioengine.kernels.native.vector_functions import LOG2_E, tanh
from aioengine.kernels.native.vectors import (
    FLOAT32,
    LANES,
    first_lanes,
    get_f32,
    get_i32,
    max_of,
    maximum,
    put_i64,
    select,
    splat,
)

SEGMENT = 64
LOWEST = np.float32(-3e38)
"""The highest score before any key is seen: finite, so that the difference of two such is 0, not NaN."""
NEVER = np.float32(-np.inf)
ZERO = np.float32(0)

load, store = FLOAT32.load, FLOAT32.store


@inlined
def find_keys(offsets, table, block_size, line, segment, begin, end):
    """Write the offsets, in bytes, of a segment's keys in the cache: int64 [SEGMENT].

    Positions before ``begin`` get the offset of the first key, those from ``end`` on that of the last, so that all
    can be read; `shape_scores` masks them.

    Args:
        table: int32, the row's blocks.
        line: bytes of a position in the cache.
        begin, end: of the positions that are seen, within the segment.
    """
    position = segment * SEGMENT + begin
    block, place = position // block_size, position % block_size
    offset = 0
    for nth in range(begin, end):
        if place == block_size:
            block, place = block + 1, 0
        if place == 0 or nth == begin:
            offset = (get_i32(table + 4 * block) * block_size + place) * line
        if nth == begin:
            for before in range(begin):
                put_i64(offsets + 8 * before, offset)
        put_i64(offsets + 8 * nth, offset)
        place += 1
        offset += line
    for nth in range(end, SEGMENT):
        put_i64(offsets + 8 * nth, offset - line)


@inlined
def sink_of(sinks, head):
    """The highest score before any key is seen; without sinks `LOWEST`.

    Args:
        sinks: float32, of query heads; 0: none.
    """
    return max(get_f32(sinks + 4 * head) * LOG2_E, LOWEST) if sinks else LOWEST


@inlined
def shape(scores, key_scales, scale, soft_cap, begin, end):
    """Scale, cap and mask the products of one query with 16 keys.

    Args:
        scores: float32 [16].
        key_scales: float32 [16], factors of the keys; 0: none.
        soft_cap: 0: none.
        begin, end: of the positions that the query sees, counted from the first of these.
    """
    s = load(scores) * splat(scale)
    if key_scales:
        s = s * load(key_scales)
    if soft_cap > ZERO:
        s = splat(soft_cap) * tanh(s / splat(soft_cap))
    if begin > 0 or end < LANES:
        s = select(first_lanes(end), s, splat(NEVER))
        s = select(first_lanes(begin), splat(NEVER), s)
    return s


@inlined
def shape_scores(scores, key_scales, scale, soft_cap, begin, end):
    """`shape` the products of one query with a segment's keys, in place.

    Returns:
        the highest score, or `LOWEST`.
    """
    highest = splat(LOWEST)
    for n in range(0, SEGMENT, LANES):
        of_keys = key_scales and key_scales + 4 * n
        s = shape(scores + 4 * n, of_keys, scale, soft_cap, begin - n, end - n)
        store(scores + 4 * n, s)
        highest = maximum(s, highest)
    return max_of(highest)
