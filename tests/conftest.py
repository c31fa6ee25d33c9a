"""What holds for every test of this package.

**Loops.** An async test runs on plain asyncio. It asks for more where the loop matters:

- ``@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])``: once on each. Plain asyncio alone is the default since
  running each test twice doubles the suite for the few that touch sockets, threads or timers.
- ``@pytest.mark.virtual_clock``: on `aioengine.testing.clock.VirtualClockLoop`, under ``--clock-seeds`` seeds (1; 50
  in ``make nightly``); ``virtual_clock(seeds=50)`` takes the seeds 0 to 49, ``virtual_clock(seeds=[17])`` takes those
  given. A failure shows its seed.
- ``loop_factories=["asyncio", "virtual-17"]``: a virtual clock with that seed beside a real one.

**Long** tests carry ``@pytest.mark.nightly``: ``make nightly`` runs them, ``make check`` does not.

**Native kernels** are compiled before the first test, once a version of them, so that each engine has them from its
start.

**Blocking** calls (``time.sleep``, file and socket IO, a contended lock) made on a running loop from code of this
package raise ``blockbuster.BlockingError`` at the call. Calls that the tests themselves make do not count, nor do
imports.

**Leaks.** A passing test fails in its teardown when a task that it started still runs after its fixtures are closed, or
a thread that it started is alive after its loop is closed (for a test on a loop wider than its function, only threads
named ``aioengine…``: the loop still owns others). A failing test is spared: what it left is not the news.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Literal

import psutil
import pytest
import pytest_asyncio
import uvloop
from blockbuster import BlockBuster

from aioengine.kernels.native.compilation import compile_library
from aioengine.testing.clock import VirtualClockLoop

# Threads of a tiny operation wait for each other longer than they work, and on a busy machine very much longer.
# Before torch is imported; subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Kernels run in Triton's interpreter where there is no GPU. Before triton is imported, which reads it then.
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts what it runs in the background with Ctrl-C ignored, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
LoopScope = Literal["function", "class", "module", "session"]

_DEFAULT_CLOCK_SEEDS = 1
# A thread that was told to end needs real time to do so. Not a sleep: joining a thread that ends returns at once.
_THREAD_END_TIMEOUT_S = 2.0
_CALL_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--clock-seeds",
        type=int,
        default=_DEFAULT_CLOCK_SEEDS,
        help="number of seeds for each test that is marked virtual_clock without seeds of its own",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What has been imported by now stays: a collection that a test asks for looks at what came later alone."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "virtual_clock(seeds): run on a virtual clock, under so many seeds (an int) or these (an iterable)"
    )


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """The loops for one test, by name."""
    names = _named_loops(item)
    virtual_clock = item.get_closest_marker("virtual_clock")
    if virtual_clock is None:
        return {name: _loop_factory(name, item) for name in names or ["asyncio"]}
    if names is not None:
        raise pytest.UsageError(f"{item.nodeid}: give either the mark virtual_clock or loop_factories, not both")
    return {f"virtual-{seed}": partial(VirtualClockLoop, seed=seed) for seed in _clock_seeds(config, virtual_clock)}


def _named_loops(item: pytest.Item) -> list[str] | None:
    marker = item.get_closest_marker("asyncio")
    names: list[str] | None = None if marker is None else marker.kwargs.get("loop_factories")
    return names


def _loop_factory(name: str, item: pytest.Item) -> LoopFactory:
    kind, _, seed = name.partition("-")
    real: dict[str, LoopFactory] = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}
    if name in real:
        return real[name]
    if kind == "virtual" and seed.isdecimal():
        return partial(VirtualClockLoop, seed=int(seed))
    # pytest-asyncio would skip the test, and nobody would see that it never runs.
    raise pytest.UsageError(f"{item.nodeid}: no loop is named {name!r}; there are asyncio, uvloop and virtual-<seed>")


def _clock_seeds(config: pytest.Config, virtual_clock: pytest.Mark) -> Iterable[int]:
    seeds = virtual_clock.kwargs.get("seeds", config.getoption("--clock-seeds", _DEFAULT_CLOCK_SEEDS))
    chosen: Iterable[int] = range(seeds) if isinstance(seeds, int) else seeds
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_CALL_PASSED] = report.passed
    return report


@pytest.fixture(scope="session", autouse=True)
def _native_kernels() -> None:
    compile_library()


@pytest.fixture(scope="session", autouse=True)
def no_blocking_call_on_a_loop() -> Iterator[BlockBuster]:
    """Make blocking calls from this package on a running loop raise, in fixtures of every scope and in tests."""
    # The virtual loop's own frames lie under all that runs on it; they must not make a test's calls count as ours.
    blockbuster = BlockBuster(scanned_modules=["aioengine"], excluded_modules=["aioengine.testing.clock"])
    for function in blockbuster.functions.values():
        function.can_block_in("<frozen importlib._bootstrap>", "_find_and_load")
    # Joining a thread that has said on the loop that it ends: microseconds, and there is no other way to see its end.
    for file in ("aioengine/processes/worker_threads.py", "aioengine/executor/device_thread.py"):
        blockbuster.functions["threading.Lock.acquire"].can_block_in(file, "aclose")
    # Asks for the working folder: a microsecond, and no disk.
    blockbuster.functions["os.path.abspath"].can_block_in("aioengine/core/control.py", "_absolute")
    # A folder of one socket: microseconds, and it must be gone before the next message is sent.
    for name in ("os.listdir", "os.stat", "os.unlink", "os.rmdir"):
        if name in blockbuster.functions:
            blockbuster.functions[name].can_block_in("aioengine/transport/backends.py", "_make_init")
    # A fork with exec takes 0.2 ms, and what is read from is the pipe that tells of the exec.
    blockbuster.functions["os.read"].can_block_in("aioengine/processes/child.py", "_spawn")
    blockbuster.activate()
    yield blockbuster
    blockbuster.deactivate()


@pytest.fixture
def quiet_log() -> Iterator[None]:
    """What a test breaks on purpose need not be printed."""
    logger = logging.getLogger("aioengine")
    logger.propagate = False
    yield
    logger.propagate = True


@pytest.fixture
def no_stray_process() -> Iterator[None]:
    """Processes that a failing test leaves are killed."""
    yield
    for process in psutil.Process().children(recursive=True):
        process.kill()


@pytest.fixture(autouse=True)
def no_thread_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a passing test that leaves a thread of its own alive after its loop is closed."""
    before = set(threading.enumerate())
    yield
    if not request.node.stash.get(_CALL_PASSED, False):
        return
    is_loop_open = _loop_scope(request.node) not in (None, "function")
    left = [thread for thread in threading.enumerate() if thread not in before and _must_end(thread, is_loop_open)]
    for thread in left:
        thread.join(_THREAD_END_TIMEOUT_S)
    stacks = [_stack_of(thread) for thread in left if thread.is_alive()]
    if stacks:
        pytest.fail("threads left behind:\n" + "\n".join(stacks), pytrace=False)


def _stack_of(thread: threading.Thread) -> str:
    """A thread's name and where it is."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}\n" + "".join(traceback.format_stack(frame) if frame is not None else ())


def _must_end(thread: threading.Thread, is_loop_open: bool) -> bool:
    # An engine that lives as long as the loop makes its threads for texts when they are first needed.
    if is_loop_open and (not thread.name.startswith("aioengine") or thread.name.startswith("aioengine-text")):
        return False
    # Not a thread that a C library lent to Python for a call (it cannot be joined), nor those that tqdm starts with the
    # first progress bar of a process, and pyzmq with the first large frame, and keep.
    kept = ("TMonitor", "GarbageCollectorThread")
    return not isinstance(thread, threading._DummyThread) and type(thread).__name__ not in kept


def _loop_scope(item: pytest.Item) -> LoopScope | None:
    """The scope of the loop that an async test runs on; None for a sync test."""
    marker = item.get_closest_marker("asyncio")
    scope: LoopScope | None = None if marker is None else marker.kwargs.get("loop_scope", "function")
    return scope


# One a loop scope: a fixture runs on one loop, and the test may live on a wider one than the function's.
def _running_loop_fixture(loop_scope: LoopScope) -> object:
    async def running_loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    return pytest_asyncio.fixture(loop_scope=loop_scope, name=f"running_loop_of_{loop_scope}")(running_loop)


running_loop_of_function = _running_loop_fixture("function")
running_loop_of_class = _running_loop_fixture("class")
running_loop_of_module = _running_loop_fixture("module")
running_loop_of_session = _running_loop_fixture("session")


@pytest.fixture(autouse=True)
def no_task_is_left(request: pytest.FixtureRequest, no_thread_is_left: None) -> Iterator[None]:
    """Fail a passing async test that leaves a task of its own on the loop.

    Set up before the other fixtures of the test, so torn down after them: what an engine's fixture closes is no leak.
    """
    loop_scope = _loop_scope(request.node)
    if loop_scope is None:
        yield
        return
    loop: asyncio.AbstractEventLoop = request.getfixturevalue(f"running_loop_of_{loop_scope}")
    before = asyncio.all_tasks(loop)
    yield
    left = {task for task in asyncio.all_tasks(loop) - before if not _closes_a_generator(task)}
    if left and request.node.stash.get(_CALL_PASSED, False):
        described = "\n".join(sorted(repr(task) for task in left))
        pytest.fail(f"tasks left behind on {loop!r}:\n{described}", pytrace=False)


def _closes_a_generator(task: asyncio.Task[object]) -> bool:
    """Whether asyncio made it to close a collected generator: httpx leaves its inner ones to that."""
    return type(task.get_coro()).__name__ == "async_generator_athrow"
