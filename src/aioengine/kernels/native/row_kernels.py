"""The rows' state: spans, the inputs of a step, sampled tokens, and copies of blocks."""

from __future__ import annotations

from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.vectors import get_i8, get_i32, get_i64, load_i32, put_i8, put_i32, store_i32
from aioengine.kernels.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow

SAMPLE_BYTES = 4 * SAMPLE_WORDS
LOGITS_ROW, ROW, END = (4 * int(word) for word in (SampleRow.LOGITS_ROW, SampleRow.ROW, SampleRow.END))
OUTPUT_POSITION, FLAGS, MASK = (4 * int(word) for word in (SampleRow.OUTPUT_POSITION, SampleRow.FLAGS, SampleRow.MASK))
FIRST = int(SampleFlag.FIRST)


@inlined
def copy_bytes(to, source, num_bytes):
    whole = num_bytes & -64
    for at in range(0, whole, 64):
        store_i32(to + at, load_i32(source + at))
    for at in range(whole, num_bytes):
        put_i8(to + at, get_i8(source + at))


@inlined
def is_first(sample):
    """Whether the sample at an address is no padding, and the first of its row of logits."""
    return get_i32(sample + LOGITS_ROW) >= 0 and get_i32(sample + FLAGS) & FIRST != 0


@kernel()
def put_spans(args, span, thread):
    target, width, spans, words = get_i64(args), get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
    span = spans + 16 * span
    row = get_i32(span)
    if row >= 0:
        to = target + 4 * (row * width + get_i32(span + 4))
        copy_bytes(to, words + 4 * get_i32(span + 8), 4 * get_i32(span + 12))


@kernel()
def copy_rows(args, nth, thread):
    target, source, num_bytes = get_i64(args), get_i64(args + 8), 4 * get_i64(args + 16)
    row = get_i32(get_i64(args + 24) + 4 * nth)
    if row >= 0:
        copy_bytes(target + row * num_bytes, source + row * num_bytes, num_bytes)


@kernel()
def gather_tokens(args, row, thread):
    step_row = get_i64(args) + 16 * row
    history, history_width = get_i64(args + 8), get_i64(args + 16)
    block_tables, table_width, block_size = get_i64(args + 24), get_i64(args + 32), get_i64(args + 40)
    row, start = get_i32(step_row), get_i32(step_row + 4)
    first, num_tokens = 4 * get_i32(step_row + 8), get_i32(step_row + 12)
    token_ids, positions, slots = get_i64(args + 48) + first, get_i64(args + 56) + first, get_i64(args + 64) + first
    num_groups, all_rows, all_tokens = get_i64(args + 72), get_i64(args + 80), get_i64(args + 88)
    history += 4 * (row * history_width + start)
    for token in range(num_tokens):
        at = 4 * token
        put_i32(token_ids + at, get_i32(history + at) if row >= 0 else 0)
        put_i32(positions + at, start + token if row >= 0 else 0)
    for group in range(num_groups):
        block = block_tables + 4 * ((group * all_rows + row) * table_width + start // block_size)
        in_block = start % block_size
        for token in range(num_tokens):
            put_i32(slots + 4 * token, get_i32(block) * block_size + in_block if row >= 0 else -1)
            in_block += 1
            if in_block == block_size:
                in_block = 0
                block += 4
        slots += 4 * all_tokens


@kernel()
def rows_of_tokens(args, row, thread):
    step_row, num_rows = get_i64(args) + 16 * row, get_i64(args + 8)
    token_rows = get_i64(args + 16) + 4 * get_i32(step_row + 8)
    number = get_i32(step_row)
    for token in range(get_i32(step_row + 12)):
        put_i32(token_rows + 4 * token, number if number >= 0 else num_rows)


@kernel()
def append_tokens(args, chunk, thread):
    history, width, samples = get_i64(args), get_i64(args + 8), get_i64(args + 16)
    num_samples, token_ids = get_i64(args + 24), get_i64(args + 32)
    for nth in range(num_samples):
        sample = samples + SAMPLE_BYTES * nth
        if is_first(sample):
            end = get_i32(sample + ROW) * width + get_i32(sample + END)
            put_i32(history + 4 * end, get_i32(token_ids + 4 * nth))


@kernel()
def copy_blocks(args, chunk, thread):
    caches, num_caches = get_i64(args), get_i64(args + 8)
    num_blocks, block_bytes = get_i64(args + 16), get_i64(args + 24)
    pair = 4 * (chunk // num_caches)
    source, target = get_i32(get_i64(args + 32) + pair), get_i32(get_i64(args + 40) + pair)
    if source >= 0 and target >= 0:
        cache = caches + chunk % num_caches * num_blocks * block_bytes
        copy_bytes(cache + target * block_bytes, cache + source * block_bytes, block_bytes)
