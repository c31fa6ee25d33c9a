"""Where blocking objects may be used, and what is left of those that nobody closes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aioengine import LLM, ConfigError, EngineClosed, LLMEngine, ModelLoadError

IDS = [5, 6, 7]


def in_thread(work: Callable[[], Any]) -> Any:
    """What the work brings or raises in a thread of its own."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="another thread")
    thread.start()
    thread.join()
    return outcome[0]


def closing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aioengine-closing"]


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


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


def test_another_thread_is_refused(open_llm: Any) -> None:
    llm = open_llm()
    for call in (lambda: llm.generate(IDS), llm.stats, llm.close, llm.is_sleeping):
        error = in_thread(call)
        assert isinstance(error, RuntimeError)
        assert "was made in the thread 'MainThread'" in str(error)
    assert len(llm.generate(IDS, max_tokens=2)) == 1


def test_a_thread_may_have_one_of_its_own(device: Any) -> None:
    def use() -> int:
        with LLM(executor=device) as llm:
            return len(llm.generate([IDS] * 3, max_tokens=2))

    assert in_thread(use) == 3
    assert device.is_closed


def test_several_live_side_by_side(open_llm: Any) -> None:
    llms = [open_llm() for _ in range(3)]
    outputs = [llm.generate(IDS, seed=1, max_tokens=3)[0].outputs for llm in llms]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_signal_handler_of_the_callers_own_stays_and_is_called(open_llm: Any, device: Any) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        device.on_sample = lambda: signal.raise_signal(signal.SIGINT)
        assert len(open_llm(device).generate(IDS, max_tokens=2)) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 2


def test_after_a_call_ctrl_c_is_pythons_again(open_llm: Any) -> None:
    open_llm().generate(IDS, max_tokens=2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Starting that fails


def test_what_cannot_start_leaves_nothing(tmp_path: Any) -> None:
    LLM().close()  # what is imported once may leave files open
    before = num_open_files()
    for config, error in (
        ({"max_num_seqs": 0}, ConfigError),
        ({"max_num_seq": 1}, ConfigError),
        ({"model": str(tmp_path)}, ModelLoadError),
    ):
        with pytest.raises(error):
            LLM(**config)
    assert num_open_files() == before


# The end


def test_closing_leaves_nothing(device: Any) -> None:
    LLM().close()
    before = num_open_files()
    with LLM() as llm:
        llm.generate("Once upon a time", max_tokens=2)
    llm.close()
    with pytest.raises(EngineClosed, match="this LLM is closed"):
        llm.generate("Once upon a time")
    assert num_open_files() == before


def test_one_that_is_dropped_closes_itself_without_a_word(device_type: Any, recwarn: Any) -> None:
    device = device_type()
    engine = LLMEngine(executor=device, max_num_seqs=2, max_waiting=2)
    for number in range(8):
        engine.add_request(str(number), IDS)
    engine.step()
    gone = weakref.ref(engine)
    before = num_open_files()
    del engine
    assert gone() is None, "something of the engine holds it"
    assert device.is_closed
    assert num_open_files() < before
    gc.collect()
    assert not recwarn.list


def test_one_that_is_dropped_in_a_running_loop_closes_itself_beside_it(device: Any) -> None:
    holder = [LLM(executor=device)]

    async def drop() -> None:
        holder.clear()

    asyncio.run(drop())
    for thread in closing_threads():
        thread.join()
    assert device.is_closed


def test_one_that_is_dropped_in_another_thread_closes_itself_there(device: Any) -> None:
    holder = [LLM(executor=device)]
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
            llm._host._closer()  # what its end would do
            os._exit(0 if is_refused else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(llm.generate(IDS, max_tokens=2)) == 1
