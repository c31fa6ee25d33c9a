"""Sampled tokens go to the ends of their rows' histories, so that the next step can read them before the host has.

history[row, end] = token, of the slots that are the first of their line. The time of a launch (2 to 3 µs).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.launch_checks import check_tensor
from aioengine.kernels.sampling import slots as words

BLOCK, NUM_WARPS = 128, 4

SLOT_WORDS = tl.constexpr(words.SLOT_WORDS)
LINE = tl.constexpr(int(words.Slot.LINE))
ROW = tl.constexpr(int(words.Slot.ROW))
END = tl.constexpr(int(words.Slot.END))
FLAGS = tl.constexpr(int(words.Slot.FLAGS))
FIRST = tl.constexpr(int(words.SlotFlag.FIRST))


# What changes from step to step must not make it compile again, nor need the width: single words are written.
@triton.jit(do_not_specialize=["slots_ptr", "token_ids_ptr", "num_slots", "width"])
def _append_tokens_kernel(history_ptr, slots_ptr, token_ids_ptr, num_slots, width, BLOCK: tl.constexpr):
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = slots < num_slots
    words_ptr = slots_ptr + slots * SLOT_WORDS
    line = tl.load(words_ptr + LINE, is_inside, -1)
    flags = tl.load(words_ptr + FLAGS, is_inside, 0)
    row = tl.load(words_ptr + ROW, is_inside, 0).to(tl.int64)
    end = tl.load(words_ptr + END, is_inside, 0)
    token_ids = tl.load(token_ids_ptr + slots, is_inside, 0)
    tl.store(history_ptr + row * width + end, token_ids, (line >= 0) & ((flags & FIRST) != 0))


def append_tokens(history: Tensor, slots: Tensor, token_ids: Tensor) -> None:
    """As `aioengine.kernels.operations.Operations.append_tokens`.

    Raises:
        InternalError: tensors that do not fit each other.
    """
    device = history.device
    check_tensor("append_tokens: history", history, (None, None), torch.int32, device)
    check_tensor("append_tokens: slots", slots, (None, words.SLOT_WORDS), torch.int32, device)
    check_tensor("append_tokens: token_ids", token_ids, (len(slots),), torch.int32, device)
    if len(slots):
        _append_tokens_kernel[(triton.cdiv(len(slots), BLOCK),)](
            history,
            slots,
            token_ids,
            len(slots),
            history.shape[1],
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
