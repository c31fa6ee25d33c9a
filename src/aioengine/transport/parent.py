"""The child's half of the handshake: an engine that is told by the process that started it what to serve."""

from __future__ import annotations

import os

import anyio

from aioengine.errors import EngineDead
from aioengine.processes.own_process import asked_by_signals
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.addresses import check_connect
from aioengine.transport.channel import Channel, Context, end_context, make_context
from aioengine.transport.handshake import HELLO_TIMEOUT_S, Failing, Hello, Init, ToEngine, check_init
from aioengine.transport.link import make_dealer
from aioengine.transport.serving import EnterGroup, closing, serve_init
from aioengine.transport.wire import PROTOCOL_VERSION, Reader, WireMessage, Writer
from aioengine.transport.wire_errors import to_fault

LINGER_S = 1.0
"""How long the final message may take to reach the parent."""


class Parent:
    """The process that started this engine.

    Args:
        address: where it waits for the engine.
        token: proves that it started this process.
    """

    def __init__(self, address: str, token: str, worker: TextWorker) -> None:
        self._address = address
        self._token = token
        self._worker = worker
        self._context: Context | None = None
        self._channel: Channel | None = None
        self._writer = Writer()

    async def greet(self) -> Init:
        """Say HELLO, and wait for the answer.

        Raises:
            EngineDead: the parent turned this engine away, or did not answer in time.
        """
        where = await self._worker.run(lambda: check_connect(self._address, has_keys=False), None)
        self._context = make_context()
        socket = make_dealer(self._context, where, None)
        self._channel = channel = Channel(socket)
        socket.connect(str(where))
        self.report(Hello(PROTOCOL_VERSION, self._token, os.getpid()))
        with anyio.move_on_after(HELLO_TIMEOUT_S):
            reader: Reader[ToEngine] = Reader(ToEngine)
            return check_init(reader.read((await channel.receive(1))[0]))
        raise EngineDead(f"no answer to HELLO from {where} within {HELLO_TIMEOUT_S:g} s")

    def report(self, body: WireMessage) -> None:
        if self._channel is not None:
            self._channel.send([self._writer.write(body)])

    async def aclose(self) -> None:
        if self._channel is not None:
            self._channel.close(LINGER_S)
        await end_context(self._context, self._worker)


async def serve_for_parent(address: str, token: str, enter_group: EnterGroup | None = None) -> None:
    """Serve what the parent asks for until SIGTERM or SIGINT, cancellation, or the engine's death.

    Args:
        address, token: as of `Parent`.
        enter_group: for an engine that gets a place in a group.
    Raises:
        ConfigError, ModelLoadError, EngineDead: the engine cannot start, or has died; the parent was sent the reason.
    """
    with anyio.CancelScope() as scope, asked_by_signals(lambda _: scope.cancel()):
        worker = TextWorker()
        parent = Parent(address, token, worker)
        try:
            await serve_init(await parent.greet(), None, parent.report, enter_group=enter_group)
        except Exception as error:
            parent.report(Failing(to_fault(error)))
            raise
        finally:
            with closing():
                await parent.aclose()
                await worker.aclose()
