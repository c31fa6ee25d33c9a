"""Device sides that do not start, to be named in ``ProcessOptions(executor=...)``."""

import os
import signal
from typing import Any

from aioengine.errors import ModelLoadError


def failing(config: Any) -> Any:
    raise ModelLoadError("no such weights")


def crashing(config: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
