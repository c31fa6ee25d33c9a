"""A device side whose every step, dummies too, is a collective operation with those of the other ranks, on gloo.

``ProcessOptions(executor="cluster.collective:make")``. A step that some ranks run alone never ends, and one that is
another rank's other step loses the device.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from typing import Any

from cluster.mortal import STEP_TIME, Mortal

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import DeviceLost, LockstepPlace
from aioengine.core.named_functions import Worker, worker_function
from aioengine.executor.gloo import Gloo
from aioengine.testing.fake_executor import FakeLaunch

EXECUTOR = "cluster.collective:make"


class Collective(Mortal):
    """As `Mortal`, in lockstep."""

    def __init__(self, config: EngineConfig, place: LockstepPlace, **options: Any) -> None:
        super().__init__(config, **options)
        self.num_dummies = self.num_collectives = 0
        self._loop = asyncio.get_running_loop()
        self._gloo = Gloo(place)
        self._queue: queue.SimpleQueue[FakeLaunch] = queue.SimpleQueue()
        threading.Thread(target=self._meet, name="collectives", daemon=True).start()

    def launch_dummy(self) -> FakeLaunch:
        self.num_dummies += 1
        return super().launch_dummy()

    def _complete_later(self, step: FakeLaunch) -> None:
        """It ends when it has run at all ranks, and no earlier than it would alone."""
        if not self.is_manual:
            self._queue.put(step)

    def _meet(self) -> None:
        while True:
            step = self._queue.get()
            self.num_collectives += 1
            try:
                self._gloo.reduce_or(True, 0, self.num_collectives)
            except Exception as error:
                lost = DeviceLost(f"the collective operation failed: {error}")
                self._loop.call_soon_threadsafe(step.lose, lost)
                return
            self._loop.call_soon_threadsafe(super()._complete_later, step)


@worker_function("lockstep.counts")
def counts(worker: Worker) -> tuple[int, int, int]:
    """(steps, dummies, collectives) so far."""
    executor: Collective = worker.model
    return executor.stats.num_steps, executor.num_dummies, executor.num_collectives


def make(config: EngineConfig, place: LockstepPlace) -> Collective:
    # In a folder of its own, which goes when all have met.
    folder, _, name = place.store.rpartition("/")
    os.makedirs(f"{folder}-device", exist_ok=True)
    of_device = LockstepPlace(place.rank, place.num_ranks, f"{folder}-device/{name}", place.timeout_s)
    return Collective(config, of_device, step_time_s=float(os.environ.get(STEP_TIME, "0"))).listen()
