"""An HTTP server as a child process: ``python -m aioengine.server.group.child``, started by `ServerProcess`.

It is bound to its parent before anything slow begins. How it is set up it hears through a socket that it has inherited;
the command line has nothing but that one's number.
"""

from __future__ import annotations

import socket
import sys

from aioengine.transport.child import die_with_parent


def main() -> int:
    """Serve until it is told to end; 0 if it was, 1 if it could not start or its engine has died."""
    from aioengine.server.group.child_server import run_server

    return run_server(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
