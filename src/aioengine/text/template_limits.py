"""How long a chat template may run, and how much it may make."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from aioengine.errors import EngineClosed
from aioengine.turns import running_loop

MAX_STEPS = 2**22
"""Steps of one rendering: loop iterations, calls, filters and operators; and one more for each `STEP_CHARS` made.

Templates that go through all messages for each message take up to 3 million for 2,000 messages."""

STEP_CHARS = 4096

MAX_CHARS = 2**20
"""Characters of one text, of all texts in a list, and of the prompt; and `MAX_GROWTH` for each that is given."""

MAX_GROWTH = 4

MAX_MADE = 256
"""All values that a rendering makes may have so many times the characters of one."""

MAX_BITS = 2**14
"""Bits of an integer."""

ITEM_CHARS = 16
"""Size of an item of a list or dict, beside its texts."""

STEPS_A_LOOK = 16
"""Steps between two looks at the clock."""

SLICE_S = 0.002
"""A rendering that takes longer pauses so often, for the event loop, which waits for the GIL."""

PAUSE_S = 0.0002

CONTAINERS: tuple[type[Collection[Any]], ...] = (
    list,
    tuple,
    dict,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class TemplateStopped(Exception):
    """A template took too long, or made something too large."""


class TemplateLimits:
    """The limits of an engine's renderings.

    Args:
        timeout_s: deadline of a rendering, from when it begins to run.
        clock: seconds.
    Attributes:
        is_closed: renderings end at their next steps with `EngineClosed`.
    """

    def __init__(self, timeout_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self.is_closed = False

    @contextlib.contextmanager
    def run(self, given: Any) -> Iterator[None]:
        """Bound what the block compiles and renders.

        Args:
            given: plain data that the template reads; a rendering may make a multiple of its size.
        Raises:
            TemplateStopped: the rendering took too long, or made something too large.
            EngineClosed: the limits are closed.
        """
        rendering = _running.rendering = Rendering(self, given)
        try:
            rendering.look()
            yield
        finally:
            _running.rendering = None


class Rendering:
    """The steps and sizes of one rendering; used by its thread alone. Its methods raise as `TemplateLimits.run`."""

    def __init__(self, limits: TemplateLimits, given: Any = "") -> None:
        self._limits = limits
        self._num_steps = self._num_made = self._next_look = 0
        self._ends_at = limits.clock() + limits.timeout_s
        # In the loop's own thread there is nothing to pause for.
        self._pauses_at = limits.clock() + SLICE_S if running_loop() is None else math.inf
        self._sizes: dict[int, tuple[Any, int]] = {}
        """Containers by id, with their sizes: a template cannot change one. Kept here, so that no other has the id."""
        self.max_chars = 2**62
        self.max_chars = MAX_CHARS + MAX_GROWTH * self.size_of(given)

    def step(self, num_chars: int = 0) -> None:
        """Count a step, which has made so many characters."""
        self._num_steps += 1 + num_chars // STEP_CHARS
        self._num_made += num_chars
        if self._num_steps >= self._next_look:
            self.look()

    def look(self) -> None:
        """Check the totals and the time, and pause if a pause is due."""
        if self._limits.is_closed:
            raise EngineClosed("the engine is closed")
        if self._num_steps > MAX_STEPS:
            raise TemplateStopped(f"it takes more than {MAX_STEPS} steps")
        if self._num_made > MAX_MADE * self.max_chars:
            raise TemplateStopped(f"it makes more than {MAX_MADE * self.max_chars} characters in all")
        now = self._limits.clock()
        if now > self._ends_at:
            raise TemplateStopped(f"it takes longer than {self._limits.timeout_s:g} s (chat_template_timeout_s)")
        if now > self._pauses_at:
            time.sleep(PAUSE_S)
            self._pauses_at = self._limits.clock() + SLICE_S
        self._next_look = self._num_steps + STEPS_A_LOOK

    def bounded(self, value: Any) -> Any:
        """Count the step that has made a value, check the value's size, and return it."""
        if isinstance(value, str):
            self.check_size(len(value))
            self.step(len(value))
        elif isinstance(value, CONTAINERS):
            self.check_size(self.size_of(value))
            self.step(8 * len(value))  # bytes of references
        else:
            if isinstance(value, int):
                self.check_bits(value.bit_length())
            self.step()
        return value

    def size_of(self, value: Any) -> int:
        """Characters of all texts in a value; a text that occurs twice counts twice, as in the value's own text."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, CONTAINERS):
            return 0
        if (known := self._sizes.get(id(value))) is not None:
            return known[1]
        size = ITEM_CHARS * len(value)
        for item in value:
            size += self.size_of(item) + (self.size_of(value[item]) if isinstance(value, dict) else 0)
            self.check_size(size)
        self._sizes[id(value)] = value, size
        return size

    def check_size(self, num_chars: int) -> None:
        if num_chars > self.max_chars:
            num_items = self.max_chars // ITEM_CHARS
            told = f"it makes a text of more than {self.max_chars} characters, or a list of more than {num_items} items"
            raise TemplateStopped(told)

    def check_bits(self, num_bits: int) -> None:
        if num_bits > MAX_BITS:
            raise TemplateStopped(f"it computes an integer of more than {MAX_BITS} bits")


class _Running(threading.local):
    rendering: Rendering | None = None


_running = _Running()


def current() -> Rendering:
    """This thread's rendering; a new one where a template is compiled or rendered outside `TemplateLimits.run`."""
    return _running.rendering or Rendering(TemplateLimits())
