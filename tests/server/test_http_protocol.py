"""What a connection may do before an app sees it: real sockets, and clients that behave badly."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import anyio
import pytest
from nightly import nightly
from server.conftest import both_loops, listening
from server.hostile import Answer, Client
from server.small_app import SmallApp, SmallEngine
from waiting import until

from aioengine.processes.turns import turns_here
from aioengine.server.config import HttpLimits
from aioengine.server.http_protocol import (
    CLOSE_TIMEOUT_S,
    LINGER_S,
    MAX_DISCARDED_BYTES,
    MAX_PIPELINED,
    HttpProtocol,
    SharedState,
)

virtual_time = pytest.mark.virtual_clock(seeds=[1, 2])

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
STREAM = b"GET /stream/one HTTP/1.1\r\nhost: x\r\n\r\n"
HEAD_OF_POST = b"POST /echo HTTP/1.1\r\nhost: x\r\n"


class Served:
    """A server on a port of its own, and what happened in it."""

    def __init__(self, limits: HttpLimits) -> None:
        self.engine = SmallEngine()
        self.app = SmallApp(self.engine)
        self.statuses: list[int] = []
        """Of the refusals, as the log tells them."""
        self.state = SharedState(limits)
        self.port = 0

    @property
    def connection(self) -> HttpProtocol:
        (only,) = self.state.all()
        return only


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[Served]:
    server, handler, logger = Served(HttpLimits(**limits)), logging.Handler(), logging.getLogger("aioengine")
    handler.emit = lambda record: server.statuses.append(record.args[1])  # type: ignore[method-assign, index]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with listening(server.app, state=server.state) as where:
            server.port = where.port
            yield server
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@asynccontextmanager
async def client_of(server: Served) -> AsyncIterator[Client]:
    with await Client.connect(server.port) as client:
        yield client


async def ask(client: Client, request: bytes = GET) -> Answer:
    await client.send(request)
    return await client.answer()


async def refusal(client: Client) -> Answer:
    """A response that is the last, and says in OpenAI's way what was wrong."""
    answer = await client.answer()
    assert answer.headers["connection"] == "close"
    assert answer.error
    assert await client.read_to_end() == b""
    return answer


# What a client may do


@both_loops
async def test_a_request_may_come_byte_by_byte_and_its_connection_is_used_again() -> None:
    async with served() as server, client_of(server) as client:
        for _ in range(2):
            request = HEAD_OF_POST + b"content-length: 5\r\n\r\nhello"
            for at in range(len(request)):
                await client.send(request[at : at + 1])
            status, headers, body = await client.answer()
            assert (status, json.loads(body)["body"]) == (200, "hello")
            assert "connection" not in headers
        assert server.statuses == []
        kept = server.connection.transport.get_extra_info("socket")
        assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@both_loops
async def test_requests_ahead_are_answered_in_order_and_too_many_are_left_unread() -> None:
    async with served() as server, client_of(server) as client:
        await client.send(b"".join(GET.replace(b"/a", b"/%d" % number) for number in range(1000)))
        answers = [await client.answer() for _ in range(MAX_PIPELINED + 1)]
        assert [answer.json()["path"] for answer in answers] == [f"/{number}" for number in range(MAX_PIPELINED + 1)]
        assert [headers.get("connection") for _, headers, _ in answers] == [None] * MAX_PIPELINED + ["close"]
        assert await client.read_to_end() == b""
        assert len(server.app.scopes) == MAX_PIPELINED + 1


@both_loops
async def test_who_leaves_while_requests_wait_behind_the_first_ends_the_first() -> None:
    async with served() as server:
        async with client_of(server) as client:
            await client.send(STREAM + GET * 2)
            await until(lambda: "one" in server.engine.running)
        await until(lambda: server.engine.ended == ["one end: client_gone"])
        assert len(server.app.scopes) == 1


async def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one_as_the_last() -> None:
    async with served() as server, client_of(server) as client:
        await client.send(b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nPRI * HTTP/2.0")
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.read_to_end() == b""


# What it may not


@both_loops
@pytest.mark.parametrize("is_bytewise", [False, True])
async def test_a_trailer_field_is_no_header(is_bytewise: bool) -> None:
    head = HEAD_OF_POST + b"x-tenant: poor\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"
    trailers = b"x-tenant: rich\r\nhost: y\r\nAuthorization: Bearer k\r\nexpect: 100-continue\r\n\r\n"
    request = head + trailers + GET
    async with served() as server, client_of(server) as client:
        for piece in [request[at : at + 1] for at in range(len(request))] if is_bytewise else [request]:
            await client.send(piece)
        assert (await client.answer()).json()["body"] == "hello"
        assert (await client.answer()).status == 200
        told, next_one = (dict(scope["headers"]) for scope in server.app.scopes)
        assert told == {b"host": b"x", b"x-tenant": b"poor", b"transfer-encoding": b"chunked"}
        assert next_one == {b"host": b"x"}


@both_loops
@pytest.mark.parametrize("trailers", [b"a:\r\n" * 200, b"a: " + b"b" * 40_000 + b"\r\n", b"a: " + b"b" * 500_000])
async def test_trailer_fields_count_among_the_headers(trailers: bytes) -> None:
    async with served() as server, client_of(server) as client:
        await client.send(HEAD_OF_POST + b"transfer-encoding: chunked\r\n\r\n0\r\n" + trailers + b"\r\n")
        assert (await refusal(client)).status == 431


@both_loops
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nHost: evil\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nhost: localhost\r\nhost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na: b\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nhost:\r\n\r\n", 200),
    ],
)
async def test_a_request_has_one_host(head: bytes, status: int) -> None:
    async with served() as server, client_of(server) as client:
        assert (await ask(client, head)).status == status
        assert server.statuses == [status] * (status == 400)


MANY_HEADERS = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n"
HEADER_LIMITS = ["headers_too_large", "100 (max_headers)", "32,768 bytes in all (max_header_bytes)"]


@both_loops
@pytest.mark.parametrize(
    ("pieces", "status", "said"),
    [
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], 400, []),
        ([b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n"], 400, []),
        ([HEAD_OF_POST + b"transfer-encoding: chunked\r\n\r\nno number\r\n"], 400, []),
        ([HEAD_OF_POST + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", b"zz\r\n"], 400, []),
        ([b"GET /" + b"a" * 8192 + b" HTTP/1.1\r\n"], 414, ["url_too_long", "8,192 bytes (max_url_bytes)"]),
        ([MANY_HEADERS], 431, HEADER_LIMITS),
        ([b"GET / HTTP/1.1\r\na: " + b"b" * 32768 + b"\r\n\r\n"], 431, HEADER_LIMITS),
        ([b"GET / HTTP/1.1\r\na: " + b"b" * 500_000], 431, HEADER_LIMITS),
        ([b"GET / HTTP/1.1\r\na: ", *[b"b" * 1000] * 50], 431, HEADER_LIMITS),
    ],
)
async def test_what_is_no_request_is_refused_in_json_and_the_connection_closed(
    pieces: list[bytes], status: int, said: list[str]
) -> None:
    async with served() as server, client_of(server) as client:
        for piece in pieces:
            await client.send(piece)
            await anyio.lowlevel.checkpoint()
        answer = await refusal(client)
        assert answer.status == status
        assert all(each in answer.body.decode() for each in said)
        assert server.statuses == [status]
        await until(lambda: not server.state.tasks)


@both_loops
async def test_a_head_may_be_as_large_as_the_limits() -> None:
    async with served() as server, client_of(server) as client:
        path = b"/" + b"p" * 8191
        headers = b"".join(b"h%02d: %s\r\n" % (number, b"v" * 320) for number in range(99))
        await client.send(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n")
        assert (await client.answer()).status == 200
        await client.send(HEAD_OF_POST + b"content-length: 200000\r\n\r\n" + b"x" * 200_000 + GET)
        assert len((await client.answer()).body) > 200_000
        assert (await client.answer()).status == 200


@both_loops
async def test_a_refusal_can_be_read_by_who_still_sends() -> None:
    async with served() as server, client_of(server) as client:
        await client.send(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 150)
        await until(lambda: server.statuses == [431])
        for _ in range(8):
            await client.send(b"c" * 2**16)
        assert (await refusal(client)).status == 431


async def test_who_never_stops_sending_after_a_refusal_is_cut_off() -> None:
    async with served() as server, client_of(server) as client:
        await client.send(b"rubbish\r\n\r\n")
        with pytest.raises(ConnectionError):
            await client.send(b"c" * 20 * MAX_DISCARDED_BYTES)
        await until(lambda: server.state.is_idle)


@both_loops
async def test_connections_beyond_the_limit_hear_503_and_when_to_come_again() -> None:
    async with served(max_connections=2) as server:
        async with client_of(server) as one, client_of(server) as two:
            for client in (one, two):
                assert (await ask(client)).status == 200
            async with client_of(server) as third:
                status, headers, body = await third.answer()
                assert (status, headers["retry-after"]) == (503, "1")
                assert json.loads(body)["error"]["code"] == "overloaded"
                assert await third.read_to_end() == b""
            assert (await ask(one)).status == 200
        await until(lambda: server.state.is_idle)
        async with client_of(server) as client:
            assert (await ask(client)).status == 200


# Bad bytes beside good requests


@both_loops
async def test_rubbish_behind_a_whole_request_does_not_cost_the_request_its_answer() -> None:
    async with served() as server, client_of(server) as client:
        await client.send(STREAM + b"rubbish\r\n\r\n")
        await until(lambda: "one" in server.engine.running)
        server.engine.running["one"].go()
        server.engine.running["one"].end()
        assert (await client.answer()).body == b"token\nend: stop\n"
        assert await client.read_to_end() == b""
        await until(lambda: server.engine.ended == ["one end: stop"])


async def test_a_body_that_goes_bad_once_the_answer_has_begun_cuts_the_connection() -> None:
    async with served() as server, client_of(server) as client:
        await client.send(b"GET /flood HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        await client.read_until(b"x" * 1000)
        await client.send(b"zz\r\n")
        assert not (await client.read_to_end()).endswith(b"0\r\n\r\n")
        await until(lambda: not server.state.tasks)


# Time


@virtual_time
@pytest.mark.parametrize("begun", [b"", b"\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50])
@pytest.mark.parametrize("before", [*nightly(b""), GET])
async def test_a_connection_without_a_request_is_closed_and_headers_that_come_too_slowly_are_refused(
    before: bytes, begun: bytes
) -> None:
    limits = {"header_timeout_s": 10.0, "keep_alive_timeout_s": 10.0}
    async with served(**limits) as server, client_of(server) as client, anyio.create_task_group() as tasks:
        if before:
            assert (await ask(client)).status == 200
        began = asyncio.get_running_loop().time()
        tasks.start_soon(drip, client, begun)
        if b"HTTP" in begun:
            assert (await refusal(client)).status == 408
        else:
            assert await client.read_to_end() == b""
            assert server.statuses == []
        tasks.cancel_scope.cancel()
        assert asyncio.get_running_loop().time() - began == pytest.approx(10.0, abs=0.5)


async def drip(client: Client, data: bytes) -> None:
    with suppress(ConnectionError):  # the server may have closed it meanwhile
        for at in range(len(data)):
            await client.send(data[at : at + 1])
            await anyio.sleep(0.1)


@virtual_time
async def test_a_stream_outlives_the_head_of_a_next_request_that_never_ends() -> None:
    async with served(header_timeout_s=10.0) as server, client_of(server) as client:
        await client.send(STREAM + b"GET /never")
        await anyio.sleep(60)
        server.engine.running["one"].end()
        assert (await client.answer()).body == b"end: stop\n"
        assert await client.read_to_end() == b""


@virtual_time
async def test_an_idle_connection_is_closed_and_one_that_waits_for_its_answer_is_not() -> None:
    async with served(keep_alive_timeout_s=75.0) as server, client_of(server) as client:
        await client.send(STREAM)
        await anyio.sleep(1000)
        server.engine.running["one"].end()
        await client.answer()
        began = asyncio.get_running_loop().time()
        assert await client.read_to_end() == b""
        assert asyncio.get_running_loop().time() - began == pytest.approx(75.0, abs=0.5)


@virtual_time
async def test_the_rest_of_a_body_that_is_not_wanted_is_read_for_a_while_so_that_the_answer_is() -> None:
    async with served(header_timeout_s=10.0) as server, client_of(server) as client:
        await client.send(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
        assert (await client.answer()).status == 413
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drip, client, b"x" * 1000)
            await until_far(lambda: server.state.is_idle)
            tasks.cancel_scope.cancel()


async def until_far(is_so: Callable[[], bool]) -> None:
    """As `until`, in virtual seconds."""
    with anyio.fail_after(20):
        while not is_so():  # noqa: ASYNC110
            await anyio.sleep(0.5)


# Clients that do not read


@virtual_time
async def test_a_client_that_does_not_read_cannot_keep_a_closing_connection() -> None:
    async with served() as server, client_of(server) as client:
        await client.send(GET.replace(b"/a", b"/flood"))
        await until_far(lambda: any(each.flow.write_paused for each in server.state.all()))
        server.connection.transport.close()
        now = asyncio.get_running_loop().time()
        for after_s in (0.0, CLOSE_TIMEOUT_S - 0.1):
            server.state.sweep(now + after_s)
            await anyio.sleep(0.1)
            assert not server.state.is_idle
        server.state.sweep(now + CLOSE_TIMEOUT_S + 0.1)
        await until_far(lambda: server.state.is_idle)


@virtual_time
async def test_a_refused_client_that_neither_reads_nor_leaves_is_cut_off() -> None:
    async with served() as server, client_of(server) as client:
        await client.send(b"rubbish\r\n\r\n")
        await until_far(lambda: len(server.state.lingering) == 1)
        assert not server.state.connections
        await anyio.sleep(LINGER_S + 0.5)
        assert server.state.is_idle


# What is held for a later turn of the loop


@contextmanager
def holding(server: Served) -> Iterator[None]:
    """All that comes is held, and given at the end."""
    turns, state = turns_here(), server.state
    give = state._hand_out
    turns._is_begun, turns._ends_at = True, float("-inf")
    state._hand_out = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        turns._is_begun = False
        state._hand_out = give  # type: ignore[method-assign]
        if state._deferred:
            asyncio.get_running_loop().call_soon(give)


@contextmanager
def loop_errors() -> Iterator[list[dict[str, Any]]]:
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    try:
        yield errors
    finally:
        loop.set_exception_handler(None)


def num_held(server: Served) -> int:
    return len(server.state._deferred)


async def hold(server: Served, client: Client, data: bytes) -> None:
    """Send what the server holds, and wait until it does."""
    before = num_held(server)
    await client.send(data)
    await until(lambda: num_held(server) > before)


on_each_connection = pytest.mark.parametrize("before", [b"", GET, STREAM], ids=["new", "kept", "running"])


async def begin(server: Served, client: Client, before: bytes) -> None:
    """Nothing, an answered request, or one that runs."""
    await client.send(before)
    if before == GET:
        await client.answer()
    elif before == STREAM:
        await until(lambda: "one" in server.engine.running)


async def end(server: Served, client: Client, before: bytes) -> None:
    if before == STREAM:
        server.engine.running["one"].end()
        assert (await client.answer()).status == 200


@both_loops
@on_each_connection
async def test_a_held_request_is_its_connections_last_when_a_drain_begins(before: bytes) -> None:
    async with served() as server, client_of(server) as client:
        await begin(server, client, before)
        with holding(server):
            await hold(server, client, GET)
            server.state.drain()
            await end(server, client, before)
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.read_to_end() == b""


@both_loops
@pytest.mark.parametrize(
    ("before", "rest"),
    [(GET, b"\r\n"), (GET, b"GET /never"), (HEAD_OF_POST + b"content-length: 5\r\n\r\nhe", b"llo")],
    ids=["newline", "beginning", "body"],
)
async def test_a_drain_does_not_wait_for_what_was_held_and_is_no_request(before: bytes, rest: bytes) -> None:
    async with served(header_timeout_s=0.1) as server, client_of(server) as client:
        await client.send(before)
        if before == GET:
            await client.answer()
        await until(lambda: len(server.app.scopes) == 1)
        with holding(server):
            await hold(server, client, rest)
            server.state.drain()
        if before != GET:
            assert (await client.answer()).headers["connection"] == "close"
        await client.read_to_end()


@virtual_time
@on_each_connection
async def test_no_timer_ends_a_connection_whose_request_is_held(before: bytes) -> None:
    async with served(header_timeout_s=10.0, keep_alive_timeout_s=10.0) as server, client_of(server) as client:
        await begin(server, client, before)
        with holding(server):
            await hold(server, client, GET)
            await end(server, client, before)
            await anyio.sleep(100)
            assert num_held(server) == 1
        assert (await client.answer()).status == 200


@virtual_time
async def test_a_head_whose_beginning_was_held_has_its_time_again_and_no_more() -> None:
    async with served(header_timeout_s=10.0) as server, client_of(server) as client:
        with holding(server):
            await client.send(b"GET /never")
            await anyio.sleep(100)
        began = asyncio.get_running_loop().time()
        assert (await refusal(client)).status == 408
        assert asyncio.get_running_loop().time() - began == pytest.approx(10.0, abs=0.5)


@both_loops
async def test_a_connection_that_fails_over_what_was_held_is_cut_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as server, client_of(server) as bad, client_of(server) as good:
        resume = HttpProtocol.resume

        def fail_first(protocol: HttpProtocol, data: bytes) -> None:
            if b"/bad" in data:
                raise RuntimeError("a bug")
            resume(protocol, data)

        monkeypatch.setattr(HttpProtocol, "resume", fail_first)
        with loop_errors() as errors:
            with holding(server):
                await hold(server, bad, GET.replace(b"/a", b"/bad"))
                await hold(server, good, GET)
            assert (await good.answer()).status == 200
            assert await bad.read_to_end() == b""
            assert [str(each["exception"]) for each in errors] == ["a bug"]


@both_loops
async def test_what_was_held_of_a_connection_that_is_lost_is_dropped() -> None:
    async with served() as server:
        with loop_errors() as errors:
            async with client_of(server) as client, client_of(server) as other:
                with holding(server):
                    await hold(server, client, GET)
                    (protocol,) = {each for each, _ in server.state._deferred}
                    protocol.data_received(GET)
                    protocol.transport.abort()
                    await until(lambda: len(server.state.all()) == 1)
                    await other.send(GET)
                    await until(lambda: num_held(server) == 3)
                assert (await other.answer()).status == 200
            assert len(server.app.scopes) == 1
            assert errors == []


@both_loops
async def test_a_client_that_ends_while_its_request_is_held_is_gone() -> None:
    async with served() as server, client_of(server) as client:
        with loop_errors() as errors:
            with holding(server):
                await client.send(STREAM)
                client.leave("half")
                await until(lambda: num_held(server) == 1)
                await asyncio.sleep(0.01)
            await until(lambda: server.state.is_idle and not server.state.tasks)
            assert errors == []


@both_loops
async def test_held_pieces_of_a_connection_stay_in_order() -> None:
    async with served() as server, client_of(server) as client:
        whole = b"".join(GET.replace(b"/a", b"/%d" % number) for number in range(10))
        with holding(server):
            await hold(server, client, whole[:7])
            protocol = server.connection
            for at in range(7, len(whole), 7):  # as where an app's reading has the transport go on
                protocol.data_received(whole[at : at + 7])
        for number in range(10):
            assert (await client.answer()).json()["path"] == f"/{number}"
        assert (await ask(client)).status == 200


@both_loops
async def test_what_is_held_is_given_also_where_no_turn_has_time_left() -> None:
    async with served() as server, client_of(server) as client:
        with holding(server):
            await hold(server, client, GET)
            del server.state._hand_out
            asyncio.get_running_loop().call_soon(server.state._hand_out)
            await server.state.wait_for_deferred()
        assert (await client.answer()).status == 200
