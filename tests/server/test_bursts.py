"""Many clients at once hold the loop no longer than a few: those that ask, and those that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from server.hostile import GONE, Client, completion, heard_errors, request_of, served
from turn_probe import LONGEST_S, TurnProbe

from aioengine.server import ServerConfig

JAPANESE = "昔々あるところに小さな狐と賢い兎が住んでいて毎朝川のほとりで話をしました。"
CONFIG = ServerConfig(max_concurrent_requests=1000)
ROOMY: dict[str, Any] = {"max_model_len": 8192, "num_blocks": 2048, "engine": {"max_waiting": 1000, "max_num_seqs": 64}}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
NESTED = [[[["a"] * 4] * 4] * 16] * 16


def japanese(number: int) -> dict[str, Any]:
    return completion(prompt=f"{number}{JAPANESE * 27}"[:1000], max_tokens=1)


def nested(number: int) -> dict[str, Any]:
    user = {"role": "user", "content": "Hi"}
    return {"messages": [user], "max_tokens": 1, "chat_template_kwargs": {"a": NESTED}}


def refused(number: int) -> dict[str, Any]:
    return completion(top_p=7.0)


async def ask_at_once(port: int, path: str, bodies: list[dict[str, Any]]) -> list[Client]:
    """All requests lie in the server's sockets before it reads the first one."""
    clients = [await Client.connect(port) for _ in bodies]
    requests = [request_of("POST", path, json.dumps(body, ensure_ascii=False).encode()) for body in bodies]
    for client, request in zip(clients, requests, strict=True):
        assert client._socket.send(request) == len(request)
    return clients


@pytest.mark.parametrize(
    ("path", "body", "count", "status"),
    [(COMPLETIONS, japanese, 200, 200), (CHATS, nested, 50, 200), (COMPLETIONS, refused, 400, 400)],
)
async def test_no_turn_is_long_however_many_ask(
    path: str,
    body: Callable[[int], dict[str, Any]],
    count: int,
    status: int,
    record_property: Callable[[str, object], None],
) -> None:
    async with served("serve", CONFIG, **ROOMY) as target:
        await target.ask(CHATS, {**nested(0), "chat_template_kwargs": {}})  # imports what renders chats
        clients = await ask_at_once(target.port, path, [body(i) for i in range(count)])
        with TurnProbe() as probe:
            answers = await asyncio.gather(*[client.answer() for client in clients])
        for client in clients:
            client.leave()
    assert {answer.status for answer in answers} == {status}
    record_property("longest_ms", round(max(probe.cpu_s) * 1e3, 1))
    assert max(probe.cpu_s) < LONGEST_S


async def test_no_turn_is_long_however_many_leave(record_property: Callable[[str, object], None]) -> None:
    count = 600
    async with served("serve", CONFIG, **ROOMY) as target:
        await target.engine.pause()
        clients = await ask_at_once(target.port, COMPLETIONS, [completion(stream=True) for _ in range(count)])
        await target.until(lambda: target.runtime.core.num_unstarted == count)
        with TurnProbe() as probe, heard_errors() as errors:
            for client in clients:
                client.leave("reset")
            await target.until(lambda: target.is_idle)
        assert not errors
        await target.engine.resume()
        await target.until_told(GONE, count)
    record_property("longest_ms", round(max(probe.cpu_s) * 1e3, 1))
    assert max(probe.cpu_s) < LONGEST_S
