"""The virtual clock, and the rules that the suite's conftest builds on it and on blockbuster."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from blockbuster import BlockingError

import aioengine
from aioengine.testing.clock import Deadlock, VirtualClockLoop, run

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run_on(loop_factory: Callable[[], VirtualClockLoop], main: Callable[[], Awaitable[Any]]) -> Any:
    async def call() -> Any:
        return await main()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(call())


class RealWaits(VirtualClockLoop):
    """A loop that tells when it has begun to wait for work outside, for threads that must not end before."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.has_waited = threading.Event()
        really_select = self._io.really_select

        def select(timeout_s: float) -> Any:
            if timeout_s == self._outside_patience_s:
                self.has_waited.set()
            return really_select(timeout_s)

        self._io.really_select = select

    def block_until_it_waits(self) -> str:
        assert self.has_waited.wait(timeout=10)
        return "done"


# Time


@pytest.mark.parametrize("delays", [[3600.0], [1e9, 0.5]], ids=["an hour", "where a nanosecond is lost in rounding"])
def test_time_passes_at_once_and_exactly(delays: list[float]) -> None:
    async def main() -> float:
        for delay in delays:
            await asyncio.sleep(delay)
        return asyncio.get_running_loop().time()

    assert run(main(), seed=0) == sum(delays)


def test_timers_fire_in_order_of_deadline_whatever_the_order_they_were_set_in() -> None:
    async def main() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, float]] = []

        async def sleeper(delay: float) -> None:
            await asyncio.sleep(delay)
            fired.append((delay, loop.time()))

        async with asyncio.TaskGroup() as group:
            for delay in (7.5, 0.1, 86400.0 * 3, 0.3, 1e-6, 0.2):
                group.create_task(sleeper(delay))
        return fired

    for seed in range(10):
        assert run(main(), seed=seed) == [(delay, delay) for delay in (1e-6, 0.1, 0.2, 0.3, 7.5, 86400.0 * 3)]


# Sockets


@pytest.mark.parametrize("io_patience_s", [0.0, 5.0], ids=["there", "on their way"])
def test_bytes_come_before_the_next_timer(io_patience_s: float) -> None:
    async def main() -> tuple[bytes, float]:
        loop: Any = asyncio.get_running_loop()
        really_select = loop._io.really_select
        here, there = socket.socketpair()

        def select_late(timeout: float) -> Any:
            if timeout:
                there.sendall(b"ping")
            return really_select(timeout)

        def send() -> None:
            if io_patience_s:
                loop._io.really_select = select_late  # it comes when the loop has begun to wait for it
            else:
                there.sendall(b"ping")

        with here, there:
            here.setblocking(False)
            loop.call_soon(loop.call_soon, send)
            async with asyncio.timeout(1):
                return await loop.sock_recv(here, 10), loop.time()

    assert run_on(lambda: VirtualClockLoop(seed=0, io_patience_s=io_patience_s), main) == (b"ping", 0.0)


# Deadlock


def test_a_deadlock_names_each_task_the_place_where_it_waits_and_the_seed() -> None:
    async def waits_for_a_sign(sign: asyncio.Event) -> None:
        await sign.wait()  # the line that the report shows

    async def main() -> None:
        await asyncio.sleep(4)
        async with asyncio.TaskGroup() as group:
            group.create_task(waits_for_a_sign(asyncio.Event()), name="the waiting one")

    with pytest.raises(Deadlock) as caught:
        run(main(), seed=71)
    report = str(caught.value)
    assert (caught.value.seed, caught.value.now) == (71, 4.0)
    assert "nothing can wake this loop" in report
    assert "virtual time 4.0 s, seed 71" in report
    assert "task 'the waiting one' waits for <Future pending" in report
    assert "in waits_for_a_sign\n    await sign.wait()  # the line that the report shows" in report
    assert "in main\n    async with asyncio.TaskGroup() as group:" in report


async def swallow_it() -> None:
    with contextlib.suppress(Exception):
        await asyncio.Event().wait()


async def listen_to_a_silent_peer() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        await asyncio.get_running_loop().sock_recv(here, 1)


@pytest.mark.parametrize("hang", [swallow_it, anyio.sleep_forever, listen_to_a_silent_peer])
def test_what_no_timer_or_byte_will_wake_is_a_deadlock_that_no_except_catches(
    hang: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    with pytest.raises(Deadlock) as caught:
        run(hang(), seed=0)
    assert caught.value.now == 0.0, "a timer at infinity is none"


def test_polling_for_a_later_time_without_sleeping_is_a_deadlock() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < 1:  # noqa: ASYNC110 - the mistake under test
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="500 rounds of the loop, and time has not moved"):
        run_on(lambda: VirtualClockLoop(seed=0, max_rounds_at_one_time=500), main)


def test_a_loop_goes_on_after_a_deadlock_so_that_fixtures_can_clean_up() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def clean_up() -> str:
        await asyncio.sleep(1)
        return "clean"

    with asyncio.Runner(loop_factory=partial(VirtualClockLoop, seed=0)) as runner:
        with pytest.raises(Deadlock):
            runner.run(hang())
        assert runner.run(clean_up()) == "clean"


# Order


async def order_of(num_tasks: int) -> tuple[int, ...]:
    order: list[int] = []

    async def step(i: int) -> None:
        order.append(i)

    async with asyncio.TaskGroup() as group:
        for i in range(num_tasks):
            group.create_task(step(i))
    return tuple(order)


def test_a_seed_that_was_drawn_is_in_the_error_and_runs_the_program_in_the_same_order_again() -> None:
    async def main() -> None:
        raise AssertionError(await order_of(20))

    with pytest.raises(AssertionError) as drawn:
        run(main())
    seed = int(drawn.value.__notes__[0].split("seed ")[1].split(",")[0])
    with pytest.raises(AssertionError) as again:
        run(main(), seed=seed)
    assert again.value.args == drawn.value.args


def test_seeds_reach_every_order_of_tasks_that_are_ready_together_and_each_its_own() -> None:
    assert [run(order_of(20), seed=seed) for seed in range(5)] == [run(order_of(20), seed=seed) for seed in range(5)]
    assert {run(order_of(3), seed=seed) for seed in range(60)} == set(permutations(range(3)))


def test_the_order_does_not_depend_on_the_order_in_which_a_set_of_tasks_is_woken() -> None:
    async def main(wakes: Callable[[list[asyncio.Event]], list[asyncio.Event]]) -> list[int]:
        order: list[int] = []

        async def wait(i: int, event: asyncio.Event) -> None:
            await event.wait()
            order.append(i)

        events = [asyncio.Event() for _ in range(10)]
        async with asyncio.TaskGroup() as group:
            for i, event in enumerate(events):
                group.create_task(wait(i, event))
            await asyncio.sleep(1)
            for event in wakes(events):
                event.set()
        return order

    assert run(main(list), seed=5) == run(main(lambda events: events[::-1]), seed=5)


def test_callbacks_stay_first_in_first_out_and_no_task_passes_one() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        seen: list[str] = []

        async def step(name: str) -> None:
            seen.append(name)

        for number in range(9):
            loop.call_soon(seen.append, f"before {number}")
        async with asyncio.TaskGroup() as group:
            first = group.create_task(step("task"))
            loop.call_soon(first.cancel)  # a task's method, and yet no step of it
            loop.call_soon(seen.append, "after")
            group.create_task(step("last task"))
        return seen

    expected = [*(f"before {number}" for number in range(9)), "task", "after", "last task"]
    for seed in range(20):
        assert run(main(), seed=seed) == expected


def test_anyio_runs_on_it_by_its_loop_factory_and_its_nested_deadlines_fire_each_in_its_scope() -> None:
    async def main() -> None:
        with anyio.move_on_after(5) as outer:
            with anyio.move_on_after(2) as inner:
                await anyio.sleep_forever()
            assert (inner.cancelled_caught, anyio.current_time()) == (True, 2.0)
            with pytest.raises(TimeoutError), anyio.fail_after(1):
                await anyio.Event().wait()
            await anyio.sleep_forever()
        assert (outer.cancelled_caught, anyio.current_time()) == (True, 5.0)

    anyio.run(main, backend_options={"loop_factory": partial(VirtualClockLoop, seed=3)})


# Threads


@pytest.mark.parametrize("to_thread", [asyncio.to_thread, anyio.to_thread.run_sync], ids=["asyncio", "anyio"])
def test_a_thread_is_waited_for_in_real_time_and_the_clock_stands_still(to_thread: Callable[..., Any]) -> None:
    async def main() -> tuple[str, float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, RealWaits)
        async with asyncio.timeout(1):
            result = await to_thread(loop.block_until_it_waits)
        time_after_thread = loop.time()
        await asyncio.sleep(5)
        return result, time_after_thread, loop.time()

    assert run_on(lambda: RealWaits(seed=0), main) == ("done", 0.0, 5.0)


@pytest.mark.parametrize("calls_back", [True, False])
def test_a_thread_of_ones_own_is_waited_for_while_its_work_is_open_and_its_end_wakes_the_loop(calls_back: bool) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, RealWaits)
        answer: asyncio.Future[str] = loop.create_future()
        work = loop.outside_work("a step on the device")

        def device() -> None:
            result = loop.block_until_it_waits()
            if calls_back:
                loop.call_soon_threadsafe(answer.set_result, result)
            work.done()
            work.done()

        thread = threading.Thread(target=device)
        thread.start()
        if calls_back:
            async with asyncio.timeout(1):
                await answer
        await asyncio.sleep(8)
        thread.join()
        return loop.time()

    assert run_on(lambda: RealWaits(seed=0, outside_patience_s=10), main) == 8.0


def test_outside_work_that_never_ends_is_reported_by_name() -> None:
    async def main() -> None:
        with asyncio.get_running_loop().outside_work("a lost step"):  # type: ignore[attr-defined]
            await asyncio.sleep(1)

    with pytest.raises(Deadlock, match=r"waited 0.01 s of real time for work outside the loop \(a lost step\)"):
        run_on(lambda: VirtualClockLoop(seed=0, outside_patience_s=0.01), main)


def test_polling_for_a_thread_is_no_deadlock() -> None:
    gate = threading.Event()

    async def main() -> None:
        waiting = asyncio.get_running_loop().run_in_executor(None, gate.wait, 10)
        for _ in range(100):
            await asyncio.sleep(0)
        gate.set()
        await waiting

    run_on(lambda: VirtualClockLoop(seed=0, max_rounds_at_one_time=10), main)


def test_a_cancelled_wait_for_a_thread_does_not_hold_the_clock() -> None:
    gate = threading.Event()

    async def main() -> float:
        waiting = asyncio.get_running_loop().run_in_executor(None, gate.wait, 10)
        waiting.cancel()
        await asyncio.sleep(30)
        gate.set()
        return asyncio.get_running_loop().time()

    assert run_on(lambda: VirtualClockLoop(seed=0, outside_patience_s=1), main) == 30.0


# Closing


def test_a_run_leaves_no_task_thread_or_file_descriptor() -> None:
    async def main() -> None:
        await asyncio.to_thread(int)
        await anyio.to_thread.run_sync(int)
        await asyncio.sleep(1)

    fds, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    runner = asyncio.Runner(loop_factory=partial(VirtualClockLoop, seed=0))
    with runner:
        loop = runner.get_loop()
        runner.run(main())
        assert not asyncio.all_tasks(loop)
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)  # anyio tells its workers to end and does not wait for them
    assert loop.is_closed()
    assert set(threading.enumerate()) == threads
    assert set(os.listdir("/proc/self/fd")) == fds


# The suite's rules: blocking calls


def as_if_in_this_package(source: str) -> Callable[..., Any]:
    """The function ``f`` of ``source``, compiled under a file name inside the package."""
    namespace: dict[str, Any] = {}
    file_name = Path(aioengine.__file__).parent / "imagined.py"
    exec(compile(source, str(file_name), "exec"), namespace)
    return namespace["f"]  # type: ignore[no-any-return]


BLOCKING = {
    "sleep": "import time\ndef f(lock, sock, path): time.sleep(0)",
    "file read": "def f(lock, sock, path):\n    with open(path) as file: file.read()",
    "file write": "def f(lock, sock, path):\n    with open('/dev/null', 'wb') as file: file.write(b'')",
    "socket": "def f(lock, sock, path): sock.recv(1)",
    "held lock": "def f(lock, sock, path): lock.acquire(timeout=0.001)",
    "directory": "import os\ndef f(lock, sock, path): os.listdir('/')",
}


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop", "virtual-0"])
@pytest.mark.parametrize("source", BLOCKING.values(), ids=BLOCKING.keys())
async def test_a_blocking_call_from_this_package_on_the_loop_raises(source: str) -> None:
    here, there = socket.socketpair()
    lock = threading.Lock()
    with here, there, lock:
        there.send(b"x")
        with pytest.raises(BlockingError):
            as_if_in_this_package(source)(lock, here, __file__)


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop", "virtual-0"])
@pytest.mark.parametrize("name", ["sleep", "file read", "directory"])
async def test_the_same_call_in_a_thread_is_fine_and_so_is_one_of_the_test_itself(name: str) -> None:
    await asyncio.to_thread(as_if_in_this_package(BLOCKING[name]), None, None, __file__)
    assert os.listdir(Path(__file__).parent)


# The suite's rules: loops, seeds and leaks, seen from outside

INNER_TESTS = """
import asyncio
import threading

import pytest

kept = []


async def test_unmarked():
    assert type(asyncio.get_running_loop()) is asyncio.SelectorEventLoop


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop", "virtual-17"])
async def test_on_three_loops():
    pass


@pytest.mark.virtual_clock
async def test_on_default_seeds():
    await asyncio.sleep(3600)


@pytest.mark.virtual_clock(seeds=[7, 8])
async def test_fails_on_both_seeds():
    await asyncio.sleep(3)
    assert 1 == 2


@pytest.mark.virtual_clock(seeds=[9])
async def test_hangs():
    kept.append(asyncio.create_task(asyncio.Event().wait()))
    await asyncio.Event().wait()


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop", "virtual-1"])
async def test_leaks_a_task():
    kept.append(asyncio.create_task(asyncio.Event().wait(), name="the lost task"))


def test_leaks_a_thread(ended):
    threading.Thread(target=ended.wait, name="aioengine-lost").start()


@pytest.fixture(scope="session")
def ended():
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def closed_in_teardown():
    task = asyncio.create_task(asyncio.Event().wait())
    yield
    task.cancel()
    await asyncio.wait([task])


async def test_whose_fixture_ends_its_task(closed_in_teardown):
    pass


@pytest.mark.asyncio(loop_scope="module")
async def test_on_the_modules_loop():
    await asyncio.to_thread(int)
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("CI", "BUILD_NUMBER"):  # where pytest finds these it repeats whole messages in its summary
        monkeypatch.delenv(name, raising=False)
    conftest = CONFTEST.read_text().replace("_THREAD_END_TIMEOUT_S = 2.0", "_THREAD_END_TIMEOUT_S = 0.01")
    pytester.makeconftest(conftest)
    pytester.makeini(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
        "addopts = --strict-markers -p no:cacheprovider"
    )
    return pytester


@pytest.mark.nightly
def test_the_suite_runs_the_loops_asked_for_and_fails_leaks_and_shows_seeds(inner: pytest.Pytester) -> None:
    inner.makepyfile(INNER_TESTS)
    result = inner.runpytest_inprocess("-v", "--clock-seeds=3")
    output = result.stdout.str()
    result.assert_outcomes(passed=1 + 3 + 3 + 3 + 1 + 1 + 1, failed=2 + 1, errors=3 + 1)
    assert "test_unmarked PASSED" in output
    for loop in ("asyncio", "uvloop", "virtual-17"):
        assert f"test_on_three_loops[{loop}] PASSED" in output
    for seed in range(3):
        assert f"test_on_default_seeds[virtual-{seed}] PASSED" in output
    for seed in (7, 8):
        assert f"virtual clock: seed {seed}, virtual time 3.0 s" in output
    assert "Deadlock: nothing can wake this loop" in output
    assert "seed 9)" in output
    assert output.count("name='the lost task'") == 3
    assert "threads left behind:\naioengine-lost" in output
