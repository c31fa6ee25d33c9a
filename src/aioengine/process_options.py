"""How the process of an engine is run."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from aioengine.errors import ConfigError
from aioengine.validation import check_fields


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `Engine` runs its core with ``process=ProcessOptions(...)``; ``process=True`` takes these defaults.

    A bad value is a `ConfigError` that names the field.
    """

    visible_devices: (
        Annotated[
            tuple[int | str, ...],
            Meta(description="CUDA_VISIBLE_DEVICES of the process; absent: as in this process"),
        ]
        | None
    ) = None
    plugins: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="modules that it imports first, such as those that register worker functions"),
    ] = ()
    executor: (
        Annotated[
            str,
            Meta(
                pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
                description="module:function that makes the device side there, from the EngineConfig; absent: torch's",
            ),
        ]
        | None
    ) = None
    start_timeout_s: Annotated[
        float, Meta(gt=0.0, le=86400.0, description="seconds until it must be ready, loading included")
    ] = 600.0
    stop_timeout_s: Annotated[
        float, Meta(ge=0.0, le=3600.0, description="seconds that it has to end when it is asked to; then it is killed")
    ] = 10.0

    def __post_init__(self) -> None:
        check_fields(self, lambda _, message: ConfigError(message))
