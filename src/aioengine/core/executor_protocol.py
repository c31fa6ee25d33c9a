"""The interfaces of an engine core to its device, and to the group of engines that run each step together.

A device launches plans, and hands back results in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from aioengine.core.control import Control
from aioengine.errors import InvalidRequest
from aioengine.scheduler.cache_layout import FULL_ATTENTION, CacheLayout
from aioengine.scheduler.plan import Handles, StepPlan, StepResult

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DeviceLost(Exception):
    """The device cannot go on: no later step can succeed. The cause is ``__cause__``."""


class ExecutorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and properties of a started executor.

    Attributes:
        num_blocks: blocks of the layout's first pool, ids 0 up to this. more_blocks: of its other pools; their ids
            follow.
        block_size: tokens in a block.
        max_model_len: most tokens in one sequence.
        vocab_size: token ids that the model takes are below this.
        max_in_flight: how many plans may be launched and not finished.
        max_mixed_prefill_tokens: most tokens of prompts in a step in which rows decode; None: as many as it takes.
        kv_cache_bytes, weight_bytes: of all KV blocks, and of the parameters.
        device, dtype: such as "cpu" and "bfloat16".
        layout: what the model's layers keep of a sequence, and in which blocks.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_in_flight: int = 1
    max_mixed_prefill_tokens: int | None = None
    kv_cache_bytes: int = 0
    weight_bytes: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    layout: CacheLayout = FULL_ATTENTION
    more_blocks: tuple[int, ...] = ()

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        """Blocks of each pool."""
        return self.num_blocks, *self.more_blocks

    def most_held(self, num_tokens: int, max_num_batched_tokens: int) -> list[int]:
        """By pool, the most blocks that a sequence holds on its way to so many tokens with KV."""
        return self.layout.most_held_by_pool(
            num_tokens, self.block_size, max_in_flight=self.max_in_flight, max_step_tokens=max_num_batched_tokens
        )


class ExecutorStats(msgspec.Struct, kw_only=True):
    """Counters since the start, for tests of what was really computed: plans run, failed ones included, and tokens."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0


class PendingStep(Protocol[T_co]):
    """A launched step, with a `StepResult`, or a dummy, with None."""

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return at once."""

    async def finish(self) -> T_co:
        """Wait for the step's result; to be called once, and for steps in the order of their launch.

        Cancelling stops the wait, not the device: the step still completes, and its blocks stay in use until then.

        Raises:
            DeviceLost: neither this step nor any later one can succeed.
            Exception: this step failed. Its deltas (rows removed, added and grown, blocks copied) hold nevertheless,
                and later plans may be launched; rows that depend on its tokens bring meaningless ones. What fails one
                row alone is in ``StepResult.failures``.
        """


class Executor(Protocol):
    """The device side of an engine. All methods are called on the event loop that it was started on."""

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def stats(self) -> ExecutorStats: ...

    @property
    def handles(self) -> Handles:
        """The grammars and logits processors of plans; the core fills it."""

    def launch(self, plan: StepPlan) -> PendingStep[StepResult]:
        """Queue a step without waiting, behind those launched before; at most ``info.max_in_flight`` are unfinished."""

    def launch_dummy(self) -> PendingStep[None]:
        """As `launch`, of no plan: one token of no request, as `ExecuteDummyBatch` has it.

        It is a step like any other to those that compute together with this one, and is unfinished like that.
        """

    async def perform(self, call: Control) -> Any:
        """Do a control call's part at the device, behind the launched steps, and return the result.

        Of `Sleep` come levels 1 and 2, of `WakeUp` the tags of what the device has to bring back. Cancelling stops the
        wait: the device may do it all the same.

        Raises:
            DeviceLost: the executor is closed.
            Exception: those of the call's class.
        """

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        """Call ``function`` with each rank's model, between two steps; returns what each returned.

        Raises:
            InvalidRequest: the weights are asleep at level 2.
            Exception: what the function raised.
        """

    async def aclose(self) -> None:
        """Stop after the step that runs, and free the weights, the KV cache and the thread. Idempotent.

        Launched steps that have not run raise `DeviceLost` from `finish`.
        """


def already_recording() -> InvalidRequest:
    return InvalidRequest("a profile is being recorded already: stop that one first")


def not_recording() -> InvalidRequest:
    return InvalidRequest("no profile is being recorded: start one first")


def weights_asleep(what: str) -> InvalidRequest:
    return InvalidRequest(f"{what} needs the weights, which are asleep: wake them up first")


def weights_came_as_tensors() -> InvalidRequest:
    return InvalidRequest(
        "sleep at level 2 discards the weights, and those came as tensors, so that they cannot be read again: sleep at "
        "level 1, or write them with save_sharded_state and take them from there with update_weights",
        param="level",
    )


class LockstepPlace(msgspec.Struct, frozen=True, array_like=True):
    """An engine's place in a group.

    Attributes:
        rank: from 0 up to ``num_ranks``.
        store: path of a file that is not there yet, where the ranks meet; alone in its folder, which goes then.
        timeout_s: for all to come there.
    """

    rank: int
    num_ranks: int
    store: str
    timeout_s: float = 600.0


class Lockstep(Protocol):
    """Decides when a step may be launched, and when a step without work must be: see `cluster.lockstep`.

    Attributes:
        grace_s: a core whose step has failed waits so long before it ends: where another engine's death is the cause,
            it is ended from outside, where that is known.
        on_change: called on the loop when `may_launch` or `is_running` may be another.
        on_report: called on the loop when the group needs ``wave`` and ``is_running``, which each beat has.
    """

    grace_s: float
    on_change: Callable[[], None]
    on_report: Callable[[], None]

    @property
    def wave(self) -> int: ...

    @property
    def is_running(self) -> bool:
        """Whether others compute: a core that has nothing to launch launches a dummy step."""

    @property
    def may_launch(self) -> bool: ...

    def on_launch(self, has_work: bool) -> None:
        """A step was launched, of work or a dummy; ``has_work``: whether there is any that could go on."""

    def on_start(self, wave: int) -> None:
        """START_WAVE, from the group's coordinator.

        Raises:
            InvalidRequest: the group cannot have come so far.
        """
