"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StopSearch:
    """Searches a text for stop strings, and holds back text that may begin one.

    The stop string found is the one that *ends* first in the text, and of those ending there the longest (of equal
    ones, the first listed). It depends on the text alone, not on where the text is cut into pieces, and it is known as
    soon as its last character is there.

    One character costs one dict lookup, or next to nothing where no stop string can begin. The lookup is in Aho and
    Corasick's automaton (1975, doi:10.1145/360825.360855). It is built only as far as the text walks into it, at a
    constant cost a character on average; building all of it for 64 stop strings of 1 KB would hold the event loop for
    tens of ms.

    Args:
        stop: non-empty strings.
        include_stop: the text ends after the stop string instead of before it.

    Attributes:
        found: the stop string, once it is there; call `feed` no more then.
    """

    __slots__ = ("_first_chars", "_held", "_include_stop", "_state", "_states", "_stop", "found")

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stop), "an empty stop string matches everywhere"
        self.found: str | None = None
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""
        self._first_chars = frozenset(string[0] for string in stop)
        self._state = _State(0, list(range(len(stop))), -1, None)
        self._states = [self._state]
        """States by number, the empty one first; numbers, since a cycle of states would need the garbage collector."""

    def feed(self, text: str) -> str:
        """Return the text that may be shown, first any held back before; once a stop string is found, the last text."""
        state, states = self._state, self._states
        if state is states[0] and self._first_chars.isdisjoint(text):
            return text
        for position, char in enumerate(text):
            number = state.following.get(char)
            state = states[self._extend(state, char) if number is None else number]
            if state.match is not None:
                self.found = self._stop[state.match]
                text = self._held + text[: position + 1]
                self._held = ""
                return text if self._include_stop else text[: -len(self.found)]
        self._state = state
        text = self._held + text
        num_shown = len(text) - state.depth
        self._held = text[num_shown:]
        return text[:num_shown]

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _extend(self, state: _State, char: str) -> int:
        """The state after ``char``; missing ones are made, with the shorter states that they fall back on."""
        missing = [state]
        while char not in missing[-1].following and missing[-1].fallback >= 0:
            missing.append(self._states[missing[-1].fallback])
        target = missing.pop().following[char] if char in missing[-1].following else 0
        # From the shortest to the longest: each one's result is the fallback of the next one's.
        for shorter in reversed(missing):
            target = shorter.following[char] = self._grow(shorter, char, target)
        return target

    def _grow(self, state: _State, char: str, fallback: int) -> int:
        stop, depth = self._stop, state.depth
        sharing = [index for index in state.sharing if len(stop[index]) > depth and stop[index][depth] == char]
        if not sharing:
            return fallback
        whole = (index for index in sharing if len(stop[index]) == depth + 1)
        self._states.append(_State(depth + 1, sharing, fallback, next(whole, self._states[fallback].match)))
        return len(self._states) - 1


class _State(msgspec.Struct, eq=False):
    """A beginning of one or more stop strings: the longest one that the text ends with.

    Attributes:
        depth: its length.
        sharing: indexes of the stop strings that begin with it.
        fallback: number of the next shorter beginning that the text ends with; -1 for the empty one.
        match: index of the longest stop string that the text ends with.
        following: numbers of the states after each character.
    """

    depth: int
    sharing: list[int]
    fallback: int
    match: int | None
    following: dict[str, int] = {}
