"""What keeps the rows' state on the device: spans, inputs of a step, sampled tokens, and copies of blocks."""

import os
import random

import pytest
import torch

from aioengine.errors import InternalError
from aioengine.kernels.rows import put_spans as put_spans_module
from aioengine.kernels.rows.append_tokens import BLOCK as SAMPLES_A_PROGRAM
from aioengine.kernels.rows.append_tokens import append_tokens
from aioengine.kernels.rows.copy_blocks import copy_blocks
from aioengine.kernels.rows.gather_tokens import gather_tokens
from aioengine.kernels.rows.put_spans import put_spans
from aioengine.kernels.sampling.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow
from aioengine.kernels.torch import layers as reference_decoder

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
POISON = 0x7F7F7F7F


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.int32, device=DEVICE)


def numbers(*shape: int, seed: int = 0, high: int = 1 << 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, dtype=torch.int32).to(DEVICE)


# put_spans


@pytest.mark.parametrize("seed", range(5))
def test_spans_go_where_they_belong(seed: int) -> None:
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
    put_spans(computed, int32(spans), words)
    reference_decoder.put_spans(expected, int32(spans), words)
    assert torch.equal(computed, expected)
    assert (computed == POISON).any()


def test_programs_take_turns_at_a_long_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_spans_module, "MAX_PROGRAMS_A_SPAN", 2)
    words, target = numbers(5000), poisoned(1, 5001)
    put_spans(target, int32([[0, 1, 3, 4990]]), words)
    assert torch.equal(target[0, 1:4991], words[3:4993])
    assert (target[0, [0, *range(4991, 5001)]] == POISON).all()


def test_spans_may_begin_anywhere_in_a_larger_tensor() -> None:
    news = numbers(40)
    news[3:11] = int32([1, 2, 0, 4, 0, 0, 4, 1])
    target = poisoned(2, 7)
    put_spans(target, news[3:11].view(2, 4), news[11:])
    expected = poisoned(2, 7)
    expected[1, 2:6], expected[0, 0] = news[11:15], news[15]
    assert torch.equal(target, expected)


def test_no_spans_are_no_launch() -> None:
    target = poisoned(2, 3)
    put_spans(target, int32([]).view(0, 4), int32([1]))
    put_spans(target, int32([[0, 0, 0, 0]]), int32([]))
    assert (target == POISON).all()


def test_spans_that_do_not_fit_are_refused() -> None:
    target, spans, words = poisoned(2, 3), int32([[0, 0, 0, 1]]), int32([1])
    for message, arguments in [
        ("target", (target.long(), spans, words)),
        ("target", (target[0], spans, words)),
        ("target has strides", (target.T, spans, words)),
        ("spans", (target, spans[:, :3], words)),
        ("spans", (target, spans.long(), words)),
        ("spans has strides", (target, poisoned(2, 8)[:, :4], words)),
        ("words", (target, spans, words.float())),
        ("words", (target, spans, spans)),
        ("meta", (target, spans, words.to("meta"))),
    ]:
        with pytest.raises(InternalError, match=message):
            put_spans(*arguments)


# gather_tokens


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(
    "counts",
    [[1], [1] * 23, [7], [300], [123, 1, 1, 7, 520, 0, 1]],
    ids=["one decode", "decodes", "chunk", "long chunk", "mixed"],
)
def test_tokens_positions_and_slots_of_a_step(counts: list[int], block_size: int) -> None:
    choose = random.Random(len(counts) * 100 + block_size)
    num_rows = len(counts) + 3
    history = numbers(num_rows, 700, high=128256)
    tables = numbers(num_rows, -(-700 // block_size), seed=1, high=100_000)
    rows, num_tokens = [], 0
    for row, count in zip(choose.sample(range(num_rows), len(counts)), counts, strict=True):
        is_padding = choose.random() < 0.2
        rows.append([-1 if is_padding else row, choose.randrange(700 - count + 1), num_tokens, count])
        num_tokens += count
    choose.shuffle(rows)
    computed = gather_tokens(int32(rows), history, tables, block_size, num_tokens)
    expected = reference_decoder.gather_tokens(int32(rows), history, tables, block_size, num_tokens)
    for ours, theirs in zip(computed, expected, strict=True):
        assert ours.shape == (num_tokens,)
        assert torch.equal(ours, theirs)


def test_padding_is_token_0_at_position_0_without_a_slot() -> None:
    history, tables = int32([[5, 6, 7, 8]]), int32([[9, 4]])
    for gather in (gather_tokens, reference_decoder.gather_tokens):
        rows = int32([[0, 1, 0, 2], [-1, 3, 2, 2], [0, 3, 4, 1]])
        token_ids, positions, slots = gather(rows, history, tables, 2, 5)
        assert token_ids.tolist() == [6, 7, 0, 0, 8]
        assert positions.tolist() == [1, 2, 0, 0, 3]
        assert slots.tolist() == [19, 8, -1, -1, 9]


def test_no_tokens_are_no_launch() -> None:
    history, tables = poisoned(2, 3), poisoned(2, 3)
    gathered = gather_tokens(int32([]).view(0, 4), history, tables, 16, 0)
    assert [part.shape for part in gathered] == [(0,)] * 3
    gathered = gather_tokens(int32([[0, 0, 0, 0]]), history, tables, 16, 0)
    assert [part.shape for part in gathered] == [(0,)] * 3


def test_tables_that_do_not_fit_are_refused() -> None:
    rows, history, tables = int32([[0, 0, 0, 1]]), poisoned(2, 4), poisoned(2, 3)
    for message, arguments in [
        ("rows", (rows[0], history, tables, 2, 1)),
        ("rows", (rows.long(), history, tables, 2, 1)),
        ("history", (rows, history.long(), tables, 2, 1)),
        ("history has strides", (rows, poisoned(2, 8)[:, :4], tables, 2, 1)),
        ("block_tables has shape", (rows, history, tables[:1], 2, 1)),
        ("block_tables has strides", (rows, history, poisoned(3, 2).T, 2, 1)),
        ("blocks of 0", (rows, history, tables, 0, 1)),
        ("0 rows of 1 tokens", (rows[:0], history, tables, 2, 1)),
        ("rows of -1 tokens", (rows, history, tables, 2, -1)),
        ("meta", (rows, history, tables.to("meta"), 2, 1)),
    ]:
        with pytest.raises(InternalError, match=message):
            gather_tokens(*arguments)


# append_tokens


@pytest.mark.parametrize("num_samples", [1, 7, 123, SAMPLES_A_PROGRAM + 1])
def test_tokens_go_to_the_ends_of_their_rows(num_samples: int) -> None:
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
    append_tokens(computed, samples, token_ids)
    reference_decoder.append_tokens(expected, samples, token_ids)
    assert torch.equal(computed, expected)


def test_only_the_first_sample_of_a_row_of_logits_counts() -> None:
    samples = torch.zeros((3, SAMPLE_WORDS), dtype=torch.int32, device=DEVICE)
    samples[:, SampleRow.END] = 2
    samples[:, SampleRow.LOGITS_ROW] = int32([0, 0, -1])
    samples[:, SampleRow.FLAGS] = int32([SampleFlag.FIRST | SampleFlag.LOGPROBS, SampleFlag.LOGPROBS, SampleFlag.FIRST])
    for append in (append_tokens, reference_decoder.append_tokens):
        history = poisoned(1, 4)
        append(history, samples, int32([11, 12, 13]))
        assert history.tolist() == [[POISON, POISON, 11, POISON]]


def test_no_samples_are_no_launch() -> None:
    history = poisoned(1, 4)
    append_tokens(history, poisoned(0, SAMPLE_WORDS), poisoned(0))
    assert (history == POISON).all()


def test_samples_that_do_not_fit_are_refused() -> None:
    history, samples, token_ids = poisoned(2, 4), poisoned(3, SAMPLE_WORDS), poisoned(3)
    for message, arguments in [
        ("history", (history[0], samples, token_ids)),
        ("history has strides", (poisoned(4, 2).T, samples, token_ids)),
        ("samples has shape", (history, samples[:, :15], token_ids)),
        ("samples", (history, samples.float(), token_ids)),
        ("token_ids has shape", (history, samples, token_ids[:2])),
        ("token_ids", (history, samples, token_ids.long())),
        ("meta", (history, samples, token_ids.to("meta"))),
    ]:
        with pytest.raises(InternalError, match=message):
            append_tokens(*arguments)


# copy_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block", [(4, 2, 16), (16, 4, 40), (1, 1, 1), (3, 1, 7)], ids=str)
def test_blocks_are_copied_in_all_caches(block: tuple[int, int, int], dtype: torch.dtype) -> None:
    shape = (3, 11, *block[:-1], block[-1] * dtype.itemsize)
    caches = numbers(*shape, high=256).to(torch.uint8).view(dtype)
    copied_from, copied_to = int32([7, 2, -1, 0, -1, 7]), int32([3, 10, 5, -1, -1, 1])
    before, expected = caches.clone(), caches.clone()
    copy_blocks(caches, copied_from, copied_to)
    reference_decoder.copy_blocks(expected, copied_from, copied_to)
    assert torch.equal(caches.view(torch.uint8), expected.view(torch.uint8))
    changed = (caches.view(torch.uint8) != before.view(torch.uint8)).flatten(2).any(2)
    assert set(changed.nonzero()[:, 1].tolist()) <= {1, 3, 10}
    for source, target in ((7, 3), (2, 10), (7, 1)):
        assert torch.equal(caches[:, target].view(torch.uint8), before[:, source].view(torch.uint8))


def test_caches_may_begin_at_any_number() -> None:
    memory = numbers(1 + 2 * 4 * 8).half()
    caches = memory[1:].view(2, 4, 1, 1, 8)
    expected = caches.clone()
    copy_blocks(caches, int32([0]), int32([2]))
    reference_decoder.copy_blocks(expected, int32([0]), int32([2]))
    assert torch.equal(caches, expected)


def test_no_copies_are_no_launch() -> None:
    caches = torch.ones(2, 3, 1, 1, 4, device=DEVICE)
    copy_blocks(caches, poisoned(0), poisoned(0))
    copy_blocks(caches[:, :, :0].contiguous(), int32([0]), int32([1]))
    assert (caches == 1).all()


def test_copies_that_do_not_fit_are_refused() -> None:
    caches, blocks = torch.ones(2, 3, 1, 1, 4, device=DEVICE), int32([0])
    many = torch.ones(65536, 2, 1, 1, 1, device=DEVICE)
    for message, arguments in [
        ("caches has shape", (caches[0], blocks, blocks)),
        ("caches has strides", (caches.transpose(0, 1), blocks, blocks)),
        ("65536 caches", (many, blocks, blocks)),
        ("copied_from", (caches, blocks.long(), blocks)),
        ("copied_to has shape", (caches, blocks, int32([1, 2]))),
        ("copied_to has strides", (caches, int32([1, 2]), poisoned(4)[::2])),
        ("meta", (caches, blocks, blocks.to("meta"))),
    ]:
        with pytest.raises(InternalError, match=message):
            copy_blocks(*arguments)
