"""What the engine core asks of a device: launch plans, hand back results, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from aioengine.core.plan import StepPlan, StepResult
from aioengine.errors import InvalidRequest


class DeviceLost(Exception):
    """The device cannot go on: no later step can succeed. The cause is ``__cause__``."""


class ExecutorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor offers once it has started.

    Attributes:
        num_blocks: KV blocks, ids 0 up to this.
        block_size: tokens in a block.
        max_model_len: most tokens in one sequence.
        vocab_size: token ids that the model takes are below this.
        max_in_flight: how many plans may be launched and not finished.
        kv_cache_bytes: bytes of all KV blocks.
        weight_bytes: bytes of the parameters.
        device: such as "cpu".
        dtype: such as "bfloat16".
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_in_flight: int = 1
    kv_cache_bytes: int = 0
    weight_bytes: int = 0
    device: str = "cpu"
    dtype: str = "float32"


class ExecutorStats(msgspec.Struct, kw_only=True):
    """Counters since the start, for tests of what was really computed.

    Attributes:
        num_steps: plans run, failed ones included.
        num_computed_tokens: sum of the plans' ``num_tokens``.
        num_sampled_tokens: tokens sampled, those of all choices.
    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0


class PendingStep(Protocol):
    """A launched step."""

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return at once."""
        ...

    async def finish(self) -> StepResult:
        """Wait for the step's result; to be called once, and for steps in the order of their launch.

        Cancelling stops the wait, not the device: the step still completes, and its blocks stay in use until then.

        Raises:
            DeviceLost: neither this step nor any later one can succeed.
            Exception: this step failed. Its deltas (rows removed, added and grown, blocks copied) hold nevertheless,
                and later plans may be launched; rows that depend on its tokens bring meaningless ones. What fails one
                row alone is in ``StepResult.failures``.
        """
        ...


class Executor(Protocol):
    """The device side of an engine. All methods are called on the event loop that it was started on."""

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def stats(self) -> ExecutorStats: ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Queue a step without waiting; at most ``info.max_in_flight`` may be unfinished.

        Plans run in the order of their launch, each on top of the state that the one before left.
        """
        ...

    async def start_profile(self, *, max_steps: int) -> None:
        """Record what the device does in the next ``max_steps`` steps (1 or more) that are launched.

        After those the recording ends by itself, and waits to be written by `stop_profile`. Cancelled, it records
        nothing.

        Raises:
            InvalidRequest: it is recording already, or has recorded what is not written yet, or what records is in use
                elsewhere in this process.
            DeviceLost: the executor is closed.
        """
        ...

    async def stop_profile(self, path: Path) -> None:
        """Stop recording, behind the steps that are launched, and write a Chrome trace (JSON) to ``path``.

        A step is an event of the category "user_annotation" named ``step N (R rows, T tokens)``. A file that is there
        is replaced once the new one is whole. If the writing fails the recording is over and lost. Cancelling stops
        the wait: the file may come all the same.

        Raises:
            InvalidRequest: it is not recording.
            OSError: the file cannot be written.
            DeviceLost: the executor is closed.
        """
        ...

    async def aclose(self) -> None:
        """Stop after the step that runs, and free the weights, the KV cache and the thread. Idempotent.

        Launched steps that have not run raise `DeviceLost` from `finish`.
        """
        ...


def already_recording() -> InvalidRequest:
    return InvalidRequest("a profile is being recorded already: stop that one first")


def not_recording() -> InvalidRequest:
    return InvalidRequest("no profile is being recorded: start one first")
