"""Operations without a Triton kernel, against loops: the rows' state, scaling; and that a CUDA graph records them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.harness import DEVICE, LAUNCHED, SMALL, TOLERANCES, assert_close, int32, normal, poisoned
from kernels.test_refusals import RIGHT, call
from torch import Tensor

from aioengine.kernels.operations import Operations, plain_torch
from aioengine.kernels.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow
from doubles.fake_graph import FakeGraph

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def numbers(*shape: int, seed: int = 0, high: int = 1 << 30) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, dtype=torch.int32).to(DEVICE)


@SMALL
@pytest.mark.parametrize("seed", range(5))
def test_spans_go_where_they_belong(ops: Any, seed: int) -> None:
    """Spans in any order, of none to many words, within a larger tensor."""
    choose = random.Random(seed)
    words, spans, first = numbers(4003, seed=seed)[3:], [], 0
    computed, expected = poisoned(6, 2700), poisoned(6, 2700)
    for row in range(6):
        end = 0
        while end < 300:
            column, count = end + choose.choice([0, 1, 5]), choose.choice([0, 1, 2, 7, 123, 300])
            first, end = first + choose.choice([0, 2]), column + count
            spans.append([row, column, first, count])
            expected[row, column:end] = words[first : first + count]
            first += count
        spans.append([-1, 0, 0, choose.choice([0, 5])])
    choose.shuffle(spans)
    ops.put_spans(computed, int32(spans), words)
    assert torch.equal(computed, expected)


@SMALL
def test_rows_are_copied_but_for_padding(ops: Any) -> None:
    source, target = numbers(7, 33), poisoned(7, 33)
    ops.copy_rows(target, source, int32([-1, 5, 0, -1, 3]))
    expected = poisoned(7, 33)
    expected[[5, 0, 3]] = source[[5, 0, 3]]
    assert torch.equal(target, expected)


@SMALL
@pytest.mark.parametrize(("block_size", "num_groups"), [(1, 1), (3, 1), (16, 3)])
@pytest.mark.parametrize(
    "counts",
    [[1], [1] * 23, [300], [123, 1, 1, 7, 520, 0, 1]],
    ids=["one decode", "decodes", "chunk", "mixed"],
)
def test_tokens_positions_and_slots_of_a_step(ops: Any, counts: list[int], block_size: int, num_groups: int) -> None:
    choose = random.Random(len(counts) * 100 + block_size)
    num_rows = len(counts) + 3
    history = numbers(num_rows, 700, high=128256)
    tables = numbers(num_groups, num_rows, -(-700 // block_size), seed=1, high=100_000)
    rows, expected = [], []
    for row, count in zip(choose.sample(range(num_rows), len(counts)), counts, strict=True):
        is_padding, start = choose.random() < 0.2, choose.randrange(700 - count + 1)
        rows.append([-1 if is_padding else row, start, len(expected), count])
        for position in range(start, start + count):
            slots = tables[:, row, position // block_size] * block_size + position % block_size
            found = [int(history[row, position]), position, *slots.tolist()]
            expected.append([0, 0, *[-1] * num_groups] if is_padding else found)
    choose.shuffle(rows)
    token_ids, positions, slots = ops.gather_tokens(int32(rows), history, tables, block_size, len(expected))
    assert {each.dtype for each in (token_ids, positions, slots)} == {torch.int32}
    assert torch.cat((token_ids[None], positions[None], slots)).T.tolist() == expected
    row_of_token = ops.rows_of_tokens(int32(rows), num_rows, len(expected)).tolist()
    for row, _, first, count in rows:
        assert row_of_token[first : first + count] == [row if row >= 0 else num_rows] * count


@SMALL
@pytest.mark.parametrize("num_samples", [1, 7, 123])
def test_the_tokens_of_first_samples_go_to_the_ends_of_their_rows(ops: Any, num_samples: int) -> None:
    choose = random.Random(num_samples)
    samples, token_ids = numbers(num_samples, SAMPLE_WORDS), numbers(num_samples, seed=1)
    computed, expected = poisoned(2 * num_samples, 9), poisoned(2 * num_samples, 9)
    flags = [0, SampleFlag.LOGPROBS, SampleFlag.FIRST, SampleFlag.FIRST | 6]
    for nth, row in enumerate(choose.sample(range(2 * num_samples), num_samples)):
        logits_row, end, flag = choose.choice([-1, 0, nth]), choose.randrange(9), choose.choice(flags)
        samples[nth, SampleRow.LOGITS_ROW], samples[nth, SampleRow.ROW] = logits_row, row
        samples[nth, SampleRow.END], samples[nth, SampleRow.FLAGS] = end, flag
        if logits_row >= 0 and flag & SampleFlag.FIRST:
            expected[row, end] = token_ids[nth]
        else:  # its row may be any
            samples[nth, SampleRow.ROW] = choose.choice([row, -1, 2**30])
    ops.append_tokens(computed, samples, token_ids)
    assert torch.equal(computed, expected)


@SMALL
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", [(4, 2, 16), (16, 4, 40), (1, 1, 1), (3, 1, 7)], ids=str)
def test_blocks_are_copied_in_all_caches(ops: Any, block: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of any dtype, wherever they begin."""
    size = 3 * 11 * block[0] * block[1] * block[2]
    memory = numbers((1 + size) * dtype.itemsize, high=256).to(torch.uint8).view(dtype)
    caches = memory[1:].view(3, 11, *block)
    expected = caches.clone().view(torch.uint8)
    expected[:, [3, 10, 1]] = expected[:, [7, 2, 7]]
    ops.copy_blocks(caches, int32([7, 2, -1, 0, -1, 7]), int32([3, 10, 5, -1, -1, 1]))
    assert torch.equal(caches.contiguous().view(torch.uint8), expected)


@SMALL
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_scales_and_caps(ops: Any, soft_cap: float | None, dtype: torch.dtype) -> None:
    x = normal(3, 1041, dtype=dtype, scale=50.0)
    exact = x.double() * 0.7
    if soft_cap is not None:
        exact = soft_cap * torch.tanh(exact / soft_cap)
    ops.scale(x, 0.7, soft_cap)
    assert_close(x, exact.to(dtype), factor=4)


@SMALL
def test_what_is_large_is_capped_and_what_is_no_number_stays(ops: Any) -> None:
    x = torch.tensor([[-1e38, torch.inf, torch.nan, 0.0]], device=DEVICE)
    ops.scale(x, 1.0, 30.0)
    torch.testing.assert_close(x.cpu(), torch.tensor([[-30.0, 30.0, torch.nan, 0.0]]), equal_nan=True)


def waits(operation: str) -> bool:
    return hasattr(getattr(Operations, operation), "waits_for_device")


@pytest.mark.parametrize("operation", RIGHT)
def test_a_graph_records_what_says_that_it_waits_for_nothing(operation: str) -> None:
    """By the marks of torch's operations: none brings a value, or a shape that depends on one, to the host."""
    graph = FakeGraph(Callable)
    if waits(operation):
        assert operation in LAUNCHED, "on a GPU it would wait in each step"
        return
    graph.record(lambda: call(plain_torch, operation))
