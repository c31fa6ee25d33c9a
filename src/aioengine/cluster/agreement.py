"""Whether replicas can stand in for each other, and what they offer together: pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.errors import ConfigError

SAME_OFFER = ("vocab_size", "block_size", "max_model_len", "dtype", "layout")
"""Fields of `ExecutorInfo` without which a request cannot go on at another replica, or would go on otherwise."""

SAME_CONFIG = (
    *("model", "revision", "quantization", "kv_cache_dtype", "logits_processors", "max_logprobs", "max_n"),
    "max_waiting",  # else a request of more choices than that would wait for ever
    "heartbeat_interval_s",  # by which the front end knows what has stopped
)
"""The same fields of `EngineConfig`. Others (memory, batch sizes, threads) change speed and no answer."""


def check_agreement(
    rank: int, ours: tuple[ExecutorInfo, EngineConfig], theirs: tuple[ExecutorInfo, EngineConfig]
) -> None:
    """Compare the engine of a rank with what its siblings have in common.

    Args:
        ours, theirs: of a sibling, and of this engine.
    Raises:
        ConfigError: they differ; the error names each field and both values.
    """
    found = []
    for own, other, names in zip(ours, theirs, (SAME_OFFER, SAME_CONFIG), strict=True):
        for name in names:
            here, there = getattr(own, name), getattr(other, name)
            if not (is_same_model(here, there) if name == "model" else here == there):
                found.append(f"{name} is {there!r} there, and {here!r} at the others")
    if found:
        raise ConfigError(
            f"replica {rank} cannot stand in for the others: {'; '.join(found)}: start all replicas with the same "
            "model and config"
        )


def combine(infos: Sequence[ExecutorInfo]) -> ExecutorInfo:
    """Add up the offers of replicas: blocks and bytes are summed, the rest is the first one's."""
    return msgspec.structs.replace(
        infos[0],
        num_blocks=sum(info.num_blocks for info in infos),
        more_blocks=tuple(map(sum, zip(*(info.more_blocks for info in infos), strict=True))),
        kv_cache_bytes=sum(info.kv_cache_bytes for info in infos),
        weight_bytes=sum(info.weight_bytes for info in infos),
        device=", ".join(dict.fromkeys(info.device for info in infos)),
    )


def is_same_model(ours: str | None, theirs: str | None) -> bool:
    """Whether two values of `EngineConfig.model` may name one model.

    Hosts may keep it in different folders, so that of a path only the last part counts. Whether the files
    are the same is not checked beyond `SAME_OFFER`.
    """
    if ours is None or theirs is None or not (_is_path(ours) or _is_path(theirs)):
        return ours == theirs
    return _last_part(ours) == _last_part(theirs)


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~"))


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]
