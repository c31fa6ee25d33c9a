"""Whether replicas can stand in for each other, and what they offer together: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.errors import ConfigError

SAME_OFFER = ("vocab_size", "block_size", "max_model_len", "dtype", "windows")
"""Fields of `ExecutorInfo` without which a request cannot go on at another replica, or would go on otherwise."""

SAME_CONFIG = ("model", "revision", "quantization", "kv_cache_dtype", "logits_processors", "max_logprobs", "max_n")
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
        differences = [
            f"{name} is {theirs!r} there and {ours!r} here"
            for name, ours, theirs in (
                *_pairs(infos[first], infos[rank], SAME_OFFER),
                *_pairs(configs[first], configs[rank], SAME_CONFIG),
            )
            if not (is_same_model(ours, theirs) if name == "model" else ours == theirs)
        ]
        if differences:
            raise ConfigError(
                f"replica {rank} cannot stand in for replica {first}: {'; '.join(differences)}: start all replicas "
                "with the same model and config"
            )
    return msgspec.structs.replace(
        infos[first],
        num_blocks=sum(info.num_blocks for info in infos.values()),
        kv_cache_bytes=sum(info.kv_cache_bytes for info in infos.values()),
        weight_bytes=sum(info.weight_bytes for info in infos.values()),
        device=", ".join(dict.fromkeys(infos[rank].device for rank in sorted(infos))),
    )


def is_same_model(ours: str | None, theirs: str | None) -> bool:
    """Whether two values of `EngineConfig.model` may name one model.

    Hosts may keep it in different folders, so that of a path only the last part counts. That the files are the same is
    not looked at beyond what `SAME_OFFER` tells of them.
    """
    if ours is None or theirs is None or not (_is_path(ours) or _is_path(theirs)):
        return ours == theirs
    return _last_part(ours) == _last_part(theirs)


def _pairs(ours: Any, theirs: Any, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    return [(name, getattr(ours, name), getattr(theirs, name)) for name in names]


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~"))


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]
