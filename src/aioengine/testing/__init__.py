"""A virtual clock and a fake executor: public, for tests of your own apps too."""

from aioengine.testing.clock import Deadlock, OutsideWork, VirtualClockLoop, run
from aioengine.testing.fake_executor import FakeExecutor, FakeStep, sample_hash

__all__ = ["Deadlock", "FakeExecutor", "FakeStep", "OutsideWork", "VirtualClockLoop", "run", "sample_hash"]
