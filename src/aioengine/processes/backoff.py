"""How long to wait before what has ended is started again; pure."""

from __future__ import annotations

STEADY_PAUSES = 10
"""A life of so many pauses is a long one, where nothing else is said."""


class Backoff:
    """The pause before a start: doubled with each short life in a row, up to a longest one.

    Args:
        first_s, longest_s: pauses, in seconds; where the first is longer it is the longest.
        steady_s: a life of more seconds is a long one, behind which all begins anew; absent: by the pause,
            `STEADY_PAUSES` of them.
    Attributes:
        num_failures: short lives in a row, the last one included.
    """

    def __init__(self, first_s: float, longest_s: float, *, steady_s: float | None = None) -> None:
        self.num_failures = 0
        self._first_s = first_s
        self._longest_s = longest_s
        self._steady_s = steady_s
        self._next_s = first_s

    def failed(self, lived_s: float) -> float:
        """It has ended after a life of so many seconds. Returns the pause before its next start, in seconds."""
        if lived_s > (self._steady_s or STEADY_PAUSES * self._next_s):
            self.num_failures, self._next_s = 0, self._first_s
        self.num_failures += 1
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, max(self._longest_s, self._first_s))
        return pause_s
