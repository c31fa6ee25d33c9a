"""Tools for tests of your own apps: time that costs nothing, and a device that computes nothing.

- `VirtualClockLoop`, `run`: an event loop whose clock jumps, whose task order varies with a seed, and that reports
  deadlocks instead of hanging.
- `FakeExecutor`: a device side for `Engine(executor=...)` that samples a hash of the history.
"""

from aioengine.testing.clock import Deadlock, OutsideWork, VirtualClockLoop, run
from aioengine.testing.fake_executor import FakeExecutor, FakeStep, sample_hash

__all__ = ["Deadlock", "FakeExecutor", "FakeStep", "OutsideWork", "VirtualClockLoop", "run", "sample_hash"]
