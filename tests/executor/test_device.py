"""The device thread by itself."""

import asyncio
import gc
import threading
import weakref

import anyio
import pytest
import torch

from aioengine.core.executor_protocol import DeviceLost
from aioengine.executor.device_thread import DeviceThread

both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


@both_loops
async def test_jobs_run_in_order_in_one_thread_under_inference_mode() -> None:
    thread = DeviceThread()
    seen: list[tuple[int, int, bool]] = []

    def job(number: int) -> int:
        seen.append((number, threading.get_ident(), torch.is_inference_mode_enabled()))
        return number

    pendings = [thread.submit(lambda n=n: job(n)) for n in range(50)]
    assert [await pending.wait() for pending in pendings] == list(range(50))
    assert [number for number, _, _ in seen] == list(range(50))
    assert len({ident for _, ident, _ in seen}) == 1
    assert all(is_inference_mode for _, _, is_inference_mode in seen)
    assert seen[0][1] != threading.get_ident()
    assert not torch.is_inference_mode_enabled()
    await thread.aclose()


async def test_what_a_job_raises_comes_to_who_waits_and_the_next_job_runs() -> None:
    thread = DeviceThread()
    failing, fine = thread.submit(lambda: 1 // 0), thread.submit(lambda: 2)
    assert await fine.wait() == 2
    with pytest.raises(ZeroDivisionError):
        await failing.wait()
    exiting = thread.submit(lambda: exec("raise SystemExit(3)"))
    with pytest.raises(SystemExit):
        await exiting.wait()
    assert await thread.submit(lambda: 3).wait() == 3
    await thread.aclose()


async def test_an_idle_thread_holds_no_result() -> None:
    class Result:
        pass

    thread = DeviceThread()
    result = await thread.submit(Result).wait()
    reference = weakref.ref(result)
    del result
    gc.collect()
    assert await thread.submit(lambda: reference() is None).wait()
    await thread.aclose()


async def test_the_last_act_runs_in_the_thread_after_the_queue_is_lost() -> None:
    events: list[object] = []
    is_running, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def run() -> None:
        loop.call_soon_threadsafe(is_running.set)
        assert may_end.wait(5)

    def on_end() -> None:
        events.append(("end", threading.current_thread() is not threading.main_thread(), queued.is_done))

    thread = DeviceThread(on_end=on_end)
    running, queued = thread.submit(run), thread.submit(lambda: events.append("queued ran"))
    await is_running.wait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.aclose)
        await asyncio.sleep(0)
        may_end.set()
    await running.wait()
    with pytest.raises(DeviceLost, match="closed"):
        await queued.wait()
    assert events == [("end", True, True)]


async def test_a_last_act_that_fails_does_not_keep_the_closing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    uncaught: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: uncaught.append(args.exc_value))

    def on_end() -> None:
        raise RuntimeError("cannot free")

    await DeviceThread(on_end=on_end).aclose()
    assert [str(error) for error in uncaught] == ["cannot free"]


async def test_closing_that_is_cancelled_closes_all_the_same() -> None:
    may_end = threading.Event()
    thread = DeviceThread()
    thread.submit(lambda: may_end.wait(5))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await thread.aclose()
    assert scope.cancelled_caught
    may_end.set()
    await thread.aclose()
    with pytest.raises(DeviceLost):
        await thread.submit(lambda: 1).wait()


async def test_long_jobs_can_ask_whether_to_stop() -> None:
    thread = DeviceThread()
    should_stop = thread.should_stop
    assert not should_stop()

    def work() -> str:
        while not should_stop():
            pass
        return "stopped"

    job = thread.submit(work)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.aclose)
    try:
        assert await job.wait() == "stopped"
    except DeviceLost:
        pass  # the thread was told to end before it took the job up


def test_a_long_job_is_told_when_its_loop_is_gone() -> None:
    ended = threading.Event()

    async def main() -> threading.Thread:
        thread = DeviceThread(on_end=ended.set)
        should_stop = thread.should_stop

        def work() -> None:
            while not should_stop():
                pass

        thread.submit(work)
        kept.append(thread)
        return thread._work.thread

    kept: list[DeviceThread] = []
    worker = asyncio.run(main())
    worker.join(5)
    assert not worker.is_alive()
    assert ended.is_set()
