"""A request that has ended is let go at once: nothing of it waits for the garbage collector, which would hold the loop
and all threads while it looks for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import BaseModel

from aioengine import Engine, InvalidRequest, OutputNotParsed
from aioengine.server import start_server
from aioengine.structured.constraints import Regex

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_REQUESTS = 5
REFUSED = "(?=a)b"
"""An expression that is compiled before it is refused."""


class Shape(BaseModel):
    number: int


async def garbage_of(request: Callable[[], Awaitable[Any]]) -> Counter[str]:
    """What requests leave to the collector: objects, functions and frames of ours, by name."""
    await request()  # what is made once
    await settle()
    with saved_garbage() as garbage:
        for _ in range(NUM_REQUESTS):
            await request()
        await settle()
    return Counter(name for name in map(our_name, garbage) if name)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.contextmanager
def saved_garbage() -> Iterator[list[object]]:
    gc.collect()
    gc.freeze()  # what is there is not looked through again
    gc.disable()
    found: list[object] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()


def our_name(value: object) -> str:
    """Empty for what is not ours."""
    if isinstance(value, types.FrameType):
        module, name = value.f_globals.get("__name__", ""), value.f_code.co_qualname
    elif isinstance(value, types.FunctionType):
        module, name = value.__module__, value.__qualname__
    else:
        module, name = type(value).__module__, type(value).__qualname__
    return name if str(module).startswith("aioengine") else ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with await start_server(engine, port=0) as server, httpx.AsyncClient(base_url=server.url) as client:
        yield client


async def test_the_measure_finds_a_cycle() -> None:
    async def request() -> None:
        error = InvalidRequest("in its own frame")
        with contextlib.suppress(InvalidRequest):
            raise error

    assert await garbage_of(request) == {"InvalidRequest": NUM_REQUESTS}


async def leave(engine: Engine) -> None:
    async with engine.stream("Once", max_tokens=40) as stream:
        async for _ in stream:
            break


async def cancel(engine: Engine) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await engine.generate("Once", max_tokens=100)


async def ask_what_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        await engine.generate("Once", structured=Regex(REFUSED))


async def ask_what_is_cut(engine: Engine) -> None:
    with pytest.raises(OutputNotParsed):
        await engine.generate("Once", output_type=Shape, max_tokens=2)


async def ask_for_much(engine: Engine) -> None:
    await engine.generate("Once", n=3, max_tokens=20, stop=["a", "the"], logprobs=2, prompt_logprobs=1)


async def watch_what_has_ended(engine: Engine) -> None:
    async with engine.stream("Once", max_tokens=3) as stream:
        await stream.finish()
        stream.watch(lambda: stream.abort())
        while not stream.is_ended:
            stream.take()


async def call_what_is_not_there(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        await engine.collective_rpc("nothing")


CALLS = [
    leave,
    cancel,
    ask_what_is_refused,
    ask_what_is_cut,
    ask_for_much,
    watch_what_has_ended,
    call_what_is_not_there,
]


@pytest.mark.parametrize("request_", CALLS)
async def test_a_call_leaves_none(engine: Engine, request_: Callable[[Engine], Awaitable[None]]) -> None:
    assert await garbage_of(lambda: request_(engine)) == {}


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 200),
        ({"stream": True}, 200),
        ({"tools": TOOLS, "tool_choice": "required"}, 200),
        ({"max_tokens": -1}, 400),
        ({"guided_regex": REFUSED}, 400),
        ({"guided_regex": REFUSED, "stream": True}, 400),
    ],
    ids=["whole", "stream", "tools", "bad", "refused", "refused-stream"],
)
async def test_a_chat_over_http_leaves_none(http: httpx.AsyncClient, fields: dict[str, Any], status: int) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}

    async def request() -> None:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == status

    assert await garbage_of(request) == {}


async def test_a_path_that_is_not_there_leaves_none(http: httpx.AsyncClient) -> None:
    assert await garbage_of(lambda: http.get("/v1/nothing")) == {}


async def test_a_client_that_leaves_leaves_none(http: httpx.AsyncClient) -> None:
    body = {"prompt": "Once", "max_tokens": 200, "stream": True}

    async def request() -> None:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())

    assert await garbage_of(request) == {}
