"""Min-p, top-k and top-p on a GPU: the lowest logit that each sample keeps, exactly, without a sort.

A filter's threshold is the lowest logit v for which the weight of the logits strictly above v is below a target: for
top-k the weight of a logit is 1 and the target k; for top-p the weight is exp((x - top) / T), and the target top_p of
the weight of what the filters before it keep. That weight falls with v, so the threshold is found by bisection on the
bits of the floats, read as integers of the same order.

One pass over the logits (`_scan_kernel`) finds the maximum of each block of 128, and what it weighs in all where only
top-p asks. The same search over the maxima alone gives a bound from below: other logits only add weight above. Only
blocks whose maximum reaches the bound are then read again (`_floor_kernel`, a program a sample): for k = 50 about 50 of
1,000. What lies in reach of the threshold is gathered, and the search ends on it in registers. Where that is too much
(a high top-p over flat logits: most of the vocabulary), passes over the blocks narrow the reach to a fifth each,
until it is gathered.

All sums have a fixed order: equal logits, parameters and vocabulary give an equal threshold, in whatever batch.

Stays if, at 64 rows of 128,256 logits, it beats torch's `sort` and `cumsum` by 2 with top-k 50 and top-p 0.9, and by
1.2 with top-p 0.9 alone over flat logits; not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.noise import NOISE_SPAN
from aioengine.kernels.triton.sample_words import LOGITS_ROW, MASK, MIN_P, SAMPLE_STRIDE, TEMPERATURE, TOP_K, TOP_P

BLOCK = 128
"""Logits that share a maximum: 1,000 blocks of 128,000, of which a program holds the maxima in registers."""

WORD = tl.constexpr(32)
"""Tokens in a word of a mask: so many logits are read together, with that word, which is read once."""

WORDS_OF_BLOCK = tl.constexpr(BLOCK // 32)

SCANNED_WORDS = 64
"""Words that a program of the scan takes: 16 logits a thread, in loads of 16 bytes; 63 programs for 128,000."""

SCAN_WARPS = 4

TILE_BLOCKS = 32
"""Blocks that the search reads at once, 16 kB: 16 logits a thread."""

MAX_GATHERED = 4096
"""Logits on which the search ends."""

PIVOTS = tl.constexpr(4)
"""A step of the search leaves a fifth of the reach: 9 steps of some 500 cycles for a reach of 2²⁰ floats, 14 for that
of all. More pivots need more registers than a thread has."""

FLOOR_WARPS = 8
"""With up to 255 registers a thread. Of 16 warps with 128 each, which a multiprocessor holds as well, they spill."""


INFINITY = tl.constexpr(float("inf"))
MAX_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)
_COLDEST = tl.constexpr(1e-30)
_KEY_OF_MINUS_INFINITY = tl.constexpr(0x7F800000 ^ -1)
# Sums are rounded, by some 1e-6 of them: a bound must not reach above a threshold for that.
_SLACK = tl.constexpr(1e-5)


@triton.jit
def load_float(word):
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def clamp(x):
    """To finite numbers."""
    return tl.minimum(tl.maximum(x, -MAX_FLOAT), MAX_FLOAT)


@triton.jit
def inverse(temperature):
    """1 / T, and finite for any T; 1 for a greedy sample."""
    return 1.0 / tl.where(temperature > 0, tl.maximum(temperature, _COLDEST), 1.0)


@triton.jit
def load_logits(logits, masks, logits_row, mask, words, is_read, vocab, HAS_MASK: tl.constexpr):
    """Logits of words of 32 tokens, -inf where they are masked, not read, or beyond the vocabulary.

    Args:
        logits_row, mask: of the logits and the masks; mask -1: none.
        words: int32 [m]; is_read: bool [m].
    Returns:
        Token ids int32 and logits float32, [m, 32].
    """
    lane = tl.arange(0, WORD)[None, :]
    tokens = words[:, None] * WORD + lane
    is_there = (tokens < vocab) & is_read[:, None]
    x = tl.load(logits + logits_row.to(tl.int64) * vocab + tokens, mask=is_there, other=-INFINITY)
    if HAS_MASK:
        num_words = tl.cdiv(vocab, WORD)
        is_masked = is_read & (words < tl.where(mask >= 0, num_words, 0))
        bits = tl.load(masks + mask.to(tl.int64) * num_words + words, mask=is_masked, other=-1)
        x = tl.where(((bits[:, None] >> lane) & 1) != 0, x, -INFINITY)
    return tokens, x


@triton.jit
def _filters(word, vocab):
    """Temperature, top-k (0: off), top-p and min-p of a sample, and whether it is drawn with any filter."""
    temperature = load_float(word + TEMPERATURE)
    top_k = tl.load(word + TOP_K)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    top_p = load_float(word + TOP_P)
    min_p = load_float(word + MIN_P)
    is_filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return temperature, top_k, top_p, min_p, is_filtered & (tl.load(word + LOGITS_ROW) >= 0)


# These begin anywhere, as in `draw`: views, and workspaces that share an allocation. They are read by single words, as
# the compiler knows too little of a mask's length for more.
_VIEWS = ["samples", "masks", "floors", "tops"]


@triton.jit(do_not_specialize_on_alignment=_VIEWS)
def _scan_kernel(
    logits, samples, masks, maxima, masses, vocab, num_blocks, HAS_MASK: tl.constexpr, WORDS: tl.constexpr
):
    BLOCKS: tl.constexpr = WORDS // WORDS_OF_BLOCK
    sample, part = tl.program_id(0), tl.program_id(1)
    word = samples + sample.to(tl.int64) * SAMPLE_STRIDE
    temperature, top_k, top_p, min_p, is_filtered = _filters(word, vocab)
    if not is_filtered:
        return
    words = part * WORDS + tl.arange(0, WORDS)
    logits_row, mask = tl.load(word + LOGITS_ROW), tl.load(word + MASK)
    _, x = load_logits(logits, masks, logits_row, mask, words, words < num_blocks * WORDS_OF_BLOCK, vocab, HAS_MASK)
    is_nan = tl.max((x != x).to(tl.int32), axis=1) != 0
    of_word = tl.max(tl.where(x != x, -INFINITY, x), axis=1)  # what a maximum makes of a NaN depends on the device
    of_block = tl.max(tl.reshape(of_word, [BLOCKS, WORDS_OF_BLOCK]), axis=1)
    is_nan_in_block = tl.max(tl.reshape(is_nan.to(tl.int32), [BLOCKS, WORDS_OF_BLOCK]), axis=1) != 0
    blocks = part * BLOCKS + tl.arange(0, BLOCKS)
    out = sample.to(tl.int64) * num_blocks + blocks
    tl.store(maxima + out, tl.where(is_nan_in_block, float("nan"), of_block), mask=blocks < num_blocks)
    if (top_p < 1) & (top_k == 0) & (min_p <= 0):
        # Finite, so that a word of -inf weighs nothing; one with +inf weighs +inf, and is not looked at.
        cold = inverse(temperature)
        mass = tl.sum(tl.exp((x - clamp(of_word)[:, None]) * cold), axis=1)
        below = tl.reshape(of_word, [BLOCKS, WORDS_OF_BLOCK]) - clamp(of_block)[:, None]
        mass = tl.sum(tl.reshape(mass, [BLOCKS, WORDS_OF_BLOCK]) * tl.exp(below * cold), axis=1)
        tl.store(masses + out, mass, mask=blocks < num_blocks)


@triton.jit
def key_of(x):
    """Float32 to int32 of the same order; -0 and 0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def of_key(key):
    """`key_of` backwards."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(keys, weights, low, step, PIVOTS: tl.constexpr):
    """The weight strictly above each of the keys ``low + step``, ``low + 2 · step``, …"""
    pivots = (low + step * (tl.arange(0, PIVOTS) + 1)).to(tl.int32)
    return tl.sum(tl.where(keys[:, None] > pivots[None, :], weights[:, None], 0.0), axis=0)


@triton.jit
def _search(keys, weights, low, high, base, target, PIVOTS: tl.constexpr):
    """The lowest key in (low, high] above which the weight, with ``base``, is below the target; ``high`` is one."""
    while high - low > 1:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        above = base + _weigh(keys, weights, low, step, PIVOTS)
        low += step * tl.sum((above >= target).to(tl.int32), axis=0)
        high = tl.minimum(high, low + step)
    return high


@triton.jit
def _bound(keys, weights, low, high, target, PIVOTS: tl.constexpr):
    """``low``, raised as far as the maxima of blocks prove that the threshold is above it."""
    if tl.sum(tl.where(keys > low, weights, 0.0), axis=0) >= target:
        low = tl.maximum(low, _search(keys, weights, low, high, 0.0, target, PIVOTS) - 1)
    return low


@triton.jit
def _list_blocks(reached, keys, low, num_blocks, NUM_BLOCKS: tl.constexpr):
    """Write down the blocks whose maximum is above ``low``; returns how many they are."""
    blocks = tl.arange(0, NUM_BLOCKS)
    is_reached = (keys > low) & (blocks < num_blocks)
    tl.debug_barrier()  # the threads may still read what was there
    tl.store(reached + tl.cumsum(is_reached.to(tl.int32), axis=0) - 1, blocks, mask=is_reached)
    tl.debug_barrier()
    return tl.sum(is_reached.to(tl.int32), axis=0)


@triton.jit
def _find(
    logits,
    masks,
    logits_row,
    mask,
    reached,
    gathered,
    num_reached,
    by_mass,
    top,
    cold,
    low,
    high,
    target,
    part,
    vocab,
    HAS_MASK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    MAX_GATHERED: tl.constexpr,
):
    """The key of a filter's threshold, which is above ``low`` and at most ``high``, by passes over the blocks reached.

    Where ``part`` is above 0 the target is this part of the weight above ``low``. If that is below the target,
    ``low + 1``: all stays.
    """
    TILE: tl.constexpr = TILE_BLOCKS * WORDS_OF_BLOCK * WORD
    base = 0.0
    num_inside = MAX_GATHERED + 1
    while (num_inside > MAX_GATHERED) & (high - low > 1):
        num_inside = 0
        inside_mass = base
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        above = tl.full([PIVOTS], 0.0, tl.float32) + base
        for start in range(0, num_reached, TILE_BLOCKS):
            place = tl.arange(0, TILE_BLOCKS * WORDS_OF_BLOCK)
            nth = start + place // WORDS_OF_BLOCK
            words = tl.load(reached + nth, mask=nth < num_reached, other=0) * WORDS_OF_BLOCK + place % WORDS_OF_BLOCK
            _, x = load_logits(logits, masks, logits_row, mask, words, nth < num_reached, vocab, HAS_MASK)
            x = tl.reshape(x, [TILE])
            keys = key_of(x)
            is_inside = (keys > low) & (keys <= high)
            weights = tl.where(is_inside, tl.where(by_mass, tl.exp((x - top) * cold), 1.0), 0.0)
            above += _weigh(keys, weights, low, step, PIVOTS)
            inside_mass += tl.sum(weights, axis=0)
            num_here = tl.sum(is_inside.to(tl.int32), axis=0)
            if num_inside + num_here <= MAX_GATHERED:
                to = num_inside + tl.cumsum(is_inside.to(tl.int32), axis=0) - 1
                tl.store(gathered + to, x, mask=is_inside)
            num_inside += num_here
        if part > 0:
            target = part * inside_mass
            part = 0.0
        if inside_mass < target:
            high = low + 1
        elif num_inside > MAX_GATHERED:
            low += step * tl.sum((above >= target).to(tl.int32), axis=0)
            high = tl.minimum(high, low + step)
            base = tl.maximum(base, tl.max(tl.where(above < target, above, 0.0), axis=0))
    if high - low > 1:
        tl.debug_barrier()
        place = tl.arange(0, MAX_GATHERED)
        x = tl.load(gathered + place, mask=place < num_inside, other=-INFINITY)
        weights = tl.where(place < num_inside, tl.where(by_mass, tl.exp((x - top) * cold), 1.0), 0.0)
        high = _search(key_of(x), weights, low, high, base, target, PIVOTS)
    return high


@triton.jit(do_not_specialize_on_alignment=_VIEWS)
def _floor_kernel(
    logits,
    samples,
    masks,
    maxima,
    masses,
    reached,
    gathered,
    floors,
    tops,
    vocab,
    num_blocks,
    HAS_MASK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    MAX_GATHERED: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    word = samples + sample * SAMPLE_STRIDE
    temperature, top_k, top_p, min_p, is_filtered = _filters(word, vocab)
    if not is_filtered:
        tl.store(floors + sample, -INFINITY)
        tl.store(tops + sample, -INFINITY)
        return
    blocks = tl.arange(0, NUM_BLOCKS)
    highest = tl.load(maxima + sample * num_blocks + blocks, mask=blocks < num_blocks, other=-INFINITY)
    is_nan = tl.max((highest != highest).to(tl.int32), axis=0) != 0
    top = tl.where(is_nan, float("nan"), tl.max(tl.where(highest != highest, -INFINITY, highest), axis=0))
    tl.store(tops + sample, top)
    if not (tl.abs(top) < INFINITY):
        tl.store(floors + sample, top)  # +inf is chosen for certain; else there is nothing to choose from
        return
    logits_row, mask = tl.load(word + LOGITS_ROW), tl.load(word + MASK)
    cold = inverse(temperature)
    num_weighed = tl.where((top_p < 1) & (top_k == 0) & (min_p <= 0), num_blocks, 0)
    mass_of_block = tl.load(masses + sample * num_blocks + blocks, mask=blocks < num_weighed, other=0.0)
    total = tl.sum(mass_of_block * tl.exp((highest - top) * cold), axis=0)
    threshold = tl.where(min_p > 0, top + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0)), -INFINITY)
    low = tl.maximum(key_of(threshold).to(tl.int64) - 1, _KEY_OF_MINUS_INFINITY)
    high = key_of(top).to(tl.int64)
    for nth_filter in range(2):
        by_mass = nth_filter == 1
        if tl.where(by_mass, top_p < 1, top_k > 0):
            target = top_k.to(tl.float32)
            part = 0.0
            # Read again: what is kept in registers all the while is spilled.
            highest = tl.load(maxima + sample * num_blocks + blocks, mask=blocks < num_blocks, other=-INFINITY)
            keys = key_of(highest)
            weights = tl.where(by_mass, tl.exp((highest - top) * cold), 1.0)
            reach = low
            if by_mass:
                if total > 0:
                    target = top_p * total
                    # Logits that weigh so little are dropped even if all V of them do.
                    lightest = top + temperature * tl.log((1 - top_p) * total / vocab)
                    lightest -= (tl.abs(top) + temperature) * _SLACK
                    reach = tl.maximum(reach, key_of(lightest).to(tl.int64) - 1)
                else:
                    part = top_p
            if part == 0:
                enough = tl.where(by_mass, target * (1 + _SLACK), target)
                reach = _bound(keys, weights, reach, high, enough, PIVOTS)
            num_reached = _list_blocks(reached + sample * num_blocks, keys, reach, num_blocks, NUM_BLOCKS)
            key = _find(
                logits, masks, logits_row, mask, reached + sample * num_blocks, gathered + sample * MAX_GATHERED,
                num_reached, by_mass, top, cold, reach, high, target, part, vocab, HAS_MASK, TILE_BLOCKS,
                MAX_GATHERED,
            )  # fmt: skip
            threshold = tl.maximum(threshold, of_key(key.to(tl.int32)))
            low = key - 1
    # A token this far below the likeliest one loses to it, whatever the noise of the two.
    tl.store(floors + sample, tl.maximum(threshold, top - temperature * NOISE_SPAN))


def find_floors(logits: Tensor, samples: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The thresholds of min-p, then top-k, then top-p on what is left, renormalised; with arguments as `draw` has.

    One read of the logits of samples with a filter, bound by bandwidth (131 MB for 256 of 128,256: 33 µs at 4 TB/s);
    then a program a sample, bound by latency: some 10 µs where a few thousand logits are in reach, and 40 µs where a
    top-p keeps most of the vocabulary.

    Returns:
        maxima: float32 [s, blocks], of each `BLOCK` of the sample's logits; not written for samples without a filter.
        floors: float32 [s], the lowest logit that may win; -inf for samples without a filter; NaN where a logit is.
        tops: float32 [s], the highest logit, or NaN; -inf for samples without a filter.
    """
    num_samples, vocab = len(samples), logits.shape[1]
    num_blocks = triton.cdiv(vocab, BLOCK)
    has_mask = masks is not None
    padded_blocks = triton.next_power_of_2(num_blocks)
    # Each by itself: the second half of one allocation would begin at a multiple of 16 bytes or not, as the number of
    # samples has it, and Triton would compile for both.
    maxima = logits.new_empty(num_samples, num_blocks)
    masses = logits.new_empty(num_samples, num_blocks)
    reached = samples.new_empty(num_samples, num_blocks)
    gathered = logits.new_empty(num_samples, MAX_GATHERED)
    floors, tops = logits.new_empty(2, num_samples)
    masks = samples if masks is None else masks  # some address; nothing is read there
    num_parts = triton.cdiv(num_blocks * WORDS_OF_BLOCK.value, SCANNED_WORDS)
    _scan_kernel[num_samples, num_parts](
        logits, samples, masks, maxima, masses,
        vocab, num_blocks, has_mask, SCANNED_WORDS,
        num_warps=SCAN_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    _floor_kernel[num_samples,](
        logits, samples, masks, maxima, masses, reached, gathered, floors, tops,
        vocab, num_blocks, has_mask, padded_blocks,
        min(TILE_BLOCKS, padded_blocks), min(MAX_GATHERED, padded_blocks * BLOCK),
        num_warps=FLOOR_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return maxima, floors, tops
