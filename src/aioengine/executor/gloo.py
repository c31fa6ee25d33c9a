"""Reductions over the engines of a group in lockstep, by torch's gloo: on the hosts, whatever their devices do."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import AllreduceOptions, ReduceOp

from aioengine.core.executor_protocol import LockstepPlace

REDUCTION_TIMEOUT = timedelta(days=7)
"""A rank may rightly be late for as long as it sleeps. A process that has died closes its connections."""


class RanksApart(Exception):
    """The engines of a group are not at the same step."""


class Gloo:
    """A rank's connections to the others; nothing of the default group of ``torch.distributed``.

    Making it blocks until all are there. They are connected over their machine's loopback.

    Raises:
        RuntimeError: they did not come in time, or cannot be reached.
    """

    def __init__(self, place: LockstepPlace) -> None:
        make: Any = distributed.ProcessGroupGloo  # whose stubs have the constructor alone
        timeout = timedelta(seconds=place.timeout_s)
        options = make._Options()
        options._timeout = timeout
        options._devices = [make.create_device(hostname="127.0.0.1")]
        self._store: Any = distributed.FileStore(place.store, place.num_ranks)  # type: ignore[attr-defined]
        """Lives as long as the group."""
        self._store.set_timeout(timeout)
        self._group = make(self._store, place.rank, place.num_ranks, options)
        self.reduce_or(False, 0, 0, timeout)  # then all have read what they need to know
        if place.rank == 0:  # should the parent be killed, no file is left
            shutil.rmtree(Path(place.store).parent, ignore_errors=True)

    def reduce_or(self, value: bool, wave: int, step: int, timeout: timedelta = REDUCTION_TIMEOUT) -> bool:
        """Whether any rank gives True; blocks until all have given theirs, without the GIL.

        Raises:
            RanksApart: they are not all at this wave and step.
            RuntimeError: one of them is gone.
        """
        at = wave << 32 | step
        values = torch.tensor([value, at, -at], dtype=torch.int64)
        options: Any = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX
        options.timeout = timeout
        self._group.allreduce([values], options).wait()
        is_any, last, first = values.tolist()
        if not last == -first == at:
            raise RanksApart(
                f"one is at wave {wave}, step {step}, another at wave {last >> 32}, step {last & 2**32 - 1}"
            )
        return bool(is_any)
