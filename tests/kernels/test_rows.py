"""What keeps the rows' state on the device: spans, inputs of a step, sampled tokens, and copies of blocks."""

import random
from types import ModuleType

import pytest
import torch
from kernels.harness import ALL, COMPILED, DEVICE, POISON, int32, poisoned

from aioengine.kernels.rows import put_spans as put_spans_module
from aioengine.kernels.rows.append_tokens import BLOCK as SAMPLES_A_PROGRAM
from aioengine.kernels.sampling.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow
from aioengine.kernels.torch import layers as reference


def numbers(*shape: int, seed: int = 0, high: int = 1 << 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, dtype=torch.int32).to(DEVICE)


# put_spans


@COMPILED
@pytest.mark.parametrize("seed", range(5))
def test_spans_go_where_they_belong(ops: ModuleType, seed: int) -> None:
    choose = random.Random(seed)
    words = numbers(2000, seed=seed)
    spans = []
    for line in range(6):
        end = 0
        while end < 1500:
            column = end + choose.choice([0, 1, 5])
            end = column + choose.choice([0, 1, 2, 7, 123, 600, 1100])
            spans.append([line, column, choose.randrange(2000 - (end - column) + 1), end - column])
        spans.append([-1, 0, 0, choose.choice([0, 5])])
    choose.shuffle(spans)
    computed, expected = poisoned(6, 2700), poisoned(6, 2700)
    ops.put_spans(computed, int32(spans), words)
    reference.put_spans(expected, int32(spans), words)
    assert torch.equal(computed, expected)
    assert (computed == POISON).any()


@ALL
def test_programs_take_turns_at_a_long_span(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_spans_module, "MAX_PROGRAMS_A_SPAN", 2)
    words, target = numbers(5000), poisoned(1, 5001)
    ops.put_spans(target, int32([[0, 1, 3, 4990]]), words)
    assert torch.equal(target[0, 1:4991], words[3:4993])
    assert (target[0, [0, *range(4991, 5001)]] == POISON).all()


@ALL
def test_spans_may_begin_anywhere_in_a_larger_tensor(ops: ModuleType) -> None:
    news = numbers(40)
    news[3:11] = int32([1, 2, 0, 4, 0, 0, 4, 1])
    target = poisoned(2, 7)
    ops.put_spans(target, news[3:11].view(2, 4), news[11:])
    expected = poisoned(2, 7)
    expected[1, 2:6], expected[0, 0] = news[11:15], news[15]
    assert torch.equal(target, expected)


# gather_tokens


@COMPILED
@pytest.mark.parametrize(("block_size", "num_groups"), [(1, 1), (3, 1), (16, 1), (16, 3)])
@pytest.mark.parametrize(
    "counts",
    [[1], [1] * 23, [7], [300], [123, 1, 1, 7, 520, 0, 1]],
    ids=["one decode", "decodes", "chunk", "long chunk", "mixed"],
)
def test_tokens_positions_and_slots_of_a_step(
    ops: ModuleType, counts: list[int], block_size: int, num_groups: int
) -> None:
    choose = random.Random(len(counts) * 100 + block_size)
    num_rows = len(counts) + 3
    history = numbers(num_rows, 700, high=128256)
    tables = numbers(num_groups * num_rows, -(-700 // block_size), seed=1, high=100_000)
    tables = tables.view(num_groups, num_rows, -1)
    rows, num_tokens = [], 0
    for row, count in zip(choose.sample(range(num_rows), len(counts)), counts, strict=True):
        is_padding = choose.random() < 0.2
        rows.append([-1 if is_padding else row, choose.randrange(700 - count + 1), num_tokens, count])
        num_tokens += count
    choose.shuffle(rows)
    computed = ops.gather_tokens(int32(rows), history, tables, block_size, num_tokens)
    expected = reference.gather_tokens(int32(rows), history, tables, block_size, num_tokens)
    for ours, theirs in zip(computed, expected, strict=True):
        assert torch.equal(ours, theirs)
    for each in (ops, reference):
        row_of_token = each.rows_of_tokens(int32(rows), num_rows, num_tokens).tolist()
        for row, _, first, count in rows:
            assert row_of_token[first : first + count] == [row if row >= 0 else num_rows] * count


@ALL
def test_padding_is_token_0_at_position_0_without_a_slot(ops: ModuleType) -> None:
    rows = int32([[0, 1, 0, 2], [-1, 3, 2, 2], [0, 3, 4, 1]])
    token_ids, positions, slots = ops.gather_tokens(rows, int32([[5, 6, 7, 8]]), int32([[[9, 4]], [[1, 3]]]), 2, 5)
    assert token_ids.tolist() == [6, 7, 0, 0, 8]
    assert positions.tolist() == [1, 2, 0, 0, 3]
    assert slots.tolist() == [[19, 8, -1, -1, 9], [3, 6, -1, -1, 7]]


# append_tokens


@COMPILED
@pytest.mark.parametrize("num_samples", [1, 7, 123, SAMPLES_A_PROGRAM + 1])
def test_tokens_go_to_the_ends_of_their_rows(ops: ModuleType, num_samples: int) -> None:
    choose = random.Random(num_samples)
    samples = numbers(num_samples, SAMPLE_WORDS)
    rows = choose.sample(range(2 * num_samples), num_samples)
    for sample, row in enumerate(rows):
        samples[sample, SampleRow.LOGITS_ROW] = choose.choice([-1, 0, sample])
        samples[sample, SampleRow.ROW] = row
        samples[sample, SampleRow.END] = choose.randrange(9)
        samples[sample, SampleRow.FLAGS] = choose.choice(
            [0, SampleFlag.LOGPROBS, SampleFlag.FIRST, SampleFlag.FIRST | 6]
        )
    token_ids = numbers(num_samples, seed=1)
    computed, expected = poisoned(2 * num_samples, 9), poisoned(2 * num_samples, 9)
    ops.append_tokens(computed, samples, token_ids)
    reference.append_tokens(expected, samples, token_ids)
    assert torch.equal(computed, expected)


@ALL
def test_only_the_first_sample_of_a_row_of_logits_counts(ops: ModuleType) -> None:
    samples = torch.zeros((3, SAMPLE_WORDS), dtype=torch.int32, device=DEVICE)
    samples[:, SampleRow.END] = 2
    samples[:, SampleRow.LOGITS_ROW] = int32([0, 0, -1])
    samples[:, SampleRow.FLAGS] = int32([SampleFlag.FIRST | SampleFlag.LOGPROBS, SampleFlag.LOGPROBS, SampleFlag.FIRST])
    history = poisoned(1, 4)
    ops.append_tokens(history, samples, int32([11, 12, 13]))
    assert history.tolist() == [[POISON, POISON, 11, POISON]]


# copy_blocks


@COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block", [(4, 2, 16), (16, 4, 40), (1, 1, 1), (3, 1, 7)], ids=str)
def test_blocks_are_copied_in_all_caches(ops: ModuleType, block: tuple[int, int, int], dtype: torch.dtype) -> None:
    shape = (3, 11, *block[:-1], block[-1] * dtype.itemsize)
    caches = numbers(*shape, high=256).to(torch.uint8).view(dtype)
    copied_from, copied_to = int32([7, 2, -1, 0, -1, 7]), int32([3, 10, 5, -1, -1, 1])
    before, expected = caches.clone(), caches.clone()
    ops.copy_blocks(caches, copied_from, copied_to)
    reference.copy_blocks(expected, copied_from, copied_to)
    assert torch.equal(caches.view(torch.uint8), expected.view(torch.uint8))
    changed = (caches.view(torch.uint8) != before.view(torch.uint8)).flatten(2).any(2)
    assert set(changed.nonzero()[:, 1].tolist()) <= {1, 3, 10}
    for source, target in ((7, 3), (2, 10), (7, 1)):
        assert torch.equal(caches[:, target].view(torch.uint8), before[:, source].view(torch.uint8))


@COMPILED
def test_caches_may_begin_at_any_number(ops: ModuleType) -> None:
    memory = numbers(1 + 2 * 4 * 8).half()
    caches = memory[1:].view(2, 4, 1, 1, 8)
    expected = caches.clone()
    ops.copy_blocks(caches, int32([0]), int32([2]))
    reference.copy_blocks(expected, int32([0]), int32([2]))
    assert torch.equal(caches, expected)
