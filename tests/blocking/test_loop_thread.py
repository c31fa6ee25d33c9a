"""Threads that share a blocking object, Ctrl-C among them, and what is left of objects that are not closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from blocking.conftest import ENDLESS, on_ctrl_c, press_ctrl_c
from nightly import seeds

from aioengine import LLM, ConfigError, EngineClosed, InvalidRequest, LLMEngine, ModelLoadError

IDS = [5, 6, 7]


def in_thread(work: Callable[[], Any]) -> Any:
    """What the work brings in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aioengine-loop"]


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_file_left_open() -> Iterator[None]:
    LLM().close()  # what is imported once may leave files open
    before = num_open_files()
    yield
    assert num_open_files() == before


# Loops and threads


@pytest.mark.parametrize("kind", [LLM, LLMEngine])
async def test_in_a_running_loop_making_one_is_refused_with_the_async_way(kind: Any) -> None:
    with pytest.raises(RuntimeError, match=r"await aioengine\.Engine\.start"):
        kind()


def test_in_a_running_loop_each_blocking_call_is_refused_and_changes_nothing(open_engine: Any, open_llm: Any) -> None:
    engine, llm = open_engine(), open_llm()
    engine.add_request("a", IDS)

    async def use() -> None:
        for call in (
            engine.step,
            engine.close,
            engine.is_sleeping,
            lambda: engine.add_request("b", IDS),
            lambda: engine.abort_request("a"),
            lambda: llm.generate(IDS),
            lambda: llm.chat([{"role": "user", "content": "Hello"}]),
            lambda: llm.__exit__(None, None, None),
        ):
            with pytest.raises(RuntimeError, match="runs an event loop"):
                call()

    asyncio.run(use())
    assert engine.get_num_unfinished_requests() == 1
    assert len(llm.generate(IDS, max_tokens=2)) == 1
    assert engine.step()


def test_calls_of_several_threads_share_its_steps(open_llm: Any, device: Any) -> None:
    llm = open_llm(device)
    expected = [output.outputs for output in llm.generate([[5, 6, number] for number in range(8)], seed=1)]
    device.is_manual = True  # until all are there

    def release() -> None:
        while llm.stats().running + llm.stats().waiting < 8:
            pass
        device.is_manual = False
        llm._host._loop.call_soon_threadsafe(device.complete)

    with ThreadPoolExecutor(9) as pool:
        calls = [pool.submit(llm.generate, [5, 6, number], seed=1) for number in range(8)]
        pool.submit(release).result()
        assert [call.result()[0].outputs for call in calls] == expected
    assert max(len(plan.rows) for plan in device.plans) == 8


def test_the_thread_that_made_it_may_end(device: Any) -> None:
    llm = in_thread(lambda: LLM(executor=device))
    assert len(llm.generate([IDS] * 3, max_tokens=2)) == 3
    assert in_thread(lambda: len(llm.generate([IDS] * 3, max_tokens=2))) == 3
    in_thread(llm.close)
    assert device.is_closed


async def test_an_error_is_that_of_the_thread_that_asked_also_beside_a_loop(open_llm: Any) -> None:
    llm = await asyncio.to_thread(open_llm)
    prompts = [IDS, [99999]] * 10
    calls = [asyncio.to_thread(llm.generate, prompt, max_tokens=2) for prompt in prompts]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [list, InvalidRequest] * 10
    await asyncio.to_thread(llm.close)


@pytest.mark.parametrize("seed", seeds(10))
def test_a_call_that_races_with_the_end_brings_its_outcome(device_type: Any, seed: int) -> None:
    llm = LLM(executor=device_type())
    outcomes: list[Any] = []

    def call_until_it_is_closed() -> None:
        try:
            while True:
                llm.generate(IDS, max_tokens=1)
                outcomes.append(True)
        except EngineClosed as error:
            outcomes.append(error)

    threads = [threading.Thread(target=call_until_it_is_closed) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(outcomes) < seed:
        pass
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: llm.close(), range(2)))
    for thread in threads:
        thread.join()
    assert sum(isinstance(outcome, EngineClosed) for outcome in outcomes) == 4


# Signals


def test_ctrl_c_ends_the_main_threads_call_and_no_other(open_llm: Any, patient_device: Any) -> None:
    llm = open_llm(patient_device)

    is_called = threading.Event()

    def interrupt_once() -> None:
        if is_called.is_set():
            is_called.clear()
            press_ctrl_c()

    def call() -> None:
        is_called.set()
        llm.generate([IDS] * 4, max_tokens=ENDLESS)

    patient_device.on_sample = interrupt_once
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(llm.generate, IDS, max_tokens=500, seed=seed) for seed in range(2)]
        with pytest.raises(KeyboardInterrupt):
            call()
        assert [len(other.result()[0].outputs[0].token_ids) for other in others] == [500] * 2
    assert llm.stats().running == llm.stats().waiting == 0


@pytest.mark.parametrize("seed", seeds(5))
def test_ctrl_c_at_any_moment_ends_a_call_or_comes_after_it(open_llm: Any, device: Any, seed: int) -> None:
    llm = open_llm(device)
    draw = random.Random(seed)
    turns: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()

    def press() -> None:
        while (is_pressed := turns.get()) is not None:
            for _ in range(draw.randrange(3000)):
                pass
            press_ctrl_c()
            is_pressed.set()

    threading.Thread(target=press).start()

    def call_until_it_is_pressed() -> None:
        is_pressed = threading.Event()
        turns.put(is_pressed)
        llm.generate([IDS] * 2, max_tokens=3)
        while True:
            is_pressed.wait()

    for _ in range(100):
        with pytest.raises(KeyboardInterrupt):
            call_until_it_is_pressed()
    turns.put(None)
    assert llm.stats().running == llm.stats().waiting == 0
    assert not llm._host._calls
    assert len(llm.generate([IDS] * 3, max_tokens=2)) == 3


def test_a_signal_handler_of_the_callers_own_is_called_and_what_it_raises_ends_the_call(
    open_llm: Any, patient_device: Any
) -> None:
    heard: list[int] = []

    def refuse(number: int, frame: Any) -> None:
        raise TimeoutError("the worker's time is over")

    llm = open_llm(patient_device)
    patient_device.interrupt_at(1)
    with on_ctrl_c(lambda number, _: heard.append(number)):
        assert len(llm.generate(IDS, max_tokens=2)) == 1
    assert heard == [signal.SIGINT]
    patient_device.interrupt_at(patient_device.num_sampled + 1)
    with on_ctrl_c(refuse), pytest.raises(TimeoutError, match="the worker's time"):
        llm.generate(IDS, max_tokens=ENDLESS)
    assert llm.stats().running == 0


# Starting that fails


def test_what_cannot_start_leaves_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    refused = [({"max_num_seqs": 0}, ConfigError), ({"max_num_seq": 1}, ConfigError)]
    with no_file_left_open():
        for config, error in (*refused, ({"model": str(tmp_path)}, ModelLoadError)):
            with pytest.raises(error):
                LLM(**config)
        assert not loop_threads()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            LLM()


# The end


def test_closing_leaves_nothing(device: Any) -> None:
    with no_file_left_open():
        with LLM() as llm:
            llm.generate("Once upon a time", max_tokens=2)
        llm.close()
        with pytest.raises(EngineClosed, match="this LLM is closed"):
            llm.generate("Once upon a time")


def test_one_that_is_dropped_closes_itself_without_a_word(device_type: Any, recwarn: Any) -> None:
    device = device_type()
    engine = LLMEngine(executor=device, max_num_seqs=2, max_waiting=2)
    for number in range(8):
        engine.add_request(str(number), IDS)
    engine.step()
    gone = weakref.ref(engine)
    before = num_open_files()
    threads = loop_threads()
    del engine
    for thread in threads:  # it holds the engine until the last call has come back from it
        thread.join(timeout=30.0)
    assert gone() is None, "something of the engine holds it"
    assert device.is_closed
    assert num_open_files() < before
    gc.collect()
    assert not recwarn.list


@pytest.mark.parametrize("in_a_loop", [True, False])
def test_one_that_is_dropped_in_a_running_loop_or_another_thread_closes_itself(device: Any, in_a_loop: bool) -> None:
    holder = [LLM(executor=device)]

    async def drop() -> None:
        holder.clear()

    if in_a_loop:
        asyncio.run(drop())
        for thread in loop_threads():
            thread.join()
    else:
        in_thread(holder.clear)
    assert device.is_closed


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of processes with threads, which is what is tested
def test_in_a_forked_child_it_is_refused_and_left_alone(open_llm: Any) -> None:
    llm = open_llm()
    pid = os.fork()
    if not pid:  # the child: nothing of pytest's may run here
        try:
            llm.generate(IDS)
        except RuntimeError as error:
            is_refused = "before a fork" in str(error)
            llm._host.drop()  # what its end would do
            llm.close()
            os._exit(0 if is_refused else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(llm.generate(IDS, max_tokens=2)) == 1
