"""Each sample's token: of the logits that its filters keep, the one whose (x - top) / T plus Gumbel noise is highest.

Each program takes a part of a row and keeps the best score so far, relative to the highest logit so far: logits of any
size lose no digits to their offset, and no pass is needed to find it. A second launch puts the parts together.

The noise is what costs: some 20 instructions for the hash of a token and 60 for two logarithms, where its 4 bytes come
in the time of some 35. So a program hashes only pieces in which a logit could win with the highest noise (of a model's
logits at T = 1: few), and takes logarithms only of pieces in which one could win by a cheap bound of its noise (of flat
ones: a handful of each part's). A warp a program, so that these are decisions within the warp.

For samples with a filter `thresholds` brings the floor under which no logit can win; only blocks whose maximum reaches
it are read.

Stays if, at 64 rows of 128,256 logits, it beats torch's division by the temperature, exponential noise and `argmax`
by 1.2; not measured.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.launch_checks import check_logits, check_samples, check_tensor
from aioengine.kernels.operations import Operations
from aioengine.kernels.sample_rows import Status
from aioengine.kernels.triton import replaces, thresholds
from aioengine.kernels.triton.noise import HIGHEST_NOISE, gumbel, gumbel_bound, hash_tokens, noise_keys, uniform
from aioengine.kernels.triton.sample_words import (
    CHOICE,
    LOGITS_ROW,
    MASK,
    OUTPUT_POSITION,
    SAMPLE_STRIDE,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
)
from aioengine.kernels.triton.thresholds import (
    INFINITY,
    MAX_FLOAT,
    WORD,
    WORDS_OF_BLOCK,
    clamp,
    inverse,
    load_float,
    load_logits,
)

PIECE_WORDS = 16
"""Words of 32 tokens that a program looks at at once: 16 logits a thread, in loads of 16 bytes."""

PROGRAMS = 8192
"""Three waves of as many programs of one warp as a GPU holds (20 on each of 132 multiprocessors), to even out their
work: rows are split no further than that. A piece each is 250 programs for a row of 128,000."""

MAX_PARTS = 512
"""Most parts of a row, which the second launch joins in registers."""

JOIN_WARPS = 4

_SAMPLED = tl.constexpr(int(Status.SAMPLED))
_NOT_A_NUMBER = tl.constexpr(int(Status.NOT_A_NUMBER))
_NOTHING_LEFT = tl.constexpr(int(Status.NOTHING_LEFT))
# The bound of noise and the score are rounded, by less than this where it matters: a score of some ±20.
_SLACK = tl.constexpr(1e-3)


# What follows the number of samples, and what is a view into a larger buffer, must not make it compile again in the
# middle of serving: neither a 1 or a multiple of 16 among the numbers, nor where a tensor begins. Of none of these a
# vector is loaded that would need it.
_VIEWS = ["samples", "masks", "floors", "tops", "part_tops", "part_scores", "part_tokens", "token_ids", "status"]


@triton.jit(do_not_specialize=["pieces_of_part"], do_not_specialize_on_alignment=_VIEWS)
def _part_kernel(
    logits,
    samples,
    masks,
    maxima,
    floors,
    tops,
    part_tops,
    part_scores,
    part_tokens,
    vocab,
    pieces_of_part,
    HAS_MASK: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    IS_GREEDY: tl.constexpr,
    WORDS: tl.constexpr,
):
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sample_word = samples + sample * SAMPLE_STRIDE
    logits_row, mask = tl.load(sample_word + LOGITS_ROW), tl.load(sample_word + MASK)
    if logits_row < 0:
        return
    temperature = load_float(sample_word + TEMPERATURE)
    cold = inverse(temperature)
    key_low, key_high = noise_keys(
        tl.load(sample_word + SEED_LOW),
        tl.load(sample_word + SEED_HIGH),
        tl.load(sample_word + CHOICE),
        tl.load(sample_word + OUTPUT_POSITION),
    )
    floor = -INFINITY
    highest = tl.full((), -INFINITY, tl.float32)
    if HAS_FILTERS:
        floor = tl.load(floors + sample)
        highest = tl.load(tops + sample)
    num_blocks = tl.cdiv(vocab, WORDS_OF_BLOCK * WORD)
    num_known = tl.where(floor == -INFINITY, 0, num_blocks)  # maxima
    has_nan = 0
    top = clamp(highest)
    best_score = tl.full((), -INFINITY, tl.float32)
    best_token = 0
    for piece in range(part * pieces_of_part, (part + 1) * pieces_of_part):
        words = piece * WORDS + tl.arange(0, WORDS)
        is_read = words * WORD < vocab
        if HAS_FILTERS:
            block = words // WORDS_OF_BLOCK
            highest_of_block = tl.load(maxima + sample * num_blocks + block, mask=block < num_known, other=INFINITY)
            is_read = is_read & (highest_of_block >= floor)
        if tl.max(is_read.to(tl.int32), axis=0) != 0:
            tokens, x = load_logits(logits, masks, logits_row, mask, words, is_read, vocab, HAS_MASK)
            # What a maximum makes of a NaN depends on the device.
            here = tl.max(tl.where(x != x, INFINITY, x))
            if here == INFINITY:
                has_nan = tl.maximum(has_nan, tl.max((x != x).to(tl.int32)))
            highest = tl.maximum(highest, here)
            raised = tl.maximum(top, clamp(here))
            best_score += tl.where(best_score == -INFINITY, 0.0, top - raised) * cold
            top = raised
            if (here - top) * cold + HIGHEST_NOISE >= best_score:
                scores = (x - top) * cold
                if HAS_FILTERS:
                    scores = tl.where(x >= floor, scores, -INFINITY)
                if not IS_GREEDY:  # noqa: SIM102  the outer one is of constants: no code for it
                    if temperature > 0:
                        u = uniform(hash_tokens(tokens, key_low, key_high))
                        if tl.max(scores + gumbel_bound(u)) + _SLACK >= best_score:
                            scores += gumbel(u)
                        else:
                            scores = tl.full(scores.shape, -INFINITY, tl.float32)
                score = tl.max(scores)
                if score > best_score:
                    best_score = score
                    best_token = tl.min(tl.where(scores == score, tokens, vocab))
    out = sample * tl.num_programs(1) + part
    tl.store(part_tops + out, tl.where(has_nan != 0, float("nan"), highest))
    tl.store(part_scores + out, best_score)
    tl.store(part_tokens + out, best_token)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=_VIEWS)
def _join_kernel(samples, part_tops, part_scores, part_tokens, token_ids, status, num_parts, NUM_PARTS: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    sample_word = samples + sample * SAMPLE_STRIDE
    is_padding = tl.load(sample_word + LOGITS_ROW) < 0
    part = tl.arange(0, NUM_PARTS)
    is_there = part < tl.where(is_padding, 0, num_parts)
    tops = tl.load(part_tops + sample * num_parts + part, mask=is_there, other=-INFINITY)
    scores = tl.load(part_scores + sample * num_parts + part, mask=is_there, other=-INFINITY)
    tokens = tl.load(part_tokens + sample * num_parts + part, mask=is_there, other=0)
    is_nan = tl.max((tops != tops).to(tl.int32), axis=0) != 0
    top = tl.max(tl.where(tops != tops, INFINITY, tops), axis=0)
    scores += (tl.minimum(tops, MAX_FLOAT) - clamp(top)) * inverse(load_float(sample_word + TEMPERATURE))
    score = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == score, tokens, 2147483647), axis=0)  # parts that have nothing say 0
    failure = tl.where(is_nan, _NOT_A_NUMBER, tl.where(top == -INFINITY, _NOTHING_LEFT, _SAMPLED))
    tl.store(status + sample, tl.where(is_padding, _SAMPLED, failure))
    tl.store(token_ids + sample, tl.where(is_padding | (failure != _SAMPLED), 0, token))


@replaces(Operations.draw)
def draw(
    logits: Tensor,
    samples: Tensor,
    masks: Tensor | None,
    token_ids: Tensor,
    status: Tensor,
    *,
    has_filters: bool,
    is_greedy: bool,
) -> None:
    """See `Operations.draw`.

    Two launches without filters, four with them. Bound by one read of the logits where they are peaked (256 rows of
    128,256: 131 MB, 33 µs at 4 TB/s), by hashing each token where they are flat (about 45 µs); with filters see
    `thresholds.find_floors`, and a few µs for what it leaves. One row is bound by latency: about 5 µs
    a launch.
    """
    device = check_logits(logits)
    check_samples(samples, device)
    num_samples, vocab = len(samples), logits.shape[1]
    if masks is not None:
        check_tensor("masks", masks, (None, triton.cdiv(vocab, WORD.value)), samples.dtype, device)
    check_tensor("token_ids", token_ids, (num_samples,), samples.dtype, device)
    check_tensor("status", status, (num_samples,), samples.dtype, device)
    if not num_samples:
        return
    has_filters = has_filters and not is_greedy
    maxima, floors, tops = thresholds.find_floors(logits, samples, masks) if has_filters else (logits,) * 3
    num_parts, pieces_of_part = split(num_samples, vocab)
    part_tops, part_scores = logits.new_empty(2, num_samples, num_parts)
    part_tokens = samples.new_empty(num_samples, num_parts)
    _part_kernel[num_samples, num_parts](
        logits, samples, samples if masks is None else masks, maxima, floors, tops,
        part_tops, part_scores, part_tokens,
        vocab, pieces_of_part, masks is not None, has_filters, is_greedy, PIECE_WORDS,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    _join_kernel[num_samples,](
        samples, part_tops, part_scores, part_tokens, token_ids, status,
        num_parts, most_parts(vocab),
        num_warps=JOIN_WARPS, enable_fp_fusion=True,
    )  # fmt: skip


def split(num_samples: int, vocab: int) -> tuple[int, int]:
    """Into how many parts a row is split, and of how many pieces each is."""
    num_pieces = triton.cdiv(vocab, PIECE_WORDS * WORD.value)
    num_parts = max(1, min(num_pieces, MAX_PARTS, PROGRAMS // num_samples))
    pieces_of_part = triton.cdiv(num_pieces, num_parts)
    return triton.cdiv(num_pieces, pieces_of_part), pieces_of_part


def most_parts(vocab: int) -> int:
    """Lanes of the second launch, a power of 2: for as many parts as there may be, so that it is compiled once and not
    for every size of a batch. Idle ones cost nothing that could be measured."""
    most, _ = split(1, vocab)
    return 1 << (most - 1).bit_length()
