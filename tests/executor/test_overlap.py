"""Steps that overlap, over a device that is always late: the same results as without overlap,
memory that is not used too soon, nothing done in a steady step that need not be, and failures that stay where they are.
"""

import asyncio
import contextlib
import gc
import itertools
import random
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from executor.contract import ExecutorContract, Opened
from executor.late_device import InjectedFailure, late_config, let_steps_fail, start_late
from executor.plan_storm import RandomPlans, check_equal, follow
from executor.plans import PlanWriter, greedy_tokens, run_step, tokens_by_row
from nightly import few, nightly
from torch.utils._python_dispatch import TorchDispatchMode

from aioengine.core.control import CommitWeights, ExecuteDummyBatch, Sleep, StageWeights, UpdateWeights, WakeUp
from aioengine.core.executor_protocol import DeviceLost, PendingStep
from aioengine.errors import InternalError, InvalidRequest
from aioengine.executor.torch_executor import TorchExecutor
from aioengine.models.folder import ModelFolder
from aioengine.scheduler.plan import StepPlan, StepResult
from doubles.fake_accelerator import FakeAccelerator

DEPTHS = (1, 2, 4)
GRAPHS = ("off", "lazy", "start")
VOCAB_SIZE = 97

Checkpoint = Callable[..., Path]


@pytest.fixture
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama2", num_hidden_layers=1, vocab_size=VOCAB_SIZE)


async def start_cpu(folder: Path, **fields: Any) -> TorchExecutor:
    """The executor that is known to be right."""
    config = late_config(device="cpu", **fields)
    model = await asyncio.to_thread(ModelFolder.read, folder)
    return await TorchExecutor.start(model, config)


@asynccontextmanager
async def started(
    folder: Path, accelerator: FakeAccelerator | None = None, **fields: Any
) -> AsyncIterator[tuple[TorchExecutor, PlanWriter]]:
    accelerator = accelerator or FakeAccelerator()
    executor = await start_late(folder, accelerator, **fields)
    try:
        yield executor, PlanWriter.of(executor.info, handles=executor.handles)
    finally:
        accelerator.go_on()  # a test that failed while it was held
        await executor.aclose()


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt) % 90 for i in range(length)]


class TestContract(ExecutorContract):
    """Without graphs before a step is run a second time, as with them."""

    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        self.folder = folder

    async def start(self, max_in_flight: int) -> Opened:
        executor = await start_late(self.folder, FakeAccelerator(), max_in_flight=max_in_flight)
        return Opened(executor, let_steps_fail(executor).add)


# Equality


@pytest.mark.parametrize(
    ("seed", "depth", "graphs"),
    few(
        [(4, 2, "lazy"), (8, 4, "start")],
        of=((seed, *both) for seed, both in enumerate(itertools.product(DEPTHS, GRAPHS))),
    ),
)
async def test_random_plans_bring_what_they_bring_on_the_cpu(folder: Path, seed: int, depth: int, graphs: str) -> None:
    rng = random.Random(seed)
    cpu = await start_cpu(folder, max_num_seqs=6)
    async with started(folder, max_num_seqs=6, max_in_flight=depth, cuda_graphs=graphs) as (executor, writer):
        assert cpu.info.num_blocks == executor.info.num_blocks
        cpu._device.runner._batch.handles = executor.handles
        failing = let_steps_fail(executor)
        plans = RandomPlans(rng, writer, vocab=VOCAB_SIZE, max_rows=6, max_len=128)
        in_flight: list[tuple[StepPlan, PendingStep[StepResult], Any]] = []
        for number in range(75):
            plan = plans.next()
            if rng.random() < 0.05:
                failing.add(plan.step)
            in_flight.append((plan, executor.launch(plan), await cpu.launch(plan).finish()))
            while len(in_flight) >= depth or (in_flight and number == 74):
                plan, step, wanted = in_flight.pop(0)
                if plan.step in failing:
                    with pytest.raises(Exception, match=f"step {plan.step}"):
                        await step.finish()
                    plans.lose(plan)
                    continue
                result = await step.finish()
                check_equal(plan, result, wanted, plans.failed)
                plans.read(plan, result)
    await cpu.aclose()
    assert {"failed", "preempted"} <= plans.ends.keys() or depth > 1


# Failures stay where they are


@pytest.mark.parametrize("graphs", ["off", "lazy"])
@pytest.mark.parametrize("is_failed", [True, False], ids=["failed", "without rows"])
async def test_a_block_that_a_row_got_in_a_step_that_did_not_compute_is_where_its_later_steps_write(
    folder: Path, is_failed: bool, graphs: str
) -> None:
    """Else they would write where the row's last sequence had its blocks, which another one has by now."""
    async with started(folder, max_in_flight=4, cuda_graphs=graphs) as (executor, writer):
        failing = let_steps_fail(executor)
        prompt = prompt_of(11, salt=3)

        async def logprobs_of(plan: StepPlan) -> list[float]:
            result = await executor.launch(plan).finish()
            writer.read(plan, result)
            return result.logprobs.top_logprobs.tolist()[0] if result.logprobs is not None else []

        writer.add(2, prompt, logprobs=5)
        expected = [await logprobs_of(writer.plan()) for _ in range(4)]
        writer.remove(2)
        writer.add(0, prompt_of(12))
        await logprobs_of(writer.plan())
        last_block = writer.remove(0, is_reused_next=True).block_ids[0][2]
        writer.add(1, prompt, logprobs=5)
        assert any(last_block in block_ids for block_ids in writer.rows[1].block_ids)
        writer.add(0, prompt_of(8, salt=1))
        found = [await logprobs_of(writer.plan())]
        plans = [writer.plan({0: None}) for _ in range(4)]
        assert set(plans[0].grown_rows.tolist()) == {0}
        if is_failed:
            failing.add(plans[0].step)
        else:
            columns = ("rows", "epochs", "starts", "num_tokens", "purposes")
            plans[0] = msgspec.structs.replace(plans[0], **{name: getattr(plans[0], name)[:0] for name in columns})
        steps = [executor.launch(plan) for plan in plans]
        outcomes = await asyncio.gather(*(step.finish() for step in steps), return_exceptions=True)
        assert [isinstance(outcome, InjectedFailure) for outcome in outcomes] == [is_failed, False, False, False]
        writer.remove(0)
        found += [await logprobs_of(writer.plan()) for _ in range(3)]
        for line, wanted in zip(found, expected, strict=True):
            assert line == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("depth", [2, *nightly(4)])
async def test_a_failed_step_of_a_row_with_a_processor_leaves_the_steps_behind_it_to_others(
    folder: Path, depth: int
) -> None:
    async with started(folder, max_in_flight=depth) as (executor, writer):
        failing = let_steps_fail(executor)
        writer.add(1, prompt_of(9))
        expected = (await run_step(executor, writer))[1]
        writer.remove(1)
        writer.add(0, prompt_of(6), logits_processors=(follow,))
        failed = writer.plan()
        failing.add(failed.step)
        writer.add(1, prompt_of(9))
        plan = writer.plan()
        steps = [executor.launch(failed), executor.launch(plan)]
        with pytest.raises(Exception, match=f"step {failed.step}"):
            await steps[0].finish()
        assert tokens_by_row(plan, await steps[1].finish())[1] == expected


async def test_a_step_without_memory_for_its_result_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator()
    async with started(folder, accelerator, max_in_flight=1) as (executor, writer):
        expected = await tokens_of(executor)
        make_words, asked = accelerator.host_words, []

        def words(num_words: int) -> Any:
            asked.append(num_words)
            raise MemoryError("no page can be locked")

        monkeypatch.setattr(accelerator, "host_words", words)
        columns = runner_of(executor)._history[0, :3].clone()
        writer.add(2, [1, 2, 3], logprobs=20)
        first = writer.plan()
        runner_of(executor)._staging[0].extra = make_words(4096)
        with pytest.raises(MemoryError):
            await executor.launch(first).finish()
        monkeypatch.setattr(accelerator, "host_words", make_words)
        assert len(asked) == 1
        assert runner_of(executor)._history[2, :3].tolist() == [1, 2, 3], "the deltas hold"
        assert runner_of(executor)._history[0, :3].tolist() == columns.tolist()
        writer.remove(2)
        await executor.launch(writer.plan({})).finish()
        assert await tokens_of(executor) == expected


async def test_a_launch_that_fails_since_the_device_is_lost_says_so(folder: Path) -> None:
    """With nothing in flight no other step would raise it, and each request to come would fail on its own."""
    accelerator = FakeAccelerator()
    async with started(folder, accelerator) as (executor, writer):
        failing = let_steps_fail(executor)
        writer.add(0, prompt_of(6))
        plan = writer.plan()
        failing.add(plan.step)
        accelerator.lose(OSError("an illegal memory access"))
        with pytest.raises(DeviceLost, match="an illegal memory access"):
            await executor.launch(plan).finish()


# The device is late


async def until(is_so: Callable[[], bool]) -> None:
    """Let the loop turn until other threads have come so far."""
    for _ in range(1_000_000):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to be so")


def runner_of(executor: TorchExecutor) -> Any:
    return executor._device.runner


@pytest.mark.parametrize(
    ("depth", "graphs"), few([(2, "start"), (4, "off"), (4, "lazy")], of=itertools.product((2, 4), GRAPHS))
)
async def test_steps_are_launched_while_the_device_has_not_begun_and_their_memory_is_its_own(
    folder: Path, depth: int, graphs: str
) -> None:
    accelerator = FakeAccelerator()
    async with started(folder, accelerator, max_in_flight=depth, cuda_graphs=graphs) as (executor, writer):
        sampling: dict[str, Any] = {"logprobs": 2, "stop_ids": (5,), "min_tokens": 50, "frequency_penalty": 0.5}
        writer.add(0, prompt_of(9), **sampling)
        expected = [(await run_step(executor, writer))[0] for _ in range(depth)]
        writer.remove(0)
        writer.add(1, prompt_of(9), **sampling)
        accelerator.hold()
        plans = [writer.plan() for _ in range(depth)]
        steps = [executor.launch(plan) for plan in plans]
        staging = list(runner_of(executor)._staging)
        await until(lambda: len(accelerator._copies) == depth)
        assert not any(step.is_done for step in steps)
        for words in (staging[0].fixed, staging[0].extra, *(one.out for one in staging)):
            with pytest.raises(InternalError, match="under way"):
                words.array  # noqa: B018 - looking is what is refused
        accelerator.go_on()
        results = [await step.finish() for step in steps]
        assert [tokens_by_row(*pair)[1] for pair in zip(plans, results, strict=True)] == expected
        assert all(len(one.fixed.array) and len(one.out.array) for one in staging), "they are the host's again"


@pytest.mark.parametrize("depth", [*nightly(2), 4])
async def test_results_that_nobody_has_fetched_are_not_written_over(folder: Path, depth: int) -> None:
    """All steps run before the first copy is made."""
    accelerator = FakeAccelerator()
    async with started(folder, accelerator, max_in_flight=depth, cuda_graphs="lazy") as (executor, writer):
        found = []
        for row, is_ahead in enumerate((False, True)):
            writer.add(row, prompt_of(9), logprobs=2)
            plans = [writer.plan()]
            results = [await executor.launch(plans[0]).finish()]
            plans += [writer.plan() for _ in range(depth)]
            if is_ahead:
                accelerator.hold()
                steps = [executor.launch(plan) for plan in plans[1:]]
                await until(lambda: len(accelerator._copies) == depth)
                accelerator.run_ahead()
                accelerator.go_on()
                results += [await step.finish() for step in steps]
            else:
                results += [await executor.launch(plan).finish() for plan in plans[1:]]
            found.append([tokens_by_row(*pair)[row] for pair in zip(plans, results, strict=True)])
            writer.remove(row)
        assert found[0] == found[1]
        assert len(set(found[0])) > 1


async def test_a_result_stays_as_it_is_when_its_memory_is_used_again(folder: Path) -> None:
    async with started(folder, max_in_flight=1) as (executor, writer):
        writer.add(0, prompt_of(9), logprobs=5)
        results, copies = [], []
        for _ in range(5):
            result = await executor.launch(writer.plan()).finish()
            assert result.logprobs is not None
            results.append((result.token_ids, result.logprobs.top_logprobs))
            copies.append([column.tolist() for column in results[-1]])
        assert [[column.tolist() for column in columns] for columns in results] == copies
        assert copies[0] != copies[1]


async def test_a_processor_waits_for_the_device_in_its_thread_and_never_on_the_loop(folder: Path) -> None:
    accelerator = FakeAccelerator()
    async with started(folder, accelerator, max_in_flight=2) as (executor, writer):
        writer.add(0, prompt_of(5), logits_processors=(follow,))
        accelerator.hold()
        plans = [writer.plan(), writer.plan()]
        steps = [executor.launch(plan) for plan in plans]
        for _ in range(200):
            await asyncio.sleep(0)
        assert not any(step.is_done for step in steps)
        accelerator.go_on()
        for plan, step in zip(plans, steps, strict=True):
            assert len(tokens_by_row(plan, await step.finish())) == 1


# A steady step


class Allocations(TorchDispatchMode):
    """Counts what torch does in the thread that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("depth", "graphs"), [*nightly((1, "lazy")), (2, "start"), *nightly((2, "lazy"), (4, "start"))]
)
async def test_a_steady_step_is_an_upload_a_graph_and_a_copy_and_allocates_nothing(
    folder: Path, depth: int, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows, num_warm, num_steps = 13, 6, 60
    accelerator = FakeAccelerator()
    fields = {"max_num_seqs": 16, "max_model_len": 256, "kv_cache_memory_bytes": 2**23}
    async with started(folder, accelerator, max_in_flight=depth, cuda_graphs=graphs, **fields) as (executor, writer):
        runner, launches, host_words = runner_of(executor), [], []
        launch, make_words = runner.step, accelerator.host_words

        def step(plan: StepPlan) -> Any:
            before = accelerator.num_enqueued
            with Allocations() as allocations:
                launched = launch(plan)
            launches.append((accelerator.num_enqueued - before, allocations.operations, launched.step.extra.num_words))
            return launched

        def words(num_words: int) -> Any:
            host_words.append(num_words)
            return make_words(num_words)

        monkeypatch.setattr(runner, "step", step)
        monkeypatch.setattr(accelerator, "host_words", words)
        for row in range(num_rows):
            writer.add(
                row, prompt_of(3 + row, salt=row), temperature=0.9, seed=row, top_p=0.9, repetition_penalty=1.2,
                frequency_penalty=0.3, stop_ids=(5, 6), min_tokens=240, logprobs=5, bad_words=((7,), (8, 9)),
            )  # fmt: skip
        in_flight: list[tuple[StepPlan, PendingStep[StepResult]]] = []
        for number in range(num_warm + num_steps):
            if number == num_warm:
                launches.clear()
                host_words.clear()
                num_graphs = len(accelerator.graphs)
            plan = writer.plan()
            in_flight.append((plan, executor.launch(plan)))
            if len(in_flight) == depth:
                plan, pending = in_flight.pop(0)
                result = await pending.finish()
                assert len(result.token_ids) == num_rows
                assert result.logprobs is not None
        for _, pending in in_flight:
            await pending.finish()
        assert len(launches) >= num_steps
        assert {pieces for pieces, _, _ in launches} == {2}, "the upload and the graph"
        assert not any(operations for _, operations, _ in launches), "torch had something to do in a launch"
        assert not any(num_words for _, _, num_words in launches), "something was uploaded beside the fixed words"
        assert len(accelerator.graphs) == num_graphs
        assert host_words == []


@pytest.mark.parametrize(
    ("rules", "larger"),
    [
        ({"bad_words": ((7,), (8, 9))}, {"logit_bias": tuple((token, 1.0) for token in range(90))}),
        ({"allowed_token_ids": (3, 4, 5, 6)}, {"allowed_token_ids": (7,)}),
    ],
    ids=["tables", "bitmasks"],
)
async def test_a_graph_is_void_once_the_rules_it_reads_have_moved(
    folder: Path, rules: dict[str, Any], larger: dict[str, Any]
) -> None:
    accelerator = FakeAccelerator()
    async with started(folder, accelerator) as (executor, writer):
        writer.add(0, prompt_of(5), **rules)
        for _ in range(4):
            await run_step(executor, writer)
        (graph,) = accelerator.graphs
        assert graph.num_replays == 1, "the third step was captured: the second of its kind"
        writer.add(1, prompt_of(5), **larger)
        await run_step(executor, writer, {1: None})
        writer.remove(1)
        for _ in range(3):
            await run_step(executor, writer)
        assert graph.num_replays == 1, "it reads where the rules were"
        assert [graph.num_replays for graph in accelerator.graphs[1:]] == [2]


# The end


@pytest.mark.parametrize("depth", [1, *nightly(2), 4])
async def test_a_lost_device_is_heard_in_all_steps_and_closing_ends(folder: Path, depth: int) -> None:
    accelerator = FakeAccelerator()
    executor = await start_late(folder, accelerator, max_in_flight=depth)
    writer = PlanWriter.of(executor.info, handles=executor.handles)
    writer.add(0, prompt_of(9))
    accelerator.hold()
    steps = [executor.launch(writer.plan()) for _ in range(depth)]
    await until(lambda: len(accelerator._copies) == depth)
    accelerator.lose(OSError("fallen off the bus"))
    for step in steps:
        with pytest.raises(DeviceLost, match="fallen off the bus"):
            await step.finish()
    with pytest.raises(DeviceLost, match="fallen off the bus"):
        await executor.launch(writer.plan()).finish()
    with anyio.fail_after(5):
        await executor.aclose()
    assert not vars(executor._device)


@pytest.mark.parametrize("graphs", [*nightly("off"), "start"])
@pytest.mark.parametrize("ends", ["well", "lost", "asleep"])
async def test_nothing_of_it_is_alive_after_it_is_closed(folder: Path, ends: str, graphs: str) -> None:
    accelerator = FakeAccelerator()
    executor = await start_late(folder, accelerator, max_in_flight=2, cuda_graphs=graphs)
    writer = PlanWriter.of(executor.info, handles=executor.handles)
    runner = runner_of(executor)
    alive = [weakref.ref(thing) for thing in (runner, runner._history, runner._attention.caches[0], runner._sampler)]
    alive += [weakref.ref(thing) for thing in (runner._decoder, runner._out, runner._staging[0])]
    alive += [weakref.ref(parameter) for parameter in runner._decoder.parameters()]
    del runner
    writer.add(0, prompt_of(9), logprobs=3, logits_processors=(follow,))
    writer.add(1, prompt_of(4), allowed_token_ids=(3, 4))
    for _ in range(3):
        await executor.launch(writer.plan()).finish()
    steps = []
    if ends == "lost":
        steps = [executor.launch(writer.plan())]
        accelerator.lose(OSError("fallen off the bus"))
    if ends == "asleep":
        await executor.perform(Sleep(1))
    num_releases = accelerator.num_releases
    await executor.aclose()
    assert accelerator.num_releases > num_releases or ends == "lost", "the memory went back to the system"
    with contextlib.suppress(DeviceLost):
        while steps:
            await steps.pop().finish()
    # The fake holds no tensors but its graphs' own, once it has run all; the executor and errors hold a lost one.
    del executor
    if ends == "lost":
        del accelerator
    gc.collect()
    assert [thing() for thing in alive if thing() is not None] == []


# Weights and sleep


@pytest.mark.nightly
async def test_sleep_and_weights_in_any_order_bring_what_they_bring_on_the_cpu(checkpoint: Checkpoint) -> None:
    """Outcomes of random calls, tokens in between."""
    folders = [checkpoint("llama2", num_hidden_layers=1, vocab_size=VOCAB_SIZE, seed=seed) for seed in range(3)]
    shape = (VOCAB_SIZE, 64)
    kinds = set()
    for seed in range(4):
        rng = random.Random(seed)
        accelerator = FakeAccelerator()
        executors = [
            await start_late(folders[0], accelerator, cuda_graphs=rng.choice(GRAPHS), max_in_flight=2),
            await start_cpu(folders[0]),
        ]
        asleep: set[str] = set()
        for _ in range(50):
            what = rng.choice(["sleep", "wake", "wake", "wake all", "update", "stage", "commit", "tokens", "dummy"])
            level, parts = rng.choice([1, 2]), frozenset(rng.sample(["weights", "kv_cache"], rng.randint(1, 2)))
            target = rng.choice(folders)
            data = np.random.default_rng(rng.randrange(9)).standard_normal(shape, np.float32).tobytes()
            piece = StageWeights(transfer="t", name="lm_head.weight", dtype="F32", shape=shape, offset=0, data=data)
            outcomes = []
            for executor in executors:
                calls: dict[str, Callable[[], Any]] = {
                    "sleep": partial(executor.perform, Sleep(level)),  # type: ignore[arg-type]
                    "wake": partial(executor.perform, WakeUp(parts)),  # type: ignore[arg-type]
                    "wake all": partial(executor.perform, WakeUp(frozenset(("weights", "kv_cache")))),
                    "update": partial(executor.perform, UpdateWeights(target)),
                    "stage": partial(executor.perform, piece),
                    "commit": partial(executor.perform, CommitWeights("t")),
                    "dummy": partial(executor.perform, ExecuteDummyBatch()),
                    "tokens": partial(tokens_of, executor),
                }
                num_releases = accelerator.num_releases
                try:
                    outcomes.append(None if what == "tokens" and asleep else await calls[what]())
                except InvalidRequest as error:
                    outcomes.append(str(error))
                else:
                    if what in ("sleep", "update", "commit") and executor is executors[0]:
                        assert accelerator.num_releases > num_releases
                    if what == "sleep" and executor is executors[0]:
                        assert len(runner_of(executor).graphs) == 0
                        assert runner_of(executor)._decoder is None
            assert outcomes[0] == outcomes[1], f"{what}, seed {seed}"
            kinds.add((what, type(outcomes[0])))
            if what == "sleep" and outcomes[0] is None:
                asleep = {"weights", "kv_cache"}
            elif what.startswith("wake"):
                asleep -= parts if what == "wake" else {"weights", "kv_cache"}
        for executor in executors:
            await executor.aclose()
    assert {("tokens", list), ("commit", type(None)), ("sleep", str), ("dummy", str)} <= kinds


async def tokens_of(executor: TorchExecutor) -> list[int]:
    return await greedy_tokens(executor, 4, tuple(prompt_of(9)))
