"""HTTP/1.1 connections: uvicorn's, parsed by httptools, with bounds on what a client may do before an app sees it.

uvicorn's public interface has no place for these promises, so that its protocol is extended here, and its versions are
bounded in pyproject.toml to those that were tested:

- limits (`HttpLimits`) of a head's time and size, of URLs, connections and requests ahead of their turn; a client gets
  an error body of the OpenAI API while it can read one;
- a client that does not read is cut off: closing, as uvicorn does, waits until it has read all;
- a drain that loses no accepted request, and marks each response as its connection's last;
- a disconnect is known at once to all requests of a connection, also behind one that runs;
- no turn of the loop is long, however many requests come in it: pieces wait for later turns.

`tests/server/test_http_protocol.py`, `test_http_server.py`, `test_slow_clients.py`, `test_disconnects.py` and
`test_loop_stays_free.py` hold them. A response is written by uvicorn's own code: nothing is added to a piece of it, and
some 3 µs to a request. A protocol of our own would have 230 lines more than this.

Of a scope's
``extensions``, ``aioengine.cut`` is a function that ends the connection at once, with what is still buffered: for a
client that does not read any more, on which closing would wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from aioengine.processes.turns import turns_here
from aioengine.server.config import HttpLimits
from aioengine.server.errors import ApiError, overloaded
from aioengine.server.exchange import CUT_EXTENSION

logger = logging.getLogger("aioengine")

MAX_PIPELINED = 16
"""Requests that a connection may send ahead of their turn; the next ones are left unread, and it closes after these."""
LINGER_S = 1.0
"""For a refused client to read why. Closing at once would reset the connection where it still sends, and the reset
takes what it has not read yet."""
MAX_DISCARDED_BYTES = 2**20
"""Bytes that a connection may send that are read no more, before it is cut."""
CLOSE_TIMEOUT_S = 10.0
"""For a client to read what is left for it on a connection that is closing."""
PIECES_A_TURN = 32
"""Deferred pieces that are parsed in one turn of the loop: half of its budget, and requests take the rest."""


class SharedState(ServerState):
    """Shared by the connections of one server: limits, and the queue of pieces that came in a turn without time left.

    Attributes:
        limits: for all of them.
        is_draining: every response is its connection's last.
        lingering: connections that were refused and are not gone yet.
        on_left: called when a connection has ended.
    """

    def __init__(self, limits: HttpLimits, *, on_left: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.limits = limits
        self.is_draining = False
        self.lingering: set[HttpProtocol] = set()
        self.on_left = on_left
        self._deferred: deque[tuple[HttpProtocol, bytes]] = deque()
        """Pieces that came while the turn of the loop had no time left, in the order of their coming."""

    def all(self) -> set[HttpProtocol]:
        """Every connection that is not gone."""
        return cast(set[HttpProtocol], self.connections) | self.lingering

    @property
    def is_idle(self) -> bool:
        return not self.all()

    def defer_if_busy(self, protocol: HttpProtocol, data: bytes) -> bool:
        """Whether the piece waits for a later turn of the loop, which hands it to `HttpProtocol.resume`."""
        if not self._deferred:
            if not turns_here().is_busy:
                return False
            asyncio.get_running_loop().call_soon(self._hand_out)
        self._deferred.append((protocol, data))
        return True

    async def wait_for_deferred(self) -> None:
        """Wait until all pieces that are deferred now were handed out."""
        last = self._deferred[-1] if self._deferred else None
        while last in self._deferred:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def _hand_out(self) -> None:
        """Hand out deferred pieces, as many as this turn has time for, and one at least."""
        turns = turns_here()
        try:
            for number in range(min(len(self._deferred), PIECES_A_TURN)):
                if turns.is_spent and number > 0:
                    break
                protocol, data = self._deferred.popleft()
                try:
                    protocol.resume(data)
                except Exception:
                    protocol.transport.abort()
                    raise
        finally:
            if self._deferred:
                asyncio.get_running_loop().call_soon(self._hand_out)

    def sweep(self, now: float) -> None:
        """Cut connections whose closing takes too long; to be called each second or so."""
        for protocol in self.all():
            protocol.sweep(now)

    def drain(self) -> None:
        """Let every connection end with the response that it is at, and idle ones now."""
        self.is_draining = True
        for protocol in self.all():
            protocol.shutdown()

    def abort(self) -> None:
        """End every connection at once."""
        for protocol in self.all():
            protocol.transport.abort()


class HttpProtocol(HttpToolsProtocol):
    """One connection. Its head timer runs where a head is due: before the first request, and once one has begun."""

    def __init__(self, config: Config, server_state: SharedState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self.access_log = False  # uvicorn's own; the app has one
        self._state = server_state
        self._limits = server_state.limits
        self._cycles: list[RequestResponseCycle] = []
        """Requests that are not answered; the first one runs."""
        self._extensions: dict[str, Any] = {}
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._head_bytes = 0
        """Bytes that are neither body nor complete: a head, trailers, a chunk's extensions; without the piece that this
        began in."""
        self._num_fields = self._header_bytes = 0
        """Number and bytes of the headers and trailers that are complete."""
        self._num_deferred = 0
        """Pieces of this connection that are deferred. While there are any, no timer ends the connection."""
        self._is_discarding = False
        """Bytes that still come are counted and thrown away."""
        self._discarded_bytes = 0
        self._closing_since: float | None = None

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._extensions[CUT_EXTENSION] = transport.abort
        if len(self.connections) > self._limits.max_connections:
            self._refuse(overloaded("too many connections", 1.0))
        else:
            self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if not self._is_discarding and self._state.defer_if_busy(self, data):
            self._num_deferred += 1
            self._unset_keepalive_if_required()
            self.transport.pause_reading()
        else:
            self._read(data)

    def resume(self, data: bytes) -> None:
        """Read a deferred piece, and go on reading from the socket once it was the last one."""
        self._num_deferred -= 1
        if self.parser is None or self.transport.is_closing():  # it was lost meanwhile, or is to be
            return
        self._read(data)
        if self._num_deferred > 0 or self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        if self._state.is_draining:
            self.shutdown()

    def _read(self, data: bytes) -> None:
        if self._is_discarding:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request is answered as if it had not asked; what follows is not HTTP/1.1 any more.
            self._is_discarding = True
            if not self._is_idle:
                self._make_last()
        except httptools.HttpParserError as error:
            cause = error.__context__  # what one of our callbacks raised
            malformed = ApiError(400, "malformed_request", "this is no HTTP/1.1 request")
            self._refuse(cause if isinstance(cause, ApiError) else malformed)
        else:
            is_coming = self._is_in_head or (not self._is_idle and self.cycle.more_body)
            if is_coming and self._head_bytes > self._limits.max_header_bytes + self._limits.max_url_bytes:
                self._refuse(_head_too_large(self._limits))
            elif self._head_timer is None and (self._is_in_head or self._is_idle):
                # Also after newlines alone, or the rest of a body that was not read: neither is a request.
                self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn notifies the newest request alone, which may stand behind the one that runs.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        self._cycles.clear()
        self._state.lingering.discard(self)
        self._state.on_left()

    def timeout_keep_alive_handler(self) -> None:
        if self._num_deferred == 0:
            super().timeout_keep_alive_handler()

    # What the parser calls. What is raised here stops it.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._is_in_head = True
        self._head_bytes = self._num_fields = self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._limits.max_url_bytes:
            message = f"the URL has more than {self._limits.max_url_bytes:,} bytes (max_url_bytes)"
            raise ApiError(414, "url_too_long", message)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Counted here: a piece of 256 KiB may hold 60,000 of them, and take 20 ms.
        self._num_fields += 1
        self._header_bytes += len(name) + len(value)
        if self._num_fields > self._limits.max_headers or self._header_bytes > self._limits.max_header_bytes:
            raise _head_too_large(self._limits)
        if not self._is_in_head:
            return  # A trailer field, behind a chunked body: never a header (RFC 9110, section 6.5.1).
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):  # RFC 9112, section 3.2
            raise ApiError(400, "malformed_request", f"the request has {num_hosts} Host headers; send one")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ApiError(400, "too_many_requests", "too many requests were sent ahead of their turn")
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        if self._state.is_draining:
            self._make_last()

    # What the server calls

    def shutdown(self) -> None:
        """End after the last request that has begun to come."""
        if self._num_deferred > 0:  # there may be one in what is deferred
            return
        if not self._is_idle:
            self._make_last()
        elif self._is_in_head or self.cycle is None:
            if not self._is_discarding:
                self._stop_head_timer()
                self._start_head_timer()
        else:
            self.transport.close()

    def sweep(self, now: float) -> None:
        """Cut the connection if it has been closing for too long."""
        if not self.transport.is_closing():
            return
        if self._closing_since is None:
            self._closing_since = now
        elif now - self._closing_since > CLOSE_TIMEOUT_S:
            self.transport.abort()

    # Refusing

    @property
    def _is_idle(self) -> bool:
        """No request waits for its answer, or for the rest of it."""
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self) -> None:
        timeout_s = self._limits.header_timeout_s
        if self._state.is_draining:
            # For a request to come whose connection, or first bytes, the server had accepted before it began to drain.
            timeout_s = min(1.0, timeout_s)
        self._head_timer = self.loop.call_later(timeout_s, self._on_no_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_no_head(self) -> None:
        self._head_timer = None
        if self._num_deferred > 0:  # the rest may have come: what is read next starts another timer if it has not
            return
        if self._is_in_head:
            self._refuse(ApiError(408, "timeout", "the request's headers did not come in time (header_timeout_s)"))
        elif self._is_idle:  # it has sent nothing; or what followed its last request was no new one
            self.transport.close()

    def _make_last(self) -> None:
        """The newest request is the last one; its response has a header for that, if it has not begun."""
        if not self.cycle.keep_alive:
            return
        self.cycle.keep_alive = False
        if not self.cycle.response_started:  # uvicorn adds the header by itself since 0.53 only
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]

    def _refuse(self, error: ApiError) -> None:
        """Read nothing more; answer what was asked before, or else the error, and close."""
        self._is_discarding = True
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        client = self.client[0] if self.client else ""  # a Unix socket's has no name
        logger.info("refused %s: %d %s", client or "a client", error.status, error.message)
        if not self._is_idle:
            if not self.cycle.more_body:  # it stands behind requests that were whole
                self._make_last()
                return
            if self.cycle.response_started or any(not cycle.response_complete for cycle in self._cycles[:-1]):
                self.transport.abort()  # an answer now would stand in the middle of another one
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        response = error.response()
        headers = {**response.headers, "content-length": str(len(response.body)), "connection": "close"}
        lines = [name + b": " + value + b"\r\n" for name, value in self._state.default_headers]
        lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", response.body]))
        # Refused connections that may linger; more are closed at once.
        if len(self._state.lingering) >= 256 or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.connections.discard(self)  # it counts no more among those that are served
        self._state.lingering.add(self)
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.abort)


def _head_too_large(limits: HttpLimits) -> ApiError:
    allowed = f"{limits.max_headers} (max_headers), with {limits.max_header_bytes:,} bytes in all (max_header_bytes)"
    message = f"the request's headers are too many or too large; allowed are {allowed}"
    return ApiError(431, "headers_too_large", message)
