"""For tests of your own apps: time that costs nothing, and a device that computes nothing.

- `VirtualClockLoop`, `run`: an event loop whose clock jumps, whose task order varies with a seed, and that reports
  deadlocks instead of hanging.
- `FakeAccelerator`: a GPU that runs its work on the host, as late as a GPU might, and `start_gpu_executor`, the real
  executor of a GPU over it. They need torch, which is imported when they are asked for.
- `FakeExecutor`: a device side for `Engine(executor=...)` that checks every plan and samples a hash of the history.
"""

import importlib
from typing import TYPE_CHECKING, Any

from aioengine.testing.clock import Deadlock, OutsideWork, VirtualClockLoop, run
from aioengine.testing.fake_executor import FakeExecutor, FakeStep, sample_hash

__all__ = [
    "Deadlock",
    "FakeAccelerator",
    "FakeExecutor",
    "FakeStep",
    "OutsideWork",
    "VirtualClockLoop",
    "run",
    "sample_hash",
    "start_gpu_executor",
]

if TYPE_CHECKING:
    from aioengine.testing.fake_accelerator import FakeAccelerator
    from aioengine.testing.gpu_executor import start_gpu_executor

NEEDS_TORCH = {"FakeAccelerator": "fake_accelerator", "start_gpu_executor": "gpu_executor"}


def __getattr__(name: str) -> Any:
    if name not in NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"aioengine.testing.{NEEDS_TORCH[name]}"), name)
