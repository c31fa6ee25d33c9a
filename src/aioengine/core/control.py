"""Control calls: what is asked of an engine beside its requests. Each is a message, in process and over a wire alike.

A message checks its arguments when it is made, so that a bad one fails its caller, on either side of a wire. What the
device alone performs a message asks of the executor itself (`Control.ask`); `CoreState` has the calls that concern the
scheduler, too. The set is closed: nothing is ever looked up by a name that came from outside, but for the functions
that the engine's own process has registered (`aioengine.worker_function`).
"""

from __future__ import annotations

import os
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args

import msgspec
from msgspec.structs import force_setattr

from aioengine.core.executor_protocol import Executor, WeightPiece
from aioengine.errors import InternalError, InvalidRequest
from aioengine.validation import shorten

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

    Raises:
        InvalidRequest: an argument is bad.
    """

    def ask(self, executor: Executor) -> Coroutine[Any, Any, Any]:
        """What the device has to do for this call: the executor's method that performs it, to be awaited."""
        raise InternalError(f"{type(self).__name__} has nothing for the device to do")


class ResetPrefixCache(Control, frozen=True):
    """Forget all cached prefixes; with ``reset_running`` what runs computes its KV again, too. → blocks forgotten."""

    reset_running: bool = False


class Pause(Control, frozen=True):
    """Hold back what comes from now on, and answer once the device is idle. → None."""

    mode: PauseMode = "keep"

    def __post_init__(self) -> None:
        _check_mode(self.mode)


class Resume(Control, frozen=True):
    """Go on after `Pause`. → None."""


class Sleep(Control, frozen=True):
    """Pause, clear the prefix cache and give the device's memory back. → None."""

    level: SleepLevel = 1
    mode: PauseMode = "abort"

    def __post_init__(self) -> None:
        if isinstance(self.level, bool) or self.level not in get_args(SleepLevel):
            raise InvalidRequest(f"level={shorten(self.level)}: 0, 1 or 2 is needed", param="level")
        _check_mode(self.mode)


class WakeUp(Control, frozen=True):
    """Bring back what `Sleep` took: these, or all. → None."""

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


class IsSleeping(Control, frozen=True):
    """→ bool: whether anything that `Sleep` took is not back yet."""


class StartProfile(Control, frozen=True):
    """Record the device's next steps. → None."""

    max_steps: int = 100

    def __post_init__(self) -> None:
        _check_count(self.max_steps, "max_steps")

    def ask(self, executor: Executor) -> Coroutine[Any, Any, None]:
        return executor.start_profile(max_steps=self.max_steps)


class StopProfile(Control, frozen=True):
    """Write the trace to a file of the engine's machine. → None."""

    path: PathText

    def __post_init__(self) -> None:
        path: Any = self.path
        if not (isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str) and Path(path).name):
            raise InvalidRequest(f"path={shorten(path)}: the name of a file is needed", param="path")
        force_setattr(self, "path", _absolute(path, "path"))

    def ask(self, executor: Executor) -> Coroutine[Any, Any, None]:
        return executor.stop_profile(Path(self.path))


class SupportedTasks(Control, frozen=True):
    """→ tuple of names, such as "generate"."""


class SaveShardedState(Control, frozen=True):
    """Write the weights as they are now into a folder of the engine's machine. → the names of the files."""

    folder: PathText
    max_shard_bytes: int

    def __post_init__(self) -> None:
        _check_count(self.max_shard_bytes, "max_shard_bytes")
        force_setattr(self, "folder", _absolute(self.folder, "folder"))

    def ask(self, executor: Executor) -> Coroutine[Any, Any, list[str]]:
        return executor.save_sharded_state(Path(self.folder), self.max_shard_bytes)


class UpdateWeights(Control, frozen=True):
    """Take other weights of the same shapes from a folder of the engine's machine. → None."""

    folder: PathText

    def __post_init__(self) -> None:
        force_setattr(self, "folder", _absolute(self.folder, "folder"))

    def ask(self, executor: Executor) -> Coroutine[Any, Any, None]:
        return executor.update_weights(Path(self.folder))


class StageWeights(WeightPiece, Control, frozen=True):
    """Keep a piece of a tensor until `CommitWeights`. → None. On the wire its ``data`` has a frame of its own."""

    def ask(self, executor: Executor) -> Coroutine[Any, Any, None]:
        return executor.stage_weights(self)


class CommitWeights(Control, frozen=True):
    """Put all staged tensors of ``transfer`` in their places, between two steps. → None."""

    transfer: str

    def ask(self, executor: Executor) -> Coroutine[Any, Any, None]:
        return executor.commit_weights(self.transfer)


class DropWeights(Control, frozen=True):
    """Forget what was staged for ``transfer``; idempotent. → None."""

    transfer: str

    def ask(self, executor: Executor) -> Coroutine[Any, Any, None]:
        return executor.drop_weights(self.transfer)


class CollectiveRpc(Control, frozen=True):
    """Call a registered function on each rank, between two steps. → a list of what it returned, by rank."""

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

    def ask(self, executor: Executor) -> Coroutine[Any, Any, list[Any]]:
        return executor.collective_rpc(self.name, self.args, self.kwargs)


class ExecuteDummyBatch(Control, frozen=True):
    """Compute one token of no request, so that this rank takes part in a collective operation. → None."""

    def ask(self, executor: Executor) -> Coroutine[Any, Any, None]:
        return executor.execute_dummy_batch()


UNBLOCKING_CALLS = (Resume, WakeUp)
"""Calls that others may be waiting for: never made to wait behind them, however many they are."""

FILES = (StopProfile, SaveShardedState, UpdateWeights)
"""Calls that read or write files of the engine's machine, by names that their caller chooses."""

if TYPE_CHECKING:
    AnyControl = Control
else:  # for decoders
    AnyControl = Union[tuple(Control.__subclasses__())]  # noqa: UP007


def _check_mode(mode: object) -> None:
    if not isinstance(mode, str) or mode not in get_args(PauseMode):
        modes = ", ".join(map(repr, get_args(PauseMode)))
        raise InvalidRequest(f"mode={shorten(mode)}: choose one of {modes}", param="mode")


def _check_count(count: object, param: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidRequest(f"{param}={shorten(count)}: an int of at least 1 is needed", param=param)


def _absolute(path: str | os.PathLike[str], param: str) -> str:
    """A path as another process will understand it."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidRequest(f"{param}={shorten(path)}: a path is needed", param=param)
    return os.path.abspath(os.path.expanduser(text))
