"""What the engine core asks of a device: launch plans, hand back results, in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from aioengine.errors import InvalidRequest
from aioengine.scheduler.plan import StepPlan, StepResult

T = TypeVar("T")

Part = Literal["weights", "kv_cache"]
"""What of a device's memory can be given back and brought back."""

WeightDtype = Literal["F32", "BF16", "F16"]
"""As safetensors names them."""


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
        kv_cache_bytes, weight_bytes: of all KV blocks, and of the parameters.
        device, dtype: such as "cpu" and "bfloat16".
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


class WeightPiece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor's bytes, on its way to the device.

    Attributes:
        transfer: which update of weights it belongs to: an id of the caller's.
        name: the tensor's, as checkpoints have it.
        shape: of the whole tensor.
        offset: where the part begins in the tensor's bytes (row-major, little-endian).
        data: contiguous bytes: bytes, bytearray or memoryview.
    """

    transfer: str
    name: str
    dtype: WeightDtype
    shape: tuple[int, ...]
    offset: int
    data: Any = None


class ExecutorStats(msgspec.Struct, kw_only=True):
    """Counters since the start, for tests of what was really computed: plans run, failed ones included, and tokens."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0


class PendingStep(Protocol):
    """A launched step."""

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return at once."""

    async def finish(self) -> StepResult:
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

    def launch(self, plan: StepPlan) -> PendingStep:
        """Queue a step without waiting, behind those launched before; at most ``info.max_in_flight`` are unfinished."""

    async def start_profile(self, *, max_steps: int) -> None:
        """Record the next ``max_steps`` steps (1 or more) that are launched; cancelled, it records nothing.

        After those the recording ends by itself, and waits to be written by `stop_profile`.

        Raises:
            InvalidRequest: it is recording already, or has recorded what is not written yet, or what records is in use
                elsewhere in this process.
            DeviceLost: the executor is closed.
        """

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

    async def sleep(self, level: Literal[1, 2]) -> None:
        """Behind the launched steps, free the KV cache and (2) the weights, or (1) move those to the host's memory.

        On a CPU they are there already. No row may hold blocks, and no plan may be launched until `wake_up` has brought
        back both parts: it would fail with an AssertionError. Rows that were not removed stay known. Idempotent; level
        2 may follow level 1, and 1 after 2 changes nothing.

        Raises:
            InvalidRequest: level 2, and the weights cannot be read again: they came as tensors (`commit_weights`); or
                level 1, and the host has no memory for them. Nothing has changed.
        """

    async def wake_up(self, parts: frozenset[Part]) -> None:
        """Bring back what `sleep` took, of these; the KV cache comes back empty. Idempotent.

        Raises:
            ModelLoadError: the weights cannot be read any more, or the device has no memory for them; they stay away,
                and this may be tried again.
            ConfigError: the same of the KV cache; the weights are back.
        """

    async def update_weights(self, folder: Path) -> None:
        """Behind the launched steps, take the weights of another checkpoint of the same shapes; all or nothing.

        They are read into the host's memory, and replace the old ones when all are there: on a GPU at the same
        addresses, so that it takes no memory there. If the GPU fails in between, later steps raise `DeviceLost`.
        Asleep at level 2, it looks at the files' headers alone: `wake_up` reads the weights.

        Raises:
            ModelLoadError: they do not fit, or cannot be read.
        """

    async def stage_weights(self, piece: WeightPiece) -> None:
        """Keep a copy of a piece of a tensor until `commit_weights` or `drop_weights`. Pieces may come in any order.

        Cancelled, it drops the transfer, since the piece may have come or not.

        Raises:
            InvalidRequest: there is no such tensor, or the piece does not fit it.
        """

    async def commit_weights(self, transfer: str) -> None:
        """Behind the launched steps, put all tensors staged for ``transfer`` in their places; all or nothing.

        Tensors that were not staged stay as they are. On a GPU as `update_weights`.

        Raises:
            InvalidRequest: nothing is staged, a tensor is not whole, or the weights are asleep at level 2.
        """

    async def drop_weights(self, transfer: str) -> None:
        """Forget what was staged for ``transfer``. Idempotent."""

    async def save_sharded_state(self, folder: Path, max_shard_bytes: int) -> list[str]:
        """Write a checkpoint of the weights as they are, with config and tokenizer, which `Engine` can load again.

        Returns:
            the names of the weight files, in order.
        Raises:
            InvalidRequest: the weights are asleep at level 2.
            OSError: it cannot be written.
        """

    async def collective_rpc(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call the registered function on each rank, between two steps; returns what each returned.

        Raises:
            InvalidRequest: no function of that name is registered in this process.
            Exception: what the function raised.
        """

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        """Call ``function`` with each rank's model, between two steps; returns what each returned.

        Raises:
            InvalidRequest: the weights are asleep at level 2.
            Exception: what the function raised.
        """

    async def execute_dummy_batch(self) -> None:
        """Behind the launched steps, compute one token that changes no row and no KV.

        Raises:
            InvalidRequest: the weights are asleep.
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
