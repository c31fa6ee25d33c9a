"""What the host makes of plans for a GPU, beside their results: graphs that may run them, tables, why rows fail."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from executor.plans import PlanWriter

from aioengine.executor import graphs as graphs_module
from aioengine.executor.batch import NUM_TOP_SIZES, PADDING_SAMPLE, Batch, Step
from aioengine.executor.graphs import MAX_SIZE, DecodeGraphs, GraphKey, default_sizes
from aioengine.executor.launched import make_result
from aioengine.executor.step_words import ExtraWords, FixedWords, num_fixed_words
from aioengine.kernels.operations import plain_torch as operations
from aioengine.kernels.sample_rows import SampleRow, Status
from aioengine.sampler.outputs import DeviceOutputs
from aioengine.sampler.rules import RuleSizes, RuleTable, RuleTensors
from aioengine.sampler.sampler import Features
from aioengine.scheduler.plan import NothingAllowed, RowSampling, StepPlan
from doubles.fake_accelerator import FakeAccelerator

POISON = 0x7F7F7F7F
MAX_ROWS = 6
BLOCK_SIZE = 4
VOCAB_SIZE = 50


class Tables:
    """A batch, and the bitmasks of the device as its words make them."""

    def __init__(self, *, sizes: tuple[int, ...] = ()) -> None:
        self.batch = Batch(max_num_seqs=MAX_ROWS, vocab_size=VOCAB_SIZE, max_tokens=4096, tile=8)
        self.masks = torch.zeros(8, 2, dtype=torch.int32)
        self.writer = PlanWriter(96, BLOCK_SIZE, windows=(None,), handles=self.batch.handles)
        self.size_for = DecodeGraphs(FakeAccelerator(), sizes).size_for

    def step(self, plan: StepPlan) -> tuple[Step, int | None]:
        """Take in a plan, over words that are rubbish; ``self.fixed`` is what it wrote."""
        self.fixed, extra = FixedWords.of(np.full(num_fixed_words(MAX_ROWS), POISON, np.int32), MAX_ROWS), ExtraWords()
        deltas = self.batch.apply(plan, self.fixed, extra)
        step, size = self.batch.step(plan, self.fixed, extra, self.size_for)
        if deltas.masks is not None:
            words = np.full(extra.num_words, POISON, np.int32)
            extra.write(words)
            spans = torch.from_numpy(deltas.masks.of(words)).view(-1, 4)
            operations.put_spans(self.masks, spans, torch.from_numpy(words))
        return step, size


def test_a_step_for_a_graph_is_padded_with_rows_that_do_nothing() -> None:
    tables = Tables(sizes=(1, 2, 4, 6))
    for row in (5, 0, 3):
        tables.writer.add(row, [row, 1])
    assert tables.step(tables.writer.plan())[1] is None
    step, size = tables.step(tables.writer.plan())
    assert (size, step.num_decodes, step.sizes.num_samples) == (4, 3, 4)
    assert tables.fixed.rows[3].tolist() == [-1, 0, 3, 1]
    assert tables.fixed.decodes[3].tolist() == [-1, 3, 0]
    assert tables.fixed.samples[3].tolist() == PADDING_SAMPLE.tolist()


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
    _, size = tables.step(tables.writer.plan({0: 1, 1: None}))
    assert size == (None if "prompt_logprobs" in sampling else 2)
    _, size = tables.step(tables.writer.plan())
    assert size == (2 if "prompt_logprobs" in sampling else None)  # the last prompt token predicts no other
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
    processed = {"temperature": 1.0, "logprobs_mode": "processed"}
    writer.add(5, [1], logprobs=5, **processed)
    assert features(3, 4).num_processed == 0
    assert features(0, 5) == Features(num_top=5, num_processed=1)
    writer.remove(1)
    writer.add(1, [1] * 4, **processed)
    assert features(1) == Features(), "no log-probabilities, and no mode of them"
    assert 20 in NUM_TOP_SIZES


def test_processed_rows_are_kept_and_named_by_their_first_samples() -> None:
    tables = Tables(sizes=(1, 2, 4, 6))
    writer = tables.writer
    ruled: dict[str, Any] = {"repetition_penalty": 2.0, "logprobs": 0}
    writer.add(0, [1], logprobs=1, logprobs_mode="processed", num_choices=3, temperature=1.0)
    writer.add(1, [1], **ruled, logprobs_mode="processed")
    writer.add(2, [1], **ruled)
    writer.add(3, [1], logprobs=0)
    writer.add(4, [1], logprobs=2, logprobs_mode="processed")
    step, size = tables.step(writer.plan(dict.fromkeys((3, 0, 1, 2, 4))))
    assert (size, step.features.num_processed) == (None, 4)
    assert tables.fixed.processed_samples[:4].tolist() == [1, 4, 6, 6], "the first one's has three choices"
    assert tables.fixed.kept.tolist() == [1, 2, 3, 4, -1, -1]
    step, size = tables.step(writer.plan(dict.fromkeys((3, 2, 4))))
    assert (size, step.features.num_processed) == (4, 1)
    assert tables.fixed.processed_samples[0] == 2
    for row in (0, 1, 4):
        writer.remove(row)
        writer.add(row, [2], logprobs=0, logprobs_mode="processed")
    writer.add(5, [2], logprobs=0, logprobs_mode="processed")
    step, _ = tables.step(writer.plan(dict.fromkeys((0, 1, 4, 5))))
    assert step.features.num_processed == 4
    for row in (2, 3):
        writer.remove(row)
        writer.add(row, [2], logprobs=0, logprobs_mode="processed")
    step, _ = tables.step(writer.plan())
    assert step.features.num_processed == MAX_ROWS, "no more than there are rows"
    assert sorted(tables.fixed.processed_samples.tolist()) == list(range(6))


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


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_tables_grow_by_powers_of_two(count: int) -> None:
    table = RuleTable(1000)
    words_of_two = tuple((n, n + 1) for n in range(count))
    table.add(0, RowSampling(bad_words=words_of_two, stop_ids=(1,), min_tokens=5))
    words = table.words()
    size = max(64, 1 << (count - 1).bit_length())
    assert table.sizes == RuleSizes(max(64, 1 << size.bit_length()), size, size)
    assert len(words) == table.sizes.total
    assert int((RuleTensors.of(torch.from_numpy(words), table.sizes).edits[0] >= 0).sum()) == count + 1
    table.remove(0)
    assert len(table.words()) == RuleSizes().total == 1


# Results


def result_of(tables: Tables, plan: StepPlan, status: dict[int, Status], failed: dict[int, Exception]) -> Any:
    step, _ = tables.step(plan)
    words = np.full(step.sizes.num_words, POISON, np.int32)
    out = DeviceOutputs(words, step.sizes)
    out.token_ids[:] = np.arange(100, 100 + len(out.token_ids))
    out.status[:] = [status.get(sample, Status.SAMPLED) for sample in range(len(out.status))]
    out.sampled.logprobs[:] = -np.arange(len(out.sampled.logprobs))
    out.extra.ranks[:] = np.arange(len(out.extra.ranks))
    return make_result(step, words, failed, seconds=0.5, ended_at_s=7.0)


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
    assert errors[3][:2] == (3, NothingAllowed)
    assert result.failures[4].error is raised
    assert result.offsets.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert result.token_ids.tolist() == [106]
    assert result.logprobs.index.tolist() == [0]
    assert result.logprobs.logprobs.tolist() == [-6.0]


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
        graphs.run(GraphKey(size, features), lambda key: work_of(key.size, key.features), captures_first=True)
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
