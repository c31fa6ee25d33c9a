"""Waking a loop from another thread."""

import asyncio
import contextvars
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import uvloop
from nightly import nightly

from aioengine.executor.device_thread import Waker

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

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


async def test_a_system_without_such_descriptors_wakes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "eventfd")
    waker = Waker(asyncio.get_running_loop())
    seen: list[int] = []
    await asyncio.to_thread(waker.call, lambda: seen.append(1))
    await all_called(seen, 1)
    waker.release()
