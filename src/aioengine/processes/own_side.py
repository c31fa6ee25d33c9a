"""A child's side of its life: it ends with its parent, and its parent logs what it logs.

This module imports nothing but a little of the standard library, so that a child is bound to its parent before anything
slow begins.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import sys

PARENT_PID = "AIOENGINE_PARENT_PID"
LOG_LEVEL = "AIOENGINE_LOG_LEVEL"
FAMILY = "AIOENGINE_FAMILY"
"""Inherited by all that descend from a child: the name of its family, and of those above that one."""

_PR_SET_PDEATHSIG = 1
_LOG_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.-]+): ?(.*)", re.DOTALL)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent ends, however it ends.

    To be called in the main thread before anything else. It holds for a process that is stopped or busy in C, too. If
    the parent has ended already, this process exits at once. The kernel takes the end of the *thread* that started this
    process for the parent's end.

    Args:
        parent_pid: by default what the parent has handed over in the environment; without it, as in a process
            started by hand, nothing happens.
    """
    if parent_pid is None:
        handed_over = os.environ.get(PARENT_PID, "")
        if not handed_over:
            return
        parent_pid = int(handed_over)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before the kernel was told, and will not end again
        os._exit(1)


def log_to_parent() -> None:
    """Send what this process logs to its stderr, in lines that the parent gives to its own logger.

    This package logs at the level of the parent's, all others from WARNING on.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_EachLine("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    level = os.environ.get(LOG_LEVEL, "")
    logging.getLogger("aioengine").setLevel(int(level) if level.isdecimal() else logging.INFO)


def read_log_line(line: str) -> tuple[int, str]:
    """The level and the message of a line; what was not made by `log_to_parent` is INFO."""
    match = _LOG_LINE.fullmatch(line)
    if match is None:
        return logging.INFO, line
    level, name, message = match.groups()
    return logging.getLevelNamesMapping()[level], message if name == "aioengine" else f"{name}: {message}"


class _EachLine(logging.Formatter):
    """``LEVEL name: `` before each line, since the reader sees a traceback line by line."""

    def format(self, record: logging.LogRecord) -> str:
        # A name of another's choosing must not break the line's form.
        name = re.sub(r"[^\w.-]", "_", record.name)
        # So does a level of a program's own: it counts as the standard one below it.
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        prefix = f"{logging.getLevelName(level)} {name}: "
        return "\n".join(prefix + line for line in super().format(record).splitlines())
