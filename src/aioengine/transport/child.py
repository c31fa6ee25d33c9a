"""An engine as a child process: ``python -m aioengine.transport.child``, started by `InChild`.

It is bound to its parent before anything slow begins: this module imports nothing but a little of the standard library,
and `main` the rest. The handshake brings the model to serve. The command line has only the parent's address, and
the environment has the token, which others must not see.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

from aioengine.processes.own_side import die_with_parent, log_to_parent

if TYPE_CHECKING:
    from aioengine.transport.engine_process import EnterGroup

logger = logging.getLogger("aioengine")

TOKEN = "AIOENGINE_TOKEN"


def main(enter_group: EnterGroup | None = None) -> int:
    """Run an engine until it is asked to end; returns 0 if it was, 1 where it failed.

    Args:
        enter_group: as of `engine_process.serve_for_parent`.
    """
    parser = argparse.ArgumentParser(prog="python -m aioengine.transport.child")
    parser.add_argument("--handshake", required=True, help="address of the process that started this one")
    arguments = parser.parse_args()
    log_to_parent()

    import uvloop

    from aioengine.errors import AioEngineError
    from aioengine.processes.own_process import limit_spinning
    from aioengine.transport.engine_process import serve_for_parent

    limit_spinning()
    try:
        uvloop.run(serve_for_parent(arguments.handshake, os.environ.pop(TOKEN, ""), enter_group))
    except AioEngineError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
