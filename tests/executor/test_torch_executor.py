"""`TorchExecutor`: the contract, its start, its end, and what it leaves behind."""

import asyncio
import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import uvloop
from executor.contract import ExecutorContract, Opened, spans, step_names
from executor.plans import PlanWriter, tokens_by_row
from executor.tiny_decoder import HookedOperations, tiny_config, tiny_decoder
from nightly import nightly

from aioengine.config import EngineConfig
from aioengine.core.control import StartProfile, StopProfile
from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import ConfigError, InvalidRequest
from aioengine.executor import torch_executor
from aioengine.executor.device_thread import THREAD_NAME
from aioengine.executor.host import HostAccelerator, num_usable_threads
from aioengine.executor.runner import Runner
from aioengine.executor.torch_executor import TorchExecutor, is_large_step
from aioengine.models.decoder import Decoder

END_TIMEOUT_S = 5.0


def make_config(**fields: Any) -> EngineConfig:
    return EngineConfig(
        **{"max_num_seqs": 4, "block_size": 4, "kv_cache_memory_bytes": 2**20, "num_threads": 1, **fields}
    )


class InjectedFailure(Exception):
    pass


class Model:
    """A tiny decoder that the device thread makes, and what the test may do to it.

    Attributes:
        failing: numbers of the forward passes, from 1, that raise.
        gate: forward passes wait for it.
        executors: those started and still referred to.
    """

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.num_passes = 0
        self.operations: Any = HookedOperations(lambda: self.before_forward())
        self.decoder: weakref.ref[Decoder] | None = None
        self.executors: weakref.WeakSet[TorchExecutor] = weakref.WeakSet()

    def load(self, *, on_progress: Callable[[int, int], None], should_stop: Callable[[], bool], **_: Any) -> Any:
        on_progress(0, 10)
        decoder = tiny_decoder()
        self.decoder = weakref.ref(decoder)
        on_progress(10, 10)
        return decoder

    def before_forward(self) -> None:
        assert self.gate.wait(END_TIMEOUT_S)
        self.num_passes += 1
        if self.num_passes in self.failing:
            raise InjectedFailure(f"pass {self.num_passes}")

    @property
    def is_freed(self) -> bool:
        gc.collect()
        return self.decoder is not None and self.decoder() is None

    async def start(self, **fields: Any) -> TorchExecutor:
        accelerator = HostAccelerator()
        accelerator.operations = self.operations
        config = make_config(**fields)
        executor = await TorchExecutor.start(None, config, load=self.load, find_accelerator=lambda: accelerator)
        self.executors.add(executor)
        return executor


def device_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def join_device_threads() -> None:
    for thread in device_threads():
        thread.join(END_TIMEOUT_S)
    assert not device_threads()


def a_plan(writer: PlanWriter | None = None) -> Any:
    writer = writer or PlanWriter(64, 4)
    writer.add(0, [1, 2, 3])
    return writer.plan()


class TestContract(ExecutorContract):
    async def start(self, max_in_flight: int) -> Opened:
        model = Model()
        executor = await model.start(max_in_flight=max_in_flight)
        return Opened(executor, model.failing.add)


@pytest.mark.nightly
@pytest.mark.asyncio(loop_factories=["uvloop"])
class TestContractOnUvloop(TestContract):
    """On the other loop; what touches it, device_thread.py and waker.py, has tests of its own on both."""


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    model = Model()
    yield model
    model.gate.set()
    for executor in list(model.executors):
        await executor.aclose()


@pytest.fixture
async def executor(model: Model) -> AsyncIterator[TorchExecutor]:
    """Of ``model``, with a step in flight at most."""
    executor = await model.start()
    yield executor
    model.gate.set()
    await executor.aclose()


# Start


async def test_it_says_what_the_config_and_the_model_make_of_it(model: Model) -> None:
    executor = await model.start(kv_cache_memory_bytes=10**5, max_num_seqs=8)
    bytes_per_block = 2 * 2 * 4 * 2 * 8 * 4  # of the two layers without a window, or of the one that has one
    info = executor.info
    assert info.num_blocks == 10**5 // bytes_per_block == 97
    assert info.kv_cache_bytes == 97 * bytes_per_block
    assert [group.reach for group in info.layout.groups] == [None, 5]
    assert (info.block_size, info.max_model_len, info.vocab_size) == (4, 64, 97)
    assert (info.max_in_flight, info.device, info.dtype) == (1, "cpu", "float32")
    assert info.weight_bytes > 0
    await executor.aclose()


@pytest.mark.parametrize(("num_threads", "warns"), [(1, False), (2, True)])
async def test_more_threads_than_cores_are_used_with_a_warning(
    num_threads: int, warns: bool, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    executor = await model.start(num_threads=num_threads)
    await executor.aclose()
    assert ("num_threads=2 is more than the usable cores (1)" in caplog.text) is warns


async def test_a_start_without_room_for_the_kv_cache_says_what_to_give(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Runner) -> None:
        raise torch.OutOfMemoryError("7 bytes")

    monkeypatch.setattr(Runner, "make_cache", fail)
    with pytest.raises(
        ConfigError, match=r"no room for a KV cache of .* 7 bytes; give a smaller kv_cache_memory_bytes"
    ):
        await model.start()


async def test_progress_is_told_on_the_loop(model: Model) -> None:
    told: list[tuple[int, int, threading.Thread]] = []
    executor = await TorchExecutor.start(
        None,
        make_config(),
        load=model.load,
        on_progress=lambda done, total: told.append((done, total, threading.current_thread())),
    )
    assert told == [(0, 10, threading.main_thread()), (10, 10, threading.main_thread())]
    await executor.aclose()


async def test_a_start_that_fails_says_why_and_leaves_nothing(model: Model) -> None:
    def load(**_: Any) -> Any:
        raise OSError("no such file")

    with pytest.raises(ConfigError, match="max_model_len=64"):
        await model.start(kv_cache_memory_bytes=1536 * 15)
    assert model.is_freed
    with pytest.raises(OSError, match="no such file"):
        await TorchExecutor.start(None, make_config(), load=load)
    assert not device_threads()


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
async def test_cancelling_the_start_stops_the_loading_and_leaves_nothing() -> None:
    is_loading, was_stopped = threading.Event(), threading.Event()

    def load(*, on_progress: Callable[[int, int], None], should_stop: Callable[[], bool], **_: Any) -> Any:
        is_loading.set()
        on_progress(0, 1)
        while not should_stop():
            pass
        was_stopped.set()
        raise RuntimeError("stopped")

    with anyio.CancelScope() as scope:
        await TorchExecutor.start(None, make_config(), load=load, on_progress=lambda *_: scope.cancel())
    assert scope.cancelled_caught
    assert was_stopped.is_set()
    assert not device_threads()


@pytest.mark.parametrize(
    ("weight_bytes", "num_layers", "kv_bytes", "num_tokens", "context_len", "expected"),
    [
        pytest.param(8_000_000, 4, 2048, 1, 64, True, id="bundled, decode of 1"),
        pytest.param(4_000_000, 4, 2048, 1, 64, False, id="half of it, decode of 1"),
        pytest.param(4_000_000, 4, 2048, 32, 32 * 64, True, id="half of it, decode of 32"),
        pytest.param(4_000_000, 4, 2048, 1, 900, True, id="half of it, decode of 1 with a long context"),
        pytest.param(63_980_544, 8, 8192, 1, 64, True, id="30M, decode of 1"),
    ],
)
def test_a_step_is_large_if_its_operations_are_long(
    weight_bytes: int, num_layers: int, kv_bytes: int, num_tokens: int, context_len: int, expected: bool
) -> None:
    """In bfloat16; the weights with a packed copy of a tied head, the KV of a token."""
    assert is_large_step(weight_bytes, num_layers, num_tokens, context_len * kv_bytes) is expected


@pytest.mark.parametrize(("large_layer_bytes", "expected"), [(2**40, 1), (0, 3)], ids=["small step", "large step"])
async def test_a_small_step_takes_one_thread_and_a_large_one_all_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, model: Model, large_layer_bytes: int, expected: int
) -> None:
    monkeypatch.setattr(torch_executor, "LARGE_LAYER_BYTES", large_layer_bytes)
    before = torch.get_num_threads()
    counts: list[int] = []
    model.before_forward = lambda: counts.append(torch.get_num_threads())  # type: ignore[method-assign]
    for num_threads in (None, 2):
        executor = await model.start(num_threads=num_threads)
        executor._device._max_threads = 3 if num_threads is None else executor._device._max_threads
        await executor.launch(a_plan()).finish()
        await executor.aclose()
    assert counts == [expected, 2]
    assert torch.get_num_threads() == before


async def test_an_executor_leaves_the_process_torchs_number_of_threads_and_the_next_one_takes_it(model: Model) -> None:
    def in_a_new_thread(ask: Callable[[], int]) -> int:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(ask).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        usable = in_a_new_thread(num_usable_threads)
        for num_threads in (1, None):
            executor = await model.start(num_threads=num_threads)
            assert executor._device._max_threads == (0 if num_threads else usable)
            await executor.launch(a_plan()).finish()
            assert in_a_new_thread(torch.get_num_threads) == 3
            await executor.aclose()
            assert in_a_new_thread(torch.get_num_threads) == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# Steps


async def test_a_plan_that_does_not_fit_the_rows_loses_the_device(executor: TorchExecutor) -> None:
    writer = PlanWriter(64, 4)
    writer.add(17, [1, 2, 3])
    for plan in (writer.plan(), a_plan()):
        with pytest.raises(DeviceLost, match="could not be applied") as lost:
            await executor.launch(plan).finish()
        assert isinstance(lost.value.__cause__, IndexError)
    assert executor.stats.num_steps == 2


# Profiles


async def test_a_profile_shows_the_operations_of_each_step_and_those_inside_them(
    model: Model, executor: TorchExecutor, tmp_path: Path
) -> None:
    writer = PlanWriter(64, 4)
    await executor.launch(a_plan(writer)).finish()
    await executor.perform(StartProfile(max_steps=2))
    for _ in range(3):
        await executor.launch(writer.plan()).finish()
    await executor.perform(StopProfile(tmp_path / "trace.json"))
    steps, operations = (spans(tmp_path / "trace.json", category) for category in ("user_annotation", "cpu_op"))
    assert len(steps) == 2
    for step in steps:
        names = Counter(operation["name"] for operation in inside(step, operations))
        assert names["aten::silu"] == tiny_config().num_layers
        assert names["aten::softmax"] == tiny_config().num_layers
    assert sum(len(inside(step, operations)) for step in steps) == len(operations)
    matmul = next(operation for operation in operations if operation["name"] == "aten::matmul")
    assert "aten::mm" in [operation["name"] for operation in inside(matmul, operations)]


def inside(outer: dict[str, Any], spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the same thread that lie in its time."""
    end = outer["ts"] + outer["dur"]
    return [s for s in spans if s["tid"] == outer["tid"] and outer["ts"] <= s["ts"] and s["ts"] + s["dur"] <= end]


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
async def test_steps_may_be_in_flight_when_a_profile_starts_and_stops(model: Model, tmp_path: Path) -> None:
    executor = await model.start(max_in_flight=4)
    model.gate.clear()
    writer = PlanWriter(64, 4)
    steps = [executor.launch(a_plan(writer))]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(executor.perform, StartProfile(max_steps=100)))
        await anyio.wait_all_tasks_blocked()
        steps += [executor.launch(writer.plan()) for _ in range(2)]
        tasks.start_soon(executor.perform, StopProfile(tmp_path / "trace.json"))
        await anyio.wait_all_tasks_blocked()
        steps.append(executor.launch(writer.plan()))
        model.gate.set()
    for step in steps:
        await step.finish()
    assert step_names(tmp_path / "trace.json") == ["step 2 (1 rows, 1 tokens)", "step 3 (1 rows, 1 tokens)"]
    await executor.aclose()


@pytest.mark.parametrize("max_steps", [1, 100])
async def test_a_failed_step_is_in_the_profile(
    model: Model, executor: TorchExecutor, tmp_path: Path, max_steps: int
) -> None:
    model.failing = {1}
    writer = PlanWriter(64, 4)
    await executor.perform(StartProfile(max_steps=max_steps))
    with pytest.raises(InjectedFailure):
        await executor.launch(a_plan(writer)).finish()
    await executor.launch(writer.plan({})).finish()
    await executor.perform(StopProfile(tmp_path / "trace.json"))
    expected = ["step 1 (1 rows, 3 tokens)", "step 2 (0 rows, 0 tokens)"]
    assert step_names(tmp_path / "trace.json") == expected[:max_steps]


async def test_a_cancelled_start_of_a_profile_records_nothing_and_a_cancelled_stop_writes_it_all_the_same(
    model: Model, executor: TorchExecutor, tmp_path: Path
) -> None:
    model.gate.clear()
    step = executor.launch(a_plan())
    with anyio.move_on_after(0.001) as scope:
        await executor.perform(StartProfile(max_steps=100))
    assert scope.cancelled_caught
    model.gate.set()
    await step.finish()
    await executor.perform(StartProfile(max_steps=100))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await executor.perform(StartProfile(max_steps=100))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await executor.perform(StopProfile(tmp_path / "first.json"))  # it is not the cancelled start's to end
    await executor.perform(StartProfile(max_steps=100))
    await executor.perform(StopProfile(tmp_path / "second.json"))
    assert sorted(os.listdir(tmp_path)) == ["first.json", "second.json"]


async def test_where_torch_fails_to_write_a_profile_it_is_an_error_and_leaves_nothing(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def export(_: object, path: str) -> None:  # what it does on a full disk, with a line on stderr
        Path(f"{path}.tmp").write_text("half of it")

    (tmp_path / "trace.json").write_text("older")
    await executor.perform(StartProfile(max_steps=100))
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    with pytest.raises(OSError, match=r"could not write.*trace\.json"):
        await executor.perform(StopProfile(tmp_path / "trace.json"))
    assert os.listdir(tmp_path) == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "older"


async def test_one_profile_is_recorded_in_a_process_at_a_time(model: Model, tmp_path: Path) -> None:
    other = Model()
    executors = [await model.start(), await other.start()]
    await executors[0].perform(StartProfile(max_steps=1))
    with pytest.raises(InvalidRequest, match="in use"):
        await executors[1].perform(StartProfile(max_steps=1))
    await executors[0].launch(a_plan()).finish()  # its last
    await executors[1].perform(StartProfile(max_steps=1))
    for number, executor in enumerate(executors):
        await executor.perform(StopProfile(tmp_path / f"{number}.json"))
        await executor.aclose()
    assert [len(step_names(tmp_path / name)) for name in ("0.json", "1.json")] == [1, 0]


async def test_a_profile_of_the_apps_own_is_left_alone(executor: TorchExecutor, tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        with pytest.raises(InvalidRequest, match="in use"):
            await executor.perform(StartProfile(max_steps=1))
        torch.ones(3).sum()
    assert "aten::sum" in [average.key for average in own.key_averages()]
    await executor.perform(StartProfile(max_steps=1))
    await executor.perform(StopProfile(tmp_path / "trace.json"))


async def test_closing_while_a_profile_is_recorded_leaves_nothing(model: Model, tmp_path: Path) -> None:
    executor = await model.start()
    await executor.perform(StartProfile(max_steps=100))
    await executor.launch(a_plan()).finish()
    assert executor._device._recording is not None
    recorded = weakref.ref(executor._device._recording._profile)
    await executor.aclose()
    gc.collect()
    assert recorded() is None
    assert model.is_freed
    assert not device_threads()
    other = Model()
    executor = await other.start()
    await executor.perform(StartProfile(max_steps=100))
    await executor.perform(StopProfile(tmp_path / "trace.json"))
    await executor.aclose()


# The end


async def test_an_error_that_someone_keeps_does_not_keep_the_model(model: Model) -> None:
    executor = await model.start()
    model.failing = {1}
    with pytest.raises(InjectedFailure) as failed:
        await executor.launch(a_plan()).finish()
    writer = PlanWriter(64, 4)
    writer.add(17, [1])
    with pytest.raises(DeviceLost) as lost:
        await executor.launch(writer.plan()).finish()
    await executor.aclose()
    assert model.is_freed
    assert failed.value is not lost.value


async def test_dropping_the_executor_loses_a_step_that_someone_waits_for_and_frees_the_model(model: Model) -> None:
    executor = await model.start(max_in_flight=2)
    model.gate.clear()
    writer = PlanWriter(64, 4)
    first, second = executor.launch(a_plan(writer)), executor.launch(writer.plan())
    del executor
    gc.collect()
    model.gate.set()
    with pytest.raises(DeviceLost):
        await second.finish()
    assert first.is_done
    join_device_threads()
    assert model.is_freed


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("is_step_running", [*nightly(False), True])
def test_closing_the_loop_ends_the_thread_and_frees_the_model(
    run: Callable[[Any], Any], is_step_running: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Model()

    async def main() -> TorchExecutor:
        executor = await model.start()
        if is_step_running:
            model.gate.clear()
            executor.launch(a_plan())
        return executor

    executor = run(main())
    model.gate.set()
    join_device_threads()
    assert model.is_freed
    assert capfd.readouterr().err == ""
    run(close(executor))


async def close(executor: TorchExecutor) -> None:
    await executor.aclose()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_many_lives_leave_no_file_descriptor_and_no_system_thread() -> None:
    async def live() -> None:
        executor = await Model().start(num_threads=2)
        await executor.launch(a_plan()).finish()
        await executor.aclose()

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    asyncio.run(live())
    before = count()
    for _ in range(5):
        asyncio.run(live())
    deadline = time.monotonic() + END_TIMEOUT_S
    while count() > before and time.monotonic() < deadline:
        os.sched_yield()  # OpenMP's threads end by themselves, soon after the thread that they worked for
    assert count() <= before


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
async def test_of_two_executors_each_ends_its_thread_and_frees_its_model(model: Model) -> None:
    other = Model()
    executors = [await model.start(), await other.start()]
    plan = a_plan()
    results = [tokens_by_row(plan, await executor.launch(plan).finish()) for executor in executors]
    assert results[0] == results[1]
    await executors[1].aclose()
    assert len(device_threads()) == 1
    assert other.is_freed
    assert not model.is_freed
    await executors[0].aclose()
    assert not device_threads()
    assert model.is_freed
