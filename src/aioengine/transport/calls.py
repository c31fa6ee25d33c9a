"""Calls that front ends make at a server: each runs beside the others, and its caller is sent what it brought."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup

from aioengine.errors import InvalidRequest
from aioengine.transport import wire
from aioengine.transport.peers import SessionT
from aioengine.transport.wire_errors import to_fault

MAX_CALLS = 64
"""Of one front end, under way."""

Call = TypeVar("Call")


class ServedCalls(Generic[SessionT, Call]):
    """What becomes of calls.

    Args:
        unpack: reads a call; what cannot be done it refuses with an `InvalidRequest`.
        perform: does it; whatever it raises, the caller alone hears it.
        always: the kinds that are performed beside `MAX_CALLS` others, which may wait for just such a one.
    """

    def __init__(
        self,
        unpack: Callable[[msgspec.Raw], Call],
        perform: Callable[[SessionT, Call], Awaitable[Any]],
        *,
        always: tuple[type[Any], ...] = (),
    ) -> None:
        self._unpack = unpack
        self._perform = perform
        self._always = always

    def begin(self, tasks: TaskGroup, session: SessionT, body: wire.CallControl) -> None:
        """Perform a call in a task of its own, or refuse it."""
        try:
            call = self._unpack(body.control)
            self._check(session, body.call_id, call)
        except InvalidRequest as refusal:
            session.send(wire.Returned(body.call_id, fault=to_fault(refusal)))
            return
        session.calls[body.call_id] = anyio.CancelScope()
        tasks.start_soon(self._run, session, body.call_id, call)

    def cancel(self, session: SessionT, call_id: int) -> None:
        """Its caller has given it up. Idempotent."""
        if call_id in session.calls:
            session.calls[call_id].cancel()

    def _check(self, session: SessionT, call_id: int, call: Call) -> None:
        if call_id in session.calls:
            raise InvalidRequest(f"a call of number {call_id} is under way already")
        if len(session.calls) >= MAX_CALLS and not isinstance(call, self._always):
            raise InvalidRequest(f"{MAX_CALLS} control calls of this front end are under way already; wait for some")

    async def _run(self, session: SessionT, call_id: int, call: Call) -> None:
        with session.calls[call_id]:
            try:
                returned = wire.Returned(call_id, await self._perform(session, call))
            except Exception as error:  # whatever it was, its caller alone hears it
                returned = wire.Returned(call_id, fault=to_fault(error))
            finally:
                del session.calls[call_id]
            _send(session, returned)


def _send(session: SessionT, returned: wire.Returned) -> None:
    try:
        session.send(returned)
    except wire.TooLarge as too_large:
        session.send(wire.Returned(returned.call_id, fault=to_fault(too_large)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        refusal = InvalidRequest(f"what the call returned is no plain data, and cannot be sent: {error}")
        session.send(wire.Returned(returned.call_id, fault=to_fault(refusal)))
