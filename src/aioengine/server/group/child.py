"""An HTTP server as a child process: ``python -m aioengine.server.group.child``, started by `ServerProcess`.

It is bound to end with its parent before anything slow begins. It gets its settings through an inherited socket; the
command line has only the number of that socket's descriptor.
"""

from __future__ import annotations

import socket
import sys

from aioengine.processes.own_side import die_with_parent


def main() -> int:
    """Serve until SIGTERM; returns 0 after that, 1 if the server could not start or its engine has died."""
    from aioengine.server.group.child_server import run_server

    return run_server(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
