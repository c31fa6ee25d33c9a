"""Recording what torch does in steps, with ``torch.profiler``."""

from __future__ import annotations

import errno
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from aioengine.core.control import StartProfile
from aioengine.errors import InvalidRequest
from aioengine.scheduler.plan import StepPlan

_in_use = threading.Lock()
"""Held while a `Recording` records: torch has one profiler a process, and a second beside it ends in a segfault."""


class Recording:
    """A running recording of a thread's next steps: each operation of torch's, nested in those that called it.

    To be made, used and stopped in that one thread, since torch records the thread that starts it.

    Args:
        asked_by: after its ``max_steps`` it stops by itself, which bounds what `stop` and `write` cost: both hold the
            GIL.
        activities: recorded beside the host's.
    Raises:
        InvalidRequest: torch's profiler is in use in this process, by another engine or by the app itself.
    """

    def __init__(self, asked_by: StartProfile, activities: Sequence[ProfilerActivity] = ()) -> None:
        self.asked_by = asked_by
        self._num_left = asked_by.max_steps
        self._is_running = _in_use.acquire(blocking=False)
        try:
            if not self._is_running or torch.autograd.profiler._is_profiler_enabled:
                raise InvalidRequest(
                    "torch's profiler is in use already in this process, and it has only one: stop that one first"
                )
            # Without shapes: with them an event costs four times as much in `stop` and `write`, and 100 steps of a
            # small model hold the loop for 1 to 3 s instead of 0.4.
            self._profile = profile(activities=[ProfilerActivity.CPU, *activities])
            self._profile.start()
        except BaseException:
            if self._is_running:
                _in_use.release()
            raise

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Around the step of ``plan``, also when the recording has ended."""
        if not self._is_running:
            yield
            return
        try:
            with record_function(f"step {plan.step} ({len(plan.rows)} rows, {int(plan.num_tokens.sum())} tokens)"):
                yield
        finally:
            self._num_left -= 1
            if self._num_left == 0:
                self.stop()

    def stop(self) -> None:
        """Record no more. Idempotent."""
        if self._is_running:
            self._is_running = False
            try:
                self._profile.stop()
            finally:
                _in_use.release()

    def write(self, path: Path) -> None:
        """Write a Chrome trace, once, after `stop`. The file is there whole or not at all.

        Raises:
            OSError: it cannot be written there.
        """
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no folder for it", str(path))
        # A folder of its own: where torch fails it raises nothing, and leaves a part of the file behind.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name, ignore_cleanup_errors=True) as folder:
            written = Path(folder, path.name)
            self._profile.export_chrome_trace(str(written))
            if not written.exists():
                raise OSError(errno.EIO, "torch could not write the trace; is there room on the disk?", str(path))
            written.replace(path)
