"""What the host makes of plans for a GPU: words, tables, sizes; and what it reads out of the words that come back."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from executor.plans import PlanWriter

from aioengine.executor import graphs as graphs_module
from aioengine.executor.gpu_batch import NUM_TOP_SIZES, PADDING_SAMPLE, GpuBatch, GpuStep
from aioengine.executor.graphs import MAX_SIZE, DecodeGraphs, GraphKey, default_sizes
from aioengine.executor.launched import make_result
from aioengine.executor.step_words import SECTIONS, WORDS_A_ROW, ExtraWords, FixedWords, Span, TableSpans
from aioengine.kernels.sampling.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow, Status, param_of
from aioengine.kernels.torch import operations
from aioengine.sampler.on_device import Features
from aioengine.sampler.outputs import DeviceOutputs, OutputSizes
from aioengine.sampler.rows import RowRules
from aioengine.sampler.rule_table import ALWAYS, RuleSizes, RuleTable, RuleTensors, pack_bits
from aioengine.sampling_params import ROW_PARAMS
from aioengine.scheduler.plan import RowSampling, StepPlan
from doubles.fake_accelerator import FakeAccelerator

POISON = 0x7F7F7F7F
MAX_ROWS = 6
BLOCK_SIZE = 4
VOCAB_SIZE = 50


class Tables:
    """A batch, and the tables of the device as its words make them."""

    def __init__(self, *, sizes: tuple[int, ...] = (), tile: int = 8) -> None:
        self.batch = GpuBatch(max_num_seqs=MAX_ROWS, vocab_size=VOCAB_SIZE, tile=tile)
        self.history = torch.full((MAX_ROWS, 65), POISON, dtype=torch.int32)
        self.blocks = torch.full((MAX_ROWS, 16), POISON, dtype=torch.int32)
        self.masks = torch.zeros(8, 2, dtype=torch.int32)
        self.writer = PlanWriter(96, BLOCK_SIZE)
        self.size_for = DecodeGraphs(FakeAccelerator(), sizes).size_for

    def step(self, plan: StepPlan) -> tuple[GpuStep, int | None]:
        """Take in a plan, over words that are rubbish; ``self.fixed`` and ``self.words`` are what it wrote."""
        words = np.full(MAX_ROWS * WORDS_A_ROW, POISON, np.int32)
        self.fixed = FixedWords.of(words, MAX_ROWS)
        extra = ExtraWords()
        deltas = self.batch.apply(plan, self.fixed, extra)
        step, size = self.batch.step(plan, self.fixed, extra, self.size_for)
        step.deltas = deltas
        self.words = np.full(extra.num_words + 7, POISON, np.int32)
        if extra.num_words:
            extra.write(self.words)
        assert (self.words[extra.num_words :] == POISON).all()
        tables = ((deltas.tokens, self.history), (deltas.blocks, self.blocks), (deltas.masks, self.masks))
        for spans, table in tables:
            if spans is not None:
                operations.put_spans(table, self.get(spans).view(-1, 4), torch.from_numpy(self.words))
        fixed = self.fixed
        operations.put_spans(self.blocks, torch.from_numpy(fixed.grown), torch.from_numpy(fixed.grown_blocks))
        return step, size

    def get(self, span: Span) -> torch.Tensor:
        return torch.from_numpy(span.of(self.words))

    def check_blocks(self) -> None:
        for row, state in self.writer.rows.items():
            assert self.blocks[row, : len(state.block_ids)].tolist() == state.block_ids


# Words


def test_the_fixed_sections_cover_all_words_and_share_none() -> None:
    words = np.zeros(5 * WORDS_A_ROW, np.int32)
    fixed = FixedWords.of(words, 5)
    for number, (section, width) in enumerate(zip(fixed, SECTIONS, strict=True), start=1):
        assert section.shape == ((5,) if width == 1 else (5, width))
        assert np.shares_memory(section, words)
        assert not section.any()
        section[...] = number
    assert words.all()
    on_device = FixedWords.of(torch.from_numpy(words), 5)
    assert all((one.numpy() == other).all() for one, other in zip(on_device, fixed, strict=True))


def test_spans_name_the_words_that_were_added() -> None:
    extra = ExtraWords()
    table = TableSpans(extra)
    assert table.end() is None
    table.add(3, 1, np.array([7, 8, 9], np.int32))
    table.add(4, 0, np.zeros(0, np.int32))
    span = extra.add(np.array([[1, 2], [3, 4]], np.int64).astype(np.int32))
    table.add(5, 2, np.array([6], np.int32))
    ends = table.end()
    words = np.full(extra.num_words, POISON, np.int32)
    extra.write(words)
    assert span.of(words).tolist() == [1, 2, 3, 4]
    assert ends is not None
    assert ends.of(words).reshape(-1, 4).tolist() == [[3, 1, 0, 3], [5, 2, 8, 1]], "each at a multiple of 16 bytes"


def test_outputs_cover_all_words_and_share_none() -> None:
    sizes = OutputSizes(num_samples=3, num_top=2, num_extra=4, num_prompt=2, num_prompt_top=1)
    words = np.zeros(sizes.num_words + 5, np.int32)
    out = DeviceOutputs.of(words[: sizes.num_words], sizes)
    sections = [out.token_ids, out.status, *out.sampled, *out.extra, *out.prompt]
    for number, section in enumerate(sections):
        assert not section.any()
        section[...] = number + 1
        assert not section.size or (section.ctypes.data - words.ctypes.data) % 16 == 0
    assert sum(section.size for section in sections) <= sizes.num_words < sum(section.size + 4 for section in sections)
    assert int((words != 0).sum()) == sum(section.size for section in sections)
    assert not words[sizes.num_words :].any()
    on_device = DeviceOutputs.of(torch.from_numpy(words), sizes)
    for section, other in zip(
        sections, [*on_device[:2], *on_device.sampled, *on_device.extra, *on_device.prompt], strict=True
    ):
        assert (section == other.numpy()).all()
    assert out.sampled.top_ids.shape == out.sampled.top_logprobs.shape == (3, 2)
    assert out.prompt.top_ids.shape == (2, 1)
    assert OutputSizes(num_samples=4).num_words == 8
    assert OutputSizes(num_samples=4, num_top=0).num_words == 20
    assert OutputSizes(num_samples=0).num_words == 0


# Rows


def test_rows_come_with_their_tokens_and_blocks_and_grow() -> None:
    tables = Tables()
    writer = tables.writer
    writer.add(4, [1, 2, 3, 4, 5])
    writer.add(1, [9, 8, 7, 6])
    step, _ = tables.step(writer.plan({4: 3, 1: None}))
    assert tables.history[4, :6].tolist() == [1, 2, 3, 4, 5, POISON]
    assert tables.history[1, :5].tolist() == [9, 8, 7, 6, POISON]
    tables.check_blocks()
    assert step.num_decodes == 0
    assert step.logits_tokens is not None
    assert tables.get(step.logits_tokens).tolist() == [6], "the last token of row 1"
    for _ in range(12):
        step, _ = tables.step(writer.plan())
        tables.check_blocks()
    assert step.extra.num_words == 0, "a steady step brings the fixed words alone"
    writer.remove(4)
    writer.add(4, [3] * 17)
    tables.step(writer.plan())
    tables.check_blocks()


@pytest.mark.parametrize("num_blocks", [1, 3, MAX_ROWS, MAX_ROWS + 3])
def test_a_row_may_get_several_blocks_at_once_beside_others(num_blocks: int) -> None:
    tables = Tables()
    tables.writer.add(2, [5])
    tables.writer.add(0, [5] * 5)
    plan = tables.writer.plan()
    tables.step(plan)
    grown = [(2, 60 + n) for n in range(num_blocks)]
    grown.insert(num_blocks // 2, (0, 90))
    plan = tables.writer.plan()
    plan = msgspec.structs.replace(
        plan,
        grown_rows=np.array([row for row, _ in grown], np.int32),
        grown_blocks=np.array([block for _, block in grown], np.int32),
    )
    first = {row: len(state.block_ids) for row, state in tables.writer.rows.items()}
    tables.step(plan)
    assert tables.blocks[2, first[2] : first[2] + num_blocks].tolist() == [60 + n for n in range(num_blocks)]
    assert tables.blocks[0, first[0]] == 90


def test_a_step_of_all_kinds_covers_each_token_once() -> None:
    rng = np.random.default_rng(6)
    for _ in range(40):
        tables = Tables(tile=int(rng.integers(1, 9)))
        writer = tables.writer
        rows = rng.permutation(MAX_ROWS)[: rng.integers(1, MAX_ROWS + 1)].tolist()
        for row in rows:
            writer.add(row, rng.integers(0, VOCAB_SIZE, rng.integers(1, 30)).tolist())
        tables.step(writer.plan({row: int(rng.integers(1, writer.rows[row].num_known + 1)) for row in rows}))
        for row in rows:
            state = writer.rows[row]
            tables.history[row, len(state.token_ids) - (state.token_ids[-1] is None) :] = 0
        chosen = rng.permutation(rows)
        plan = writer.plan({int(row): None for row in chosen})
        step, _ = tables.step(plan)
        ids, positions, slots = operations.gather_tokens(
            torch.from_numpy(tables.fixed.rows[: len(plan.rows)]),
            tables.history, tables.blocks, BLOCK_SIZE, step.num_tokens,
        )  # fmt: skip
        where = [
            (int(row), int(start) + n)
            for row, start, count in zip(plan.rows, plan.starts, plan.num_tokens, strict=True)
            for n in range(count)
        ]
        assert positions.tolist() == [position for _, position in where]
        assert ids.tolist() == [writer.rows[row].token_ids[position] or 0 for row, position in where]
        blocks = [writer.rows[row].block_ids[position // BLOCK_SIZE] for row, position in where]
        assert slots.tolist() == [
            block * BLOCK_SIZE + position % BLOCK_SIZE for block, (_, position) in zip(blocks, where, strict=True)
        ]
        covered = []
        for row, index, context in tables.fixed.decodes[: step.num_decodes].tolist():
            covered.append(index)
            assert where[index] == (row, context - 1)
        tiles = tables.get(step.tiles).view(-1, 4).tolist() if step.tiles is not None else []
        for row, first, count, position in tiles:
            assert 1 <= count <= tables.batch._tile
            covered += range(first, first + count)
            assert where[first : first + count] == [(row, position + n) for n in range(count)]
        assert sorted(covered) == list(range(step.num_tokens))
        assert step.max_context == max(position + 1 for _, position in where)


def test_a_step_for_a_graph_is_padded_with_rows_that_do_nothing() -> None:
    tables = Tables(sizes=(1, 2, 4, 6))
    writer = tables.writer
    for row in (5, 0, 3, 2):
        writer.add(row, [row, 1, 2])
    step, size = tables.step(writer.plan())
    assert size is None
    assert not step.is_plain
    writer.remove(0)
    plan = writer.plan()
    step, size = tables.step(plan)
    assert (size, step.num_decodes, step.sizes.num_samples) == (4, 3, 4)
    fixed = tables.fixed
    assert fixed.rows[3].tolist() == [-1, 0, 3, 1]
    assert fixed.decodes[3].tolist() == [-1, 3, 0]
    assert fixed.samples[3].tolist() == PADDING_SAMPLE.tolist()
    assert fixed.samples[:3, SampleRow.LOGITS_ROW].tolist() == [0, 1, 2]
    assert fixed.samples[:3, SampleRow.ROW].tolist() == plan.rows.tolist()
    assert (fixed.samples[:3, SampleRow.FLAGS] == SampleFlag.FIRST).all()
    assert step.logits_tokens is None
    # A row of one token that samples nothing keeps its words, and its sample is padding.
    writer.add(1, [4, 4])
    step, size = tables.step(writer.plan({5: None, 1: 1, 3: None}))
    assert size == 4
    assert tables.fixed.samples[:2, SampleRow.LOGITS_ROW].tolist() == [0, 2]
    assert (tables.fixed.samples[2:4, SampleRow.LOGITS_ROW] == -1).all()
    assert step.row_of_sample.tolist() == [0, 2]
    assert tables.step(writer.plan({}))[1] is None


@pytest.mark.parametrize(
    "sampling",
    [
        {"prompt_logprobs": 1},
        {"logprobs": 0, "logprob_token_ids": (3,)},
        {"logits_processors": (lambda logits, rows: None,)},
        {"num_choices": 2, "temperature": 1.0},
        {"logprobs": 21},
    ],
)
def test_what_only_few_steps_need_is_in_no_graph(sampling: dict[str, Any]) -> None:
    tables = Tables(sizes=(1, 2, 4, 6))
    tables.writer.add(0, [1, 2], **sampling)
    tables.writer.add(1, [3])
    tables.step(tables.writer.plan({0: 1}))
    step, size = tables.step(tables.writer.plan())
    assert size == (2 if "prompt_logprobs" in sampling else None)  # the last prompt token predicts no other
    del step
    size = tables.step(tables.writer.plan())[1]
    assert size == (2 if sampling.keys() & {"num_choices", "prompt_logprobs"} else None)


def test_features_are_those_of_the_rows_that_sample() -> None:
    tables = Tables(sizes=(1, 2, 4, 6))
    writer = tables.writer
    writer.add(0, [1])
    writer.add(1, [1], temperature=0.5, top_k=3)
    writer.add(2, [1], allowed_token_ids=(3,), repetition_penalty=2.0, bad_words=((1, 2),), logprobs=2)
    writer.add(3, [1], stop_ids=(4,), min_tokens=2, top_p=0.5, logprobs=0)
    writer.add(4, [1] * 3, logprobs=6, temperature=1.0)

    def features(*rows: int) -> Features:
        return tables.step(writer.plan(dict.fromkeys(rows)))[0].features

    assert features(0) == Features(is_greedy=True)
    assert features(1) == Features(has_filters=True)
    assert features(0, 1) == Features(has_filters=True)
    rules = RuleSizes(128, 64, 64)
    assert features(2) == Features(is_greedy=True, has_masks=True, is_penalised=True, rules=rules, num_top=5)
    assert features(3) == Features(is_greedy=True, rules=rules, num_top=0), "a greedy row has no filters"
    assert features(3).rules == rules
    assert features(3).rules == RuleSizes(), "min_tokens are there"
    assert features(3, 4).num_top == 20
    assert 20 in NUM_TOP_SIZES


def test_a_sample_says_how_its_row_is_sampled() -> None:
    tables = Tables()
    seed = -(2**62) + 12345
    params = {name: kind(place + 2) for place, (name, kind) in enumerate(ROW_PARAMS.items())}
    tables.writer.add(3, [1, 2, 3], num_prompt_tokens=2, seed=seed, choice=5, logprobs=1, num_choices=1, **params)
    tables.step(tables.writer.plan())
    line = tables.fixed.samples[0]
    expected = {
        SampleRow.LOGITS_ROW: 0,
        SampleRow.ROW: 3,
        SampleRow.END: 3,
        SampleRow.OUTPUT_POSITION: 1,
        SampleRow.FLAGS: 3,
        SampleRow.CHOICE: 5,
    }
    assert {sample: line[sample] for sample in expected} == expected
    assert line[SampleRow.SEED_LOW : SampleRow.SEED_HIGH + 1].copy().view(np.int64)[0] == seed
    assert line[SampleRow.MASK] == -1
    assert {name: param_of(torch.from_numpy(line), name).item() for name in ROW_PARAMS} == params


def test_choices_that_begin_have_a_sample_each_of_one_row_of_logits() -> None:
    tables = Tables()
    tables.writer.add(0, [1, 2], temperature=1.0, num_choices=MAX_ROWS + 2, choice=3, bad_words=((4,),))
    tables.writer.add(1, [1], bad_words=((4,),))
    step, size = tables.step(tables.writer.plan({1: None, 0: None}))
    assert size is None
    assert step.samples is not None, "more than there are rows"
    samples = tables.get(step.samples).view(-1, SAMPLE_WORDS)
    assert samples[:, SampleRow.LOGITS_ROW].tolist() == [0] + [1] * (MAX_ROWS + 2)
    assert samples[:, SampleRow.CHOICE].tolist() == [0, *range(3, 3 + MAX_ROWS + 2)]
    assert samples[:, SampleRow.FLAGS].tolist() == [1, 1] + [0] * (MAX_ROWS + 1)
    assert step.row_of_sample.tolist() == samples[:, SampleRow.LOGITS_ROW].tolist()
    assert tables.fixed.sample_of_row.tolist() == [1, 0, -1, -1, -1, -1]
    step, _ = tables.step(tables.writer.plan())
    assert step.samples is None
    assert len(step.row_of_sample) == 2


def test_bitmasks_are_used_again_and_only_by_one_row_at_a_time() -> None:
    tables = Tables()
    writer = tables.writer

    def masks() -> dict[int, list[int]]:
        """By row, what its mask allows."""
        tables.step(writer.plan())
        found = {}
        for line in tables.fixed.samples[: len(writer.rows)]:
            if line[SampleRow.MASK] >= 0:
                bits = np.unpackbits(tables.masks[int(line[SampleRow.MASK])].numpy().view(np.uint8), bitorder="little")
                found[int(line[SampleRow.ROW])] = np.flatnonzero(bits).tolist()
        return found

    writer.add(0, [1], allowed_token_ids=(0, 31, 32, 49, 50, 2**31 - 1))
    writer.add(1, [1], allowed_token_ids=(7,))
    writer.add(2, [1])
    assert masks() == {0: [0, 31, 32, 49], 1: [7]}
    writer.remove(0)
    writer.add(0, [1], allowed_token_ids=(9, 10))
    writer.add(3, [1], allowed_token_ids=(11,))
    assert masks() == {0: [9, 10], 1: [7], 3: [11]}
    assert tables.batch.num_masks == 3
    for row in (0, 1, 3):
        writer.remove(row)
    assert masks() == {}
    for row in (3, 0, 1):
        writer.add(row, [1], allowed_token_ids=(row + 20,))
    assert masks() == {0: [20], 1: [21], 3: [23]}
    assert tables.batch.num_masks == 3


# Rules


def rules_of(**fields: Any) -> RowRules:
    return RowRules.of(RowSampling(**fields))


def test_tables_hold_each_rows_edits_and_padding() -> None:
    table = RuleTable(VOCAB_SIZE)
    assert not table.add(0, rules_of(), 0)
    assert not table.is_changed
    assert not table.add(1, rules_of(stop_ids=(3, 99)), 4), "only for a while"
    assert table.add(2, rules_of(bad_words=((7,), (8, 9, 10), (60, 11), (5, 60)), logit_bias=((12, 1.5), (50, 2.0))), 0)
    assert table.is_changed
    tensors = RuleTensors.of(torch.from_numpy(table.words()), table.sizes)
    assert not table.is_changed
    assert table.sizes == RuleSizes(128, 64, 64)
    num_words = table.sizes.num_words
    edits = [
        (row, token, value, until)
        for row, token, value, until in zip(*(column.tolist() for column in tensors[:4]), strict=True)
        if row >= 0
    ]
    always = int(ALWAYS)
    assert edits[:2] == [(2, 10, 0.0, always), (2, 11, 0.0, always)], "values are the device's to find"
    assert sorted(edits[2:]) == [(1, 3, -np.inf, 4), (2, 7, -np.inf, always), (2, 12, 1.5, always)]
    assert all(row == -1 for row in tensors.edit_rows[2:num_words].tolist())
    assert tensors.word_rows.tolist() == [2, 2] + [-1] * (num_words - 2)
    assert tensors.word_offsets.tolist()[:4] == [0, 2, 3, 3]
    assert tensors.word_ids.tolist()[:3] == [8, 9, 60]
    table.remove(2)
    table.remove(5)
    words = table.words()
    assert table.sizes == RuleSizes(64, 0, 0)
    assert len(words) == table.sizes.total
    table.remove(1)
    assert len(table.words()) == RuleSizes().total == 1


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_tables_grow_by_powers_of_two(count: int) -> None:
    table = RuleTable(1000)
    table.add(0, rules_of(bad_words=tuple((n, n + 1) for n in range(count)), stop_ids=(1,)), 5)
    words = table.words()
    size = max(64, 1 << (count - 1).bit_length())
    assert table.sizes == RuleSizes(max(64, 1 << size.bit_length()), size, size)
    tensors = RuleTensors.of(torch.from_numpy(words), table.sizes)
    assert tensors.word_offsets.tolist() == [*range(count), *[count] * (size + 1 - count)]
    assert int((tensors.edit_rows >= 0).sum()) == count + 1


def test_bits_say_which_tokens_are_allowed() -> None:
    for vocab in (1, 31, 32, 33, 97):
        ids = np.array([0, vocab - 1, vocab, vocab + 40], np.int64)
        bits = np.unpackbits(pack_bits(ids, vocab).view(np.uint8), bitorder="little")
        assert len(bits) == -(-vocab // 32) * 32
        assert np.flatnonzero(bits).tolist() == sorted({0, vocab - 1})


# Results


def result_of(tables: Tables, plan: StepPlan, status: dict[int, Status], failed: dict[int, Exception]) -> Any:
    step, _ = tables.step(plan)
    words = np.full(step.sizes.num_words, POISON, np.int32)
    out = DeviceOutputs.of(words, step.sizes)
    out.token_ids[:] = np.arange(100, 100 + len(out.token_ids))
    out.status[:] = [status.get(sample, Status.SAMPLED) for sample in range(len(out.status))]
    out.sampled.logprobs[:] = -np.arange(len(out.sampled.logprobs))
    out.extra.ranks[:] = np.arange(len(out.extra.ranks))
    return make_result(step, words, failed, seconds=0.5, ended_at_s=7.0)


def test_a_result_has_the_tokens_of_the_rows_that_sampled() -> None:
    tables = Tables(sizes=(1, 2, 4, 6))
    for row in range(4):
        tables.writer.add(row, [1, 2, 3], num_choices=3 if row == 1 else 1, temperature=1.0, logprobs=row - 2)
    result = result_of(tables, tables.writer.plan({0: None, 1: None, 2: 2, 3: None}), {}, {})
    assert result.offsets.tolist() == [0, 1, 4, 4, 5]
    assert result.token_ids.tolist() == [100, 101, 102, 103, 104]
    assert result.token_ids.dtype == result.offsets.dtype == np.int32
    assert result.logprobs.index.tolist() == [4]
    assert (result.device_time_s, result.ended_at_s, result.failures) == (0.5, 7.0, ())
    # A padded step: what stands for the padding is no row's.
    result = result_of(tables, tables.writer.plan({0: None, 1: None, 3: None}), {}, {})
    assert result.offsets.tolist() == [0, 1, 2, 3]
    assert result.logprobs.index.tolist() == [2]
    assert result.logprobs.top_ids.shape == (1, 5)


def test_rows_that_fail_bring_nothing_and_say_why() -> None:
    def spoil(logits: Any, rows: Any) -> None: ...

    tables = Tables()
    ways: list[dict[str, Any]] = [
        {"num_choices": 2, "temperature": 1.0}, {"logits_processors": (spoil,)}, {}, {"bad_words": ((1,),)},
        {"logits_processors": (spoil,), "logprobs": 0}, {"logprobs": 0},
    ]  # fmt: skip
    for row, way in enumerate(ways):
        tables.writer.add(row, [1, 2], **way)
    bad = {0: Status.NOT_A_NUMBER, 2: Status.NOT_A_NUMBER, 3: Status.NOTHING_LEFT, 4: Status.NOTHING_LEFT}
    plan = tables.writer.plan(dict.fromkeys(range(6)))
    raised = KeyError("own")
    result = result_of(tables, plan, bad, {4: raised})
    errors = [(failure.index, type(failure.error), str(failure.error)) for failure in result.failures]
    assert errors[0] == (0, ArithmeticError, "the model's logits are not numbers"), "one of its choices is enough"
    assert errors[1] == (1, ArithmeticError, "the logits are not numbers after the request's processors")
    assert errors[2] == (2, ArithmeticError, "the model's logits are all -inf")
    assert errors[3][:2] == (3, ValueError)
    assert result.failures[4].error is raised
    assert result.offsets.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert result.token_ids.tolist() == [106]
    assert result.logprobs.index.tolist() == [0]
    assert result.logprobs.logprobs.tolist() == [-6.0]


def test_named_tokens_stay_with_their_lines() -> None:
    tables = Tables()
    named: list[tuple[int, tuple[int, ...]]] = [(0, (5, 6)), (-1, (7, 8, 9)), (0, ()), (0, (99, 3, 4, 5))]
    for row, (logprobs, ids) in enumerate(named):
        tables.writer.add(row, [1, 2], logprobs=logprobs, logprob_token_ids=ids, num_choices=2 if row == 0 else 1)
    result = result_of(tables, tables.writer.plan(dict.fromkeys(range(4))), {}, {})
    assert result.logprobs.index.tolist() == [0, 1, 3, 4]
    assert result.logprobs.extra_offsets.tolist() == [0, 2, 4, 4, 7]
    assert result.logprobs.extra_ids.tolist() == [5, 6, 5, 6, 3, 4, 5]
    assert result.logprobs.extra_ranks.tolist() == [0, 1, 2, 3, 7, 8, 9]


# Sizes of graphs


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 100, 256, 300, 1000, 1023, 1024, 1025, 5000])
def test_graphs_have_sizes_for_all_numbers_of_rows_with_little_padding(rows: int) -> None:
    sizes = default_sizes(rows)
    assert list(sizes) == sorted(set(sizes)), "each once"
    assert sizes[-1] == min(rows, MAX_SIZE)
    size_for = DecodeGraphs(FakeAccelerator(), sizes).size_for
    assert list(size_for) == list(range(1, sizes[-1] + 1))
    for number, size in size_for.items():
        assert number <= size <= max(2 * number, number + 7)
        assert number < 64 or (size - number) / number <= 0.12


def test_a_graph_stands_in_for_one_that_does_less_and_for_no_other() -> None:
    accelerator = FakeAccelerator()
    graphs = DecodeGraphs(accelerator, (1, 2))
    works: list[str] = []
    ran = torch.zeros(1, dtype=torch.int64)

    def work_of(size: int, features: Features) -> Callable[[], None]:
        works.append(f"{size} {features}")
        number = len(works) - 1

        def work() -> None:
            ran.fill_(number)

        return work

    def run(size: int, features: Features) -> str:
        graphs.run(GraphKey(size, features), lambda key: work_of(*key), captures_first=True)
        accelerator.synchronize()
        return works[int(ran)]

    fullest = Features(has_filters=True)
    assert run(2, fullest) == run(2, Features(is_greedy=True)) == run(2, Features()) == f"2 {fullest}"
    assert len(graphs) == 1
    others = [
        (1, fullest), (2, Features(has_filters=True, num_top=0)), (2, Features(has_masks=True)),
        (2, Features(is_penalised=True)), (2, Features(rules=RuleSizes(64, 0, 0))),
    ]  # fmt: skip
    for size, features in others:
        assert run(size, features) == f"{size} {features}"
    greedy = Features(is_greedy=True)
    assert run(1, greedy) == f"1 {fullest}"
    assert len(graphs) == 6
    graphs.clear_ruled()
    assert len(graphs) == 4, "those with bitmasks and tables are void"
    graphs.clear()
    assert run(1, greedy) == f"1 {greedy}"
    assert run(1, Features()) == f"1 {Features()}", "a greedy one draws nothing"


def test_a_step_is_captured_when_it_comes_a_second_time_and_the_least_used_graph_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 2)
    accelerator = FakeAccelerator()
    graphs = DecodeGraphs(accelerator, (1, 2, 4))
    keys = [GraphKey(size, Features()) for size in (1, 2, 4)]

    def run(key: GraphKey) -> int:
        graphs.run(key, lambda _: lambda: None)
        return len(accelerator.graphs)

    assert [run(keys[0]), run(keys[0]), run(keys[0])] == [0, 1, 1]
    assert [run(keys[1]), run(keys[1]), run(keys[0])] == [1, 2, 2]
    assert [run(keys[2]), run(keys[2])] == [2, 3], "in the place of the second"
    assert len(graphs) == 2
    assert run(keys[0]) == 3
    assert run(keys[1]) == 4


def test_what_cannot_be_captured_runs_without_and_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = FakeAccelerator()
    tried = []

    def capture(work: Any) -> Any:
        tried.append(work)
        raise RuntimeError("no memory")

    accelerator.capture = capture  # type: ignore[method-assign]
    graphs = DecodeGraphs(accelerator, (1,))
    ran: list[int] = []
    for number in range(4):
        graphs.run(GraphKey(1, Features()), lambda _, number=number: lambda: ran.append(number))  # type: ignore[misc]
    accelerator.synchronize()
    assert ran == [0, 1, 2, 3]
    assert len(tried) == 1
    assert "could not be captured" in caplog.text
