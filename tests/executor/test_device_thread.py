"""Jobs that only launch their work, the thread that waits for it, and how threads wake a loop."""

import asyncio
import contextvars
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import pytest
import torch
import uvloop
from nightly import nightly

from aioengine.core.executor_protocol import DeviceLost
from aioengine.executor import device_thread as device
from aioengine.executor.device_thread import DeferredResult, DeviceThread, Waker

T = TypeVar("T")

both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

TIMEOUT_S = 5.0


class Launched(DeferredResult[Any]):
    """Work on a device that ends when the test says so."""

    def __init__(self, bring: Callable[[], Any], *, is_over: bool = False) -> None:
        self.over = threading.Event()
        self.is_waited_for = threading.Event()
        self._bring = bring
        if is_over:
            self.over.set()

    def wait(self) -> Any:
        self.is_waited_for.set()
        assert self.over.wait(TIMEOUT_S), "the test forgot it"
        return self._bring()


def waiter_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == device.COMPLETION_THREAD_NAME]


async def reached(event: threading.Event) -> None:
    """Wait on the loop until a thread has set this."""
    with anyio.fail_after(TIMEOUT_S):
        while not event.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0)


Wrap = Callable[[Callable[[], Any]], Callable[[], Any]]
with_and_without_launching = pytest.mark.parametrize(
    "wrap", [lambda work: work, lambda work: lambda: Launched(work, is_over=True)], ids=["computing", "launching"]
)
"""What makes a job of some work: one that does it, or one that launches it."""


@both_loops
async def test_jobs_and_results_come_in_order_each_from_one_thread_under_inference_mode() -> None:
    thread = DeviceThread()
    ran: list[tuple[int, str, bool]] = []
    seen: list[tuple[int, str, bool]] = []

    def note(number: int, where: list[tuple[int, str, bool]]) -> int:
        where.append((number, threading.current_thread().name, torch.is_inference_mode_enabled()))
        return number

    def job(number: int) -> Launched:
        note(number, ran)
        return launched[number]

    launched = [Launched(lambda n=n: note(n, seen)) for n in range(50)]
    pendings = [thread.submit(lambda n=n: job(n)) for n in range(50)]
    for later in reversed(launched):  # the order in which they are over is of no account
        later.over.set()
    assert [await pending.finish() for pending in pendings] == list(range(50))
    assert ran == [(number, device.THREAD_NAME, True) for number in range(50)]
    assert seen == [(number, device.COMPLETION_THREAD_NAME, True) for number in range(50)]
    assert not torch.is_inference_mode_enabled()
    await thread.aclose()
    assert not waiter_threads()


@both_loops
async def test_the_next_job_runs_while_what_was_launched_is_not_over() -> None:
    thread = DeviceThread()
    first, second = Launched(lambda: "first"), Launched(lambda: "second")
    pendings = [thread.submit(lambda: first), thread.submit(lambda: second)]
    assert await thread.submit(lambda: "beside them").finish() == "beside them"
    with pytest.raises(ZeroDivisionError):
        await thread.submit(lambda: 1 // 0).finish()
    assert [(pending.is_launched, pending.is_done) for pending in pendings] == [(True, False)] * 2
    second.over.set()
    assert not pendings[1].is_done
    first.over.set()
    assert [await pending.finish() for pending in pendings] == ["first", "second"]
    await thread.aclose()


@both_loops
async def test_a_step_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[str] = []
    call = Waker.call

    def counted(waker: Waker, callback: Callable[[], object]) -> None:
        callers.append(threading.current_thread().name)
        call(waker, callback)

    monkeypatch.setattr(Waker, "call", counted)
    thread = DeviceThread()
    for _ in range(20):
        await thread.submit(lambda: Launched(lambda: None, is_over=True)).finish()
    assert callers == [device.COMPLETION_THREAD_NAME] * 20
    await thread.aclose()


@with_and_without_launching
async def test_what_a_job_raises_comes_to_its_caller_and_the_next_one_runs(wrap: Wrap) -> None:
    thread = DeviceThread()
    failing, fine = thread.submit(wrap(lambda: 1 // 0)), thread.submit(wrap(lambda: 2))
    exiting = thread.submit(wrap(lambda: exec("raise SystemExit(3)")))
    assert await fine.finish() == 2
    with pytest.raises(ZeroDivisionError):
        await failing.finish()
    with pytest.raises(SystemExit):
        await exiting.finish()
    assert await thread.submit(wrap(lambda: 3)).finish() == 3
    await thread.aclose()


class Large:
    """What must not stay."""


@with_and_without_launching
async def test_idle_threads_hold_neither_a_result_nor_what_brought_it(wrap: Wrap) -> None:
    thread = DeviceThread()
    job = wrap(Large)
    made = job()
    pending = thread.submit(lambda made=made: made)
    result = await pending.finish()
    references = [weakref.ref(result), weakref.ref(made)]
    del result, made, pending
    with anyio.fail_after(TIMEOUT_S):  # the threads let go of it soon after they have told of it
        while any(reference() is not None for reference in references):
            await asyncio.sleep(0)
            gc.collect()
    await thread.aclose()


@both_loops
async def test_cancelling_stops_the_wait_and_one_may_wait_again() -> None:
    thread = DeviceThread()
    later = Launched(lambda: 7)
    pending = thread.submit(lambda: later)
    await reached(later.is_waited_for)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await pending.finish()
    assert scope.cancelled_caught
    later.over.set()
    assert await pending.finish() == 7
    assert await pending.finish() == 7
    await thread.aclose()


@both_loops
async def test_closing_lets_what_is_launched_end_and_loses_what_is_queued() -> None:
    events: list[object] = []
    may_go_on = threading.Event()
    laters = [Launched(lambda n=n: events.append(n) or n) for n in range(3)]

    def on_end() -> None:
        events.append(("end", threading.current_thread().name, queued.is_done))

    thread = DeviceThread(on_end=on_end)
    launched = [thread.submit(lambda later=later: later) for later in laters]
    running = thread.submit(lambda: may_go_on.wait(TIMEOUT_S))
    queued = thread.submit(lambda: Launched(lambda: events.append("queued"), is_over=True))
    await reached(laters[0].is_waited_for)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.aclose)
        await asyncio.sleep(0)
        may_go_on.set()
        assert await running.finish()
        with pytest.raises(DeviceLost, match="closed"):  # at once, and not behind what still runs
            await queued.finish()
        assert not events
        for later in laters:
            later.over.set()
    assert [await pending.finish() for pending in launched] == [0, 1, 2]
    assert events == [0, 1, 2, ("end", device.THREAD_NAME, True)]
    assert not waiter_threads()


@both_loops
async def test_a_device_that_hangs_does_not_hang_the_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "DRAIN_DEADLINE_S", 0.01)
    ended = threading.Event()
    waited: list[str] = []
    hung, behind = Launched(lambda: waited.append("hung")), Launched(lambda: waited.append("behind"))
    thread = DeviceThread(on_end=ended.set)
    done = Launched(lambda: "done")
    before, *pendings = [thread.submit(lambda later=later: later) for later in (done, hung, behind)]
    await thread.submit(lambda: None).finish()
    done.over.set()
    assert await before.finish() == "done"
    await reached(hung.is_waited_for)
    with caplog.at_level(logging.ERROR, "aioengine"):
        await thread.aclose()
    assert "has not finished its work after 0.01 s" in caplog.text
    for pending in pendings:
        with pytest.raises(DeviceLost, match="not finished"), anyio.fail_after(TIMEOUT_S):
            await pending.finish()
    await thread.aclose()
    assert not ended.is_set(), "memory was freed that the device works on"
    # It comes back after all: what it has is freed then, and what it brings is too late.
    hung.over.set()
    await reached(behind.is_waited_for)
    assert not ended.is_set()
    behind.over.set()
    await reached(ended)
    assert waited == ["hung", "behind"]
    with pytest.raises(DeviceLost):
        await pendings[0].finish()


async def test_closing_from_another_loop_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DRAIN_DEADLINE_S", 0.01)
    later = Launched(lambda: None)
    kept: list[DeviceThread] = []

    async def main() -> None:
        kept.append(DeviceThread())
        kept[0].submit(lambda: later)
        await reached(later.is_waited_for)

    other = threading.Thread(target=asyncio.run, args=(main(),))
    other.start()
    while other.is_alive():  # noqa: ASYNC110 - no event tells of a thread's end
        await asyncio.sleep(0)
    await kept[0].aclose()
    later.over.set()


async def test_closing_that_is_cancelled_still_ends_the_threads_after_the_device() -> None:
    ended = threading.Event()
    later = Launched(lambda: 1)
    thread = DeviceThread(on_end=ended.set)
    pending = thread.submit(lambda: later)
    await reached(later.is_waited_for)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await thread.aclose()
    assert scope.cancelled_caught
    assert not ended.is_set()
    later.over.set()
    assert await pending.finish() == 1
    await reached(ended)
    await thread.aclose()
    with pytest.raises(DeviceLost):
        await thread.submit(lambda: 1).finish()


async def test_a_last_act_that_fails_does_not_keep_the_closing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    uncaught: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: uncaught.append(args.exc_value))

    def on_end() -> None:
        raise RuntimeError("cannot free")

    await DeviceThread(on_end=on_end).aclose()
    assert [str(error) for error in uncaught] == ["cannot free"]


def test_threads_end_when_their_loop_is_gone_with_work_outstanding_and_a_long_job_is_told() -> None:
    events: list[str] = []
    told = threading.Event()
    later = Launched(lambda: events.append("over"))
    kept: list[DeviceThread] = []

    async def main() -> None:
        thread = DeviceThread(on_end=lambda: events.append("end"))
        kept.append(thread)
        thread.submit(lambda: later)

        def work() -> None:
            while not thread.should_stop():
                pass
            told.set()

        thread.submit(work)
        await reached(later.is_waited_for)

    asyncio.run(main())
    assert told.wait(TIMEOUT_S)
    later.over.set()
    kept[0]._work.thread.join(TIMEOUT_S)
    assert not kept[0]._work.thread.is_alive()
    assert not waiter_threads()
    assert events == ["over", "end"]


async def test_threads_end_when_nobody_refers_to_them_with_work_outstanding() -> None:
    events: list[str] = []
    ended = threading.Event()

    def on_end() -> None:
        events.append("end")
        ended.set()

    later = Launched(lambda: events.append("over"))
    thread = DeviceThread(on_end=on_end)
    pending = thread.submit(lambda: later)
    await reached(later.is_waited_for)
    del thread
    gc.collect()
    later.over.set()
    await pending.finish()
    await reached(ended)
    assert events == ["over", "end"]


async def test_where_no_thread_can_be_had_the_device_thread_waits_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == device.COMPLETION_THREAD_NAME:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    thread = DeviceThread()
    names = [thread.submit(lambda: Launched(lambda: threading.current_thread().name, is_over=True)) for _ in range(3)]
    assert [await name.finish() for name in names] == [device.THREAD_NAME] * 3
    await thread.aclose()


def run_program(program: str) -> tuple[bytes, bytes]:
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    return process.stdout, process.stderr


@pytest.mark.nightly
def test_a_program_that_ends_waits_for_what_it_has_launched() -> None:
    assert run_program(PROGRAM.format(num_jobs=3, exit_deadline_s=10.0, work_s=0.3)) == (b"over\nwaited\nfreed\n", b"")


@pytest.mark.nightly
def test_a_program_ends_though_its_device_hangs() -> None:
    assert run_program(PROGRAM.format(num_jobs=0, exit_deadline_s=0.1, work_s=3600)) == (b"over\n", b"")


PROGRAM = """
import asyncio, os, time
from aioengine.executor import device_thread as device

device.EXIT_DEADLINE_S = {exit_deadline_s}

class Work(device.DeferredResult[None]):
    def wait(self):
        time.sleep({work_s})
        os.write(1, b"waited\\n")

def compute():
    import torch
    for _ in range(200):
        torch.ones(300, 300) @ torch.ones(300, 300)

async def main():
    thread = device.DeviceThread(on_end=lambda: os.write(1, b"freed\\n"))
    thread.submit(Work)
    await thread.submit(lambda: None).finish()
    for _ in range({num_jobs}):
        thread.submit(compute)
    return thread

kept = asyncio.run(main())
os.write(1, b"over\\n")
"""


# Waking the loop

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def all_called(seen: list[int], count: int) -> None:
    async with asyncio.timeout(5):
        while len(seen) < count:  # noqa: ASYNC110 - what is tested is how this loop gets to know of it
            await asyncio.sleep(0)


@both_loops
async def test_calls_of_several_threads_all_come_each_ones_in_order() -> None:
    waker = Waker(asyncio.get_running_loop())
    seen: list[int] = []

    def call(first: int) -> None:
        for number in range(first, first + 1000):
            waker.call(lambda n=number: seen.append(n))

    threads = [threading.Thread(target=call, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    await all_called(seen, 3000)
    for thread in threads:
        thread.join()
    for first in (0, 1000, 2000):
        assert [number for number in seen if first <= number < first + 1000] == list(range(first, first + 1000))
    waker.release()


@linux
@pytest.mark.parametrize("loop", [*nightly("asyncio"), "uvloop"])
def test_a_closed_loop_is_told_of_and_its_descriptor_is_given_back(loop: str) -> None:
    before = num_descriptors()
    kept: list[Waker] = []

    async def main() -> None:
        kept.append(Waker(asyncio.get_running_loop()))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())
    with pytest.raises(RuntimeError, match="loop is gone"):
        kept[0].call(lambda: None)
    kept[0].release()
    kept.clear()
    gc.collect()
    assert num_descriptors() == before


@both_loops
async def test_the_loop_holds_nothing_of_who_made_it() -> None:
    class Large:
        pass

    variable: contextvars.ContextVar[Large] = contextvars.ContextVar("variable")
    references: list[weakref.ref[Large]] = []

    def make() -> Waker:
        large = Large()
        references.append(weakref.ref(large))
        variable.set(large)
        return Waker(asyncio.get_running_loop())

    waker = contextvars.copy_context().run(make)
    gc.collect()
    assert references[0]() is None
    waker.release()


@linux
async def test_a_descriptor_is_closed_by_no_callback_of_a_call_that_has_yet_to_write_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop was woken by an earlier call, and finds the last one's callback before its thread goes on."""
    waker = Waker(asyncio.get_running_loop())
    write, releasing = os.eventfd_write, threading.Thread(target=waker._close)

    def write_late(fd: int, value: int) -> None:
        releasing.start()
        assert waker._lock.locked()
        assert waker._fd == fd
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    asyncio.get_running_loop().remove_reader(waker._fd)
    await asyncio.to_thread(waker.call, lambda: None)
    releasing.join()
    assert waker._fd == -1


@linux
async def test_a_system_without_such_descriptors_wakes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "eventfd")
    waker = Waker(asyncio.get_running_loop())
    seen: list[int] = []
    await asyncio.to_thread(waker.call, lambda: seen.append(1))
    await all_called(seen, 1)
    waker.release()
