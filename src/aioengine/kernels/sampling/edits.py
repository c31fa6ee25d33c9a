"""Changes to single logits: biases and masks.

``logits[logits_row, token] += value``, and -inf masks. Which row of logits an edit is for is looked up on the
device (row → sample → row of logits), so that lists of edits stay the same from step to step while rows come and go.

Stays if, at 50 edits in each of 64 rows, it beats torch's `index_put_` with the look-up before it by 1.2; not
measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.launch_checks import check_logits, check_samples, check_tensor
from aioengine.kernels.sampling.constants import FIRST, FLAGS, LOGITS_ROW, OUTPUT_POSITION, SAMPLE_STRIDE

BLOCK = 128
"""Edits of a program, one a thread: it is all latency (four loads that depend on each other), so spread it wide."""

NUM_WARPS = 4

_MASKED_BITS = tl.constexpr(-(2**23))
"""Those of -inf, as int32."""

# The number of edits changes from step to step, and the lists are views into larger buffers: without this Triton would
# compile once more, in the middle of serving, for the first number or pointer that is divisible by 16.
_CHANGING = ["num_edits"]
_VIEWS = ["samples", "sample_of_row", "edit_rows", "edit_tokens", "edit_values", "edit_until"]


@triton.jit
def first_samples(samples, sample_of_row, rows):
    """Of rows int32 [m], -1 for none: the words of their first samples, their rows of logits, and which sample now."""
    sample = tl.load(sample_of_row + rows, mask=rows >= 0, other=-1)
    words = samples + sample.to(tl.int64) * SAMPLE_STRIDE
    logits_row = tl.load(words + LOGITS_ROW, mask=sample >= 0, other=-1)
    flags = tl.load(words + FLAGS, mask=sample >= 0, other=0)
    return words, logits_row, (logits_row >= 0) & ((flags & FIRST) != 0)


@triton.jit
def _locate(samples, sample_of_row, edit_rows, edit_tokens, edits, num_edits, vocab):
    """For edits [BLOCK]: their samples, where their logits are, and whether there is one to edit."""
    is_edit = edits < num_edits
    rows = tl.load(edit_rows + edits, mask=is_edit, other=-1)
    tokens = tl.load(edit_tokens + edits, mask=is_edit, other=-1)
    words, logits_row, is_sampled = first_samples(samples, sample_of_row, rows)
    is_made = is_sampled & (tokens >= 0) & (tokens < vocab)
    return words, logits_row.to(tl.int64) * vocab + tokens, is_made


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_VIEWS)
def _edit_logits_kernel(
    logits,
    samples,
    sample_of_row,
    edit_rows,
    edit_tokens,
    edit_values,
    edit_until,
    num_edits,
    vocab,
    BLOCK: tl.constexpr,
):
    # One launch for both kinds, although they may meet on a logit: an exchange puts -inf there whatever it was, and
    # finite numbers that are added before that are overwritten, those after it leave -inf. So any order comes out the
    # same. A mask that were added instead would make NaN of +inf.
    edits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words, offsets, is_made = _locate(samples, sample_of_row, edit_rows, edit_tokens, edits, num_edits, vocab)
    values = tl.load(edit_values + edits, mask=is_made, other=0.0)
    until = tl.load(edit_until + edits, mask=is_made, other=0)
    output_position = tl.load(words + OUTPUT_POSITION, mask=is_made, other=0)
    is_made = is_made & (output_position < until)
    is_mask = values == float("-inf")
    # Relaxed: nothing else is read or published in this launch, and the next one sees it all.
    words_of_logits = logits.to(tl.pointer_type(tl.int32), bitcast=True)  # the interpreter exchanges no floats
    tl.atomic_xchg(words_of_logits + offsets, _MASKED_BITS, mask=is_made & is_mask, sem="relaxed")
    # Most bad words of several tokens are not about to end: 0, no edit.
    tl.atomic_add(logits + offsets, values, mask=is_made & (values != 0) & ~is_mask, sem="relaxed")


def edit_logits(logits: Tensor, samples: Tensor, sample_of_row: Tensor, edits: Tensor) -> None:
    """See `Operations.edit_logits`. One launch, of about 3 µs for any number of edits: four loads, each of which waits.

    Args:
        edits: of finite values and -inf. Of a logit that gets several finite ones, the last bit of the sum may depend
            on their order, which is anyone's guess: give one bias a token.
    """
    device, num_edits = check_logits(logits), edits.shape[-1]
    check_samples(samples, device)
    check_tensor("sample_of_row", sample_of_row, (None,), torch.int32, device)
    check_tensor("edits", edits, (4, None), torch.int32, device)
    if not num_edits or not len(logits) or not len(samples):
        return
    _edit_logits_kernel[(triton.cdiv(num_edits, BLOCK),)](
        logits, samples, sample_of_row, edits[0], edits[1], edits[2].view(torch.float32), edits[3],
        num_edits, logits.shape[1], BLOCK,
        num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
