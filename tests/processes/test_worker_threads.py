"""Long text work runs in one thread that closing ends; short text work runs at once."""

import asyncio
import gc
import threading
from collections.abc import Callable

import anyio
import pytest
from waiting import until

from aioengine.errors import EngineClosed
from aioengine.processes.worker_threads import TextWorker, run_abandonable

LONG = TextWorker.MAX_INLINE_CHARS + 1
BOTH_LOOPS = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


def text_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aioengine-text")]


class Held:
    """Work that goes on until it is let go."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        self.first = first
        self.started, self.gate = threading.Event(), threading.Event()

    def __call__(self) -> threading.Thread:
        self.first()
        self.started.set()
        self.gate.wait(10)
        return threading.current_thread()

    async def runs(self) -> None:
        await until(self.started.is_set)


@BOTH_LOOPS
async def test_short_work_runs_at_once_and_long_work_in_one_thread_that_closing_ends() -> None:
    worker = TextWorker()
    assert await worker.run(threading.current_thread, TextWorker.MAX_INLINE_CHARS) is threading.current_thread()
    assert text_threads() == []
    used = {await worker.run(threading.current_thread, size) for size in (LONG, None, LONG)}
    assert used == set(text_threads())
    assert len(used) == 1
    for size in (0, LONG):
        assert await worker.run(sorted, size, [1, 3, 2], reverse=True) == [3, 2, 1]
        with pytest.raises(ValueError, match="invalid literal"):
            await worker.run(int, size, "x")
    for _ in range(2):
        await worker.aclose()
        assert text_threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        await worker.run(str, 0, 5)


@BOTH_LOOPS
async def test_a_cancelled_wait_leaves_the_loop_free_and_the_worker_usable() -> None:
    worker, held, dropped = TextWorker(), Held(), threading.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run, held, None)
        group.start_soon(worker.run, dropped.set, None)
        await held.runs()
        group.cancel_scope.cancel()
    held.gate.set()
    assert await worker.run(str, LONG, 5) == "5"
    assert not dropped.is_set()
    await worker.aclose()


@BOTH_LOOPS
async def test_a_thread_that_cannot_start_is_started_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = TextWorker()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            await worker.run(str, LONG, 5)
    with anyio.fail_after(5):
        assert await worker.run(str, LONG, 5) == "5"
    await worker.aclose()


@BOTH_LOOPS
async def test_closing_waits_for_work_that_is_wanted() -> None:
    worker, held = TextWorker(), Held()
    wanted = [worker.begin(held), worker.begin(threading.current_thread)]
    await held.runs()
    async with anyio.create_task_group() as group:
        group.start_soon(worker.aclose)
        await asyncio.sleep(0)
        [thread] = text_threads()
        held.gate.set()
    assert await asyncio.gather(*wanted) == [thread] * 2
    assert text_threads() == []


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_work_that_outlasts_the_closing_has_ended_for_its_caller(is_cancelled: bool) -> None:
    worker, held, dropped = TextWorker(close_grace_s=None if is_cancelled else 0.01), Held(), threading.Event()
    callers = [worker.begin(work) for work in (held, dropped.set)]
    await held.runs()
    assert all(thread.daemon for thread in text_threads())
    with anyio.CancelScope() as scope:
        if is_cancelled:
            scope.cancel()
        await worker.aclose()
    errors = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineClosed] * 2
    held.gate.set()
    for thread in text_threads():
        thread.join(10)
    assert text_threads() == []
    assert not dropped.is_set()


async def test_work_that_ends_while_closing_is_heard() -> None:
    worker, held = TextWorker(close_grace_s=10.0), Held()
    caller = worker.begin(held)
    await held.runs()
    held.gate.set()
    await worker.aclose()
    assert await caller not in text_threads()


async def test_what_waits_gets_another_thread_than_what_is_left_behind() -> None:
    worker = TextWorker(close_grace_s=10.0)
    [first] = {await worker.run(threading.current_thread, None) for _ in range(3)}
    overdue = Held(worker.leave_behind)
    long = worker.begin(overdue)
    await overdue.runs()
    [other] = {await worker.run(threading.current_thread, None) for _ in range(3)}
    assert other is not first
    overdue.gate.set()
    assert await long is first
    first.join(10)
    assert text_threads() == [other]
    await worker.aclose()
    assert text_threads() == []


async def test_a_thread_that_is_left_behind_when_its_work_is_done_ends_with_the_others() -> None:
    worker = TextWorker(close_grace_s=10.0)
    for _ in range(40):  # some of which leave two threads that wait for work
        worker.leave_behind()
        await asyncio.gather(*(worker.begin(threading.current_thread) for _ in range(2)))
    with anyio.fail_after(5):
        await worker.aclose()
    assert text_threads() == []


async def test_the_thread_of_a_dropped_worker_ends() -> None:
    worker = TextWorker()
    thread = await worker.run(threading.current_thread, None)
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


async def test_a_wait_that_is_cancelled_while_its_thread_unwinds_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()
    unwinding = []

    class SlowToEnd(threading.Thread):
        def run(self) -> None:
            super().run()
            unwinding.append(self)
            may_end.wait(30)

    monkeypatch.setattr(threading, "Thread", SlowToEnd)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(run_abandonable(lambda: 1))
        await until(lambda: bool(unwinding))
        for _ in range(10):  # by now it has heard of the result
            await asyncio.sleep(0)
        waiting.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        may_end.set()
    assert waiting.cancelled()
    assert not unwinding[0].is_alive()
