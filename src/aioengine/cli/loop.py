"""The event loop of a command: the command line owns its process, so it may choose the loop and handle Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a command to its end, on uvloop where there is one.

    Raises:
        KeyboardInterrupt: Ctrl-C; ``main`` was cancelled and has cleaned up.
    """
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)
