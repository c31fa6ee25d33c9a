"""`EngineServer`: an engine core that other processes use.

Front ends reach it at one address, a ROUTER socket. The server runs the core and follows each sequence for its front
end. It ends the requests of a front end that goes, stops reading, or sends messages out of turn. Nothing here ever
waits for a front end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec

from aioengine.core.control import FILES, UNBLOCKING_CALLS, AnyControl, DropWeights
from aioengine.core.engine_core import EngineCore
from aioengine.errors import AioEngineError, EngineClosed, InvalidRequest, WireError
from aioengine.outputs.metrics import RequestMetrics, StepRecord
from aioengine.processes.turns import turns_here
from aioengine.processes.worker_threads import TextWorker
from aioengine.scheduler.sequence import Request
from aioengine.transport import wire
from aioengine.transport.peers import LINGER_S, Arrival, PeerServer
from aioengine.transport.security import ServerKeys
from aioengine.transport.session import Session

logger = logging.getLogger("aioengine")

PUBLISH_SLICE = 256
"""Tokens handed to followers between the loop's turns: they only note them, in half a microsecond each."""


class EngineServer(PeerServer[Session]):
    """Serves an engine core to other processes.

    Args:
        core: not running yet; `serve` runs it.
        address, keys: as of `PeerServer`.
        model_path: the model's folder, which front ends look for a tokenizer in.
    """

    kinds = wire.FromFrontEnd
    title = "engine"
    unbounded_calls = UNBLOCKING_CALLS
    request_type: type[Request] = Request
    """The class as which requests are read; one with more fields gives the core more attributes."""

    def __init__(self, core: EngineCore, address: str, *, model_path: Path, keys: ServerKeys | None = None) -> None:
        super().__init__(address, keys=keys, worker=TextWorker())
        self.core = core
        self._model_path = model_path
        self._left: deque[Session] = deque()
        """Sessions to be tidied, by a task that stands: one made for each, which a loop's end cancelled before its
        first turn, left a warning about its coroutine."""
        self._has_left = asyncio.Event()
        self._record: StepRecord | None = None
        self._is_marked = False
        self._beats_now = asyncio.Event()

    async def serve(self) -> None:
        """Run the core and serve it until cancelled, or until the core dies; then everything is closed.

        Every front end hears the end: `EngineDead` with what the core died of, or that the engine was closed.
        """
        if not self.core.config.log_stats_interval_s:
            self.core.observers.stop_metrics()  # each front end has its own, made of the same records
        self.core.observers.add(self)
        self.core.on_published = self._flush
        self.core.publish_slice = PUBLISH_SLICE
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._or_break, self.receive)
                self._tasks.start_soon(self.watch)
                self._tasks.start_soon(self._beat)
                self._tasks.start_soon(self._or_break, self._tidy)
                await self.core.run()
                self._tasks.cancel_scope.cancel()
        finally:
            self._end_all()
            with anyio.CancelScope(shield=True), anyio.move_on_after(2 * LINGER_S):
                await self.aclose()

    async def aclose(self) -> None:
        """Close the sockets; idempotent. `serve` does it by itself."""
        await self.close_sockets()
        await self._worker.aclose()

    # Tasks

    async def _or_break(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task that calls the core; what it raises is what the core dies of, for all to hear."""
        try:
            await task()
        except Exception as error:
            self.core.break_down(error)

    async def _beat(self) -> None:
        interval_s = self.core.config.heartbeat_interval_s
        if self.core.lockstep is not None:
            self.core.lockstep.on_report = self._beats_now.set
        while True:
            self._beats_now.clear()
            beat = msgspec.structs.replace(self.core.beat(), num_refused=self.num_refused.total())
            for session in self.attached:
                session.beat(beat)
            with anyio.move_on_after(interval_s):
                await self._beats_now.wait()

    # Messages

    async def act_on(self, session: Session, body: wire.FromFrontEnd) -> None:
        match body:
            case wire.AddRequest():
                await session.add_request(body)
            case wire.Finish():
                session.finish(body)
            case wire.Allow():
                follower = session.followers.get(body.number)
                if follower is not None:
                    follower.allow(body.num_allowed)
            case _:
                raise WireError(f"a {type(body).__name__} in the middle of a session")

    def unpack_call(self, raw: msgspec.Raw) -> AnyControl:
        control = wire.unpack_control(raw)
        if isinstance(control, FILES) and self.is_far:
            raise InvalidRequest(
                "any user of the machine can connect to this address, and this call reads or writes files as the "
                "engine's user: serve at an ipc:// address, or with keys (`aioengine keys`)"
            )
        return control

    async def perform_call(self, session: Session, control: AnyControl) -> Any:
        result = await self.core.call(control)
        session.note_transfer(control)
        return result

    # Sessions

    def begin_session(self, arrival: Arrival) -> tuple[Session, wire.Attached]:
        core = self.core
        attached = wire.Attached(
            version=wire.PROTOCOL_VERSION,
            config=msgspec.structs.asdict(core.config),
            info=core.info,
            eos_token_ids=core.eos_token_ids,
            model_path=str(self._model_path),
            first_beat=core.beat(),
            stats=core.stats(),
        )
        is_trusted = not self.is_far
        session = Session(core, self._worker, arrival, self.request_type, mark=self._mark, is_trusted=is_trusted)
        return session, attached

    def on_left(self, session: Session) -> None:
        self._left.append(session)
        self._has_left.set()

    def _end_all(self) -> None:
        """Hand out what is left, and final messages: the core has ended, and all sequences with it."""
        for session in self.attached:
            session.flush()
        self.end_sessions(self.core.copy_death() if self.core.death is not None else EngineClosed("it was closed"))

    async def _tidy(self) -> None:
        """Put away what front ends have left: their sequences, and weights that they did not commit."""
        while True:
            await self._has_left.wait()
            self._has_left.clear()
            while self._left:
                session = self._left.popleft()
                for follower in list(session.followers.values()):
                    await turns_here().take()
                    self.core.finish(follower.sequence, "abort")
                for transfer in session.transfers:
                    with contextlib.suppress(AioEngineError):  # the engine is ending, and they with it
                        await self.core.call(DropWeights(transfer))

    # Sending

    def _mark(self) -> None:
        """There is news beside a step's: send it at the end of this turn of the loop, or with the step."""
        if not self._is_marked and not self.core.is_publishing:
            self._is_marked = True
            asyncio.get_running_loop().call_soon(self._flush_marked)

    def _flush_marked(self) -> None:
        if not self.core.is_publishing:  # else it goes with the step
            self._flush()

    def _flush(self) -> None:
        self._is_marked = False
        record, self._record = self._record, None
        for session in self.attached:
            session.flush(record)

    def on_step(self, record: StepRecord) -> None:
        """As an `Observer`: the step whose tokens are handed out next."""
        self._record = record

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        """As an `Observer`: requests end in the processes where they were made."""
