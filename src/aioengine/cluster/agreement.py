"""Whether replicas can stand in for each other, and what they offer together: pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.errors import ConfigError

SAME_OFFER = ("vocab_size", "block_size", "max_model_len", "dtype", "windows")
"""Fields of `ExecutorInfo` without which a request cannot go on at another replica, or would go on otherwise."""

SAME_CONFIG = (
    *("model", "revision", "quantization", "kv_cache_dtype", "logits_processors", "max_logprobs", "max_n"),
    "max_waiting",  # else a request of more choices than that would wait for ever
    "heartbeat_interval_s",  # by which the front end knows what has stopped
)
"""Likewise of `EngineConfig`. What else differs (memory, batch sizes, threads) changes speed and no answer."""


def agree(infos: Mapping[int, ExecutorInfo], configs: Mapping[int, EngineConfig]) -> ExecutorInfo:
    """What replicas offer together: blocks and bytes are summed, the rest is that of the lowest rank.

    Args:
        infos, configs: by rank; of the same ranks, one at least.
    Raises:
        ConfigError: one of them differs from the lowest rank's in what all must have in common; it names all of that.
    """
    first, *others = sorted(infos)
    for rank in others:
        found = differences((infos[first], configs[first]), (infos[rank], configs[rank]))
        if found:
            raise ConfigError(
                f"replica {rank} cannot stand in for replica {first}: {found}: start all replicas with the same model "
                "and config"
            )
    return msgspec.structs.replace(
        infos[first],
        num_blocks=sum(info.num_blocks for info in infos.values()),
        kv_cache_bytes=sum(info.kv_cache_bytes for info in infos.values()),
        weight_bytes=sum(info.weight_bytes for info in infos.values()),
        device=", ".join(dict.fromkeys(infos[rank].device for rank in sorted(infos))),
    )


def differences(ours: tuple[ExecutorInfo, EngineConfig], theirs: tuple[ExecutorInfo, EngineConfig]) -> str:
    """What keeps two engines from standing in for each other, in words; empty: nothing."""
    found = []
    for own, other, names in zip(ours, theirs, (SAME_OFFER, SAME_CONFIG), strict=True):
        for name in names:
            here, there = getattr(own, name), getattr(other, name)
            if not (is_same_model(here, there) if name == "model" else here == there):
                found.append(f"{name} is {there!r} there and {here!r} here")
    return "; ".join(found)


def is_same_model(ours: str | None, theirs: str | None) -> bool:
    """Whether two values of `EngineConfig.model` may name one model.

    Hosts may keep it in different folders, so that of a path only the last part counts. That the files are the same is
    not looked at beyond what `SAME_OFFER` tells of them.
    """
    if ours is None or theirs is None or not (_is_path(ours) or _is_path(theirs)):
        return ours == theirs
    return _last_part(ours) == _last_part(theirs)


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~"))


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]
