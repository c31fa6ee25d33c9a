"""Changes of logits by rules, and log-probabilities of logits."""

from __future__ import annotations

import math

import numpy as np

from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.draw_kernels import (
    INFINITY,
    KEY_OF_MINUS_INFINITY,
    ONE,
    find_by_maxima,
    highest_of,
    key_of,
    load_logits,
    maxima_of,
    of_key,
    weigh,
)
from aioengine.kernels.native.row_kernels import (
    END,
    FLAGS,
    LOGITS_ROW,
    OUTPUT_POSITION,
    ROW,
    SAMPLE_BYTES,
    is_first,
)
from aioengine.kernels.native.vectors import (
    bits_of,
    get_f32,
    get_i32,
    get_i64,
    is_above,
    is_equal,
    is_nan,
    lane_of,
    lowest_bit,
    put_f32,
    put_i32,
    splat,
)
from aioengine.kernels.sample_rows import PARAM_WORDS, SampleFlag

REPETITION, FREQUENCY, PRESENCE = (
    4 * PARAM_WORDS[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")
)
LOGPROBS = int(SampleFlag.LOGPROBS)
ZERO = np.float32(0)
IN_PROMPT, IN_OUTPUT = 1, 2
"""Added to a token's counter: bit 0 says that the prompt has it, the other bits count it in the output."""


@inlined
def first_sample(samples, sample_of_row, row):
    """The address of a row's first sample; 0: the row does not sample, or is padding."""
    nth = get_i32(sample_of_row + 4 * row) if row >= 0 else -1
    sample = samples + SAMPLE_BYTES * nth
    return sample if nth >= 0 and is_first(sample) else 0


@kernel()
def edit_logits(args, chunk, thread):
    """All edits, in order, in one chunk: several may change the same logit."""
    logits, vocab, samples, sample_of_row = get_i64(args), get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    rows, tokens, values, until = get_i64(args + 32), get_i64(args + 40), get_i64(args + 48), get_i64(args + 56)
    for at in range(0, 4 * get_i64(args + 64), 4):
        sample, token = first_sample(samples, sample_of_row, get_i32(rows + at)), get_i32(tokens + at)
        if sample and 0 <= token < vocab and get_i32(sample + OUTPUT_POSITION) < get_i32(until + at):
            place, value = logits + 4 * (vocab * get_i32(sample + LOGITS_ROW) + token), get_f32(values + at)
            put_f32(place, value if value == -INFINITY else get_f32(place) + value)


@kernel()
def ends_of_bad_words(args, word, thread):
    samples, sample_of_row, history, width = get_i64(args), get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    rows, offsets, ids, values = get_i64(args + 32), get_i64(args + 40), get_i64(args + 48), get_i64(args + 56)
    sample = first_sample(samples, sample_of_row, get_i32(rows + 4 * word))
    first, end = get_i32(offsets + 4 * word), get_i32(offsets + 4 * word + 4)
    is_begun = False
    if sample:
        is_begun = end - first <= get_i32(sample + OUTPUT_POSITION)
        tail = history + 4 * (width * get_i32(sample + ROW) + get_i32(sample + END) - end)
        while is_begun and end > first:
            end -= 1
            is_begun = get_i32(ids + 4 * end) == get_i32(tail + 4 * end)
    put_f32(values + 4 * word, -INFINITY if is_begun else ZERO)


@kernel()
def penalise(args, nth, thread):
    logits, vocab, samples, history = get_i64(args), get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    width, counters = get_i64(args + 32), get_i64(args + 40) + 4 * vocab * nth
    sample = samples + SAMPLE_BYTES * nth
    repetition, frequency = get_f32(sample + REPETITION), get_f32(sample + FREQUENCY)
    presence = get_f32(sample + PRESENCE)
    if not is_first(sample) or (repetition == 1 and frequency == 0 and presence == 0):
        return
    row, tokens = logits + 4 * vocab * get_i32(sample + LOGITS_ROW), history + 4 * width * get_i32(sample + ROW)
    end = get_i32(sample + END)
    prompt_end = end - get_i32(sample + OUTPUT_POSITION)
    first = prompt_end if repetition == 1 else 0
    for at in range(first, end):
        token = get_i32(tokens + 4 * at)
        if 0 <= token < vocab:
            count = get_i32(counters + 4 * token)
            put_i32(counters + 4 * token, count | IN_PROMPT if at < prompt_end else count + IN_OUTPUT)
    for at in range(first, end):
        token = get_i32(tokens + 4 * at)
        count = get_i32(counters + 4 * token) if 0 <= token < vocab else 0
        if count:
            put_i32(counters + 4 * token, 0)
            logit = get_f32(row + 4 * token)
            logit = logit / repetition if logit > 0 else logit * repetition
            if count >= IN_OUTPUT:
                logit = logit - frequency * np.float32(count // IN_OUTPUT) - presence
            put_f32(row + 4 * token, logit)


@inlined
def order_of(values, ids, place):
    """An int64 that is higher for likelier tokens, highest for NaN, and of equal logits higher for the lower id."""
    value = get_f32(values + place)
    return ((0x7FFFFFFF if value != value else key_of(value)) << 32) - get_i32(ids + place)


@inlined
def sort_tokens(values, ids, count):
    """By `order_of`, the highest first (Shell, 1959)."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for nth in range(gap, count):
            at = 4 * nth
            value, token, order = get_i32(values + at), get_i32(ids + at), order_of(values, ids, at)
            while at >= 4 * gap and order_of(values, ids, at - 4 * gap) < order:
                put_i32(values + at, get_i32(values + at - 4 * gap))
                put_i32(ids + at, get_i32(ids + at - 4 * gap))
                at -= 4 * gap
            put_i32(values + at, value)
            put_i32(ids + at, token)
        gap //= 3


@kernel()
def top_logprobs(args, nth, thread):
    logits, vocab, samples = get_i64(args), get_i64(args + 8), get_i64(args + 16)
    maxima, log_mass, k = maxima_of(get_i64(args + 24), nth, vocab), get_i64(args + 32) + 4 * nth, get_i64(args + 40)
    ids, values = get_i64(args + 48) + 4 * nth * k, get_i64(args + 56) + 4 * nth * k
    sample = samples + SAMPLE_BYTES * nth
    if get_i32(sample + LOGITS_ROW) < 0 or get_i32(sample + FLAGS) & LOGPROBS == 0:
        return
    row = logits + 4 * vocab * get_i32(sample + LOGITS_ROW)
    top = highest_of(maxima, vocab)
    mass, high, num_nan = top, key_of(top), 0.0
    if top != top:
        # Maxima say nothing of what is beside a NaN. Its logits, above all others, are counted apart.
        maxima, high = 0, ~KEY_OF_MINUS_INFINITY
        for token in range(vocab):
            logit = get_f32(row + 4 * token)
            num_nan += logit != logit
    elif abs(top) < INFINITY:
        mass = np.float32(top + math.log(weigh(row, 0, maxima, vocab, -INFINITY, INFINITY, True, top, ONE)))
    put_f32(log_mass, mass)
    if k == 0:
        return
    low = KEY_OF_MINUS_INFINITY - 1
    lowest = of_key(find_by_maxima(row, 0, maxima, vocab, low, high, num_nan, np.float64(k), False, ONE, ONE))
    found = 0  # k at most, so that what is beyond the vocabulary, -inf too, does not get in
    for is_last in (False, True):
        for token in range(0, vocab, 16):
            x = load_logits(row, 0, token, vocab)
            wanted = is_equal(x, splat(lowest)) if is_last else is_above(x, splat(lowest)) | is_nan(x)
            bits = bits_of(wanted)
            while bits and found < k:
                lane = lowest_bit(bits)
                bits &= bits - 1
                put_f32(values + 4 * found, lane_of(x, lane))
                put_i32(ids + 4 * found, token + lane)
                found += 1
    sort_tokens(values, ids, found)
    for at in range(0, 4 * found, 4):
        put_f32(values + at, get_f32(values + at) - mass)


@kernel()
def look_up(args, pair, thread):
    logits, vocab, rows, token_ids = get_i64(args), get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    log_mass, logprobs, ranks = get_i64(args + 32), get_i64(args + 40), get_i64(args + 48)
    at = 4 * pair
    if get_i32(rows + at) < 0:
        return
    row = logits + 4 * vocab * get_i32(rows + at)
    value = get_f32(row + 4 * get_i32(token_ids + at))
    put_f32(logprobs + at, value - get_f32(log_mass + at))
    put_i32(ranks + at, 1 + int(weigh(row, 0, 0, vocab, value, INFINITY, False, ONE, ONE)))
