"""Clients that do not read, and clients that write for ever: they cost a bounded buffer and a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import anyio
import pytest
from nightly import nightly
from server.conftest import each_adapter, texts_of
from server.hostile import CUT, GONE, Adapter, Answer, Client, Target, completion, heard_errors, request_of, served
from waiting import Tasks, turns

from aioengine.server import ServerConfig
from aioengine.server.api import PIECE_BYTES
from aioengine.server.asgi import AsgiExchange
from aioengine.server.decoding import MAX_BODIES_AT_ONCE
from aioengine.server.exchange import WriteMonitor

SMALL_BUFFER = 4096
LONG: dict[str, Any] = {"n": 16, "temperature": 1.0, "max_tokens": 400}
"""64 KiB of text, in events of more than a megabyte."""
LONG_TEXTS: dict[str, Any] = {"max_model_len": 512, "num_blocks": 4096, "vocab_size": 2048}


async def stalled(target: Target, body: dict[str, Any]) -> Client:
    """A client that sends its request and reads nothing."""
    client = await target.connect(receive_buffer=SMALL_BUFFER)
    await client.post("/v1/completions", body)
    return client


# Readers that stop


@each_adapter
@pytest.mark.parametrize(
    "body",
    [*nightly(completion(stream=True, **LONG)), completion(n=64, temperature=1.0, max_tokens=200, logprobs=10)],
    ids=["stream", "whole"],
)
async def test_a_reader_that_stops_costs_a_bounded_buffer_and_is_cut_off(
    adapter: Adapter, body: dict[str, Any]
) -> None:
    async with served(adapter, ServerConfig(write_timeout_s=0.3), send_buffer=SMALL_BUFFER, **LONG_TEXTS) as target:
        with await stalled(target, body) as client, heard_errors() as errors:
            most = 0

            def is_cut() -> Any:
                nonlocal most
                most = max(most, target.num_buffered)
                return target.api._metrics_of_http.cut.value == 1 and target.is_idle

            await target.until(is_cut)
            assert 0 < most < 4 * PIECE_BYTES, most
            assert await target.metric(GONE) == 0
            if adapter == "uvicorn":
                # Nothing of uvicorn's can end a connection whose client does not read: what is buffered stays, with
                # an error in its log, until the client reads it or leaves.
                assert [record.getMessage() for record in errors] == [
                    "ASGI callable returned without completing response."
                ]
                assert 0 < target.num_buffered < 4 * PIECE_BYTES
            else:
                assert errors == []
                await target.until(lambda: not target.num_buffered)
                head = await client.read_until(b"\r\n\r\n")
                assert b"chunked" in head or int(re.findall(rb"(?i)content-length: (\d+)", head)[0]) > 2**20
                assert len(await client.read_to_end()) < 2**18


@each_adapter
@pytest.mark.parametrize("is_stream", [True, *nightly(False)])
async def test_a_reader_that_comes_back_in_time_gets_everything_and_others_get_on_meanwhile(
    adapter: Adapter, is_stream: bool
) -> None:
    body = completion(stream=True, **LONG) if is_stream else completion(**{**LONG, "max_tokens": 450, "logprobs": 2})
    other = completion(8, stream=True, max_tokens=200)
    async with served(adapter, ServerConfig(write_timeout_s=30.0), send_buffer=SMALL_BUFFER, **LONG_TEXTS) as target:
        steady, alone = await target.ask("/v1/completions", body), await target.ask("/v1/completions", other)
        with await stalled(target, body) as client:
            await target.until(lambda: target.num_buffered > (2**16 if is_stream else 0))
            beside = await target.ask("/v1/completions", other)
            await turns(1000)
            answer = await client.answer()
        assert answer.status == 200
        assert texts_of(beside.body) == texts_of(alone.body)
        if is_stream:
            assert texts_of(answer.body) == texts_of(steady.body)
            assert len(texts_of(answer.body)) == LONG["n"]
        else:
            assert answer.json()["choices"] == steady.json()["choices"]
        assert await target.metric(CUT) == 0


@each_adapter
async def test_who_stops_reading_at_the_very_end_is_cut_off_too(adapter: Adapter) -> None:
    # Of one of these the last piece is what fills the buffer: all is written, and the end waits.
    sizes = range(90_000, 130_001, 10_000)
    async with served(adapter, ServerConfig(write_timeout_s=0.3), send_buffer=SMALL_BUFFER) as target:
        (word,) = target.runtime.require_tokenizer().encode(" and", add_special_tokens=False)
        clients = [await target.connect(receive_buffer=SMALL_BUFFER) for _ in sizes]
        with heard_errors():
            for size, client in zip(sizes, clients, strict=True):
                await client.post("/detokenize", {"tokens": [word] * (size // len(" and"))})
            await target.until_told(CUT, len(sizes))
        assert await target.metric("aioengine:http_requests_in_progress") == 1
        for client in clients:
            client.leave("reset")


@each_adapter
async def test_who_asks_again_and_again_and_reads_nothing_costs_a_bounded_buffer(adapter: Adapter) -> None:
    async with served(adapter, ServerConfig(write_timeout_s=0.3), send_buffer=SMALL_BUFFER) as target:
        http = target.api._metrics_of_http
        size = len((await target.ask("/metrics")).body)
        assert 2**18 // 16 < size <= PIECE_BYTES, "the answers are to fill the buffer, and each to be given at once"
        with await target.connect(receive_buffer=SMALL_BUFFER) as client:
            await client.send(request_of("GET", "/metrics") * 15)
            # In aiohttp each answer waits until the one before has been taken.
            await target.until(lambda: target.num_buffered > (0 if adapter == "aiohttp" else 2**16))
            await turns(2000)
            # uvicorn as it is cannot cut: it waits on, with no more than this.
            assert target.num_buffered < (size + 1000 if adapter == "aiohttp" else 2**18)
            if adapter == "serve":
                await target.until(lambda: http.cut.value == 1)
            if adapter != "uvicorn":  # aiohttp writes by itself, and no metric counts it
                await target.until(lambda: not target.transports())
            assert http.gone.value == 0


# Writers that do not come to an end


@each_adapter
async def test_a_body_a_byte_at_a_time_is_too_slow(adapter: Adapter) -> None:
    async with served(adapter, ServerConfig(body_timeout_s=0.2)) as target, Tasks() as tasks:
        with await target.connect() as client:
            whole = request_of("POST", "/v1/completions", completion(prompt="x" * 100_000))

            async def drip() -> None:
                await client.send(whole[:500])
                for place in range(500, len(whole)):
                    await client.send(whole[place : place + 1])
                    await turns(20)

            tasks.start(drip())
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (408, "timeout")
            assert answer.headers["connection"] == "close"
        assert target.executor.plans == []


@each_adapter
@pytest.mark.parametrize(("body", "length"), [(None, "100"), (completion(), "5000")], ids=["none", "some"])
async def test_a_body_that_never_begins_or_is_shorter_than_it_says_is_too_slow(
    adapter: Adapter, body: Any, length: str
) -> None:
    async with served(adapter, ServerConfig(body_timeout_s=0.1)) as target, target.client() as client:
        await client.send(request_of("POST", "/v1/completions", body, content_length=length))
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (408, "timeout")


@each_adapter
async def test_a_body_that_announces_gigabytes_is_refused_by_its_announcement(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioengine.server.decoding.LINGER_S", 0.05)
    async with served(adapter) as target:
        for length in ("10000000000", "9" * 19):
            with await target.connect() as client:
                await client.send(request_of("POST", "/v1/completions", content_length=length) + b'{"prompt": "')
                answer = await client.answer()
                assert (answer.status, answer.error["code"]) == (413, "request_too_large")


@each_adapter
async def test_chunks_without_end_are_refused_when_they_are_too_many(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioengine.server.decoding.LINGER_S", 0.05)
    async with served(adapter, ServerConfig(max_body_bytes=100_000)) as target, Tasks() as tasks:
        with await target.connect() as client:
            await client.send(
                request_of("POST", "/v1/completions", content_length="", transfer_encoding="chunked", x="y")
            )

            async def flood() -> None:
                while True:
                    await client.send(b"1000\r\n" + b" " * 4096 + b"\r\n")

            flooding = tasks.start(flood())
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (413, "request_too_large")
            flooding.cancel()
        await target.until(lambda: not target.api._bodies._num_bytes)


@each_adapter
async def test_what_follows_a_body_that_says_to_be_shorter_is_no_part_of_it(adapter: Adapter) -> None:
    async with served(adapter) as target, target.client() as client:
        await client.send(request_of("POST", "/v1/completions", completion(max_tokens=1), content_length="20"))
        if adapter == "serve":
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (400, "invalid_json")
        else:  # the others read ahead, too, and say what is no HTTP in their own words
            assert b" 400 " in await client.read_until(b"\r\n")
        assert target.executor.plans == []


@each_adapter
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", {"content_length": "10000000000"}, 413),
        ("/v1/completions", {"content_type": "text/plain"}, 415),
        ("/v1/completions", {"authorization": "Bearer wrong-key"}, 401),
        ("/nothing", {}, 404),
    ],
)
async def test_who_asks_before_sending_its_body_is_not_asked_for_one_that_is_refused(
    adapter: Adapter, path: str, headers: dict[str, str], status: int
) -> None:
    fields = {"authorization": "Bearer right-key", "expect": "100-continue", "content_length": "1000", **headers}
    async with served(adapter, ServerConfig(api_keys=("right-key",))) as target, target.client() as client:
        await client.send(request_of("POST", path, **fields))
        head = await client.read_until(b"\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())


@each_adapter
async def test_who_asks_before_sending_its_body_is_told_to(adapter: Adapter) -> None:
    async with served(adapter) as target, target.client() as client:
        whole = request_of("POST", "/v1/completions", completion(max_tokens=2), expect="100-continue")
        head, _, body = whole.partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body)
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    "adapter", ["serve", *(pytest.param(adapter, marks=pytest.mark.nightly) for adapter in ("uvicorn", "aiohttp"))]
)
async def test_hundreds_of_large_bodies_at_once_are_held_to_a_bound(adapter: Adapter) -> None:
    config = ServerConfig(max_body_bytes=2**15, max_concurrent_requests=1000)
    whole = request_of("POST", "/tokenize", {"prompt": "x" * (2**15 - 20)})
    num_clients, num_held_back = 500, 10
    async with served(adapter, config) as target, Tasks() as tasks:
        bodies, http = target.api._bodies, target.api._metrics_of_http
        others_have_come = asyncio.Event()
        most = 0

        async def upload() -> Answer:
            with await target.connect() as client:
                with contextlib.suppress(ConnectionError):  # refused amid it: there is an answer all the same
                    await client.send(whole[:-num_held_back])
                    await others_have_come.wait()
                    await client.send(whole[-num_held_back:])
                return await client.answer()

        def have_all_come() -> Any:
            nonlocal most
            most = max(most, bodies._num_bytes)
            num_begun = http.in_progress.value
            return num_begun + http.shed.value == num_clients and bodies._num_bytes >= num_begun * (2**15 - 50)

        uploads = [tasks.start(upload()) for _ in range(num_clients)]
        await target.until(have_all_come)
        others_have_come.set()
        await target.until(lambda: all(task.done() for task in uploads))
        answers = [task.result() for task in uploads if task.exception() is None]
        refused = [answer for answer in answers if answer.status == 503]
        assert len(answers) == num_clients
        assert len(refused) == http.shed.value
        assert {answer.status for answer in answers} == {200, 503}
        assert {answer.error["code"] for answer in refused} == {"overloaded"}
        assert all("retry-after" in answer.headers for answer in refused)
        assert MAX_BODIES_AT_ONCE * 2**14 < most <= MAX_BODIES_AT_ONCE * 2**15
        assert bodies._num_bytes == 0
        assert (await target.ask("/tokenize", {"prompt": "x"})).status == 200


class StuckExchange:
    """Takes nothing; ends when it is cut."""

    def __init__(self) -> None:
        self.is_cut = False

    async def start(self, *given: Any) -> None:
        await asyncio.get_running_loop().create_future()

    write = end = start

    def cut(self) -> None:
        self.is_cut = True


@pytest.mark.virtual_clock
@pytest.mark.parametrize("stage", ["start", "write", "end"])
async def test_a_client_that_takes_nothing_is_cut_after_the_timeout_at_each_stage(stage: str) -> None:
    exchange = StuckExchange()
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:
        monitor = WriteMonitor(
            exchange,  # type: ignore[arg-type]  # of an exchange it needs no more
            timeout_s=30.0,
            on_stuck=scope.cancel,
            idle_s=15.0,
            on_idle=lambda: None,
        )
        with monitor:
            await anyio.sleep(7)
            began = loop.time()
            await monitor.write(getattr(exchange, stage)())
    assert exchange.is_cut
    assert loop.time() - began == pytest.approx(30.0, abs=0.01)


async def test_an_exchange_that_breaks_once_its_response_has_begun_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(exchange: AsgiExchange, data: bytes) -> None:
        raise RuntimeError("the framework broke")

    monkeypatch.setattr(AsgiExchange, "write", fail)
    async with served("serve") as target, target.client() as client:
        await client.post("/v1/completions", completion(stream=True))
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 200 ")
