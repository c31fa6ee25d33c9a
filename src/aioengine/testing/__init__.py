"""A virtual clock and a fake executor: public, for tests of your own apps too.

- `clock`: a loop whose time jumps to the next deadline. `fake_executor`: a device that computes nothing, with
  `answers` that a test gives it.
"""

from aioengine.testing.clock import Deadlock, OutsideWork, VirtualClockLoop, run
from aioengine.testing.fake_executor import FakeExecutor, FakeStep, sample_hash

__all__ = ["Deadlock", "FakeExecutor", "FakeStep", "OutsideWork", "VirtualClockLoop", "run", "sample_hash"]
