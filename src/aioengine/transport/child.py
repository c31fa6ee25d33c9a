"""An engine as a child process: ``python -m aioengine.transport.child``, started by `InChild`.

It is bound to its parent before anything slow begins: this module imports nothing but a little of the standard library,
and `main` the rest. What the engine is to do it hears in the handshake; the command line has only where that is, and
the environment what must not be seen there.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import re
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioengine.transport.serving import EnterGroup

logger = logging.getLogger("aioengine")

TOKEN = "AIOENGINE_TOKEN"
PARENT_PID = "AIOENGINE_PARENT_PID"
LOG_LEVEL = "AIOENGINE_LOG_LEVEL"
FAMILY = "AIOENGINE_FAMILY"
"""Inherited by all that descend from a child: the name of its family, and of those above that one."""

AGAIN = 75
"""Exit code of an engine in whose place another one is wanted; EX_TEMPFAIL of sysexits.h."""

NO_FRONT_END = 69
"""Exit code of an engine whose front end is not there; EX_UNAVAILABLE of sysexits.h."""

BAD_CONFIG = 78
"""Exit code of an engine that cannot start as it is configured, or not as that of its front end; EX_CONFIG."""

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


def main(enter_group: EnterGroup | None = None) -> int:
    """Run an engine until it is told to end; returns 0 if it was, 1 where it failed, or a code from above.

    Args:
        enter_group: as of `serving.serve_engine`.
    """
    parser = argparse.ArgumentParser(prog="python -m aioengine.transport.child")
    parser.add_argument("--handshake", required=True, help="address of the one that started this process")
    parser.add_argument("--index", type=int, default=0, help="which engine to say HELLO as")
    parser.add_argument("--shared", help="address of a front end that several engines share")
    parser.add_argument("--rank", type=int, default=-1, help="which engine to say HELLO as to that; -1: any")
    parser.add_argument("--keys", help="folder of keys for that")
    parser.add_argument("--join-timeout", type=float, help="seconds to wait for it when it is not there")
    arguments = parser.parse_args()
    log_to_parent()

    import uvloop

    from aioengine.errors import AioEngineError, ConfigError
    from aioengine.own_process import limit_spinning
    from aioengine.transport.joining import JOIN_TIMEOUT_S, Endpoint, NoFrontEnd
    from aioengine.transport.security import ClientKeys
    from aioengine.transport.serving import serve_engine

    limit_spinning()
    endpoints = [Endpoint(arguments.handshake, arguments.index, token=os.environ.pop(TOKEN, ""))]
    try:
        if arguments.shared:
            keys = ClientKeys.load(arguments.keys) if arguments.keys else None
            timeout_s = arguments.join_timeout or JOIN_TIMEOUT_S
            endpoints.append(Endpoint(arguments.shared, arguments.rank, "", False, keys, timeout_s))
        goodbye = uvloop.run(serve_engine(endpoints, enter_group=enter_group))
    except AioEngineError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return NO_FRONT_END if isinstance(error, NoFrontEnd) else BAD_CONFIG if isinstance(error, ConfigError) else 1
    return AGAIN if goodbye is not None and goodbye.is_wanted_again else 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
