"""A virtual clock for asyncio: timers fire at once, task order is seeded, and a program that hangs raises `Deadlock`.

This program waits an hour, and a test of it would too::

    async def main():
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

On a `VirtualClockLoop` it ends at once, at exactly 3600.0 s: ``assert run(main(), seed=1) == 3600.0``. All that takes a
loop factory takes ``functools.partial(VirtualClockLoop, seed=1)``: ``asyncio.Runner``, ``anyio.run`` (in its
``backend_options``), pytest-asyncio's hook ``pytest_asyncio_loop_factories``.

**Time** stands still while anything can run. When nothing can, the clock jumps to the next timer. Only ``loop.time()``
and what is built on it (``asyncio.sleep``, ``asyncio.timeout``, anyio's deadlines) is virtual; ``time.monotonic()`` is
not. A timer at infinity (``anyio.sleep_forever()``) is no timer.

**Order**: tasks that are ready together run in an order drawn from the seed. Only their steps are shuffled. Plain
callbacks keep their place, and a step passes no callback that stands before or after it: asyncio promises that
``call_soon`` is first in, first out, and done callbacks, transports and anyio's cancel scopes rely on it. Steps are
sorted by the age of their task first, so the order is a function of the program and the seed even where a library walks
a set of tasks. An exception that leaves the run carries the seed as a note.

**Deadlock**: when nothing is ready, no timer is set and nothing outside is at work, the run raises `Deadlock` with each
task and the place where it waits.

**Threads** live in real time. While one is at work for the loop, the clock stands still and the loop really waits, so a
timeout around it does not fire. Counted without a word from you: ``asyncio.to_thread``, ``loop.run_in_executor`` (until
the wait for it ends: a cancelled wait is not waited for) and ``anyio.to_thread.run_sync`` (until the thread is idle).
For a thread, process or device of your own, open an `OutsideWork` before you hand over the work, and end it after the
last ``call_soon_threadsafe``::

    work = loop.outside_work("matmul on the device thread")
    jobs.put((x, future, work))

    # on the device thread
    loop.call_soon_threadsafe(future.set_result, y)
    work.done()

When a thread answers is up to the machine: a program with threads does not repeat exactly.

**Sockets** are real. What is ready is delivered before time moves. With file descriptors registered, the loop also
waits ``io_patience_s`` of real time before each jump, for bytes that the kernel still carries; hold an `outside_work`
for a peer that needs longer.
"""

import asyncio
import math
import random
import selectors
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from types import FrameType
from typing import Any, TypeVar

from anyio._backends._asyncio import WorkerThread

__all__ = ["Deadlock", "OutsideWork", "VirtualClockLoop", "run"]

T = TypeVar("T")
_Events = list[tuple[selectors.SelectorKey, int]]

# Callbacks that step or wake a task, of the C task and of the Python one. They are found by name, since other bound
# methods of a task (``call_soon(task.cancel)``) are plain callbacks.
_STEP_NAMES = frozenset({"TaskStepMethWrapper", "task_wakeup", "__step", "__wakeup"})
_MAX_TASKS_SHOWN = 20


class Deadlock(Exception):
    """The run cannot go on; the message lists each task and the place where it waits.

    Raised out of the run itself, not into a task, so that no ``except`` in the program under test can swallow it.

    Attributes:
        seed: the seed of the loop.
        now: virtual time, s.
    """

    def __init__(self, reason: str, loop: "VirtualClockLoop") -> None:
        self.seed = loop.seed
        self.now = loop.time()
        super().__init__(f"{reason} (virtual time {self.now} s, seed {self.seed})\n{_describe_tasks(loop)}")


class OutsideWork:
    """Work for a loop that the loop cannot see. While any is open the clock stands still and the loop really waits.

    Made by `VirtualClockLoop.outside_work`. Ends with `done`, or as a context manager.
    """

    def __init__(self, loop: "VirtualClockLoop", name: str) -> None:
        self.name = name
        self._loop = loop
        loop._open_work.add(self)

    def done(self) -> None:
        """End the work: from any thread, more than once if you like, after the last ``call_soon_threadsafe``."""
        self._loop._open_work.discard(self)
        # The loop may be asleep in its selector, waiting for this very work.
        self._loop._write_to_self()

    def __enter__(self) -> "OutsideWork":
        return self

    def __exit__(self, *_: object) -> None:
        self.done()


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop with virtual time, seeded task order and deadlock detection (see the module).

    Args:
        seed: draws the order of the tasks that are ready together. The same program with the same seed runs the same.
        io_patience_s: real seconds to wait for the file descriptors that the program has registered before time jumps
            or a deadlock is reported. 0 jumps at once.
        outside_patience_s: real seconds to wait for work outside the loop until that is reported as a deadlock.
        max_rounds_at_one_time: rounds of the loop without IO and without time moving until that is reported as a
            deadlock: a program that polls ``sleep(0)`` until a later time would never get there.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float
    _write_to_self: Callable[[], None]

    def __init__(
        self,
        *,
        seed: int,
        io_patience_s: float = 0.005,
        outside_patience_s: float = 60.0,
        max_rounds_at_one_time: int = 100_000,
    ) -> None:
        self.seed = seed
        self._now = 0.0
        self._rng = random.Random(seed)
        self._task_ages: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._num_tasks_seen = 0
        self._open_work: set[OutsideWork] = set()
        self._io_patience_s = io_patience_s
        self._outside_patience_s = outside_patience_s
        self._max_rounds_at_one_time = max_rounds_at_one_time
        self._num_rounds_at_one_time = 0
        self._io = _WaitingSelector(self._wait)
        super().__init__(self._io)
        self._num_own_fds = len(self._io.get_map())

    def time(self) -> float:
        """Virtual time, s. A new loop stands at 0.0."""
        return self._now

    def outside_work(self, name: str) -> OutsideWork:
        """Count work that this loop cannot see, until it is `OutsideWork.done`.

        Args:
            name: what is being waited for, shown when it takes longer than ``outside_patience_s``.
        """
        return OutsideWork(self, name)

    def run_in_executor(  # type: ignore[override]  # typeshed wants Unpack; asyncio takes any positional arguments
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Like asyncio's, and counted as work outside the loop until the returned future is done."""
        future = super().run_in_executor(executor, func, *args)
        work = self.outside_work(getattr(func, "__qualname__", repr(func)))
        future.add_done_callback(lambda _: work.done())
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """Like asyncio's; it waits for a thread, so it is counted."""
        with self.outside_work("shutdown of the default executor"):
            await super().shutdown_default_executor(*args, **kwargs)

    def run_until_complete(self, future: Any) -> Any:
        """Like asyncio's; an exception that leaves it carries the seed as a note (PEP 678)."""
        try:
            return super().run_until_complete(future)
        except Deadlock:
            raise  # its message has the seed
        except BaseException as error:
            note = f"virtual clock: seed {self.seed}, virtual time {self._now} s"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    def _wait(self, timeout: float | None) -> _Events:
        """Stand in for ``selector.select(timeout)`` of asyncio's loop; 0 means that callbacks are ready."""
        if timeout == 0:
            self._shuffle_ready_tasks()
            events = self._io.really_select(0)
            self._num_rounds_at_one_time = 0 if events else self._num_rounds_at_one_time + 1
            if self._num_rounds_at_one_time > self._max_rounds_at_one_time:
                self._num_rounds_at_one_time = 0
                if not self._outside():  # polling until a thread is done is slow, not endless
                    raise Deadlock(f"{self._max_rounds_at_one_time} rounds of the loop, and time has not moved", self)
            return events
        # The work is listed before the look at the selector: if the last of it ends in between, its wake-up is there.
        outside = self._outside()
        if events := self._io.really_select(0):
            return events
        if outside:
            if events := self._io.really_select(self._outside_patience_s):
                return events
            names = ", ".join(outside)
            raise Deadlock(
                f"waited {self._outside_patience_s} s of real time for work outside the loop ({names})", self
            )
        has_files = self._io_patience_s and len(self._io.get_map()) > self._num_own_fds
        if has_files and (events := self._io.really_select(self._io_patience_s)):
            return events
        # The clock jumps to the next timer, exactly: adding ``timeout`` to the time would round.
        when = self._scheduled[0].when() if self._scheduled else math.inf
        if when == math.inf:
            raise Deadlock("nothing can wake this loop: no callback or IO is ready, no timer is set", self)
        self._now = max(self._now, when)
        # asyncio runs the timers before time + resolution. Past 1e7 s a fixed 1e-9 is lost in rounding, and none would
        # ever be due.
        self._clock_resolution = max(1e-9, math.ulp(self._now))
        self._num_rounds_at_one_time = 0
        return []

    def _outside(self) -> list[str]:
        """Names of the work outside the loop."""
        # anyio's worker threads bypass run_in_executor. A worker leaves its idle list when it gets a call and is put
        # back by a callback on this loop, so the list cannot change under us.
        workers = [
            f"{thread.name} (anyio.to_thread.run_sync)"
            for thread in threading.enumerate()
            if isinstance(thread, WorkerThread) and thread.loop is self
            if not thread.stopping and thread not in thread.idle_workers
        ]
        return [work.name for work in list(self._open_work)] + workers

    def _shuffle_ready_tasks(self) -> None:
        """Reorder each run of task steps between two plain callbacks in the ready queue."""
        # Taken out from the left and put back there, so that a thread's call_soon_threadsafe may append meanwhile.
        handles = [self._ready.popleft() for _ in range(len(self._ready))]
        ordered: list[asyncio.Handle] = []
        steps: list[tuple[int, asyncio.Handle]] = []
        for handle in handles:
            task = _stepped_task(handle)
            if task is None:
                ordered += self._draw_order(steps)
                ordered.append(handle)
                steps = []
            else:
                steps.append((self._age(task), handle))
        ordered += self._draw_order(steps)
        self._ready.extendleft(reversed(ordered))

    def _draw_order(self, steps: list[tuple[int, asyncio.Handle]]) -> Iterator[asyncio.Handle]:
        if len(steps) > 1:
            steps.sort(key=lambda step: step[0])
            self._rng.shuffle(steps)
        return (handle for _, handle in steps)

    def _age(self, task: asyncio.Task[Any]) -> int:
        """Number of the task in order of creation: each is queued when it is made, so it is seen in that order."""
        age = self._task_ages.get(task)
        if age is None:
            age = self._task_ages[task] = self._num_tasks_seen
            self._num_tasks_seen += 1
        return age


def run(main: Coroutine[Any, Any, T], *, seed: int | None = None) -> T:
    """Run a coroutine to its end on a new `VirtualClockLoop`, as ``asyncio.run`` would, and return its result.

    Args:
        seed: of the order in which ready tasks run; absent: drawn, so that each run tries another order. The error of
            a program that fails has it, and with it the program runs in the same order again.
    Raises:
        Deadlock: nothing can wake the program.
        BaseException: what ``main`` raises, with the seed as a note.
    """
    seed = random.randrange(2**32) if seed is None else seed
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(seed=seed)) as runner:
        return runner.run(main)


class _WaitingSelector(selectors.DefaultSelector):
    """A selector whose ``select`` is the loop's `VirtualClockLoop._wait`."""

    def __init__(self, wait: Callable[[float | None], _Events]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> _Events:
        return self._wait(timeout)

    def really_select(self, timeout: float) -> _Events:
        return super().select(timeout)


def _stepped_task(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    """The task that this handle steps or wakes; None for any other callback."""
    callback = handle._callback  # type: ignore[attr-defined]  # None once cancelled
    owner = getattr(callback, "__self__", None)
    if asyncio.isfuture(owner) and getattr(callback, "__name__", type(callback).__name__) in _STEP_NAMES:
        return owner  # type: ignore[return-value]
    return None


def _describe_tasks(loop: VirtualClockLoop) -> str:
    tasks = sorted(asyncio.all_tasks(loop), key=loop._age)
    lines = []
    for task in tasks[:_MAX_TASKS_SHOWN]:
        waits_for = getattr(task, "_fut_waiter", None)
        state = f"waits for {waits_for!r}" if waits_for is not None else "is ready to run"
        frames = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in _awaiting_frames(task))
        lines += [f"task {task.get_name()!r} {state}", *(line.rstrip("\n") for line in frames.format())]
    if (num_more := len(tasks) - _MAX_TASKS_SHOWN) > 0:
        lines.append(f"and {num_more} more tasks")
    return "\n".join(lines)


def _awaiting_frames(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of a suspended task from its coroutine inward; `asyncio.Task.get_stack` gives only the first."""
    awaited: object = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            return
        yield frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
