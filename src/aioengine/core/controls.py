"""Performing control calls on an engine core: everything about the whole engine that is not a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from aioengine.core import control as c
from aioengine.core.executor_protocol import DeviceLost, Part
from aioengine.errors import EngineClosed, InvalidRequest

if TYPE_CHECKING:
    from aioengine.core.engine_core import EngineCore

TASKS = ("generate",)

_PARTS: tuple[Part, ...] = ("weights", "kv_cache")
_AWAY: dict[int, tuple[c.WakeTag, ...]] = {
    0: ("scheduling",),
    1: ("scheduling", "kv_cache", "weights"),
    2: ("scheduling", "kv_cache", "weights"),
}
"""What a level of sleep takes."""


class Controls:
    """Performs control calls, each by its type. Calls that change the device's memory go one after the other."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._away: set[c.WakeTag] = set()
        self._device_turn = anyio.Lock(fast_acquire=True)
        self._perform: dict[type[c.Control], Callable[[Any], Awaitable[Any]]] = {
            c.ResetPrefixCache: self._reset_prefix_cache,
            c.Pause: self._pause,
            c.Resume: self._resume,
            c.Sleep: self._sleep,
            c.WakeUp: self._wake_up,
            c.IsSleeping: self._is_sleeping,
            c.StartProfile: lambda call: core.at_device(core.executor.start_profile(max_steps=call.max_steps)),
            c.StopProfile: lambda call: core.at_device(core.executor.stop_profile(Path(call.path))),
            c.SupportedTasks: self._supported_tasks,
            c.SaveShardedState: self._save_sharded_state,
            c.UpdateWeights: self._update_weights,
            c.StageWeights: lambda call: core.at_device(core.executor.stage_weights(call)),
            c.CommitWeights: self._commit_weights,
            c.DropWeights: lambda call: core.at_device(core.executor.drop_weights(call.transfer)),
            c.CollectiveRpc: lambda call: core.at_device(
                core.executor.collective_rpc(call.name, call.args, call.kwargs), f"collective_rpc({call.name!r})"
            ),
            c.ExecuteDummyBatch: self._execute_dummy_batch,
            c.GetStats: self._get_stats,
        }

    @property
    def is_sleeping(self) -> bool:
        return bool(self._away)

    async def perform(self, call: c.AnyControl) -> Any:
        """As `EngineCore.call`."""
        try:
            return await self._perform[type(call)](call)
        except DeviceLost as lost:
            if self._core.death is not None:
                raise self._core.copy_death() from lost
            raise EngineClosed("the engine is closed") from lost

    # Scheduling

    async def _reset_prefix_cache(self, call: c.ResetPrefixCache) -> int:
        if call.reset_running:
            self._core.scheduler.preempt_all()
        return self._core.reset_prefix_cache()

    async def _pause(self, call: c.Pause) -> None:
        self._core.hold("pause", call.mode)
        await self._core.when(lambda: self._core.is_quiet)

    async def _resume(self, call: c.Resume) -> None:
        self._core.resume()

    async def _supported_tasks(self, call: c.SupportedTasks) -> tuple[str, ...]:
        return TASKS

    async def _get_stats(self, call: c.GetStats) -> Any:
        return self._core.stats()

    # Sleep

    async def _sleep(self, call: c.Sleep) -> None:
        self._away.add("scheduling")
        self._core.hold("sleep", call.mode)
        await self._fall_asleep(call.level)

    async def _fall_asleep(self, level: c.SleepLevel) -> None:
        core = self._core
        await core.when(lambda: not self._away or core.is_quiet)
        async with self._device_turn:
            if not self._away:  # woken meanwhile
                return
            core.check_accepting()
            core.freeze("sleep")
            await core.when(lambda: core.is_quiet)
            core.check_accepting()
            self._forget_kv()
            if level:
                before = set(self._away)
                self._away.update(_AWAY[level])
                try:
                    await core.at_device(core.executor.sleep(level))
                except Exception:
                    self._away = before  # as deep as it was
                    if before == {"scheduling"}:
                        self._wake_scheduling()
                    raise

    async def _wake_up(self, call: c.WakeUp) -> None:
        if self._away == {"scheduling"} and "scheduling" in call.tags and not self._device_turn.locked():
            self._wake_scheduling()  # it only waits for others to end
            return
        await self._wake_parts(call.tags)

    async def _wake_parts(self, tags: tuple[c.WakeTag, ...]) -> None:
        async with self._device_turn:  # behind whoever is falling asleep
            parts: frozenset[Part] = frozenset(part for part in _PARTS if part in tags and part in self._away)
            if parts:
                await self._core.at_device(self._core.executor.wake_up(parts))
                self._away -= parts
            if self._away <= {"scheduling"} and (parts or "scheduling" in tags):
                self._wake_scheduling()

    def _wake_scheduling(self) -> None:
        self._away.clear()
        self._core.let_go("sleep")

    async def _is_sleeping(self, call: c.IsSleeping) -> bool:
        return self.is_sleeping

    # Weights

    async def _update_weights(self, call: c.UpdateWeights) -> None:
        await self._between_steps(lambda: self._core.executor.update_weights(Path(call.folder)))

    async def _commit_weights(self, call: c.CommitWeights) -> None:
        await self._between_steps(lambda: self._core.executor.commit_weights(call.transfer))

    async def _save_sharded_state(self, call: c.SaveShardedState) -> list[str]:
        async with self._device_turn:
            save = self._core.executor.save_sharded_state(Path(call.folder), call.max_shard_bytes)
            return await self._core.at_device(save)

    async def _execute_dummy_batch(self, call: c.ExecuteDummyBatch) -> None:
        async with self._device_turn:
            if self._away - {"scheduling"}:
                raise InvalidRequest("a sleeping engine computes nothing: wake it up first")
            await self._core.at_device(self._core.executor.execute_dummy_batch())

    async def _between_steps(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Change the weights while nothing runs. No KV of the old ones is used again: what runs computes its anew."""
        core = self._core
        async with self._device_turn:
            core.freeze("weights")
            try:
                await core.when(lambda: core.is_quiet)
                core.check_accepting()
                await core.at_device(change())
            finally:  # also when cancelled: the device may do it all the same
                self._forget_kv()
                core.let_go("weights")

    def _forget_kv(self) -> None:
        self._core.scheduler.preempt_all()
        self._core.reset_prefix_cache()
