"""Limits on the time of a chat template and on the size of its values."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, MappingView
from contextvars import ContextVar
from typing import Any

import msgspec

from aioengine.errors import EngineClosed
from aioengine.processes.turns import running_loop

MAX_STEPS = 2**23
"""The most loop iterations, calls, filters, tests, operators and written pieces of text of one rendering.

Templates that go through all messages for each message take up to 3 million steps for 2,000 messages."""

MAX_CHARS, GROWTH = 2**20, 4
"""The most characters of one value, the prompt included: ``MAX_CHARS`` plus ``GROWTH`` times the template's input."""

MAX_MADE = 256
"""All values that a rendering makes may have this many times the characters of one value."""

ITEM_CHARS = 8
"""Size of an item of a list or dict, beside its texts: the bytes of a reference."""

SLICE_S, PAUSE_S = 0.002, 0.0002
"""A rendering pauses after each ``SLICE_S`` for ``PAUSE_S``, since the event loop waits for the GIL."""

CONTAINERS = (list, tuple, dict, set, MappingView)


class TemplateStopped(Exception):
    """A template took too long, or made something too large."""


class TemplateLimits(msgspec.Struct, eq=False):
    """The limits of an engine's renderings.

    Attributes:
        timeout_s: time limit of a rendering, from when it begins to run.
        clock: returns seconds.
        is_closed: renderings raise `EngineClosed` at their next check.
    """

    timeout_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    is_closed: bool = False

    @contextlib.contextmanager
    def run(self, given: Any) -> Iterator[None]:
        """Apply the limits to the templates that the block compiles and renders.

        Args:
            given: plain data that the template reads; its size raises the limit on values.
        Raises:
            TemplateStopped: the rendering took too long, or made something too large.
            EngineClosed: the limits are closed.
        """
        rendering = Rendering(self, sys.maxsize)
        _running.set(rendering)
        try:
            rendering.max_chars = MAX_CHARS + GROWTH * rendering.size_of(given)
            rendering.look()
            yield
        finally:
            _running.set(None)


class Rendering:
    """The steps and sizes of one rendering; used by its thread alone. Its methods raise as `TemplateLimits.run`."""

    def __init__(self, limits: TemplateLimits, max_chars: int = MAX_CHARS) -> None:
        self.max_chars = max_chars
        self._limits = limits
        self._num_steps = self._num_made = 0
        now = limits.clock()
        self._ends_at = now + limits.timeout_s
        # In the loop's own thread a pause gains nothing.
        self._pauses_at = now + SLICE_S if running_loop() is None else math.inf
        self._sizes: dict[int, tuple[Any, int]] = {}
        """Containers by id, with their sizes, which a template cannot change. Kept alive, so that no id is reused."""

    def step(self) -> None:
        self._num_steps += 1
        if not self._num_steps % 16:
            self.look()

    def look(self) -> None:
        """Check the totals and the time, and pause if a pause is due."""
        if self._limits.is_closed:
            raise EngineClosed("the engine is closed")
        if self._num_steps > MAX_STEPS:
            raise TemplateStopped(f"it takes more than {MAX_STEPS} steps")
        now = self._limits.clock()
        if now > self._ends_at:
            raise TemplateStopped(f"it takes longer than {self._limits.timeout_s:g} s (chat_template_timeout_s)")
        if now > self._pauses_at:
            time.sleep(PAUSE_S)
            self._pauses_at = self._limits.clock() + SLICE_S

    def bounded(self, value: Any) -> Any:
        """Count the step that has made a value, check the value's size, and return it."""
        self.step()
        if isinstance(value, str):
            self.check_size(len(value))
            self._num_made += len(value)
        elif isinstance(value, CONTAINERS):
            self.size_of(value)
            self._num_made += ITEM_CHARS * len(value)
        elif isinstance(value, int):
            self.check_size(64 * value.bit_length())  # a division takes quadratic time
        if self._num_made > MAX_MADE * self.max_chars:
            raise TemplateStopped(f"it makes more than {MAX_MADE * self.max_chars} characters in all")
        return value

    def size_of(self, value: Any) -> int:
        """Characters of all texts in a value; a text that occurs twice counts twice, as in the value's own text."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 64 * 20  # decimal digits
        if isinstance(value, float) or value is None:
            return 0
        if id(value) not in self._sizes:
            if isinstance(value, CONTAINERS):
                parts: Any = (*value, *value.values()) if isinstance(value, dict) else value
                size = ITEM_CHARS * len(value) + sum(map(self.size_of, parts))
            else:
                size = len(repr(value))  # a macro's name, but the whole text for a method of `Markup`
            self.check_size(size)
            self._sizes[id(value)] = value, size
        return self._sizes[id(value)][1]

    def check_size(self, num_chars: int) -> None:
        if num_chars > self.max_chars:
            raise TemplateStopped(f"it makes a text, list or number of more than {self.max_chars} characters")


_running: ContextVar[Rendering | None] = ContextVar("running", default=None)


def current() -> Rendering:
    """The rendering of this context; a new one if a template is compiled or rendered outside `TemplateLimits.run`."""
    return _running.get() or Rendering(TemplateLimits())
