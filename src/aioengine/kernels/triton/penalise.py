"""Penalties on tokens that were there already: repetition (Keskar et al., 2019, arXiv:1909.05858), frequency, presence.

Once for each token of prompt and output: ``x = x / r if x > 0 else x · r``; then for each token that the output has c
times: ``x -= f · c; x -= p``. Only the logits of a row's own tokens are read and written.

Two launches, and no sort: the first counts, the second applies. Counters are one int32 a token of the vocabulary; only
those of the row's own tokens are touched, which is why they are kept as zeros instead of being cleared for each step:
131 MB at 256 rows of 128,000, where 256 rows of 2,000 tokens touch 16 MB at most.

Stays if, at 64 rows of 2,000 tokens and 128,256 logits, it beats torch's `scatter_add_` and arithmetic over the
vocabulary by 2; not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.launch_checks import check_logits, check_samples, check_tensor
from aioengine.kernels.operations import Operations
from aioengine.kernels.triton import replaces
from aioengine.kernels.triton.sample_words import (
    END,
    FIRST,
    FLAGS,
    FREQUENCY,
    LOGITS_ROW,
    OUTPUT_POSITION,
    PRESENCE,
    REPETITION,
    ROW,
    SAMPLE_STRIDE,
)

BLOCK = 512
"""Positions that a program works on at once: four a thread, so that their latencies overlap."""

NUM_WARPS = 4

MANY_PROGRAMS = 1024
"""About what a GPU holds at once, 8 for each of 132 multiprocessors: a few rows share it, many get `FEW_PARTS` each."""

FEW_PARTS = 8


# A counter: bit 0 says that the prompt has the token, the bits above it how often the output has it. "Or" and additions
# of 2 leave each other's bits alone, in whatever order they come.
_IN_PROMPT = tl.constexpr(1)
_IN_OUTPUT = tl.constexpr(2)

# A view into a larger buffer: Triton would compile once more where it begins at a multiple of 16 bytes.
_VIEWS = ["samples"]


@triton.jit
def _span(samples, sample):
    """The positions of a sample's history that count, first to end; none if it has no penalties or is passed over."""
    words = samples + sample.to(tl.int64) * SAMPLE_STRIDE
    logits_row = tl.load(words + LOGITS_ROW)
    end = tl.load(words + END)
    prompt_end = end - tl.load(words + OUTPUT_POSITION)
    repetition = tl.load(words + REPETITION).to(tl.float32, bitcast=True)
    frequency = tl.load(words + FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(words + PRESENCE).to(tl.float32, bitcast=True)
    is_wanted = (logits_row >= 0) & ((tl.load(words + FLAGS) & FIRST) != 0)
    is_repeated = repetition != 1.0
    is_penalised = is_wanted & (is_repeated | (frequency != 0.0) | (presence != 0.0))
    # Frequency and presence alone are about the output, so that the prompt is not read.
    first = tl.where(is_penalised & ~is_repeated, prompt_end, 0)
    return logits_row, first, prompt_end, tl.where(is_penalised, end, 0), repetition, frequency, presence


@triton.jit
def _tokens_at(history, samples, sample, positions, first, end, history_width, vocab):
    """The tokens at these positions, and which of them count and are in the vocabulary."""
    row = tl.load(samples + sample.to(tl.int64) * SAMPLE_STRIDE + ROW)
    is_there = (positions >= first) & (positions < end)
    tokens = tl.load(history + row.to(tl.int64) * history_width + positions, mask=is_there, other=-1)
    return tokens, is_there & (tokens >= 0) & (tokens < vocab)


# The programs of one launch meet on counters only, by atomics that are complete in themselves: a counter's final value
# does not depend on their order, and of the exchanges that take it exactly one gets it. So they are relaxed; fences
# would cost more than the work. What a launch has written, by atomics or not, the next one on the stream sees. Atomics
# are of the whole GPU's scope (Triton's default), since the parts of a sample run anywhere on it.


@triton.jit(do_not_specialize_on_alignment=_VIEWS)
def _count_kernel(samples, history, counters, vocab, history_width, BLOCK: tl.constexpr):
    sample, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    _, first, prompt_end, end, _, _, _ = _span(samples, sample)
    counters_of_sample = counters + sample.to(tl.int64) * vocab
    for start in range(first // BLOCK * BLOCK + part * BLOCK, end, num_parts * BLOCK):
        positions = start + tl.arange(0, BLOCK)
        tokens, is_known = _tokens_at(history, samples, sample, positions, first, end, history_width, vocab)
        is_prompt = positions < prompt_end
        tl.atomic_or(counters_of_sample + tokens, _IN_PROMPT, mask=is_known & is_prompt, sem="relaxed")
        tl.atomic_add(counters_of_sample + tokens, _IN_OUTPUT, mask=is_known & ~is_prompt, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_VIEWS)
def _apply_kernel(logits, samples, history, counters, vocab, history_width, BLOCK: tl.constexpr):
    # Of all positions that hold a token, in whichever programs, one gets its counter and changes its logit; no other
    # reads or writes that. The others get 0, which is also what the next step needs to be there.
    sample, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits_row, first, _, end, repetition, frequency, presence = _span(samples, sample)
    counters_of_sample = counters + sample.to(tl.int64) * vocab
    logits_of_row = logits + logits_row.to(tl.int64) * vocab
    for start in range(first // BLOCK * BLOCK + part * BLOCK, end, num_parts * BLOCK):
        positions = start + tl.arange(0, BLOCK)
        tokens, is_known = _tokens_at(history, samples, sample, positions, first, end, history_width, vocab)
        counted = tl.atomic_xchg(counters_of_sample + tokens, 0, mask=is_known, sem="relaxed")
        is_taken = is_known & (counted != 0)
        logit = tl.load(logits_of_row + tokens, mask=is_taken, other=0.0)
        # As the oracle to the last bit: IEEE division, and launched without fused multiply-add.
        logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        count = counted // _IN_OUTPUT
        lowered = (logit - frequency * count.to(tl.float32)) - presence
        tl.store(logits_of_row + tokens, tl.where(count > 0, lowered, logit), mask=is_taken)


@replaces(Operations.penalise)
def penalise(logits: Tensor, samples: Tensor, history: Tensor, counters: Tensor) -> None:
    """See `Operations.penalise`.

    Two launches. For each position: 4 bytes of history, one atomic on a counter, then an exchange; for each token, its
    logit. Bound by latency for few rows (about 5 µs a launch), by the L2 cache's atomics for many: half a million
    positions (256 rows of 2,000), if it does some 100 a cycle, are 3 µs a launch.
    """
    device = check_logits(logits)
    check_samples(samples, device)
    check_tensor("history", history, (None, None), torch.int32, device)
    num_samples, vocab = len(samples), logits.shape[1]
    check_tensor("counters", counters, (None, vocab), torch.int32, device)
    if len(counters) < num_samples:
        raise InternalError(f"counters are for {len(counters)} samples, and there are {num_samples}")
    if not num_samples or not len(logits):
        return
    grid = (num_samples, parts_a_sample(num_samples, history.shape[1]))
    _count_kernel[grid](
        samples, history, counters, vocab, history.shape[1], BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True
    )
    _apply_kernel[grid](
        logits, samples, history, counters,
        vocab, history.shape[1], BLOCK,
        num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def parts_a_sample(num_samples: int, longest: int) -> int:
    """Programs that share a sample's history, by shapes alone: how long it is only the device knows. A part that finds
    nothing ends at once."""
    return max(1, min(-(-longest // BLOCK), max(FEW_PARTS, MANY_PROGRAMS // num_samples)))
