"""One rank of a group in lockstep: its waves, driven in the engine's process, and gloo for the reductions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aioengine.cluster.lockstep import RankWaves, WaveDuty
from aioengine.core.engine_core import EngineCore
from aioengine.core.executor_protocol import LockstepPlace
from aioengine.errors import EngineDead, InvalidRequest
from aioengine.executor.gloo import Gloo
from aioengine.processes.worker_threads import run_abandonable

logger = logging.getLogger("aioengine")

GRACE_S = 2.0
"""An engine that has lost its group, or its device, waits so long to be ended by its parent, which knows the rank that
died first. Then it ends itself."""


class LockstepBroken(Exception):
    """Another engine of the group is gone."""


class GlooReducer:
    """All-reduces in a thread of its own, in order.

    A reduction that waits for others cannot be ended: its daemon thread is left behind, and the process has to end by
    ``os._exit``.

    Args:
        on_result: called on the loop with each result: whether any rank has given True, or what went wrong.
    """

    def __init__(self, gloo: Gloo, on_result: Callable[[bool | Exception], None]) -> None:
        self._gloo = gloo
        self._on_result = on_result
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[bool, int, int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="aioengine-lockstep", daemon=True).start()

    def begin(self, value: bool, wave: int, step: int) -> None:
        """Reduce a value; that it is of the same wave and step at all ranks is checked."""
        self._queue.put((value, wave, step))

    def close(self) -> None:
        """Begin no more."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            outcome: bool | Exception
            try:
                outcome = self._gloo.reduce_or(*item)
            except Exception as error:
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_result, outcome)
            if isinstance(outcome, Exception):
                return


class LockstepGroup:
    """A `Lockstep`: `RankWaves` with its reductions.

    Args:
        on_broken: called when the group is lost, and this engine with it: nothing more is launched at once, and after
            `GRACE_S` it is called.
    """

    def __init__(self, place: LockstepPlace, on_broken: Callable[[Exception], None]) -> None:
        self.grace_s = GRACE_S
        self.on_change: Callable[[], None] = lambda: None
        self.on_report: Callable[[], None] = lambda: None
        self._waves = RankWaves(place.rank)
        self._on_broken = on_broken
        self.begin_reduction: Callable[[bool, int, int], None]
        """Begins to reduce a value at a wave and step, once the group is connected; ends in `on_result`."""
        self._end: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._end is not None:
            self._end.cancel()

    @property
    def wave(self) -> int:
        return self._waves.wave

    @property
    def is_running(self) -> bool:
        return self._waves.is_running

    @property
    def may_launch(self) -> bool:
        return self._waves.may_launch

    def on_launch(self, has_work: bool) -> None:
        if (duty := self._waves.on_launch(has_work)) is not WaveDuty.NOTHING:
            self._do(duty)

    def on_start(self, wave: int) -> None:
        try:
            self._waves.on_start(wave)
        except ValueError as error:
            raise InvalidRequest(str(error), param="wave") from error
        self.on_change()

    def on_result(self, outcome: bool | Exception) -> None:
        """A reduction has ended, in one way or another."""
        if isinstance(outcome, Exception):
            self._waves.on_death()
            broken = LockstepBroken(f"an engine that it steps together with is gone: {outcome}")
            logger.error("%s", broken)
            self._end = asyncio.get_running_loop().call_later(GRACE_S, self._on_broken, broken)
        else:
            self._do(self._waves.on_result(outcome))
        self.on_change()

    def _do(self, duty: WaveDuty) -> None:
        if duty is WaveDuty.REPORT:
            self.on_report()
        elif duty is WaveDuty.REDUCE:
            self.begin_reduction(self._waves.has_work, self._waves.wave, self._waves.step)


@asynccontextmanager
async def in_lockstep(place: LockstepPlace, core: EngineCore) -> AsyncIterator[None]:
    """Have a core step with its group, as `transport.engine_process` loads it by name.

    Raises:
        EngineDead: the group did not come together in time.
    """
    lockstep = LockstepGroup(place, core.break_down)
    try:
        gloo = await run_abandonable(lambda: Gloo(place))
    except Exception as error:  # gloo's and the store's are RuntimeErrors
        raise EngineDead(
            f"rank {place.rank} of {place.num_ranks} in lockstep did not meet the others at {place.store}: {error}"
        ) from error
    reducer = GlooReducer(gloo, lockstep.on_result)
    lockstep.begin_reduction = reducer.begin
    core.enter_group(lockstep)
    try:
        yield
    finally:
        reducer.close()
        lockstep.close()
