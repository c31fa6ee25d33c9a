"""What a child writes: how it is logged and kept, and that it holds nobody. The child's own logging is here, too."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator

import pytest

from aioengine.processes.child import (
    MAX_LAST_LINES,
    MAX_LINE_BYTES,
    MAX_LINES_PER_READ,
    READ_BYTES,
    ChildOutput,
    telling_line,
)

Pipe = tuple[ChildOutput, int]


@pytest.fixture
async def pipe(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Pipe]:
    """A child's output, and the end that the child writes to."""
    caplog.set_level(logging.INFO, "aioengine")
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    output = ChildOutput("engine 0", os.fdopen(reading, "rb", buffering=0), asyncio.get_running_loop())
    yield output, writing
    output.close()
    os.close(writing)


async def test_a_flood_of_lines_is_logged_a_little_at_a_time(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    output, writing = pipe
    written = os.write(writing, b"ab\n" * 50_000)  # as much as the pipe takes
    counts = []
    for _ in range(4 * written // READ_BYTES):
        caplog.clear()
        await asyncio.sleep(0)
        counts.append(len(caplog.records))
    assert max(counts) == MAX_LINES_PER_READ + 1
    assert sum(count > 0 for count in counts) == -(-written // READ_BYTES)
    assert list(output.tail) == ["ab"] * MAX_LAST_LINES


async def test_lines_that_are_left_out_are_counted(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    output, writing = pipe
    os.write(writing, b"line\n" * 500)
    output.finish()
    assert caplog.messages[-1] == f"engine 0: … {500 - MAX_LINES_PER_READ} more lines at once"


async def test_what_never_ends_its_line_does_not_pile_up(pipe: Pipe) -> None:
    output, writing = pipe
    for _ in range(100):
        os.write(writing, b"x" * 10_000)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(output._rest) <= MAX_LINE_BYTES
    assert max(map(len, output.tail)) <= MAX_LINE_BYTES


async def test_a_line_in_pieces_and_one_without_an_end_are_whole(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    output, writing = pipe
    for piece in (b"on", b"e\ntw", b"o\n\n", b"\xff"):
        os.write(writing, piece)
        output._read(READ_BYTES)
    output.finish()
    output.finish()
    assert caplog.messages == ["engine 0: one", "engine 0: two", "engine 0: �"]
    assert list(output.tail) == ["one", "two", "", "�"]


async def test_of_a_progress_bar_the_last_state_is_shown(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    output, writing = pipe
    os.write(writing, b"\r 1%\r50%\r99%\r\n")
    output.finish()
    assert caplog.messages == ["engine 0: 99%"]


async def test_the_levels_of_a_childs_log_lines_are_kept(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    output, writing = pipe
    no_log_lines = ["WARNING: no log line", "NOTICE x: y", "ERROR two words: y"]
    os.write(writing, b"WARNING aioengine: a: b\nERROR x.y-z: broken\nDEBUG a: unheard\n")
    os.write(writing, "\n".join(no_log_lines).encode())
    output.finish()
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "engine 0: a: b"),
        (logging.ERROR, "engine 0: x.y-z: broken"),
        *((logging.INFO, f"engine 0: {line}") for line in no_log_lines),
    ]


TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1', "    fail()"]


@pytest.mark.parametrize(
    ("lines", "telling"),
    [
        ([], ""),
        (["", "  "], ""),
        (["loading", "ready", ""], "ready"),
        ([*TRACEBACK, "aioengine.errors.EngineDead: lost", "bye"], "aioengine.errors.EngineDead: lost"),
        (
            [*TRACEBACK, "KeyError: 1", "", "During handling …", "", *TRACEBACK, "x.OddError: 2", "more"],
            "x.OddError: 2",
        ),
        ([*TRACEBACK, "KeyError: 1", "Fatal Python error: Aborted", "", "  File x"], "Fatal Python error: Aborted"),
        (["ERROR aioengine: the device is lost", "INFO aioengine: bye"], "the device is lost"),
        ([f"ERROR aioengine: {line}" for line in [*TRACEBACK, "ValueError: x"]] + ["bye"], "ValueError: x"),
        (["INFO aioengine: loading", "WARNING x.y: slow", "INFO aioengine: ready"], ""),
        (["INFO aioengine: loading", "terminating", "INFO aioengine: ready"], "terminating"),
        (["RuntimeError: CUDA out of memory", "terminating"], "RuntimeError: CUDA out of memory"),
    ],
)
def test_the_telling_line_is_what_the_last_error_says(lines: list[str], telling: str) -> None:
    assert telling_line(lines) == telling
