"""Control calls: what is asked of an engine beside its requests. Each is a message, in process and on a wire alike.

`EngineCore.call` performs one, `RemoteCore.call` sends it to the process that does; `Engine` has a method for each. The
set is closed: nothing is ever looked up by a name that came from outside, but for the functions that the engine's own
process has registered (`aioengine.worker_function`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PauseMode = Literal["abort", "wait", "keep"]
SleepLevel = Literal[0, 1, 2]
WakeTag = Literal["scheduling", "kv_cache", "weights"]
WeightDtype = Literal["F32", "BF16", "F16"]
"""As safetensors names them."""

WAKE_TAGS: tuple[WakeTag, ...] = ("weights", "kv_cache", "scheduling")
"""In the order in which an engine wakes up."""


class Control(msgspec.Struct, frozen=True, kw_only=False, array_like=True, tag=True):
    """Any control call. On the wire fields are only ever appended, with defaults."""


class ResetPrefixCache(Control, frozen=True):
    """Forget all cached prefixes; with ``reset_running`` what runs computes its KV again, too. → blocks forgotten."""

    reset_running: bool = False


class Pause(Control, frozen=True):
    """Hold back what comes from now on, and answer once the device is idle. → None."""

    mode: PauseMode = "keep"


class Resume(Control, frozen=True):
    """Go on after `Pause`. → None."""


class Sleep(Control, frozen=True):
    """Pause, clear the prefix cache and give the device's memory back. → None."""

    level: SleepLevel = 1
    mode: PauseMode = "abort"


class WakeUp(Control, frozen=True):
    """Bring back what `Sleep` took: these, or all. → None."""

    tags: tuple[WakeTag, ...] = WAKE_TAGS


class IsSleeping(Control, frozen=True):
    """→ bool: whether anything that `Sleep` took is not back yet."""


class StartProfile(Control, frozen=True):
    max_steps: int = 100


class StopProfile(Control, frozen=True):
    """Write the trace to a file of the engine's machine. → None."""

    path: str


class SupportedTasks(Control, frozen=True):
    """→ tuple of names, such as "generate"."""


class SaveShardedState(Control, frozen=True):
    """Write the weights as they are now into a folder of the engine's machine. → the names of the files."""

    folder: str
    max_shard_bytes: int


class UpdateWeights(Control, frozen=True):
    """Take other weights of the same shapes from a folder of the engine's machine. → None."""

    folder: str


class StageWeights(Control, frozen=True):
    """A piece of a tensor, kept until `CommitWeights`; its bytes lie in ``data``, on the wire in a frame of its own."""

    transfer: str
    """Which update it belongs to: an id of the caller's."""
    name: str
    """As checkpoints name it."""
    dtype: WeightDtype
    shape: tuple[int, ...]
    offset: int
    """Of this piece in the tensor's bytes (row-major, little-endian)."""
    data: Any = None
    """Contiguous bytes: bytes, bytearray or memoryview."""


class CommitWeights(Control, frozen=True):
    """Put all staged tensors of ``transfer`` in their places, between two steps. → None."""

    transfer: str


class DropWeights(Control, frozen=True):
    """Forget what was staged for ``transfer``; idempotent. → None."""

    transfer: str


UNBLOCKING_CALLS = (Resume, WakeUp)
"""What others may be waiting for: never made to wait behind them, however many they are."""

FILES = (StopProfile, SaveShardedState, UpdateWeights)
"""What reads or writes files of the engine's machine, by names that its caller chooses."""


class CollectiveRpc(Control, frozen=True):
    """Call a registered function on each rank, between two steps. → a list of what it returned, by rank."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class ExecuteDummyBatch(Control, frozen=True):
    """Compute one token that is nobody's, so that a collective operation finds this rank taking part. → None."""


class GetStats(Control, frozen=True):
    """→ `SchedulerStats`: sequences of all who use the engine, and its blocks."""


AnyControl = (
    ResetPrefixCache
    | Pause
    | Resume
    | Sleep
    | WakeUp
    | IsSleeping
    | StartProfile
    | StopProfile
    | SupportedTasks
    | SaveShardedState
    | UpdateWeights
    | StageWeights
    | CommitWeights
    | DropWeights
    | CollectiveRpc
    | ExecuteDummyBatch
    | GetStats
)
