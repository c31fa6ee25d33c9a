"""Counts the events of a streamed answer while they come, with next to no work for each."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

EVENT = b"\ndata: "
"""Begins an event. Nothing within one looks like that: in JSON a line's end is escaped."""
OVERLAP = len(EVENT) - 1
DONE = b"[DONE]"
TAIL_BYTES = 2048
"""Kept of what was read last: the final events, with the usage, come to a few hundred bytes."""
MAX_HEAD_BYTES = 2**16
"""Without any text in so much, what comes counts as text all the same."""


class EventCounter:
    """One answer in the making: when events were read, and how many at a time.

    Parsing each event would cost more than the server's making it. So the first ones are parsed until one has text (a
    chat's first event has a role alone), those in between are counted by how they begin, and the last ones are parsed
    when all have come.

    Attributes:
        read_at, num_events: of each read that brought some, from the first one with text on.
        num_tokens: as the usage block says, else the events with text.
        num_prompt_tokens: as the usage block says, else 0.
        is_done: whether the stream was ended properly.
        error: what an error event said; None: there was none.
    """

    __slots__ = ("_carry", "_is_cut", "error", "is_done", "num_events", "num_prompt_tokens", "num_tokens", "read_at")

    def __init__(self) -> None:
        self.read_at = array("d")
        self.num_events = array("L")
        self.num_tokens = self.num_prompt_tokens = 0
        self.is_done = False
        self.error: str | None = None
        self._carry = b"\n"
        self._is_cut = False

    def feed(self, data: bytes, now: float) -> None:
        """Take what was read."""
        joined = self._carry + data
        if self.read_at or len(joined) > MAX_HEAD_BYTES:
            count = joined.count(EVENT, max(0, len(self._carry) - OVERLAP))
        else:
            events = _complete_events(joined)
            first = next((i for i, event in enumerate(events) if _has_text(_decode(event))), None)
            if first is None:
                self._carry = joined
                return
            count = joined.count(EVENT) - first
        if count:
            self.read_at.append(now)
            self.num_events.append(count)
        self._is_cut = self._is_cut or len(joined) > TAIL_BYTES
        self._carry = joined[-TAIL_BYTES:]

    def finish(self) -> None:
        """All has come: take the events at the end that have no text out of the count, and read the usage."""
        num_without_text = 0
        usage: dict[str, Any] = {}
        for event in reversed(_complete_events(self._carry, is_cut=self._is_cut)):
            if event == DONE:
                self.is_done = True
            else:
                content = _decode(event)
                usage = usage or content.get("usage") or {}
                if "error" in content:
                    self.error = str(content["error"])[:200]
                if _has_text(content):
                    break
            num_without_text += 1
        if self.read_at:
            self._take_back(num_without_text)
        self.num_tokens = int(usage.get("completion_tokens") or sum(self.num_events))
        self.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)

    def _take_back(self, num_without_text: int) -> None:
        while num_without_text and self.num_events:
            taken = min(num_without_text, self.num_events[-1])
            num_without_text -= taken
            self.num_events[-1] -= taken
            if not self.num_events[-1]:
                self.num_events.pop()
                self.read_at.pop()


def _complete_events(data: bytes, *, is_cut: bool = False) -> list[bytes]:
    """The data of each complete event; ``is_cut``: the first one lacks its beginning."""
    pieces = data.replace(b"\r\n", b"\n").split(b"\n\n")[1 if is_cut else 0 : -1]
    return [line[6:] for piece in pieces for line in piece.split(b"\n") if line.startswith(b"data: ")]


def _decode(event: bytes) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(event)
    except msgspec.DecodeError:
        return {}
    return content if isinstance(content, dict) else {}


def _has_text(content: dict[str, Any]) -> bool:
    for choice in content.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "reasoning")):
            return True
    return False
