"""What a device did and when, written as a Chrome trace: for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from aioengine.errors import InvalidRequest

MAX_SPANS = 500_000
"""About 80 MB. What comes later is counted and dropped, so that a profile that nobody stops does not eat the memory."""

SPANS_A_PIECE = 200
"""As many as are encoded in a millisecond."""


class Span(NamedTuple):
    """Something that took time. The clock is the recorder's; spans that lie in others are shown below them."""

    category: str
    name: str
    begin_ns: int
    end_ns: int
    details: dict[str, Any] | None = None


class Trace:
    """Spans of one thread, in the order in which they ended.

    Attributes:
        spans: at most `MAX_SPANS`.
        num_dropped: how many there were beyond.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.num_dropped = 0

    def add(self, span: Span) -> None:
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.num_dropped += 1

    async def write(self, path: Path) -> None:
        """Write the trace, in a thread of its own that is gone afterwards. The file is there whole or not at all.

        Cancelling stops the writing.

        Raises:
            OSError: it cannot be written there.
        """
        threads: list[threading.Thread] = []
        is_cancelled = threading.Event()
        pool = ThreadPoolExecutor(1, "aioengine-trace", lambda: threads.append(threading.current_thread()))
        try:
            await asyncio.get_running_loop().run_in_executor(pool, self._write, path, is_cancelled)
        finally:
            is_cancelled.set()
            pool.shutdown(wait=False)
        # It has nothing left to do, and is gone in some µs; a join would hold the loop.
        while threads[0].is_alive():  # noqa: ASYNC110 - a thread's end sets no event
            await asyncio.sleep(0)

    def _write(self, path: Path, is_cancelled: threading.Event) -> None:
        part = path.with_name(f"{path.name}.part")
        try:
            # Unbuffered, since a write lets go of the GIL; else the loop would wait 5 ms for it each time.
            with part.open("wb", buffering=0) as file:
                for piece in self._pieces():
                    if is_cancelled.is_set():
                        break
                    file.write(piece)
                else:
                    part.replace(path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def _pieces(self) -> Iterator[bytes]:
        """The file, a millisecond's work at a time."""
        head = {"displayTimeUnit": "ms", "numDropped": self.num_dropped, "traceEvents": []}
        yield json.dumps(head).removesuffix("]}").encode()
        process_id = os.getpid()
        thread_name = {"name": "thread_name", "ph": "M", "pid": process_id, "tid": 0, "args": {"name": "device"}}
        yield json.dumps(thread_name).encode()
        spans = iter(self.spans)
        while piece := list(itertools.islice(spans, SPANS_A_PIECE)):
            yield "".join(f",\n{json.dumps(_event(span, process_id))}" for span in piece).encode()
        yield b"]}\n"


def _event(span: Span, process_id: int) -> dict[str, Any]:
    """A "complete event" of the Trace Event Format; its times are µs."""
    return {
        "ph": "X",
        "cat": span.category,
        "name": span.name,
        "ts": span.begin_ns / 1000,
        "dur": (span.end_ns - span.begin_ns) / 1000,
        "pid": process_id,
        "tid": 0,
        "args": span.details or {},
    }


def already_recording() -> InvalidRequest:
    return InvalidRequest("a profile is being recorded already: stop that one first")


def not_recording() -> InvalidRequest:
    return InvalidRequest("no profile is being recorded: start one first")
