"""The device of the contract suite, importable by an engine's own process, and what a test asks of it by name.

Whatever way an engine is had, its device is reached by its public API alone: `Engine.collective_rpc`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
from hostile_errors import HOSTILE

from aioengine import EngineConfig
from aioengine.core.executor_protocol import DeviceLost
from aioengine.core.named_functions import Worker, worker_function
from aioengine.scheduler.plan import RowSampling
from aioengine.scheduler.policy import Fair, Incoming, Policy, TenantQueues
from aioengine.scheduler.sequence import Sequence
from aioengine.testing import sample_hash
from doubles.weighted_executor import WeightedExecutor

VOCAB_SIZE = 2048
NUM_SPECIAL = 3
MAX_IN_FLIGHT = 2
SLOW_STEP_S = 0.001
NUM_BLOCKS = 512


class ByTenant(Policy):
    """A policy of one's own: the tenant's name is a number, and the largest goes first."""

    def key(self, request: Incoming) -> tuple[float, float]:
        return 0, -int(request.tenant)


class Unfit(Fair):
    """A policy of one's own that cannot order or weigh some tenants' requests.

    Nothing of a user's is asked later, so that a queue which breaks stands for a scheduler that does.
    """

    WEIGHTS: ClassVar[dict[str, Any]] = {
        "zero": 0, "negative": -1.0, "infinite": math.inf, "no weight": math.nan, "heavy": "x", "": 1, "later": 1,
        "again": 1,
    }  # fmt: skip
    KEYS: ClassVar[dict[str, Any]] = {
        "text": "x", "none": None, "triple": (0, 1, 2), "words": ("a", "b"), "nan": (0, math.nan),
    }  # fmt: skip

    def key(self, request: Incoming) -> tuple[float, float]:
        if request.tenant == "raises":
            raise LookupError("an unknown customer")
        key: tuple[float, float] = self.KEYS.get(request.tenant, (0, 0))
        return key

    def tenant(self, request: Incoming) -> str:
        tenant: Any = 7 if request.tenant == "number" else request.tenant
        return "" if tenant in self.KEYS else tenant

    def weight(self, tenant: str) -> float:
        weight: float = self.WEIGHTS[tenant]
        return weight

    def _make_queue(self) -> TenantQueues:
        return FussyQueues()


class FussyQueues(TenantQueues):
    """Breaks when one of the tenant "later" takes a row, or one of "again" waits a second time."""

    def charge_prompt(self, sequence: Sequence) -> None:
        if sequence.request.tenant == "later":
            raise LookupError("an unknown account")
        super().charge_prompt(sequence)

    def add(self, sequence: Sequence) -> None:
        if sequence.has_run and sequence.request.tenant == "again":
            raise LookupError("an unknown place")
        super().add(sequence)


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


def on_device(name: str, function: Callable[..., Any]) -> None:
    """Let tests call ``function`` with the device and arguments of theirs, as "contract.<name>"."""
    worker_function(f"contract.{name}")(lambda worker, *args: function(worker.model, *args))


def fail_next_step(device: Device, error: Exception) -> None:
    device.make_step_fail(len(device.plans), error)


on_device("sampled", lambda device, seed: device.sampled.get(seed, 0))
on_device("order", lambda device: list(device.sampled))
on_device("num_computed", lambda device: device.stats.num_computed_tokens)
on_device("num_steps", lambda device: device.stats.num_steps)
on_device("fail_next_step", lambda device, message: fail_next_step(device, RuntimeError(message)))
on_device("lose_device", lambda device, message: fail_next_step(device, DeviceLost(message)))
on_device(
    "fail_row_of_next_step",
    lambda device, row, message: device.make_row_fail(len(device.plans), row, RuntimeError(message)),
)
on_device("repeat", lambda device, text, count: text * count)
on_device("return_function", lambda device: lambda: None)
# The control calls that came to the device, but for those that ask.
on_device("calls", lambda device: [e[0] for e in device.events if e[0] not in ("launch", "finish", "collective_rpc")])


@worker_function("contract.sampling")
def sampling_of(worker: Worker, seed: int) -> dict[str, Any]:
    """What the device was told about the last request of this seed."""
    found = [added.sampling for plan in worker.model.plans for added in plan.added if added.sampling.seed == seed]
    told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found[-1]))  # a wire makes lists of tuples, too
    return told


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
            fail_next_step(worker.model, error)
        elif where == "row":
            for row in range(256):
                worker.model.make_row_fail(len(worker.model.plans), row, error)
        else:
            lost = DeviceLost("the device is gone")
            lost.__cause__ = error
            fail_next_step(worker.model, lost)
