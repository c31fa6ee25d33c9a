"""Clients that leave: at every moment of a request, in every way, and by hundreds."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import threading
from typing import Any

import pytest
from server.conftest import each_adapter, texts_of
from server.hostile import GONE, Adapter, Client, Leaving, Target, chat, completion, request_of, served
from waiting import Tasks, turns

from aioengine.frontend.stream import Stream
from aioengine.server.aiohttp_adapter import AiohttpExchange
from aioengine.server.asgi import AsgiExchange
from aioengine.server.record import RequestRecord

each_way = pytest.mark.parametrize("way", ["close", "reset", "half"])

LEAVER, STAYER = 7, 8


async def begun(target: Target, body: dict[str, Any], path: str = "/v1/completions") -> Client:
    """A client whose request has been sent, and is computed now by a manual device."""
    client = await target.connect()
    await client.post(path, body)
    await target.until(lambda: target.num_plans_with(body["seed"]))
    return client


async def step(target: Target, count: int = 1) -> None:
    """Let a manual device end so many steps, each with a next one launched behind it."""
    for _ in range(count):
        num_next = len(target.executor.plans) + 1
        target.executor.complete()
        await target.until(functools.partial(target.has_launched, num_next))


async def assert_aborted_at_once(target: Target, num_others: int = 0) -> None:
    """The engine forgets the leaver while the device is still at the step that it was at, and computes no other one."""
    num_plans = len(target.executor.plans)
    await target.until(lambda: target.num_registered == num_others)
    assert len(target.executor.plans) == num_plans, "the engine learned of it only after a step"
    target.complete_all()
    await turns(100)
    assert target.num_plans_with(LEAVER, num_plans) == 0


# One client, at each moment


CHAT_STREAM = ("/v1/chat/completions", chat(LEAVER, stream=True))
SEVERAL = completion(LEAVER, prompt=["Once", "upon", "a time"], n=4, temperature=1.0)


@each_adapter
@each_way
@pytest.mark.parametrize(
    ("path", "body", "num_steps", "num_prompts"),
    [
        ("/v1/completions", completion(LEAVER), 0, 1),
        (*CHAT_STREAM, 0, 1),
        (*CHAT_STREAM, 5, 1),
        ("/v1/completions", SEVERAL, 3, 3),
    ],
    ids=["before any token", "before a stream", "amid a stream", "amid all choices of several prompts"],
)
async def test_who_leaves_is_in_no_later_step(
    adapter: Adapter, way: Leaving, path: str, body: dict[str, Any], num_steps: int, num_prompts: int
) -> None:
    async with served(adapter, is_manual=True) as target:
        with await begun(target, body, path) as client:
            await step(target, num_steps)
            assert target.num_registered == num_prompts
            if body.get("stream") and num_steps:
                await client.read_until(b'"content":')
            client.leave(way)
            await assert_aborted_at_once(target)
        await target.until_told(GONE, 1)


@each_adapter
async def test_who_leaves_while_its_request_waits_behind_others_is_never_computed(adapter: Adapter) -> None:
    async with served(adapter, is_manual=True, engine={"max_num_seqs": 1}) as target:
        with await begun(target, completion(STAYER, max_tokens=10)) as other, await target.connect() as client:
            await client.post("/v1/completions", completion(LEAVER))
            await target.until(lambda: target.runtime.core.stats().waiting == 1)
            client.leave()
            await assert_aborted_at_once(target, num_others=1)
            await target.idle()
            assert (await other.answer()).json()["usage"]["completion_tokens"] == 10
        assert target.num_plans_with(LEAVER) == 0
        await target.until_told(GONE, 1)


@each_adapter
@pytest.mark.parametrize("work", ["encode", "render_chat"])
async def test_who_leaves_while_its_prompt_is_prepared_is_never_computed(
    adapter: Adapter, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(adapter, is_manual=True) as target:
        tokenizer = target.runtime.require_tokenizer()
        gate, has_begun, really = threading.Event(), threading.Event(), getattr(tokenizer, work)

        def gated(*args: Any, **options: Any) -> Any:
            has_begun.set()
            assert gate.wait(30), "it was not let go on"
            return really(*args, **options)

        monkeypatch.setattr(tokenizer, work, gated)
        with await target.connect() as client:
            if work == "encode":
                await client.post("/v1/completions", completion(LEAVER, prompt="word " * 1000))
            else:
                await client.post("/v1/chat/completions", chat(LEAVER))
            await target.until(has_begun.is_set)
            assert target.num_registered == 1
            client.leave()
            await target.until(lambda: not target.num_registered)
        gate.set()
        await target.idle()
        assert target.executor.plans == []
        await target.until_told(GONE, 1)


@each_adapter
@each_way
async def test_who_leaves_amid_its_body_is_counted_and_reaches_no_engine(adapter: Adapter, way: Leaving) -> None:
    async with served(adapter) as target:
        with await target.connect() as client:
            whole = request_of("POST", "/v1/completions", completion(LEAVER))
            await client.send(whole[:-20])
            await asyncio.sleep(0)
            assert await target.metric("aioengine:http_requests_in_progress") == 2  # that, and who asks
            client.leave(way)
            await target.until_told(GONE, 1)
        assert target.executor.plans == []


@each_adapter
async def test_others_streams_do_not_notice_who_leaves(adapter: Adapter) -> None:
    async with served(adapter, step_time_s=0.001) as target:
        undisturbed = await target.ask("/v1/completions", completion(STAYER, stream=True, max_tokens=150))
        with await target.connect() as other:
            await other.post("/v1/completions", completion(STAYER, stream=True, max_tokens=150))
            for number in range(10):
                with await target.connect() as client:
                    await client.post("/v1/completions", completion(100 + number, stream=True))
                    await client.read_until(b"data: ")
                    client.leave("reset" if number % 2 else "close")
            answer = await other.answer()
        assert texts_of(answer.body) == texts_of(undisturbed.body)
        await target.idle()
        await target.until_told(GONE, 10)


# A client library that gives up


# Hundreds


@each_adapter
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
async def test_a_storm_of_clients_that_leave_leaves_nothing(adapter: Adapter, seed: int) -> None:
    rng = random.Random(seed)
    async with served(adapter, step_time_s=0.001, max_model_len=512, engine={"max_num_seqs": 16}) as target:
        async with Tasks() as tasks:
            storm = [tasks.start(visit(target, random.Random(rng.random()))) for _ in range(200)]
            await target.until(lambda: all(visitor.done() for visitor in storm))
            assert [visitor.exception() for visitor in storm] == [None] * 200
        await target.idle()
        assert await target.metric(GONE) > 50
        assert (await target.ask("/v1/completions", completion(max_tokens=3))).status == 200
        await target.until(lambda: not kept())
        assert await target.metric("aioengine:http_requests_in_progress") == 1  # that one itself


def kept() -> list[Any]:
    """What a request's objects are that are still alive; a cycle would keep them until it is collected."""
    gc.collect()
    kinds = (AsgiExchange, AiohttpExchange, RequestRecord, Stream)
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


async def visit(target: Target, rng: random.Random) -> None:
    """Come, begin something, and leave at a moment that is not chosen."""
    await turns(rng.randrange(2000))
    with await target.connect() as client:
        is_stream, n = rng.random() < 0.5, rng.choice((1, 1, 3))
        prompt: Any = rng.choice(("Once", ["Once", "upon"], "word " * 250, [1, 2, 3]))
        whole = request_of(
            "POST", "/v1/completions", completion(rng.randrange(100), prompt=prompt, stream=is_stream, n=n)
        )
        try:
            size = rng.choice((0, 30, len(whole) - 10, len(whole), len(whole), len(whole)))
            await client.send(whole[:size])
            await turns(rng.randrange(1000))
            if size == len(whole) and is_stream and rng.random() < 0.3:
                head = await client.read_until(b"\r\n\r\n")
                for _ in range(rng.randrange(5) if b" 200 " in head else 0):
                    await client.read_until(b"\n\n")
        except (EOFError, ConnectionError):  # it was refused, or the server was quicker
            pass
        client.leave(rng.choice(("close", "reset")))
