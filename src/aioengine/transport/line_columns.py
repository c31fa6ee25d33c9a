"""Log-probabilities as columns of numbers, read line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioengine.core.listener import SampledLogprobs
from aioengine.errors import WireError


class LineColumns:
    """The lines of one message: first those of tokens, then those of prompts.

    Args:
        places: int32 [m], rising: which tokens the first m lines belong to.
        columns: as `wire.LINES`.
    Raises:
        WireError: they do not fit each other.
    """

    def __init__(self, places: Any, columns: Sequence[Any]) -> None:
        values, ranks, counts, ids, logprobs, other_ranks = columns
        is_whole = (
            len(values) == len(ranks) == len(counts)
            and len(places) <= len(values)
            and len(ids) == len(logprobs) == len(other_ranks)
            and (not len(counts) or (int(counts.min()) >= 0 and int(counts.sum(dtype="int64")) == len(ids)))
        )
        if not is_whole:
            raise WireError("columns of log-probabilities that do not fit each other")
        self._values, self._ranks, self._counts = values.tolist(), ranks.tolist(), counts.tolist()
        self._others = list(zip(ids.tolist(), logprobs.tolist(), other_ranks.tolist(), strict=True))
        self._places = places.tolist()
        self._next_line = self._next_other = 0

    def at(self, place: int) -> SampledLogprobs | None:
        """The line of the token at this place of the message, to be asked in order; None if it has none."""
        if self._next_line < len(self._places) and self._places[self._next_line] == place:
            return self._take_one()
        return None

    def take(self, count: int) -> list[SampledLogprobs]:
        """The next ``count`` lines, or as many as there are."""
        return [self._take_one() for _ in range(min(count, len(self._values) - self._next_line))]

    def _take_one(self) -> SampledLogprobs:
        line, begin = self._next_line, self._next_other
        self._next_line += 1
        self._next_other = begin + self._counts[line]
        return SampledLogprobs(self._values[line], self._ranks[line], self._others[begin : self._next_other])
