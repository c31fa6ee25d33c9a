"""An engine as a child process: ``python -m aioengine.transport.child``, started by a `Supervisor`.

What it is to do it hears in the handshake; the command line has only where that is, and the environment what must not
be seen there.
"""

from __future__ import annotations

from aioengine.transport.child_life import die_with_parent, log_to_parent

if __name__ == "__main__":
    die_with_parent()  # before anything that takes time

import argparse
import logging
import os
import sys

TOKEN = "AIOENGINE_TOKEN"

logger = logging.getLogger("aioengine")


def main() -> int:
    """Run an engine until it is told to end; 0 if it was, 1 if it could not start or has died."""
    parser = argparse.ArgumentParser(prog="python -m aioengine.transport.child")
    parser.add_argument("--handshake", required=True, help="address of the one that started this process")
    parser.add_argument("--index", type=int, default=0, help="which engine to say HELLO as")
    parser.add_argument("--shared", help="address of a front end that several engines share")
    parser.add_argument("--keys", help="folder of keys for that")
    arguments = parser.parse_args()
    log_to_parent()

    import uvloop

    from aioengine.errors import AioEngineError
    from aioengine.process_options import limit_spinning
    from aioengine.transport.security import ClientKeys
    from aioengine.transport.serving import Endpoint, serve_engine

    limit_spinning()
    hosts = [Endpoint(arguments.handshake, token=os.environ.pop(TOKEN, ""))]
    if arguments.shared:
        keys = ClientKeys.load(arguments.keys) if arguments.keys else None
        hosts.append(Endpoint(arguments.shared, is_local=False, keys=keys))
    try:
        uvloop.run(serve_engine(hosts, index=arguments.index))
    except AioEngineError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
