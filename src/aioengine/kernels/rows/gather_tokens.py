"""The inputs of a step, from the rows' tables on the device: a step is launched before its tokens are known elsewhere.

For token i of a row, at p = start + i: id = history[row, p], slot = block_tables[group, row, p // B] · B + p % B.

Several programs share a row, taking turns: prompts have thousands of tokens in a step. Bound: 20 bytes a token; with
few tokens the time of a launch (2 to 3 µs).

Stays if, at 64 rows of one token and at 2,048 tokens, it beats plain torch, some ten launches, by 2; not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.errors import InternalError
from aioengine.kernels.launch_checks import check_tensor

BLOCK, NUM_WARPS = 256, 4
MAX_PROGRAMS_A_ROW = 64
"""A chunk of 16k tokens in one turn."""


# What begins anywhere in a larger tensor must not make it compile again by its alignment. Positions are anything:
# nothing would be gained by knowing more of the widths.
@triton.jit(
    do_not_specialize=[
        *("rows_ptr", "token_ids_ptr", "positions_ptr", "slots_ptr"),
        *("history_width", "table_width", "all_rows", "all_tokens"),
    ]
)
def _gather_tokens_kernel(
    rows_ptr,
    history_ptr,
    block_tables_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    history_width,
    table_width,
    all_rows,
    all_tokens,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_ptr = rows_ptr + tl.program_id(0) * 4
    row = tl.load(row_ptr).to(tl.int64)
    start = tl.load(row_ptr + 1)
    first = tl.load(row_ptr + 2)
    num_tokens = tl.load(row_ptr + 3)
    # Padding has tokens, and knows none of them.
    num_known = tl.where(row >= 0, num_tokens, 0)
    for turn in range(tl.program_id(1) * BLOCK, num_tokens, tl.num_programs(1) * BLOCK):
        tokens = turn + tl.arange(0, BLOCK)
        is_inside = tokens < num_tokens
        is_known = tokens < num_known
        positions = start + tokens
        token_ids = tl.load(history_ptr + row * history_width + positions, is_known, 0)
        tl.store(token_ids_ptr + first + tokens, token_ids, is_inside)
        tl.store(positions_ptr + first + tokens, tl.where(is_known, positions, 0), is_inside)
        for group in tl.static_range(GROUPS):
            table = block_tables_ptr + (group * all_rows + row) * table_width
            blocks = tl.load(table + positions // BLOCK_SIZE, is_known, 0)
            slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            tl.store(slots_ptr + group * all_tokens + first + tokens, tl.where(is_known, slots, -1), is_inside)


def gather_tokens(
    rows: Tensor, history: Tensor, block_tables: Tensor, block_size: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `Operations.gather_tokens`."""
    device = history.device
    check_tensor("gather_tokens: rows", rows, (None, 4), torch.int32, device)
    check_tensor("gather_tokens: history", history, (None, None), torch.int32, device)
    check_tensor("gather_tokens: block_tables", block_tables, (None, len(history), None), torch.int32, device)
    if block_size < 1 or num_tokens < 0 or (num_tokens and not len(rows)):
        raise InternalError(f"gather_tokens: {len(rows)} rows of {num_tokens} tokens, blocks of {block_size}")
    num_groups = len(block_tables)
    # One allocation for all of them.
    out = torch.empty((2 + num_groups, num_tokens), dtype=torch.int32, device=device)
    token_ids, positions, slots = out[0], out[1], out[2:]
    if num_tokens:
        # No row has more tokens than the step.
        programs = min(triton.cdiv(num_tokens, BLOCK), MAX_PROGRAMS_A_ROW)
        _gather_tokens_kernel[(len(rows), programs)](
            rows, history, block_tables, token_ids, positions, slots,
            history.shape[1], block_tables.shape[2], len(history), num_tokens,
            GROUPS=num_groups, BLOCK_SIZE=block_size, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return token_ids, positions, slots
