"""Control calls of a whole cluster: made at all replicas, and replayed at one that starts again."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import msgspec

from aioengine.cluster.replica import ReplicaCore
from aioengine.core import control as c
from aioengine.errors import EngineClosed, EngineDead, EngineOverloaded, ModelLoadError, describe

SHARD_BYTES = 5 * 2**30
WEIGHTS = c.UpdateWeights.state
MAX_TRIES = 4
GONE = (EngineDead, EngineClosed)
"""Errors of calls to a replica that has died, or was ended while others go on."""


class ClusterControl:
    """Performs control calls at all replicas, and replays those that leave state at a replica that starts again."""

    def __init__(self) -> None:
        self._replayed: dict[str, tuple[c.Control, ...]] = {}
        """The calls that bring about each state, by `Control.state`."""
        self._weights_turn = anyio.Lock(fast_acquire=True)
        """Held while weights change, and while a replica gets those of its siblings, so that it gets the new ones."""

    async def perform(
        self,
        control: c.AnyControl,
        get_cores: Callable[[], Sequence[ReplicaCore]],
        until_some: Callable[[], Awaitable[bool]],
    ) -> Any:
        """As `call`, once a replica serves; and again at those that come when all have died over it.

        Args:
            until_some: waits for a replica that serves, and returns whether it had to; raises where none will.
        Raises:
            EngineOverloaded: all died each time, or may have done what is not to be done twice; the engine goes on.
            Exception: as `call`.
        """
        for num_tries in range(1, MAX_TRIES + 1):
            if await until_some() or num_tries > 1:
                control = _without_abort(control)
            try:
                return await self.call(control, get_cores)
            except EngineDead as error:
                death = error
            if not control.is_repeated:
                break
        await until_some()  # raises if the engine has ended
        raise EngineOverloaded(
            f"{type(control).__name__}: all replicas ended while they did it ({num_tries} tries): {death}; others "
            "serve now: call it again",
            retry_after_s=0.0,
        ) from death

    async def call(self, control: c.AnyControl, get_cores: Callable[[], Sequence[ReplicaCore]]) -> Any:
        """Perform a call at all replicas that live, and return their results as one.

        A replica that dies meanwhile is passed over, since it will be brought to the state of the others. So is one
        that cannot take weights which others have taken: it is to die.

        Args:
            get_cores: those that live.
        Raises:
            EngineDead: all have died, or none was there.
            Exception: what went wrong at one of them, the first in order.
        """
        if control.state == WEIGHTS:
            async with self._weights_turn:
                result = await self._call(control, get_cores())
                self.note(control)
                return result
        # At once: a replica that enters before all others have answered is to be paused, or awake, like them.
        before = self._replayed.get(control.state, ())
        noted = self.note(control)
        try:
            return await self._call(control, get_cores())
        except Exception:
            if control.state and self._replayed[control.state] is noted:  # else another one came meanwhile
                self._replayed[control.state] = before
            raise

    def note(self, control: c.Control) -> tuple[c.Control, ...]:
        """Note the state that a call leaves; returns the calls that bring it about."""
        if not control.state:
            return ()
        replayed = self._replayed[control.state] = control.replayed(self._replayed.get(control.state, ()))
        return replayed

    async def _call(self, control: c.AnyControl, cores: Sequence[ReplicaCore]) -> Any:
        if control.is_for_one:
            return await self._call_one(control, cores)
        outcomes: list[Any] = [None] * len(cores)

        async def call(place: int) -> None:
            try:
                outcomes[place] = await cores[place].call(_for_place(control, place))
            except Exception as error:
                outcomes[place] = error

        async with anyio.create_task_group() as tasks:
            for place in range(len(cores)):
                tasks.start_soon(call, place)
        if control.state == WEIGHTS and not all(isinstance(outcome, Exception) for outcome in outcomes):
            for place, outcome in enumerate(outcomes):
                if isinstance(outcome, Exception):
                    cores[place].die(EngineDead(f"it did not take the weights that others took: {describe(outcome)}"))
                    outcomes[place] = cores[place].death
        there = [outcome for outcome in outcomes if not isinstance(outcome, GONE)]
        if not there:
            raise _death(outcomes)
        for outcome in there:
            if isinstance(outcome, Exception):
                raise outcome
        return _together(control, there)

    async def _call_one(self, control: c.AnyControl, cores: Sequence[ReplicaCore]) -> Any:
        """Call the first replica; where that dies, the next."""
        deaths: list[Any] = []
        for core in cores:
            try:
                return await core.call(control)
            except GONE as error:
                deaths.append(error)
        raise _death(deaths)

    async def restore(self, core: ReplicaCore, get_others: Callable[[], Sequence[ReplicaCore]]) -> None:
        """Bring a replica that has started again to the state of its siblings.

        Weights that came as tensors are not kept here: another replica writes them to a folder, for both to see.

        Args:
            get_others: those that have that state.
        Raises:
            ModelLoadError: the weights that the others have cannot be had again.
        """
        async with self._weights_turn:
            for control in self._replayed.get(WEIGHTS, ()):
                if control.is_repeated:
                    await core.call(control)
                else:
                    await _copy_weights(core, get_others())
        for state, controls in self._replayed.items():
            for control in controls if state != WEIGHTS else ():
                await core.call(control)


async def _copy_weights(core: ReplicaCore, others: Sequence[ReplicaCore]) -> None:
    """Give a replica the weights of another one, by a folder that both see."""
    if not others:
        raise ModelLoadError(
            "the weights came as tensors, and no replica that has them is left: send them again to an engine that is "
            "started anew"
        )
    giver = next((other for other in others if other.is_far == core.is_far), others[0])
    folder = await anyio.to_thread.run_sync(lambda: tempfile.mkdtemp(prefix="aioengine-weights-"))
    try:
        await giver.call(c.SaveShardedState(folder, SHARD_BYTES))
        await core.call(c.UpdateWeights(folder))
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))


def _without_abort(control: c.AnyControl) -> c.AnyControl:
    """The same, of a call that began earlier: what it was to abort has been, and what came since is not to be."""
    if isinstance(control, c.Pause | c.Sleep) and control.mode == "abort":
        return msgspec.structs.replace(control, mode="keep")
    return control


def _death(outcomes: list[Any]) -> EngineDead:
    """The error of a call that no replica has performed, since all are gone."""
    if outcomes and isinstance(outcomes[0], EngineDead):
        return outcomes[0]
    return EngineDead(str(outcomes[0]) if outcomes else "no replica was there")


def _for_place(control: c.AnyControl, place: int) -> c.AnyControl:
    """The call for the replica at a place among several: each writes a file of its own."""
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
