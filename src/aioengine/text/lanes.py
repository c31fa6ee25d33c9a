"""How long a chat template may run and how much it may make; renderings take turns, quick ones first."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from aioengine.errors import EngineClosed, EngineOverloaded

MAX_STEPS = 2**23
"""Steps of one rendering."""

MAX_CHARS = 2**22
"""Characters of a text, of all texts in a list, and of what a template writes; and `MAX_GROWTH` for each that the
messages have."""

MAX_GROWTH = 4

MAX_MADE = 64
"""All intermediate values of one rendering together may have so many times the characters of one."""

OVERDUE_S = 0.02
"""Seconds of computing after which a rendering is overdue and lets others pass; usual ones take 0.1 ms."""

REFUSED_S = 0.05
"""Seconds of computing after which a rendering is refused if `MAX_OVERDUE` others are overdue already."""

SLICE_S = 0.002
"""Longest time that an overdue rendering runs before others."""

PAUSE_S = 0.001
"""Pause of an overdue rendering after each slice: for the event loop, and for other overdue ones."""

MAX_OVERDUE = 6
"""Renderings that may be overdue at once, each in a thread of its own."""

LOOK_S = 0.1
"""Interval at which a rendering that waits for its turn checks whether the lanes are closed."""


class TemplateStopped(Exception):
    """A template took too long, or made something too large."""


class Lanes:
    """Lets the quick renderings of a template run one at a time and, beside them, the overdue ones one slice at a time.

    Args:
        timeout_s: deadline of a rendering, from when it begins to run.
        on_overdue: called in the thread of a rendering that becomes overdue: quick ones need another thread.
        clock, cpu_clock: seconds, and seconds that this thread has computed.
    """

    def __init__(
        self,
        timeout_s: float = 10.0,
        *,
        on_overdue: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self.cpu_clock = cpu_clock
        self.is_closed = False
        self._on_overdue = on_overdue
        self._quick = threading.Lock()
        self._overdue = threading.Lock()
        self._overdue_slots = threading.BoundedSemaphore(MAX_OVERDUE)

    @contextlib.contextmanager
    def run(self, num_chars: int) -> Iterator[None]:
        """Bound what the block renders; `step`, which the sandbox calls in it, may wait there and raises these.

        Args:
            num_chars: characters of the messages; a rendering may make a multiple of them.
        Raises:
            TemplateStopped: the rendering took too long, or made something too large.
            EngineOverloaded: it is overdue, and too many others are.
            EngineClosed: the lanes are closed.
        """
        while not self._quick.acquire(timeout=LOOK_S):
            self.check_open()
        # The deadline is set here: the wait for others does not count.
        lane = _Lane(self, self._quick, MAX_CHARS + MAX_GROWTH * num_chars)
        _running.lane = lane
        try:
            self.check_open()
            yield
        finally:
            _running.lane = None
            lane.leave()

    def close(self) -> None:
        """Stop the renderings that run or wait, at their next steps, and admit no more."""
        self.is_closed = True

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineClosed("the engine is closed")

    def change(self, lane: _Lane) -> None:
        """Move a rendering from the quick lane to the overdue one."""
        if not self._overdue_slots.acquire(blocking=False):
            if lane.computed_s() < REFUSED_S:
                return
            raise EngineOverloaded(
                f"the chat template takes long over these messages, and over {MAX_OVERDUE} others at this moment",
                retry_after_s=self.timeout_s / 2,
            )
        self._quick.release()
        lane.lock = None
        lane.is_overdue = True
        self._on_overdue()
        self.take_turn(lane)

    def take_turn(self, lane: _Lane) -> None:
        """Pause, then wait until no other overdue rendering runs."""
        time.sleep(
            PAUSE_S
        )  # before the lock is released: another rendering would compete with the event loop for the GIL
        if lane.lock is not None:
            lane.lock = None
            self._overdue.release()
        while not self._overdue.acquire(timeout=min(LOOK_S, max(0.0, lane.deadline - self.clock()))):
            self.check_open()
            if self.clock() >= lane.deadline:
                raise lane.late()
        lane.lock = self._overdue
        lane.slice_ends = self.clock() + SLICE_S

    def end_overdue(self) -> None:
        self._overdue_slots.release()


class _Lane:
    """The state of one rendering, used by its thread alone."""

    def __init__(self, lanes: Lanes, lock: threading.Lock, max_chars: int) -> None:
        self.lanes = lanes
        self.lock: threading.Lock | None = lock
        self.is_overdue = False
        self.max_chars = max_chars
        self.num_made = 0
        self.deadline = lanes.clock() + lanes.timeout_s
        self.slice_ends = 0.0
        self._began_at_cpu = lanes.cpu_clock()
        self._num_steps = 0

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise TemplateStopped(f"it takes more than {MAX_STEPS} steps")
        self.lanes.check_open()
        now = self.lanes.clock()
        if now > self.deadline:
            raise self.late()
        if self.is_overdue:
            if now > self.slice_ends:
                self.lanes.take_turn(self)
        elif now > self.deadline - self.lanes.timeout_s + OVERDUE_S and self.computed_s() > OVERDUE_S:
            self.lanes.change(self)

    def computed_s(self) -> float:
        """Seconds that this rendering has computed, without those of other threads."""
        return self.lanes.cpu_clock() - self._began_at_cpu

    def late(self) -> TemplateStopped:
        return TemplateStopped(f"it takes longer than {self.lanes.timeout_s:g} s (chat_template_timeout_s)")

    def leave(self) -> None:
        if self.lock is not None:
            self.lock.release()
        if self.is_overdue:
            self.lanes.end_overdue()


_running = threading.local()


def max_chars() -> int:
    """Largest number of characters of one value in this thread's rendering."""
    lane: _Lane | None = getattr(_running, "lane", None)
    return MAX_CHARS if lane is None else lane.max_chars


def count(num_chars: int) -> None:
    """Count characters that this thread's rendering has made and may keep.

    Raises:
        TemplateStopped: it has made too many in all.
    """
    lane: _Lane | None = getattr(_running, "lane", None)
    if lane is not None:
        lane.num_made += num_chars
        if lane.num_made > MAX_MADE * lane.max_chars:
            raise TemplateStopped(f"it makes more than {MAX_MADE * lane.max_chars} characters in all")


def step() -> None:
    """Count a step of this thread's rendering, where there is one: compiling a template evaluates its constants, too.

    Raises:
        TemplateStopped, EngineOverloaded, EngineClosed: as `Lanes.run` says.
    """
    lane: _Lane | None = getattr(_running, "lane", None)
    if lane is not None:
        lane.step()
