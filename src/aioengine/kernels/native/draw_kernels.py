"""Drawing tokens: each row of logits is read once, and of most of it the noise is never made.

A row is seen in groups of 256 logits, 16 vectors. `scan_logits` writes the vectors' maximum, lane by lane, of each
group: 1/16 of the row, by which all that follows passes over groups that cannot matter.
"""

from __future__ import annotations

import math

import numpy as np

from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.row_kernels import FLAGS, LOGITS_ROW, MASK, OUTPUT_POSITION, SAMPLE_BYTES
from aioengine.kernels.native.vector_functions import exp
from aioengine.kernels.native.vectors import (
    FLOAT32,
    LANES,
    bits_of,
    bits_to_float,
    first_lanes,
    float_to_bits,
    get_f32,
    get_i16,
    get_i32,
    get_i64,
    is_above,
    is_at_least,
    is_equal,
    is_nan,
    lane_numbers,
    lane_of,
    lane_of_i32,
    lanes_of,
    load_where,
    lowest_bit,
    max_of,
    maximum,
    put_i32,
    select,
    shift_right,
    splat,
    splat_i32,
    sum_of,
    to_float,
    zeros,
)
from aioengine.kernels.sample_rows import PARAM_WORDS, SampleRow, Status

GROUP = 256
"""Logits that share a vector of maxima: 16 vectors of 16."""

CHOICE, SEED_LOW, SEED_HIGH = (4 * int(word) for word in (SampleRow.CHOICE, SampleRow.SEED_LOW, SampleRow.SEED_HIGH))
TEMPERATURE, TOP_K, TOP_P, MIN_P = (4 * PARAM_WORDS[name] for name in ("temperature", "top_k", "top_p", "min_p"))
SAMPLED, NOT_A_NUMBER, NOTHING_LEFT = int(Status.SAMPLED), int(Status.NOT_A_NUMBER), int(Status.NOTHING_LEFT)

INFINITY = np.float32(np.inf)
NAN = np.float32(np.nan)
COLDEST = np.float32(1e-30)
HIGHEST_NOISE = np.float32(16.7)
"""An upper bound of the noise, whose highest value is -log(-log(1 - 2⁻²⁴)) = 16.64."""
SLACK = np.float32(1e-3)
"""Above the rounding errors of `gumbel_bound` and of scores, which are some ±20 where they can win."""
LN2_OF_BITS = np.float32(math.log(2) / 2**23)
BITS_OF_ONE = 0x3F800000
KEY_OF_MINUS_INFINITY = ~0x7F800000
ONE, HALF, TO_UNIT = np.float32(1), np.float32(0.5), np.float32(2.0**-23)

load_f, store_f = FLOAT32.load, FLOAT32.store


# A row of logits is known by its address and that of its mask, 0 where it has none.


@inlined
def mask_of(sample, masks, vocab):
    mask = get_i32(sample + MASK)
    return masks + 4 * mask * ((vocab + 31) // 32) if masks != 0 and mask >= 0 else 0


@inlined
def load_logits(row, mask, token, vocab):
    """16 logits from a token on, which is a multiple of 16 and in the vocabulary; -inf for those that are not allowed,
    or beyond it."""
    if mask == 0 and token + LANES <= vocab:
        return load_f(row + 4 * token)
    lanes = first_lanes(vocab - token)
    if mask:
        lanes = lanes & lanes_of(get_i16(mask + token // 8))
    return select(lanes, load_where(row + 4 * token, lanes), splat(-INFINITY))


@inlined
def maxima_of(maxima, nth, vocab):
    return maxima + nth * ((vocab + GROUP - 1) // GROUP * 64)


@kernel()
def scan_logits(args, chunk, thread):
    """Write the maxima of the groups of a part of a row; NaN in the lanes that have a NaN."""
    logits, vocab, samples, masks = get_i64(args), get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    flags, maxima, num_parts, part = (get_i64(args + 32), get_i64(args + 40), get_i64(args + 48), get_i64(args + 56))
    sample = samples + chunk // num_parts * SAMPLE_BYTES
    if get_i32(sample + LOGITS_ROW) < 0 or get_i32(sample + FLAGS) & flags != flags:
        return
    row, mask = logits + 4 * vocab * get_i32(sample + LOGITS_ROW), mask_of(sample, masks, vocab)
    out = maxima_of(maxima, chunk // num_parts, vocab)
    first = chunk % num_parts * part
    for group in range(first, min(first + part, vocab), GROUP):
        highest, has_nan = splat(-INFINITY), first_lanes(0)
        for token in range(group, min(group + GROUP, vocab), 16):
            x = load_logits(row, mask, token, vocab)
            highest, has_nan = maximum(x, highest), has_nan | is_nan(x)
        store_f(out + group // 4, select(has_nan, splat(NAN), highest))


@inlined
def highest_of(maxima, vocab):
    """The highest logit of a row; NaN if it has a NaN."""
    highest, has_nan = splat(-INFINITY), first_lanes(0)
    for group in range(0, vocab, GROUP):
        x = load_f(maxima + group // 4)
        highest, has_nan = maximum(x, highest), has_nan | is_nan(x)
    return NAN if bits_of(has_nan) else max_of(highest)


@inlined
def first_of(row, mask, maxima, vocab, value):
    """The lowest token id with this logit, which must be the maximum of its lane in its group."""
    for group in range(0, vocab, GROUP):
        if bits_of(is_equal(load_f(maxima + group // 4), splat(value))):
            for token in range(group, min(group + GROUP, vocab), 16):
                found = bits_of(is_equal(load_logits(row, mask, token, vocab), splat(value)))
                if found:
                    return token + lowest_bit(found)
    return 0


# Filters: a filter keeps the logits at and above a threshold, which is the lowest above which the weight of the logits
# is below a target: for top-k each weighs 1 and the target is k, for top-p exp((x - top) / T) and p of what the filters
# before it keep. That weight falls as the threshold rises, so it is found by bisection on the bits of the floats, read
# as integers of the same order, without a sort. What is passed over: groups by their maxima, vectors by a comparison.


@inlined
def key_of(x):
    """An integer of the same order; that of both zeros is the lower one."""
    bits = lane_of_i32(float_to_bits(splat(x)), 0)
    return -1 if x == 0 else bits ^ (bits >> 31 & 0x7FFFFFFF)


@inlined
def of_key(key):
    return lane_of(bits_to_float(splat_i32(key ^ (key >> 31 & 0x7FFFFFFF))), 0)


@inlined
def weigh(row, mask, maxima, vocab, low, high, by_mass, top, cold):
    """The weight of the logits above ``low`` and at most ``high``, in float64: of groups summed in float32.

    Args:
        maxima: groups without a maximum above ``low`` are passed over; 0: all are read.
        by_mass: a logit x weighs exp((x - top) · cold); else 1.
    """
    total = 0.0
    for group in range(0, vocab, GROUP):
        if maxima != 0 and not bits_of(is_above(load_f(maxima + group // 4), splat(low))):
            continue
        of_group = zeros()
        for token in range(group, min(group + GROUP, vocab), 16):
            x = load_logits(row, mask, token, vocab)
            inside = is_above(x, splat(low)) & is_at_least(splat(high), x)
            if bits_of(inside):
                weights = exp((x - splat(top)) * splat(cold)) if by_mass else splat(ONE)
                of_group = of_group + select(inside, weights, zeros())
        total += sum_of(of_group)
    return total


@inlined
def find_threshold(row, mask, maxima, vocab, low, high, base, target, by_mass, top, cold):
    """The lowest key in (low, high] for which ``base`` and the weight of the logits above it, up to ``high``, are below
    the target; they must be for ``high`` itself."""
    while high - low > 1:
        middle = low + high >> 1
        weight = base + weigh(row, mask, maxima, vocab, of_key(middle), of_key(high), by_mass, top, cold)
        if weight >= target:
            low = middle
        else:
            high, base = middle, weight
    return high


@inlined
def find_by_maxima(row, mask, maxima, vocab, low, high, base, target, by_mass, top, cold):
    """Do `find_threshold` in less time: a search over the maxima alone gives a lower bound first, since the other
    logits only add weight."""
    if maxima:
        num_maxima = (vocab + GROUP - 1) // GROUP * 16
        enough = target * (1 + 1e-5)  # in spite of rounding
        low = find_threshold(maxima, 0, 0, num_maxima, low, high, base, enough, by_mass, top, cold) - 1
    return find_threshold(row, mask, maxima, vocab, low, high, base, target, by_mass, top, cold)


@inlined
def lowest_kept(sample, row, mask, maxima, vocab, top, temperature):
    """The threshold of min-p, then top-k, then top-p on what is left, renormalised; ``top`` is finite."""
    top_k, top_p, min_p = get_i32(sample + TOP_K), get_f32(sample + TOP_P), get_f32(sample + MIN_P)
    cold = ONE / max(temperature, COLDEST)
    threshold = top + temperature * np.float32(math.log(min_p)) if min_p > 0 else -INFINITY
    high = key_of(top)
    for by_mass in (False, True):
        if (top_p < 1) if by_mass else (0 < top_k < vocab):
            low, target = max(key_of(threshold) - 1, KEY_OF_MINUS_INFINITY), np.float64(top_k)
            if by_mass:
                total = weigh(row, mask, maxima, vocab, of_key(low), top, by_mass, top, cold)
                target = total * top_p
                # Logits that weigh so little are dropped even if all of them do.
                lightest = top + temperature * math.log((1 - top_p) * total / vocab)
                lightest -= (abs(top) + temperature) * 1e-5
                low = max(low, key_of(np.float32(lightest)) - 1)
            key = find_by_maxima(row, mask, maxima, vocab, low, high, 0.0, target, by_mass, top, cold)
            threshold = max(threshold, of_key(key))
    return threshold


# The noise of (seed, choice, output position, token): as `aioengine.kernels.torch.draws.gumbel`, to the bit as far
# as the hash.


@inlined
def shifted(x, bits):
    """Zeros come in from the left."""
    return x >> bits & (1 << 64 - bits) - 1


@inlined
def mix64(x):
    """SplitMix64's step (Steele, Lea & Flood, OOPSLA 2014) on int64, which wraps around as uint64 does."""
    x += GOLDEN
    x = (x ^ shifted(x, 30)) * MIX_1
    x = (x ^ shifted(x, 27)) * MIX_2
    return x ^ shifted(x, 31)


GOLDEN, MIX_1, MIX_2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@inlined
def noise_key(sample):
    key = mix64(get_i32(sample + SEED_LOW) & 0xFFFFFFFF | get_i32(sample + SEED_HIGH) << 32)
    key = mix64(key ^ get_i32(sample + CHOICE))
    return mix64(key ^ get_i32(sample + OUTPUT_POSITION))


@inlined
def hash_tokens(tokens, key):
    """The higher 23 of the 32 bits of "triple32" of Wellons' hash-prospector, with the key's words mixed in."""
    x = tokens + splat_i32(key)
    x = (x ^ shift_right(x, 17)) * splat_i32(0xED5AD4BB)
    x = (x ^ shift_right(x, 11)) * splat_i32(0xAC4C1B51)
    x = x + splat_i32(key >> 32)
    x = (x ^ shift_right(x, 15)) * splat_i32(0x31848BAB)
    return shift_right(x ^ shift_right(x, 14), 9)


@inlined
def gumbel(bits):
    """-log(-log(u)) of u = (bits + 0.5) · 2⁻²³, in float32, each logarithm rounded once."""
    inner = np.float32(math.log((bits + 0.5) * 2.0**-23))
    return -np.float32(math.log(-np.float64(inner)))


@inlined
def gumbel_bound(bits):
    """An upper bound of `gumbel`, but for rounding: -log(1 - u), with a logarithm from a float's bits.

    -log(u) ≥ 1 - u; and the bits of a float are, but for scale and offset, a line below its log2 that meets it at each
    power of two. At most 0.06 above -log(1 - u), which is what counts where the noise is high.
    """
    rest = splat(ONE) - (to_float(bits) + splat(HALF)) * splat(TO_UNIT)
    return to_float(float_to_bits(rest) - splat_i32(BITS_OF_ONE)) * splat(-LN2_OF_BITS)


@inlined
def draw_token(row, mask, maxima, vocab, top, temperature, threshold, key):
    """Among tokens whose logit is not below the threshold, the one with the highest (x - top) / T + noise; of equal
    ones the lowest id.

    Only vectors in which a logit could win with the highest noise are hashed, and logarithms are taken only of those
    in which one could win by `gumbel_bound`.
    """
    cold, tops = splat(ONE / max(temperature, COLDEST)), splat(top)
    best_token = first_of(row, mask, maxima, vocab, top)
    best = gumbel(lane_of_i32(hash_tokens(splat_i32(best_token), key), 0))
    for group in range(0, vocab, GROUP):
        x = load_f(maxima + group // 4)
        if not bits_of(is_above((x - tops) * cold, splat(best - HIGHEST_NOISE)) & is_at_least(x, splat(threshold))):
            continue
        for token in range(group, min(group + GROUP, vocab), 16):
            x = load_logits(row, mask, token, vocab)
            x = select(is_at_least(x, splat(threshold)), x, splat(-INFINITY))
            relative = (x - tops) * cold
            if not bits_of(is_above(relative, splat(best - HIGHEST_NOISE))):
                continue
            hashed = hash_tokens(splat_i32(token) + lane_numbers(), key)
            found = bits_of(is_above(relative + gumbel_bound(hashed), splat(best - SLACK)))
            while found:
                lane = lowest_bit(found)
                found &= found - 1
                score = (lane_of(x, lane) - top) / temperature + gumbel(lane_of_i32(hashed, lane))
                if score > best or (score == best and token + lane < best_token):
                    best, best_token = score, token + lane
    return best_token


@kernel()
def draw(args, nth, thread):
    logits, vocab, samples, masks = get_i64(args), get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    maxima = maxima_of(get_i64(args + 32), nth, vocab)
    token_at, status_at = get_i64(args + 40) + 4 * nth, get_i64(args + 48) + 4 * nth
    sample = samples + SAMPLE_BYTES * nth
    put_i32(token_at, 0)
    put_i32(status_at, SAMPLED)
    if get_i32(sample + LOGITS_ROW) < 0:
        return
    row, mask = logits + 4 * vocab * get_i32(sample + LOGITS_ROW), mask_of(sample, masks, vocab)
    top, temperature = highest_of(maxima, vocab), get_f32(sample + TEMPERATURE)
    if top != top:
        put_i32(status_at, NOT_A_NUMBER)
    elif top == -INFINITY:
        put_i32(status_at, NOTHING_LEFT)
    elif temperature > 0 and top < INFINITY:
        threshold = lowest_kept(sample, row, mask, maxima, vocab, top, temperature)
        put_i32(token_at, draw_token(row, mask, maxima, vocab, top, temperature, threshold, noise_key(sample)))
    else:
        put_i32(token_at, first_of(row, mask, maxima, vocab, top))
