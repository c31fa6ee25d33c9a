"""How long a chat template may run and how much it may make; overdue renderings take turns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from aioengine.errors import EngineClosed, EngineOverloaded

MAX_CHARS = 2**22
"""Characters of a text, of all texts in a list, and of what a template writes; and `MAX_GROWTH` for each that the
messages have."""

MAX_GROWTH = 4

MAX_MADE = 64
"""All intermediate values of one rendering together may have so many times the characters of one."""

OVERDUE_S = 0.02
"""Seconds of computing after which a rendering is overdue: it lets others pass; usual ones take 0.1 ms."""

SLICE_S = 0.002
"""Longest time that an overdue rendering runs before others."""

PAUSE_S = 0.001
"""Pause of an overdue rendering after each slice: for the event loop, and for other overdue ones."""

MAX_OVERDUE = 6
"""Renderings that may be overdue at once, each in a thread of its own; one more is refused."""

LOOK_S = 0.1
"""Interval at which a rendering that waits for its turn checks whether the lanes are closed."""


class TemplateStopped(Exception):
    """A template took too long, or made something too large."""


class Lanes:
    """The quick lane of an engine's renderings and, beside it, the overdue one, in which one runs at a time.

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
        self.on_overdue = on_overdue
        self.clock = clock
        self.cpu_clock = cpu_clock
        self.turn = threading.Lock()
        self.overdue_slots = threading.BoundedSemaphore(MAX_OVERDUE)
        self._is_closed = False

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
        self.check_open()
        rendering = _running.rendering = _Rendering(self, MAX_CHARS + MAX_GROWTH * num_chars)
        try:
            yield
        finally:
            _running.rendering = None
            rendering.leave()

    def close(self) -> None:
        """Stop the renderings that run, at their next steps, and admit no more."""
        self._is_closed = True

    def check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine is closed")


class _Rendering:
    """One in the lanes; used by its thread alone."""

    def __init__(self, lanes: Lanes, max_chars: int) -> None:
        self.max_chars = max_chars
        self.num_made = 0
        self._lanes = lanes
        self._began_at = lanes.clock()
        self._began_at_cpu = lanes.cpu_clock()
        self._is_overdue = self._has_turn = False
        self._slice_ends = 0.0

    def step(self) -> None:
        self._lanes.check_open()
        now = self._lanes.clock()
        self._check_deadline(now)
        if self._is_overdue:
            if now > self._slice_ends:
                self._take_turn()
        elif now > self._began_at + OVERDUE_S and self._lanes.cpu_clock() - self._began_at_cpu > OVERDUE_S:
            self._become_overdue()

    def leave(self) -> None:
        self._give_turn()
        if self._is_overdue:
            self._lanes.overdue_slots.release()

    def _check_deadline(self, now: float) -> None:
        if now > self._began_at + self._lanes.timeout_s:
            raise TemplateStopped(f"it takes longer than {self._lanes.timeout_s:g} s (chat_template_timeout_s)")

    def _become_overdue(self) -> None:
        self._is_overdue = self._lanes.overdue_slots.acquire(blocking=False)
        if not self._is_overdue:
            raise EngineOverloaded(
                f"the chat template takes long over these messages, and over {MAX_OVERDUE} others at this moment",
                retry_after_s=self._lanes.timeout_s / 2,
            )
        self._lanes.on_overdue()
        self._take_turn()

    def _take_turn(self) -> None:
        """Pause, then wait until no other overdue rendering runs."""
        time.sleep(PAUSE_S)  # with the turn: another rendering would compete with the event loop for the GIL
        self._give_turn()
        while not self._lanes.turn.acquire(timeout=LOOK_S):
            self._lanes.check_open()
            self._check_deadline(self._lanes.clock())
        self._has_turn = True
        self._slice_ends = self._lanes.clock() + SLICE_S

    def _give_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._lanes.turn.release()


class _Running(threading.local):
    """This thread's rendering; there is none while a template is compiled, which evaluates its constants, too."""

    rendering: _Rendering | None = None


_running = _Running()


def max_chars() -> int:
    """Largest number of characters of one value in this thread's rendering."""
    return MAX_CHARS if _running.rendering is None else _running.rendering.max_chars


def count(num_chars: int) -> None:
    """Count characters that this thread's rendering has made and may keep.

    Raises:
        TemplateStopped: it has made too many in all.
    """
    rendering = _running.rendering
    if rendering is not None:
        rendering.num_made += num_chars
        if rendering.num_made > MAX_MADE * rendering.max_chars:
            raise TemplateStopped(f"it makes more than {MAX_MADE * rendering.max_chars} characters in all")


def step() -> None:
    """Look at the time of this thread's rendering.

    Raises:
        TemplateStopped, EngineOverloaded, EngineClosed: as `Lanes.run` says.
    """
    if _running.rendering is not None:
        _running.rendering.step()
