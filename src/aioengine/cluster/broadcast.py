"""Control calls of a whole cluster: made at all replicas, and again at one that was started anew."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from aioengine.cluster.replica import ReplicaCore
from aioengine.core import control as c
from aioengine.errors import EngineDead, ModelLoadError, describe

AT_ONE = (c.SaveShardedState, c.SupportedTasks)
"""Calls whose answer is any replica's."""
OF_WEIGHTS = (c.UpdateWeights, c.CommitWeights)
"""Calls after which replicas give other answers than one that has not performed them."""
SHARD_BYTES = 5 * 2**30


class ClusterControl:
    """Performs control calls at all replicas, and remembers what one that is started later has to do, too."""

    def __init__(self) -> None:
        self._pause: c.Pause | None = None
        self._sleep: c.Sleep | None = None
        self._weights: c.UpdateWeights | None = None
        self._has_sent_weights = False
        """Whether weights came as tensors, which are not kept here."""

    async def call(self, control: c.AnyControl, cores: Sequence[ReplicaCore]) -> Any:
        """Perform a call at these, and return what they say together.

        A replica that dies meanwhile is passed over, since it will be brought to the state of the others. So is one
        that cannot take weights which others have taken: it is to die.

        Raises:
            Exception: what went wrong at one of them, the first in order.
        """
        if isinstance(control, AT_ONE):
            cores = cores[:1]
        outcomes: list[Any] = [None] * len(cores)

        async def call(place: int) -> None:
            try:
                outcomes[place] = await cores[place].call(_for_place(control, place))
            except Exception as error:
                outcomes[place] = error

        async with anyio.create_task_group() as tasks:
            for place in range(len(cores)):
                tasks.start_soon(call, place)
        if isinstance(control, OF_WEIGHTS) and not all(isinstance(outcome, Exception) for outcome in outcomes):
            for place, outcome in enumerate(outcomes):
                if isinstance(outcome, Exception):
                    cores[place].die(EngineDead(f"it did not take the weights that others took: {describe(outcome)}"))
                    outcomes[place] = cores[place].death
        there = [outcome for outcome in outcomes if not isinstance(outcome, EngineDead)]
        for outcome in there or outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        self._note(control)
        return _together(control, there)

    def note_resume(self) -> None:
        """Pauses are over."""
        self._pause = None

    async def restore(self, core: ReplicaCore, others: Sequence[ReplicaCore]) -> None:
        """Bring a replica that was started anew to the state of the others.

        Weights that came as tensors are not kept here: another replica writes them to a folder, for both to see.

        Raises:
            ModelLoadError: the weights that the others have cannot be had again.
        """
        if self._has_sent_weights:
            if not others:
                raise ModelLoadError(
                    "the weights came as tensors, and no replica that has them is left: send them again to an engine "
                    "that is started anew"
                )
            with tempfile.TemporaryDirectory(prefix="aioengine-weights-") as folder:
                await others[0].call(c.SaveShardedState(folder, SHARD_BYTES))
                await core.call(c.UpdateWeights(folder))
        elif self._weights is not None:
            await core.call(self._weights)
        if self._pause is not None:
            await core.call(c.Pause("wait"))
        if self._sleep is not None:
            await core.call(self._sleep)

    def _note(self, control: c.AnyControl) -> None:
        match control:
            case c.Pause():
                self._pause = control
            case c.Resume():
                self._pause = None
            case c.Sleep():
                self._sleep = control
            case c.WakeUp() if set(control.tags) >= set(c.WAKE_TAGS):
                self._sleep = None
            case c.UpdateWeights():
                self._weights, self._has_sent_weights = control, False
            case c.CommitWeights():
                self._has_sent_weights = True


def _for_place(control: c.AnyControl, place: int) -> c.AnyControl:
    """What one of several is asked: each writes a file of its own."""
    if isinstance(control, c.StopProfile) and place:
        stem, suffix = os.path.splitext(control.path)
        return msgspec.structs.replace(control, path=f"{stem}.{place}{suffix}")
    return control


def _together(control: c.AnyControl, results: list[Any]) -> Any:
    match control:
        case c.ResetPrefixCache():
            return sum(results)
        case c.IsSleeping():
            return any(results)
        case c.CollectiveRpc():
            return [result for of_replica in results for result in of_replica]
        case _:
            return results[0]
