"""Device sides for engines in processes of their own, to be named in ``ProcessOptions(executor=...)``.

What they are told comes through a FIFO, whose path is in the environment.
"""

import asyncio
import ctypes
import os
import signal
import sys
from typing import Any

import anyio

from aioengine.config import EngineConfig
from aioengine.core.control import Control, ExecuteDummyBatch
from aioengine.core.executor_protocol import DeviceLost
from aioengine.core.named_functions import Worker, worker_function
from aioengine.errors import ModelLoadError
from aioengine.scheduler.plan import StepPlan
from doubles.fake_executor import FakeExecutor, FakeStep

FIFO = "AIOENGINE_TEST_FIFO"

VOCAB_SIZE = 2048
NUM_FREE_STEPS = 4
STEP_TIME_S = 0.005

GO, HANG, LOSE = b"g", b"h", b"l"
"""What a device can be told: let all steps end; hold them from now on; lose the device at the next step."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ToldExecutor(FakeExecutor):
    """Does as it is told; ``num_free_steps``: from then on steps are held until it is told to go on."""

    def __init__(self, num_free_steps: int | None = None, step_time_s: float = 0.0) -> None:
        super().__init__(
            vocab_size=VOCAB_SIZE, num_blocks=4096, max_model_len=2048, step_time_s=step_time_s, max_in_flight=2
        )
        self._num_free_steps = num_free_steps
        self._is_lost = False
        self._goes_on = asyncio.Event()

    def listen(self) -> "ToldExecutor":
        """From now on do what the FIFO says."""
        fd = os.open(os.environ[FIFO], os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(fd, lambda: self.tell(os.read(fd, 64)))
        return self

    def tell(self, words: bytes) -> None:
        """Do so."""
        for word in words:
            if word == HANG[0]:
                self.is_manual = True
            elif word == LOSE[0]:
                self._is_lost = True
            elif word == GO[0]:
                self.is_manual, self._num_free_steps = False, None
                self._goes_on.set()
                for step in self.unfinished:
                    step.complete()

    async def perform(self, call: Control) -> Any:
        if isinstance(call, ExecuteDummyBatch) and self.is_manual:
            await self._goes_on.wait()
        return await super().perform(call)

    def launch(self, plan: StepPlan) -> FakeStep:
        if self.stats.num_steps == self._num_free_steps:
            self.is_manual = True
        if self._is_lost:
            self.make_step_fail(plan.step, DeviceLost("the device fell off the bus"))
        return super().launch(plan)


@worker_function("tell the device")
def tell_device(worker: Worker, word: str) -> None:
    """As `ToldExecutor.tell`, and done when the call returns: for what is not said while steps are held."""
    worker.model.tell(word.encode())


@worker_function("leave a descendant")
def leave_a_descendant(_: Worker) -> None:
    """It has the sockets of this process, and a session of its own."""
    if os.fork() == 0:
        os.setsid()
        while True:
            signal.pause()


class ClingingExecutor(ToldExecutor):
    """Does not close."""

    async def aclose(self) -> None:
        say("closing")
        await anyio.sleep_forever()


def told(_: EngineConfig) -> FakeExecutor:
    return ToldExecutor().listen()


def steady(_: EngineConfig) -> FakeExecutor:
    return ToldExecutor(step_time_s=STEP_TIME_S)


def held(_: EngineConfig) -> FakeExecutor:
    return ToldExecutor(NUM_FREE_STEPS).listen()


def clinging(_: EngineConfig) -> FakeExecutor:
    return ClingingExecutor(NUM_FREE_STEPS)


def slow_to_load(_: EngineConfig) -> FakeExecutor:
    """Holds the loop of its process until it is told to go on."""
    say("loading")
    with open(os.environ[FIFO], "rb", buffering=0) as fifo:
        assert fifo.read(1) == GO
    return ToldExecutor()


def cramped(_: EngineConfig) -> FakeExecutor:
    """Without room for the longest sequence."""
    return FakeExecutor(vocab_size=VOCAB_SIZE, num_blocks=2, max_model_len=2048)


# Those that end their process


def not_loading(_: EngineConfig) -> FakeExecutor:
    raise ModelLoadError("shard 3 of 7 is damaged")


def raising(_: EngineConfig) -> FakeExecutor:
    raise ZeroDivisionError("no device to divide by")


def exiting(_: EngineConfig) -> FakeExecutor:
    os._exit(3)


def speaking(_: EngineConfig) -> FakeExecutor:
    say("the driver is too old for this library")
    os._exit(1)


def crashing(_: EngineConfig) -> FakeExecutor:
    ctypes.string_at(0)
    raise AssertionError("it was to crash")
