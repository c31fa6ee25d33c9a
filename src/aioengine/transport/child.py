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

from aioengine.processes.own_side import die_with_parent, log_to_parent

logger = logging.getLogger("aioengine")

TOKEN = "AIOENGINE_TOKEN"


def main() -> None:
    """Run an engine until it is asked to end; exit with 0 if it was, with 1 where it failed."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m aioengine.transport.child")
    parser.add_argument("--handshake", required=True, help="address of the process that started this one")
    arguments = parser.parse_args()
    log_to_parent()

    import uvloop

    from aioengine.errors import AioEngineError
    from aioengine.processes.own_process import limit_spinning
    from aioengine.transport.engine_process import LOCKSTEP_MODULE, serve_for_parent

    limit_spinning()
    code = 0
    try:
        uvloop.run(serve_for_parent(arguments.handshake, os.environ.pop(TOKEN, "")))
    except AioEngineError as error:
        logger.error("%s: %s", type(error).__name__, error)
        code = 1
    if LOCKSTEP_MODULE in sys.modules:
        # A reduction that waits for others cannot be ended, and gloo aborts a process that exits beside one.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
