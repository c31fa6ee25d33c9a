"""Device sides that die in every way, to be named in ``ProcessOptions(executor="cluster.mortal:make")``.

Tokens are a hash of all that comes before them, of the seed, the choice and the weights, so that what a request brings
does not depend on which replica computes it, nor on how often it was begun anew. A prompt that begins with a `Poison`
kills the process, loses the device or stalls it when that token is computed. `SIGUSR1` to the process loses its device
with the next step, `SIGUSR2` holds all steps from now on for ever. What is in the folder `FAULTS` of the environment
befalls starts: see `Faults`.
"""

from __future__ import annotations

import asyncio
import enum
import os
import signal
from pathlib import Path
from typing import Any

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import DeviceLost
from aioengine.core.named_functions import Worker, worker_function
from aioengine.errors import ModelLoadError
from aioengine.scheduler.plan import RowSampling, StepPlan
from aioengine.testing import sample_hash
from aioengine.testing.fake_executor import RowWork
from doubles.fake_executor import FakeStep
from doubles.weighted_executor import WeightedExecutor

EXECUTOR = "cluster.mortal:make"
FAULTS = "AIOENGINE_TEST_FAULTS"
"""The environment variable with the folder of `Faults`."""
STEP_TIME = "AIOENGINE_TEST_STEP_TIME_S"

VOCAB_SIZE = 2048
FIRST_ID, LAST_ID = 10, 1999
"""Of what prompts of unaffected hold, and of what is sampled, but for grammars."""
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
NUM_BLOCKS = 2048


class Poison(enum.IntEnum):
    """First tokens of a prompt, and what they do to the process that computes them."""

    EXIT = 2040
    SEGFAULT = 2041
    LOSE = 2042
    STALL = 2043
    LATE = 2044
    """[LATE, k]: it exits when output token number k is to be sampled, whoever has computed those before."""
    CREEPING = 2045
    """[CREEPING, k]: it exits when k tokens have been sampled since the row came here: progress, and a death."""
    ONCE = 2046
    """[ONCE, k]: as LATE, and only the first process that comes to it: the next one finds that noted in `Faults`."""


class Mortal(WeightedExecutor):
    """As `WeightedExecutor`, and it can die."""

    def __init__(self, config: EngineConfig | None = None, *, step_time_s: float = 0.0, is_mortal: bool = True) -> None:
        config = config or EngineConfig()
        super().__init__(
            num_blocks=config.kv_cache_memory_bytes or NUM_BLOCKS,
            block_size=config.block_size,
            max_model_len=config.max_model_len or MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            max_in_flight=config.max_in_flight or 2,
            step_time_s=step_time_s,
            sampler=sample_word,
        )
        self._is_mortal = is_mortal
        self._is_lost = False
        self._num_sampled_here: dict[int, int] = {}
        """By row, for `Poison.CREEPING`."""

    def listen(self) -> Mortal:
        """From now on heed signals."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.lose_device)
        loop.add_signal_handler(signal.SIGUSR2, self.hang)
        return self

    def lose_device(self) -> None:
        self._is_lost = True

    def hang(self) -> None:
        """No step ends any more."""
        self.is_manual = True

    def launch(self, plan: StepPlan) -> FakeStep:
        if self._is_lost:
            self.make_step_fail(plan.step, DeviceLost("the device fell off the bus"))
        return super().launch(plan)

    def apply(self, plan: StepPlan) -> None:
        for row in plan.removed.tolist():
            self._num_sampled_here.pop(row, None)
        super().apply(plan)

    def _works(self, plan: StepPlan) -> list[RowWork]:
        works = super()._works(plan)
        if self._is_mortal:
            for work in works:
                self._swallow(work)
        return works

    def _swallow(self, work: RowWork) -> None:
        prompt = work.row.tokens[: work.row.added.num_prompt_tokens]
        if prompt[0] < Poison.EXIT:
            return
        poison = Poison(prompt[0])
        if poison in (Poison.LATE, Poison.ONCE):
            is_there = work.samples and work.end - len(prompt) == prompt[1]
            if is_there and (poison == Poison.LATE or Faults.here().is_first("-".join(map(str, prompt)))):
                os._exit(9)
        elif poison == Poison.CREEPING:
            num_sampled = self._num_sampled_here.get(work.number, 0)
            if num_sampled == prompt[1]:
                os._exit(9)
            self._num_sampled_here[work.number] = num_sampled + work.samples
        elif work.start == 0:
            self._die(poison)

    def _die(self, poison: Poison) -> None:
        if poison == Poison.EXIT:
            os._exit(7)
        elif poison == Poison.SEGFAULT:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif poison == Poison.LOSE:
            self._lost = DeviceLost("an illegal memory access was encountered")
        elif poison == Poison.STALL:
            self.hang()

    def _compute(self, plan: StepPlan) -> Any:
        result = super()._compute(plan)
        return result if self._lost is None else self._lost


def sample_word(token_ids: list[int], sampling: RowSampling) -> int:
    return FIRST_ID + sample_hash(token_ids, sampling, vocab_size=LAST_ID + 1 - FIRST_ID)


class Faults:
    """What befalls the starts of processes: both sides look into one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def let_no_start_succeed(self) -> None:
        (self._folder / "no-start").touch()

    def let_starts_succeed(self) -> None:
        (self._folder / "no-start").unlink()

    def hold_starts(self) -> None:
        """Until `release_starts`."""
        os.mkfifo(self._folder / "hold")

    def release_starts(self) -> None:
        fd = os.open(self._folder / "hold", os.O_RDWR)  # by which each that waits to open it goes on
        (self._folder / "hold").unlink()
        os.close(fd)

    def stop_next_start(self) -> None:
        """It is stopped as by SIGSTOP, once."""
        (self._folder / "stop").touch()

    @classmethod
    def here(cls) -> Faults:
        return cls(Path(os.environ[FAULTS]))

    def is_first(self, name: str) -> bool:
        """Whether no process has asked so yet."""
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def meet(self) -> None:
        """In a process that starts."""
        try:
            with open(self._folder / "hold") as fifo:
                fifo.read()
        except FileNotFoundError:
            pass
        if (self._folder / "stop").exists():
            (self._folder / "stop").unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        if (self._folder / "no-start").exists():
            raise ModelLoadError("shard 3 of 7 is damaged")


def make(config: EngineConfig) -> Mortal:
    """A device in a process, which may be told not to start."""
    Faults.here().meet()
    return Mortal(config, step_time_s=float(os.environ.get(STEP_TIME, "0"))).listen()


@worker_function("mortal.weights")
def weights_version(worker: Worker) -> int:
    version: int = worker.model.weights_version
    return version
