"""An engine as a child process: ``python -m aioengine.transport.child``, started by `InChild`.

It is bound to its parent before anything slow begins: this module imports nothing but a little of the standard library,
and `main` the rest. What the engine is to do it hears in the handshake; the command line has only where that is, and
the environment what must not be seen there.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

from aioengine.processes.own_side import die_with_parent, log_to_parent

if TYPE_CHECKING:
    from aioengine.transport.serving import EnterGroup

logger = logging.getLogger("aioengine")

TOKEN = "AIOENGINE_TOKEN"

AGAIN = 75
"""Exit code of an engine in whose place another one is wanted; EX_TEMPFAIL of sysexits.h."""

NO_FRONT_END = 69
"""Exit code of an engine whose front end is not there; EX_UNAVAILABLE of sysexits.h."""

BAD_CONFIG = 78
"""Exit code of an engine that cannot start as it is configured, or not as that of its front end; EX_CONFIG."""


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
    from aioengine.processes.own_process import limit_spinning
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
