"""Device sides that do not start, to be named in ``ProcessOptions(executor=...)``; and what a device is asked."""

import os
import signal
from typing import Any

from aioengine.core.named_functions import Worker, worker_function
from aioengine.errors import ModelLoadError


def failing(config: Any) -> Any:
    raise ModelLoadError("no such weights")


def crashing(config: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@worker_function("visible devices")
def visible_devices(worker: Worker) -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
