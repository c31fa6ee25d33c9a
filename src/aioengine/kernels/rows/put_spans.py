"""News of the rows' tables, such as histories and block tables: spans of words, copied to where they belong.

target[line, column + i] = words[first + i], for i below the span's length.

Several programs share a span, taking turns, since a new prompt brings thousands of words and a grown row one. Bound: 8
bytes a word; the usual step's few words take the time of a launch (2 to 3 µs).

Stays if, at 256 spans of one word and at one of 2,048, it beats torch's `index_put_` at indices that the host makes
by 1.2; not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.launch_checks import check_tensor

BLOCK, NUM_WARPS = 512, 4
MAX_PROGRAMS_A_SPAN = 16
"""A prompt of 8k words in one turn; of 128k in 16."""


# Spans and words may begin anywhere in a larger tensor, and tables have any width: a start compiles this for one of
# them, and it must not be compiled again for the others. Columns are anything: nothing is gained by knowing more.
@triton.jit(do_not_specialize=["target_ptr", "spans_ptr", "words_ptr", "width"])
def _put_spans_kernel(target_ptr, spans_ptr, words_ptr, width, BLOCK: tl.constexpr):
    span_ptr = spans_ptr + tl.program_id(0) * 4
    line = tl.load(span_ptr).to(tl.int64)
    if line >= 0:
        column = tl.load(span_ptr + 1)
        first = tl.load(span_ptr + 2)
        num_words = tl.load(span_ptr + 3)
        to_ptr = target_ptr + line * width + column
        from_ptr = words_ptr + first
        for turn in range(tl.program_id(1) * BLOCK, num_words, tl.num_programs(1) * BLOCK):
            words = turn + tl.arange(0, BLOCK)
            is_inside = words < num_words
            tl.store(to_ptr + words, tl.load(from_ptr + words, is_inside, 0), is_inside)


def put_spans(target: Tensor, spans: Tensor, words: Tensor) -> None:
    """As `Operations.put_spans`."""
    device = target.device
    check_tensor("put_spans: target", target, (None, None), torch.int32, device)
    check_tensor("put_spans: spans", spans, (None, 4), torch.int32, device)
    check_tensor("put_spans: words", words, (None,), torch.int32, device)
    if len(spans) and len(words):
        # No span is longer than all words.
        programs = min(triton.cdiv(len(words), BLOCK), MAX_PROGRAMS_A_SPAN)
        _put_spans_kernel[(len(spans), programs)](
            target, spans, words, target.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True
        )
