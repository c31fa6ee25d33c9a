"""Of which session a request is, over HTTP: by OpenAI's ``prompt_cache_key``, or by a header."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from aioengine import Engine
from aioengine.scheduler.sequence import MAX_SESSION_CHARS, Request, Sequence
from aioengine.server import create_app
from doubles.fake_executor import FakeExecutor

HELLO = [{"role": "user", "content": "Once"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "demo", "prompt": "Once", "max_tokens": 2},
    "/v1/chat/completions": {"model": "demo", "messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"model": "demo", "input": "Once", "max_output_tokens": 2},
    "/v1/messages": {"model": "demo", "messages": HELLO, "max_tokens": 2},
}


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, ""),
        ({}, {"prompt_cache_key": ""}, ""),
        ({}, {"prompt_cache_key": "chat-7"}, "chat-7"),
        ({"X-Session-ID": "chat-8"}, {}, "chat-8"),
        ({"X-Session-ID": "chat-8"}, {"prompt_cache_key": "chat-7"}, "chat-7"),
        ({}, {"prompt_cache_key": "x" * 1000}, "x" * MAX_SESSION_CHARS),
        ({"X-Session-ID": "x" * 1000}, {}, "x" * MAX_SESSION_CHARS),
    ],
)
async def test_a_request_is_of_the_session_that_its_body_or_a_header_names(
    headers: dict[str, str], body: dict[str, Any], session: str
) -> None:
    async with Engine(executor=FakeExecutor(vocab_size=2048)) as engine:
        core = engine._runtime.core  # type: ignore[union-attr]
        seen: list[Request] = []
        make_sequence = core.make_sequence

        def watched(request: Request) -> Sequence:
            seen.append(request)
            return make_sequence(request)

        core.make_sequence = watched  # type: ignore[method-assign]
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, whole in BODIES.items():
                answer = await client.post(path, json={**whole, **body}, headers=headers)
                assert answer.status_code == 200, answer.text
                assert seen.pop().session == session, path
