"""Long text work runs in one thread that closing ends; short text work runs at once."""

import asyncio
import gc
import threading
from collections.abc import Callable

import anyio
import pytest
from waiting import until

from aioengine.errors import EngineClosed
from aioengine.text.worker import TextWorker

LONG = TextWorker.MAX_INLINE_CHARS + 1
BOTH_LOOPS = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


def text_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aioengine-text")]


def waiting(gate: threading.Event, started: threading.Event) -> Callable[[], str]:
    def work() -> str:
        started.set()
        gate.wait(10)
        return "done"

    return work


@BOTH_LOOPS
async def test_short_work_runs_at_once_and_makes_no_thread() -> None:
    worker = TextWorker()
    assert await worker.run(threading.current_thread, TextWorker.MAX_INLINE_CHARS) is threading.current_thread()
    assert text_threads() == []
    await worker.aclose()


@BOTH_LOOPS
async def test_long_work_runs_in_one_thread_that_closing_ends() -> None:
    worker = TextWorker()
    used = {await worker.run(threading.current_thread, size) for size in (LONG, None, LONG)}
    assert used == set(text_threads())
    assert len(used) == 1
    await worker.aclose()
    assert text_threads() == []


async def test_arguments_and_results_pass_through() -> None:
    worker = TextWorker()
    for size in (0, LONG):
        assert await worker.run(sorted, size, [1, 3, 2], reverse=True) == [3, 2, 1]
    await worker.aclose()


async def test_errors_pass_through() -> None:
    worker = TextWorker()
    for size in (0, LONG):
        with pytest.raises(ValueError, match="invalid literal"):
            await worker.run(int, size, "x")
    await worker.aclose()


@BOTH_LOOPS
async def test_the_loop_goes_on_while_long_work_runs() -> None:
    worker, gate, started = TextWorker(), threading.Event(), threading.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run, waiting(gate, started), None)
        await until(started.is_set)
        gate.set()
    await worker.aclose()


@BOTH_LOOPS
async def test_a_cancelled_wait_leaves_the_worker_usable() -> None:
    worker, gate, started, dropped = TextWorker(), threading.Event(), threading.Event(), threading.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run, waiting(gate, started), None)
        group.start_soon(worker.run, dropped.set, None)
        await until(started.is_set)
        group.cancel_scope.cancel()
    gate.set()
    assert await worker.run(str, LONG, 5) == "5"
    assert not dropped.is_set()
    await worker.aclose()


@BOTH_LOOPS
async def test_closing_waits_for_work_that_is_wanted() -> None:
    worker, gate, started = TextWorker(), threading.Event(), threading.Event()
    results = []

    async def keep() -> None:
        results.append(await worker.run(waiting(gate, started), None))

    async with anyio.create_task_group() as group:
        group.start_soon(keep)
        await until(started.is_set)
        group.start_soon(worker.aclose)
        await asyncio.sleep(0)
        assert len(text_threads()) == 1
        gate.set()
    assert results == ["done"]
    assert text_threads() == []


async def test_a_cancelled_close_still_ends_the_thread() -> None:
    worker, gate, started = TextWorker(), threading.Event(), threading.Event()
    caller = worker.begin(waiting(gate, started))
    await until(started.is_set)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await worker.aclose()
    with pytest.raises(EngineClosed):
        await caller
    gate.set()
    for thread in text_threads():
        thread.join(10)
        assert not thread.is_alive()


async def test_a_closed_worker_says_so() -> None:
    worker = TextWorker()
    await worker.aclose()
    await worker.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await worker.run(str, 0, 5)


async def test_chats_share_one_thread_but_for_one_that_is_overdue() -> None:
    worker, gate, started = TextWorker(close_grace_s=10.0), threading.Event(), threading.Event()
    used = {await worker.run(threading.current_thread, None) for _ in range(3)}
    assert len(used) == 1

    def overdue() -> threading.Thread:
        worker.give_way()
        started.set()
        gate.wait(10)
        return threading.current_thread()

    long = worker.begin(overdue)
    await until(started.is_set)
    [other] = {await worker.run(threading.current_thread, None) for _ in range(3)}
    assert other not in used
    gate.set()
    assert {await long} == used
    used.pop().join(10)
    assert text_threads() == [other]
    await worker.aclose()
    assert text_threads() == []


async def test_a_chat_that_nothing_can_stop_holds_nobody() -> None:
    worker, gate, started, dropped = (
        TextWorker(close_grace_s=0.01),
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )
    callers = [worker.begin(work) for work in (waiting(gate, started), dropped.set)]
    await until(started.is_set)
    assert all(thread.daemon for thread in text_threads())
    await worker.aclose()
    errors = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineClosed] * 2
    gate.set()
    for thread in text_threads():
        thread.join(10)
    assert not dropped.is_set()


async def test_a_chat_that_ends_while_closing_is_heard() -> None:
    worker, gate, started = TextWorker(close_grace_s=10.0), threading.Event(), threading.Event()
    caller = worker.begin(waiting(gate, started))
    await until(started.is_set)
    gate.set()
    await worker.aclose()
    assert await caller == "done"


async def test_the_thread_of_a_dropped_chat_worker_ends() -> None:
    worker = TextWorker(close_grace_s=10.0)
    thread = await worker.run(threading.current_thread, None)
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
