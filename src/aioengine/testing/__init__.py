"""For tests of your own apps: time that costs nothing, and a device that computes nothing.

- `VirtualClockLoop`, `run`: an event loop whose clock jumps, whose task order varies with a seed, and that reports
  deadlocks instead of hanging.
- `FakeAccelerator`: a GPU for the real executor that runs its work on the host, as late as a GPU might. It needs torch,
  which is imported when it is asked for.
- `FakeExecutor`: a device side for `Engine(executor=...)` that checks every plan and samples a hash of the history.
"""

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
]

if TYPE_CHECKING:
    from aioengine.testing.fake_accelerator import FakeAccelerator


def __getattr__(name: str) -> Any:
    if name == "FakeAccelerator":
        from aioengine.testing.fake_accelerator import FakeAccelerator

        return FakeAccelerator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
