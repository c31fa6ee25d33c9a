"""Renderings of chat templates share the threads: quick ones first, and none for longer than its deadline."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from aioengine.errors import EngineClosed, EngineOverloaded

MAX_STEPS = 2**23
MAX_CHARS = 2**22
"""Of a text, of all texts in a list, and of what a template writes, with `MAX_GROWTH` more for each of the messages."""

MAX_GROWTH = 4
MAX_MADE = 64
"""All intermediate values of one rendering together may have 64 times as many characters."""

OVERDUE_S = 0.02
"""Seconds of computing after which a rendering lets others pass; usual ones take 0.1 ms."""

REFUSED_S = 0.05
"""Seconds of computing after which it is refused if it cannot let others pass, as too many are overdue already."""

SLICE_S = 0.002
PAUSE_S = 0.001
"""An overdue rendering pauses for so long after each slice: for the event loop, and for other overdue ones."""

MAX_OVERDUE = 6
"""Renderings that may be overdue at once, each in a thread of its own."""

LOOK_S = 0.1
"""After so many seconds what waits for its turn looks whether the lanes were closed."""


class TemplateStopped(Exception):
    """A template took too long, or made something too large."""


class Lanes:
    """Lets renderings of one template run one at a time while they are quick, and overdue ones beside them, in turns.

    Args:
        timeout_s: how long one may take.
        on_overdue: called in the thread of a rendering that becomes overdue: another is needed for what is quick.
        clock, cpu_clock: seconds, and those that this thread has computed for.
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
        self._places = threading.BoundedSemaphore(MAX_OVERDUE)

    @contextlib.contextmanager
    def run(self, num_chars: int) -> Iterator[None]:
        """Do all that the block renders in a lane.

        Args:
            num_chars: of the messages, whose multiple a rendering may make.
        Raises:
            TemplateStopped: by the environment's steps, in the block.
            EngineOverloaded: it is overdue, and too many others are.
            EngineClosed: the lanes are closed.
        """
        while not self._quick.acquire(timeout=LOOK_S):
            self.check_open()
        # From here on: what waits for others is not late.
        lane = _Lane(self, self._quick, MAX_CHARS + MAX_GROWTH * num_chars)
        _running.lane = lane
        try:
            self.check_open()
            yield
        finally:
            _running.lane = None
            lane.leave()

    def close(self) -> None:
        """Stop the renderings that run or wait, at their next steps; there will be no others."""
        self.is_closed = True

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineClosed("the engine is closed")

    def change(self, lane: _Lane) -> None:
        """Let a quick one that is overdue go on in the other lane."""
        if not self._places.acquire(blocking=False):
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
        time.sleep(PAUSE_S)  # before another may go on, or the event loop would compete with that for the GIL
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
        self._places.release()


class _Lane:
    """A rendering that runs, as its thread knows it."""

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
        """Without what others have computed meanwhile."""
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
    """Most characters of a value of the rendering that this thread runs."""
    lane: _Lane | None = getattr(_running, "lane", None)
    return MAX_CHARS if lane is None else lane.max_chars


def count(num_chars: int) -> None:
    """Count what the rendering that this thread runs has made: it may keep all of it."""
    lane: _Lane | None = getattr(_running, "lane", None)
    if lane is not None:
        lane.num_made += num_chars
        if lane.num_made > MAX_MADE * lane.max_chars:
            raise TemplateStopped(f"it makes more than {MAX_MADE * lane.max_chars} characters in all")


def step() -> None:
    """A step of the rendering that this thread runs; a template that is being compiled takes none."""
    lane: _Lane | None = getattr(_running, "lane", None)
    if lane is not None:
        lane.step()
