"""Performing control calls on an engine core: everything about the whole engine that is not a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import anyio

from aioengine.core import control as c
from aioengine.core.core_state import CoreState
from aioengine.core.executor_protocol import DeviceLost, Part
from aioengine.errors import EngineClosed, InvalidRequest

TASKS = ("generate",)

_PARTS: tuple[Part, ...] = ("weights", "kv_cache")
"""What `Sleep` takes of the device's memory at level 1 and 2."""


class Controls:
    """Performs control calls. What the device alone performs needs no entry here (`Control.ask`).

    Calls that change the device's memory go one after the other.
    """

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._device_turn = anyio.Lock(fast_acquire=True)
        self._perform: dict[type[c.Control], Callable[[Any], Awaitable[Any]]] = {
            c.ResetPrefixCache: self._reset_prefix_cache,
            c.Pause: self._pause,
            c.Resume: self._resume,
            c.SupportedTasks: self._supported_tasks,
            c.Sleep: self._sleep,
            c.WakeUp: self._wake_up,
            c.IsSleeping: self._is_sleeping,
            c.UpdateWeights: self._change_weights,
            c.CommitWeights: self._change_weights,
            c.SaveShardedState: self._save_sharded_state,
            c.ExecuteDummyBatch: self._execute_dummy_batch,
        }

    async def perform(self, call: c.AnyControl) -> Any:
        """As `EngineCore.call`."""
        try:
            perform: Callable[[Any], Awaitable[Any]] = self._perform.get(type(call), self._ask_device)
            return await perform(call)
        except DeviceLost as lost:
            if self._core.death is not None:
                raise self._core.copy_death() from lost
            raise EngineClosed("the engine is closed") from lost

    async def _ask_device(self, call: c.AnyControl) -> Any:
        name = f"collective_rpc({call.name!r})" if isinstance(call, c.CollectiveRpc) else ""
        return await self._core.at_device(call.ask(self._core.executor), name)

    # Scheduling

    async def _reset_prefix_cache(self, call: c.ResetPrefixCache) -> int:
        if call.reset_running:
            self._core.scheduler.preempt_all()
        return self._core.scheduler.reset_prefix_cache()

    async def _pause(self, call: c.Pause) -> None:
        self._core.hold("pause", call.mode)
        await self._core.when(lambda: self._core.is_quiet)

    async def _resume(self, call: c.Resume) -> None:
        self._core.resume()

    async def _supported_tasks(self, call: c.SupportedTasks) -> tuple[str, ...]:
        return TASKS

    # Sleep

    async def _sleep(self, call: c.Sleep) -> None:
        core = self._core
        core.asleep.add("scheduling")
        core.hold("sleep", call.mode)
        await core.when(lambda: not core.asleep or core.is_quiet)
        async with self._device_turn:
            if core.asleep:  # else it was woken meanwhile
                core.check_accepting()
                core.freeze("sleep")
                await core.when(lambda: core.is_quiet)
                core.check_accepting()
                self._forget_kv()
                if call.level:
                    await self._give_memory_back(call.level)

    async def _give_memory_back(self, level: Literal[1, 2]) -> None:
        core = self._core
        before = set(core.asleep)
        core.asleep.update(_PARTS)
        try:
            await core.at_device(core.executor.sleep(level))
        except Exception:
            core.asleep = before  # as deep as it was
            if before == {"scheduling"}:
                self._wake_scheduling()
            raise

    async def _wake_up(self, call: c.WakeUp) -> None:
        core = self._core
        if core.asleep == {"scheduling"} and "scheduling" in call.tags and not self._device_turn.locked():
            self._wake_scheduling()  # it only waits for others to end
            return
        async with self._device_turn:  # behind a `Sleep` that is under way
            parts: frozenset[Part] = frozenset(part for part in _PARTS if part in call.tags and part in core.asleep)
            if parts:
                await core.at_device(core.executor.wake_up(parts))
                core.asleep -= parts
            if core.asleep <= {"scheduling"} and (parts or "scheduling" in call.tags):
                self._wake_scheduling()

    def _wake_scheduling(self) -> None:
        self._core.asleep.clear()
        self._core.let_go("sleep")

    async def _is_sleeping(self, call: c.IsSleeping) -> bool:
        return self._core.is_sleeping

    # Weights

    async def _change_weights(self, call: c.UpdateWeights | c.CommitWeights) -> None:
        """Change the weights while nothing runs. No KV of the old ones is used again: what runs computes its anew."""
        core = self._core
        async with self._device_turn:
            core.freeze("weights")
            try:
                await core.when(lambda: core.is_quiet)
                core.check_accepting()
                await self._ask_device(call)
            finally:  # also when cancelled: the device may do it all the same
                self._forget_kv()
                core.let_go("weights")

    async def _save_sharded_state(self, call: c.SaveShardedState) -> list[str]:
        async with self._device_turn:
            names: list[str] = await self._ask_device(call)
            return names

    async def _execute_dummy_batch(self, call: c.ExecuteDummyBatch) -> None:
        async with self._device_turn:
            if self._core.asleep - {"scheduling"}:
                raise InvalidRequest("a sleeping engine computes nothing: wake it up first")
            await self._ask_device(call)

    def _forget_kv(self) -> None:
        self._core.scheduler.preempt_all()
        self._core.scheduler.reset_prefix_cache()
