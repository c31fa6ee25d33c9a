"""A decoder layer's norm, activation, and what is done to queries, keys and values: each in one pass over memory."""

from __future__ import annotations

import numpy as np
from numba import float32

from aioengine.kernels.native.compiler import inlined, kernel
from aioengine.kernels.native.sizes import MAX_HEAD_DIM
from aioengine.kernels.native.vector_functions import exp, tanh
from aioengine.kernels.native.vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Memory,
    absolute,
    every_other,
    fma,
    get_f32,
    get_i32,
    get_i64,
    max_of,
    maximum,
    minimum,
    put_f32,
    round_even,
    splat,
    stack,
    store_some_int8,
    sum_of,
    to_int,
    zeros,
)

ZERO, ONE = np.float32(0), np.float32(1)
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu")
CLAMPED_GAIN, CLAMP = np.float32(1.702), np.float32(7)
GELU_LINEAR = np.float32(2 * np.sqrt(2 / np.pi))
GELU_CUBIC = np.float32(0.044715) * GELU_LINEAR


def make_rms_norm(memory: Memory, *, adds: bool = False, is_added: bool = False):
    """x / √(mean(x²) + ε) · (w + offset) of rows; with ``adds`` of x · scale + residual, which takes the residual's
    place, rounded; with ``is_added`` added to ``out``."""
    read, write = memory.load_some, memory.store_some
    size = memory.size

    def rms_norm(args, chunk, thread):
        x, residual, weight, out = get_i64(args), get_i64(args + 8), get_i64(args + 16), get_i64(args + 24)
        num_rows, width, eps = get_i64(args + 32), get_i64(args + 40), get_f32(args + 48)
        rows_a_chunk, offset, scale = get_i64(args + 56), splat(get_f32(args + 64)), splat(get_f32(args + 72))
        for row in range(chunk * rows_a_chunk, min((chunk + 1) * rows_a_chunk, num_rows)):
            begin = row * width * size
            normed = x + begin
            squares = zeros()
            if adds:
                normed = residual + begin
                for n in range(0, width, 16):
                    at, count = n * size, width - n
                    write(normed + at, fma(read(x + begin + at, count), scale, read(normed + at, count)), count)
            for n in range(0, width, 16):
                values = read(normed + n * size, width - n)
                squares = fma(values, values, squares)
            factor = splat(ONE / np.sqrt(sum_of(squares) / float32(width) + eps))
            for n in range(0, width, 16):
                at, count = n * size, width - n
                values = read(normed + at, count) * factor * (read(weight + at, count) + offset)
                if is_added:
                    values = values + read(out + begin + at, count)
                write(out + begin + at, values, count)

    return rms_norm


def make_gated_activation(memory: Memory, activation: str):
    """gate · up / (1 + e^-t), of rows and columns of a chunk: with t = gate that is SiLU(gate) · up, with
    t = 2 · √(2/π) · (gate + 0.044715 · gate³) it is GELU(gate) · up by tanh;
    with t = 1.702 · gate gpt-oss's, of gates and ups that are cut off."""
    is_gelu, is_clamped = activation == "gelu_tanh", activation == "clamped_silu"
    read, write = memory.load_some, memory.store_some
    size = memory.size

    def gated_activation(args, chunk, thread):
        gate_up, out = get_i64(args), get_i64(args + 8)
        num_rows, width = get_i64(args + 16), get_i64(args + 24)
        rows_a_chunk, columns_a_chunk = get_i64(args + 32), get_i64(args + 40)
        parts = (width + columns_a_chunk - 1) // columns_a_chunk
        first_row, first = chunk // parts * rows_a_chunk, chunk % parts * columns_a_chunk
        end = min(first + columns_a_chunk, width)
        for row in range(first_row, min(first_row + rows_a_chunk, num_rows)):
            for n in range(first, end, 16):
                at, count = gate_up + (2 * row * width + n) * size, end - n
                if is_clamped:  # gate and up are neighbours
                    at += n * size
                    low, high = read(at, 2 * count), read(at + 16 * size, 2 * count - 16)
                    gate, up = every_other(low, high, False), every_other(low, high, True)
                    gate = minimum(splat(CLAMP), gate)
                    up = maximum(splat(-CLAMP), minimum(splat(CLAMP), up)) + splat(ONE)
                    turning = gate * splat(CLAMPED_GAIN)
                else:
                    gate, up = read(at, count), read(at + width * size, count)
                    turning = gate
                if is_gelu:
                    turning = gate * fma(gate * gate, splat(GELU_CUBIC), splat(GELU_LINEAR))
                write(out + (row * width + n) * size, gate * up / (splat(ONE) + exp(zeros() - turning)), count)

    return gated_activation


def make_scale(memory: Memory):
    """x · factor, in place; with a soft cap c that is not 0: c · tanh(x · factor / c)."""
    read, write = memory.load_some, memory.store_some
    size = memory.size

    def scale(args, chunk, thread):
        x, num_values, values_a_chunk = get_i64(args), get_i64(args + 8), get_i64(args + 16)
        factor, soft_cap = get_f32(args + 24), get_f32(args + 32)
        end = min((chunk + 1) * values_a_chunk, num_values)
        for n in range(chunk * values_a_chunk, end, 16):
            at, count = x + n * size, end - n
            values = read(at, count) * splat(factor)
            if soft_cap != ZERO:
                values = tanh(values * splat(ONE / soft_cap)) * splat(soft_cap)
            write(at, values, count)

    return scale


def make_rotate(memory: Memory, to: Memory):
    read, write = memory.load_some, to.store_some
    read_f32 = FLOAT32.load_some
    size, out_size = memory.size, to.size

    @inlined
    def rotate(x, weight, offset, norm, table, table_is_float32, out, head_dim):
        """x · cos + roll(x, head_dim / 2) · sin, of x · norm · (w + offset) where there is a weight; the latter alone
        where there is no table."""
        half, factor = head_dim // 2, splat(norm)
        for n in range(0, half, 16):
            count = half - n
            low, high = n * size, (half + n) * size
            a, b = read(x + low, count), read(x + high, count)
            if weight:
                a = a * factor * (read(weight + low, count) + splat(offset))
                b = b * factor * (read(weight + high, count) + splat(offset))
            if not table:
                write(out + n * out_size, a, count)
                write(out + (half + n) * out_size, b, count)
                continue
            if table_is_float32:
                at, step = table + 4 * n, 4 * half
                cos_a, cos_b = read_f32(at, count), read_f32(at + step, count)
                sin_a, sin_b = read_f32(at + 2 * step, count), read_f32(at + 3 * step, count)
            else:
                at, step = table + size * n, size * half
                cos_a, cos_b = read(at, count), read(at + step, count)
                sin_a, sin_b = read(at + 2 * step, count), read(at + 3 * step, count)
            write(out + n * out_size, fma(b, sin_a, a * cos_a), count)
            write(out + (half + n) * out_size, fma(a, sin_b, b * cos_b), count)

    return rotate


def make_rotate_and_write(memory: Memory):
    """Norm and rotation of each head's query and key; keys and values go to the cache."""
    read, write = memory.load_some, memory.store_some
    read_f32, write_f32 = FLOAT32.load_some, FLOAT32.store_some
    size = memory.size
    rotate, rotate_to_f32 = make_rotate(memory, memory), make_rotate(memory, FLOAT32)
    room_for_head = stack(4 * MAX_HEAD_DIM)

    @inlined
    def norm_of(x, width, eps):
        """1 / √(mean(x²) + ε)"""
        squares = zeros()
        for n in range(0, width, 16):
            values = read(x + n * size, width - n)
            squares = fma(values, values, squares)
        return ONE / np.sqrt(sum_of(squares) / float32(width) + eps)

    @inlined
    def quantize(x, to, head_dim):
        """float32 numbers to int8 and their scale: what is not finite makes the scale NaN."""
        largest, none = zeros(), zeros()
        for n in range(0, head_dim, 16):
            values = read_f32(x + 4 * n, head_dim - n)
            largest, none = maximum(largest, absolute(values)), fma(values, zeros(), none)
        highest = max_of(largest)
        factor = splat(float32(127) / highest if highest > ZERO else ZERO)
        for n in range(0, head_dim, 16):
            rounded = to_int(round_even(read_f32(x + 4 * n, head_dim - n) * factor))
            store_some_int8(to + n, rounded, head_dim - n)
        put_f32(to + head_dim, highest / float32(127) + sum_of(none))

    def rotate_and_write(args, chunk, thread):
        qkv, positions, slots = get_i64(args), get_i64(args + 8), get_i64(args + 16)
        table, table_is_float32 = get_i64(args + 24), get_i64(args + 32)
        weight, eps = get_i64(args + 40), get_f32(args + 48)
        k_cache, v_cache, q = get_i64(args + 56), get_i64(args + 64), get_i64(args + 72)
        num_tokens, num_heads, num_kv_heads = get_i64(args + 80), get_i64(args + 88), get_i64(args + 96)
        head_dim, tokens_a_chunk = get_i64(args + 104), get_i64(args + 112)
        is_int8, head, line, room = get_i64(args + 120), head_dim * size, get_i64(args + 128), room_for_head()
        offset, is_wide = get_f32(args + 136), get_i64(args + 144)
        norm = ONE
        for token in range(chunk * tokens_a_chunk, min((chunk + 1) * tokens_a_chunk, num_tokens)):
            angles = table and table + get_i32(positions + 4 * token) * 2 * head_dim * (4 if table_is_float32 else size)
            x = qkv + token * (num_heads + 2 * num_kv_heads) * head
            to = q + token * num_heads * head
            w = weight
            if is_wide:
                norm = norm_of(x, num_heads * head_dim, eps)
            for _ in range(num_heads):
                if weight and not is_wide:
                    norm = norm_of(x, head_dim, eps)
                rotate(x, w, offset, norm, angles, table_is_float32, to, head_dim)
                x, to = x + head, to + head
                w += head if weight else 0
            slot = get_i32(slots + 4 * token)
            if slot < 0:
                continue
            k, v = k_cache + slot * num_kv_heads * line, v_cache + slot * num_kv_heads * line
            if is_wide:
                norm = norm_of(x, num_kv_heads * head_dim, eps)
            for n in range(num_kv_heads):
                if weight and not is_wide:
                    norm = norm_of(x, head_dim, eps)
                if is_int8:
                    rotate_to_f32(x, w, offset, norm, angles, table_is_float32, room, head_dim)
                    quantize(room, k + n * line, head_dim)
                else:
                    rotate(x, w, offset, norm, angles, table_is_float32, k + n * line, head_dim)
                x += head
                w += head if weight else 0
            if is_int8:
                for n in range(num_kv_heads):
                    for at in range(0, head_dim, 16):
                        write_f32(room + 4 * at, read(x + at * size, head_dim - at), head_dim - at)
                    quantize(room, v + n * line, head_dim)
                    x += head
            else:
                for n in range(0, num_kv_heads * head_dim, 16):
                    count = num_kv_heads * head_dim - n
                    write(v + n * size, read(x + n * size, count), count)

    return rotate_and_write


for _suffix, _memory in (("float32", FLOAT32), ("bfloat16", BFLOAT16), ("float16", FLOAT16)):
    kernel(name=f"rms_norm_{_suffix}")(make_rms_norm(_memory))
    kernel(name=f"add_rms_norm_{_suffix}")(make_rms_norm(_memory, adds=True))
    kernel(name=f"rms_norm_add_{_suffix}")(make_rms_norm(_memory, is_added=True))
    for _activation in ACTIVATIONS:
        kernel(name=f"{_activation}_{_suffix}")(make_gated_activation(_memory, _activation))
    # Logits are float32 whatever the model is, and a model loads the kernels of its dtype and the common ones.
    kernel(name="scale" if _memory is FLOAT32 else f"scale_{_suffix}")(make_scale(_memory))
    kernel(name=f"rotate_and_write_{_suffix}")(make_rotate_and_write(_memory))
