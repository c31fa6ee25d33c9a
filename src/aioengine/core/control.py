"""Control calls: what is asked of an engine beside its requests. Each is a message, in process and over a wire alike.

A message checks its arguments when it is made, so that a bad one fails its caller, on either side of a wire. A call
that leaves state names that state, and a cluster replays it for a replica that starts again. What a device has to do
for it is the executor's (`Executor.perform`); `EngineCore` has the calls that concern the scheduler, too. The set is
closed: nothing is ever looked up by a name that came from outside, but for the functions that the engine's own process
has registered (`aioengine.worker_function`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

import msgspec
from msgspec.structs import force_setattr

from aioengine.errors import InvalidRequest
from aioengine.validation import Bytes, check_field, check_fields, invalid, shorten

WeightDtype = Literal["F32", "BF16", "F16"]
"""As safetensors names them."""

PauseMode = Literal["abort", "wait", "keep"]
SleepLevel = Literal[0, 1, 2]
WakeTag = Literal["scheduling", "kv_cache", "weights"]
if TYPE_CHECKING:
    PathText = str | os.PathLike[str]
else:
    PathText = str  # which a path is made into

TASKS = ("generate",)

WAKE_TAGS: tuple[WakeTag, ...] = ("weights", "kv_cache", "scheduling")
"""In the order in which an engine wakes up."""


class Control(msgspec.Struct, frozen=True, kw_only=False, array_like=True, tag=True):
    """Any control call. On the wire fields are only ever appended, with defaults.

    Attributes:
        state: the name of the state of an engine that the call changes; empty: it leaves none. A replica that starts
            again is brought to the state of its siblings by `replayed`.
        is_repeated: whether another engine may perform the call when the one that did has died.
        is_for_one: whether of several engines any one may answer.
    Raises:
        InvalidRequest: an argument is bad.
    """

    state: ClassVar[str] = ""
    is_repeated: ClassVar[bool] = True
    is_for_one: ClassVar[bool] = False

    def replayed(self, before: tuple[Control, ...]) -> tuple[Control, ...]:
        """Return the calls that give a started engine its `state` after this call.

        Args:
            before: the same before this call.
        """
        return (self,)


class ResetPrefixCache(Control, frozen=True):
    """Forget all cached prefixes; with ``reset_running`` what runs computes its KV again, too. → blocks forgotten."""

    reset_running: bool = False


class Pause(Control, frozen=True):
    """Hold back what comes from now on, and answer once the device is idle. → None."""

    state: ClassVar[str] = "pause"

    mode: PauseMode = "keep"

    def __post_init__(self) -> None:
        check_fields(self, invalid)

    def replayed(self, before: tuple[Control, ...]) -> tuple[Control, ...]:
        return (Pause("wait"),)


class Resume(Control, frozen=True):
    """Go on after `Pause`. → None."""

    state: ClassVar[str] = "pause"

    def replayed(self, before: tuple[Control, ...]) -> tuple[Control, ...]:
        return ()


class Sleep(Control, frozen=True):
    """Pause, clear the prefix cache and give the device's memory back. → None.

    The device frees the KV cache and (2) the weights, or (1) moves those to the host's memory, where a CPU has them
    already. No plan may be launched until `WakeUp` has brought back both: it would fail with an AssertionError. Rows
    that were not removed stay known. Idempotent; level 2 may follow level 1, and 1 after 2 changes nothing.

    Raises:
        InvalidRequest: level 2, and the weights cannot be read again: they came as tensors (`CommitWeights`); or level
            1, and the host has no memory for them. The device is as it was.
    """

    state: ClassVar[str] = "sleep"

    level: SleepLevel = 1
    mode: PauseMode = "abort"

    def __post_init__(self) -> None:
        check_fields(self, invalid)

    def replayed(self, before: tuple[Control, ...]) -> tuple[Control, ...]:
        is_deeper = any(isinstance(call, Sleep) and call.level > self.level for call in before)
        return before if is_deeper else (self,)


class WakeUp(Control, frozen=True):
    """Bring back what `Sleep` took: these, or all; the KV cache comes back empty. Idempotent. → None.

    Raises:
        ModelLoadError: the weights cannot be read any more, or the device has no memory for them; they stay away, and
            this may be tried again.
        ConfigError: the same of the KV cache; the weights are back.
    """

    state: ClassVar[str] = "sleep"

    tags: tuple[WakeTag, ...] = WAKE_TAGS

    if TYPE_CHECKING:  # any iterable is as good as the tuple that is made of it, one name too; None: all

        def __init__(self, tags: Iterable[WakeTag] | None = None) -> None: ...

    def __post_init__(self) -> None:
        tags: Any = self.tags
        if tags is not None and not isinstance(tags, Iterable):
            raise InvalidRequest(f"tags={shorten(tags)}: names are needed, such as ['weights']", param="tags")
        wanted = WAKE_TAGS if tags is None else (tags,) if isinstance(tags, str) else tuple(tags)
        for tag in wanted:
            if tag not in WAKE_TAGS:
                names = ", ".join(map(repr, WAKE_TAGS))
                raise InvalidRequest(f"tags holds {shorten(tag)}: choose of {names}", param="tags")
        force_setattr(self, "tags", wanted)

    def replayed(self, before: tuple[Control, ...]) -> tuple[Control, ...]:
        asleep = next((call for call in before if isinstance(call, Sleep)), None)
        earlier = {tag for call in before if isinstance(call, WakeUp) for tag in call.tags}
        woken = WakeUp(tag for tag in WAKE_TAGS if tag in earlier.union(self.tags))
        if asleep is None or set(woken.tags) >= ({"weights", "kv_cache"} if asleep.level else {"scheduling"}):
            return ()
        return asleep, woken


class IsSleeping(Control, frozen=True):
    """→ bool: whether anything that `Sleep` took is not back yet."""


class StartProfile(Control, frozen=True):
    """Record the device's next steps; cancelled, it records nothing. → None.

    After ``max_steps`` of them the recording ends by itself, and waits to be written by `StopProfile`.

    Raises:
        InvalidRequest: it is recording already, or has recorded what is not written yet, or what records is in use
            elsewhere in the engine's process.
    """

    max_steps: int = 100

    def __post_init__(self) -> None:
        _check_count(self.max_steps, "max_steps")


class StopProfile(Control, frozen=True):
    """Stop recording, and write a Chrome trace (JSON) to a file of the engine's machine. → None.

    A step is an event of the category "user_annotation" named ``step N (R rows, T tokens)``. A file that is there is
    replaced once the new one is whole. If the writing fails the recording is over and lost.

    Raises:
        InvalidRequest: it is not recording.
        OSError: the file cannot be written.
    """

    is_repeated: ClassVar[bool] = False

    path: PathText

    def __post_init__(self) -> None:
        path: Any = self.path
        if not (isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str) and Path(path).name):
            raise InvalidRequest(f"path={shorten(path)}: the name of a file is needed", param="path")
        force_setattr(self, "path", _absolute(path, "path"))


class SupportedTasks(Control, frozen=True):
    """→ tuple of names, such as "generate"."""

    is_for_one: ClassVar[bool] = True


class SaveShardedState(Control, frozen=True):
    """Write the weights as they are now, with config and tokenizer, into a folder of the engine's machine, which
    `Engine` can load. → the names of the weight files, in order.

    Raises:
        InvalidRequest: the weights are asleep at level 2.
        OSError: it cannot be written.
    """

    is_for_one: ClassVar[bool] = True

    folder: PathText
    max_shard_bytes: Bytes[int]

    def __post_init__(self) -> None:
        num_bytes = check_field(SaveShardedState, "max_shard_bytes", self.max_shard_bytes, invalid)
        _check_count(num_bytes, "max_shard_bytes")
        force_setattr(self, "max_shard_bytes", num_bytes)
        force_setattr(self, "folder", _absolute(self.folder, "folder"))


class UpdateWeights(Control, frozen=True):
    """Take other weights of the same shapes from a folder of the engine's machine; all or nothing. → None.

    They are read into the host's memory, and replace the old ones when all are there: on a GPU at the same addresses,
    so that it takes no memory there. If the GPU fails in between, later steps raise `DeviceLost`. Asleep at level 2
    the device looks at the files' headers alone: `WakeUp` reads the weights.

    Raises:
        ModelLoadError: they do not fit, or cannot be read.
    """

    state: ClassVar[str] = "weights"

    folder: PathText

    def __post_init__(self) -> None:
        force_setattr(self, "folder", _absolute(self.folder, "folder"))


class StageWeights(Control, frozen=True):
    """Keep a piece of a tensor's bytes until `CommitWeights` or `DropWeights`; pieces may come in any order. → None.

    Cancelled, it drops the transfer, since the piece may have come or not.

    Attributes:
        transfer: which update of weights it belongs to: an id of the caller's.
        name: the tensor's, as checkpoints have it.
        shape: of the whole tensor.
        offset: where the piece begins in the tensor's bytes (row-major, little-endian).
        data: contiguous bytes: bytes, bytearray or memoryview.

    Raises:
        InvalidRequest: there is no such tensor, or the piece does not fit it.
    """

    is_repeated: ClassVar[bool] = False

    transfer: str
    name: str
    dtype: WeightDtype
    shape: tuple[int, ...]
    offset: int
    data: Any = None


class CommitWeights(Control, frozen=True):
    """Put all staged tensors of ``transfer`` in their places, between two steps; all or nothing. → None.

    Tensors that were not staged stay as they are. On a GPU as `UpdateWeights`.

    Raises:
        InvalidRequest: nothing is staged, a tensor is not whole, or the weights are asleep at level 2.
    """

    state: ClassVar[str] = "weights"
    is_repeated: ClassVar[bool] = False

    transfer: str


class DropWeights(Control, frozen=True):
    """Forget what was staged for ``transfer``; idempotent. → None."""

    transfer: str


class CollectiveRpc(Control, frozen=True):
    """Call a registered function on each rank, between two steps. → a list of what it returned, by rank.

    Raises:
        InvalidRequest: no function of that name is registered in the engine's process.
        Exception: what the function raised.
    """

    is_repeated: ClassVar[bool] = False

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}

    if TYPE_CHECKING:

        def __init__(self, name: str, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None: ...

    def __post_init__(self) -> None:
        name, args, kwargs = (getattr(self, field) for field in self.__struct_fields__)
        if not isinstance(name, str):
            raise InvalidRequest(
                f"name={shorten(name)}: the name of a registered function is needed (aioengine.worker_function); "
                "apply_model takes a function itself, in process",
                param="name",
            )
        if isinstance(args, str) or not isinstance(args, Iterable):
            raise InvalidRequest(f"args={shorten(args)}: a list of arguments is needed", param="args")
        if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
            raise InvalidRequest(f"kwargs={shorten(kwargs)}: a mapping of names is needed", param="kwargs")
        force_setattr(self, "args", tuple(args))
        force_setattr(self, "kwargs", dict(kwargs or {}))


class ExecuteDummyBatch(Control, frozen=True):
    """Compute one token of no request, so that this rank takes part in a collective operation: no row and no KV
    changes. → None.

    Raises:
        InvalidRequest: the engine sleeps.
    """


class StartWave(Control, frozen=True):
    """Compute with the others of the group from now on: a wave has begun at one of them. Idempotent. → None.

    Raises:
        InvalidRequest: the engine is in no group; or the wave cannot have begun.
    """

    wave: int


UNBLOCKING_CALLS = (Resume, WakeUp, StartWave)
"""Calls that others may be waiting for: never made to wait behind them, however many they are."""

FILES = (StopProfile, SaveShardedState, UpdateWeights)
"""Calls that read or write files of the engine's machine, by names that their caller chooses."""

if TYPE_CHECKING:
    AnyControl = Control
else:  # for decoders
    AnyControl = Union[tuple(Control.__subclasses__())]  # noqa: UP007


def name_of(call: Control) -> str:
    """Such as "save_sharded_state"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(call).__name__).lower()


def _check_count(count: object, param: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidRequest(f"{param}={shorten(count)}: an int of at least 1 is needed", param=param)


def _absolute(path: str | os.PathLike[str], param: str) -> str:
    """A path as another process will understand it."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidRequest(f"{param}={shorten(path)}: a path is needed", param=param)
    return os.path.abspath(os.path.expanduser(text))
