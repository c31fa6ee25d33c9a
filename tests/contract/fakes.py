"""The device of the contract suite, importable by an engine's own process, and what a test asks of it by name.

Whatever way an engine is had, its device is reached by its public API alone: `Engine.collective_rpc`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hostile_errors import HOSTILE

from aioengine import EngineConfig
from aioengine.core.executor_protocol import DeviceLost
from aioengine.core.worker_functions import Worker, worker_function
from aioengine.scheduler.plan import RowSampling
from aioengine.testing import sample_hash
from doubles.weighted_executor import WeightedExecutor

VOCAB_SIZE = 2048
NUM_SPECIAL = 3
MAX_IN_FLIGHT = 2
SLOW_STEP_S = 0.001
NUM_BLOCKS = 512


class Device(WeightedExecutor):
    """A fake device of the demo model's vocabulary that never ends an output by itself, and counts by seed.

    Its output depends on its weights, too. It does not let itself be held: other requests are known to run by what they
    bring.
    """

    def __init__(self, config: EngineConfig, *, step_time_s: float = 0.0, max_model_len: int = 512) -> None:
        super().__init__(
            num_blocks=config.kv_cache_memory_bytes or NUM_BLOCKS,
            block_size=config.block_size,
            max_model_len=config.max_model_len or max_model_len,
            vocab_size=VOCAB_SIZE,
            max_in_flight=config.max_in_flight or MAX_IN_FLIGHT,
            step_time_s=step_time_s,
            sampler=self._sample_next,
        )
        self.sampled: dict[int, int] = {}
        """By seed, in the order of their first tokens: how many were sampled."""

    def _sample_next(self, token_ids: list[int], sampling: RowSampling) -> int:
        self.sampled[sampling.seed] = self.sampled.get(sampling.seed, 0) + 1
        return NUM_SPECIAL + sample_hash(token_ids, sampling, vocab_size=VOCAB_SIZE - NUM_SPECIAL)


def make(config: EngineConfig) -> Device:
    """A device whose steps take no time."""
    return Device(config)


def make_slow(config: EngineConfig) -> Device:
    """A device on which a long request lasts for seconds, so that it is there for as long as a test needs."""
    return Device(config, step_time_s=SLOW_STEP_S, max_model_len=4096)


# What tests ask for


@worker_function("contract.sampled")
def sampled(worker: Worker, seed: int) -> int:
    """Tokens that were sampled for the request of this seed."""
    return int(worker.model.sampled.get(seed, 0))


@worker_function("contract.order")
def order(worker: Worker) -> list[int]:
    """The seeds in the order of their first tokens."""
    return list(worker.model.sampled)


@worker_function("contract.num_computed")
def num_computed(worker: Worker) -> int:
    return int(worker.model.stats.num_computed_tokens)


@worker_function("contract.num_steps")
def num_steps(worker: Worker) -> int:
    return int(worker.model.stats.num_steps)


@worker_function("contract.sampling")
def sampling_of(worker: Worker, seed: int) -> dict[str, Any]:
    """What the device was told about the last request of this seed."""
    found = [added.sampling for plan in worker.model.plans for added in plan.added if added.sampling.seed == seed]
    told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found[-1]))  # a wire makes lists of tuples, too
    return told


@worker_function("contract.calls")
def calls(worker: Worker) -> list[str]:
    """The control calls that came to the device, but for those that ask."""
    return [name for name, _ in worker.model.events if name not in ("launch", "finish", "collective_rpc")]


@worker_function("contract.fail_next_step")
def fail_next_step(worker: Worker, message: str) -> None:
    worker.model.make_step_fail(len(worker.model.plans), RuntimeError(message))


@worker_function("contract.fail_row_of_next_step")
def fail_row_of_next_step(worker: Worker, row: int, message: str) -> None:
    worker.model.make_row_fail(len(worker.model.plans), row, RuntimeError(message))


@worker_function("contract.lose_device")
def lose_device(worker: Worker, message: str) -> None:
    worker.model.make_step_fail(len(worker.model.plans), DeviceLost(message))


@worker_function("contract.repeat")
def repeat(worker: Worker, text: str, count: int) -> str:
    return text * count


@worker_function("contract.echo")
def echo(worker: Worker, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"args": list(args), "kwargs": kwargs, "rank": worker.rank, "world_size": worker.world_size}


class OwnError(Exception):
    """No type of Python's, nor of aioengine's."""


ERRORS = {
    kind.__name__: kind
    for kind in (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError, OSError, FileNotFoundError, OwnError)
}


@worker_function("contract.fail")
def fail(worker: Worker, kind: str, message: str) -> None:
    raise ERRORS[kind](message)


@worker_function("contract.fail_hostilely")
def fail_hostilely(worker: Worker, what: str, where: str) -> None:
    """Raise one of `HOSTILE`, here, in the next step, or in the rows of that."""
    try:
        HOSTILE[what]()
    except Exception as error:
        if where == "here":
            raise
        if where == "step":
            worker.model.make_step_fail(len(worker.model.plans), error)
        elif where == "row":
            for row in range(256):
                worker.model.make_row_fail(len(worker.model.plans), row, error)
        else:
            lost = DeviceLost("the device is gone")
            lost.__cause__ = error
            worker.model.make_step_fail(len(worker.model.plans), lost)


@worker_function("contract.return_function")
def return_function(worker: Worker) -> Any:
    """What is no plain data."""
    return lambda: None
