"""How the process of an engine is run."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from aioengine.errors import ConfigError
from aioengine.validation import check_fields

SPIN_COUNT = 10_000
"""Some 0.2 ms: longer than the host's part of any operation, and much shorter than a scheduler's time slice. With 1,000
one stream of a 0.6B model is a tenth slower on an idle machine (benchmarks/README.md)."""

OPENMP_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""How threads of torch's OpenMP runtime, libgomp on Linux, wait for each other; read when torch is imported."""


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


def limit_spinning() -> None:
    """Have torch's threads sleep soon when they wait for each other, unless the environment says how they wait.

    By libgomp's default they spin for 300,000 turns, some 5 ms: where another program holds a core, the thread that is
    waited for stands still for all of that. For processes that are the engine's own, before torch is imported.
    """
    if not any(name in os.environ for name in OPENMP_WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
