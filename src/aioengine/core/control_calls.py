"""Control calls as a caller makes them: their arguments checked, and made a message."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from aioengine.core.control import (
    WAKE_TAGS,
    CollectiveRpc,
    PauseMode,
    SaveShardedState,
    Sleep,
    SleepLevel,
    StartProfile,
    StopProfile,
    WakeUp,
)
from aioengine.core.weight_pieces import absolute
from aioengine.errors import InvalidRequest
from aioengine.validation import shorten


def check_mode(mode: object) -> None:
    """Raise InvalidRequest if this is no way to pause."""
    if not isinstance(mode, str) or mode not in get_args(PauseMode):
        modes = ", ".join(map(repr, get_args(PauseMode)))
        raise InvalidRequest(f"mode={shorten(mode)}: choose one of {modes}", param="mode")


def sleep(level: Any, mode: Any) -> Sleep:
    if isinstance(level, bool) or level not in get_args(SleepLevel):
        raise InvalidRequest(f"level={shorten(level)}: 0, 1 or 2 is needed", param="level")
    check_mode(mode)
    return Sleep(level, mode)


def wake_up(tags: Any) -> WakeUp:
    if tags is not None and not isinstance(tags, Iterable):
        raise InvalidRequest(f"tags={shorten(tags)}: names are needed, such as ['weights']", param="tags")
    wanted: tuple[Any, ...] = WAKE_TAGS if tags is None else (tags,) if isinstance(tags, str) else tuple(tags)
    for tag in wanted:
        if tag not in WAKE_TAGS:
            names = ", ".join(map(repr, WAKE_TAGS))
            raise InvalidRequest(f"tags holds {shorten(tag)}: choose of {names}", param="tags")
    return WakeUp(wanted)


def save_sharded_state(folder: Any, max_shard_bytes: Any) -> SaveShardedState:
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise InvalidRequest(
            f"max_shard_bytes={shorten(max_shard_bytes)}: an int of at least 1 is needed", param="max_shard_bytes"
        )
    return SaveShardedState(absolute(folder, "folder"), max_shard_bytes)


def collective_rpc(name: Any, args: Any, kwargs: Any) -> CollectiveRpc:
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
    return CollectiveRpc(name, tuple(args), dict(kwargs or {}))


def start_profile(max_steps: Any) -> StartProfile:
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise InvalidRequest(f"max_steps={shorten(max_steps)}: an int of at least 1 is needed", param="max_steps")
    return StartProfile(max_steps)


def stop_profile(path: Any) -> StopProfile:
    if not (isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str) and Path(path).name):
        raise InvalidRequest(f"path={shorten(path)}: the name of a file is needed", param="path")
    return StopProfile(absolute(path, "path"))
