"""The tenant and the session of a request over HTTP: from its body, or from a header."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from aioengine import Engine
from aioengine.scheduler.sequence import MAX_SESSION_CHARS, Request, Sequence
from aioengine.server import ServerConfig, create_app
from doubles.fake_executor import FakeExecutor

HELLO = [{"role": "user", "content": "Once"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "Once", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
}
BY_HEADER = "X-Tenant"


@pytest.mark.parametrize(
    ("header", "headers", "body", "tenant", "session"),
    [
        (None, {}, {}, "", ""),
        (None, {"X-Tenant": "red"}, {"tenant": "blue"}, "blue", ""),
        (BY_HEADER, {"X-Tenant": "red"}, {"tenant": "blue"}, "red", ""),
        (BY_HEADER, {"x-tenant": "red"}, {}, "red", ""),
        (BY_HEADER, {}, {"tenant": "blue"}, "", ""),
        (None, {}, {"prompt_cache_key": ""}, "", ""),
        (None, {}, {"prompt_cache_key": "chat-7"}, "", "chat-7"),
        (None, {"X-Session-ID": "chat-8"}, {}, "", "chat-8"),
        (None, {"X-Session-ID": "chat-8"}, {"prompt_cache_key": "chat-7"}, "", "chat-7"),
        (None, {}, {"prompt_cache_key": "x" * 1000}, "", "x" * MAX_SESSION_CHARS),
        (None, {"X-Session-ID": "x" * 1000}, {}, "", "x" * MAX_SESSION_CHARS),
    ],
)
async def test_a_request_is_of_the_tenant_and_the_session_that_its_body_or_a_header_names(
    header: str | None, headers: dict[str, str], body: dict[str, Any], tenant: str, session: str
) -> None:
    async with Engine(executor=FakeExecutor(vocab_size=2048), scheduler="fair") as engine:
        core = engine._runtime.core  # type: ignore[union-attr]
        seen: list[Request] = []
        make_sequence = core.make_sequence

        def watched(request: Request) -> Sequence:
            seen.append(request)
            return make_sequence(request)

        core.make_sequence = watched  # type: ignore[method-assign]
        transport = httpx.ASGITransport(create_app(engine, ServerConfig(tenant_header=header)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, whole in BODIES.items():
                answer = await client.post(path, json={**whole, **body}, headers=headers)
                assert answer.status_code == 200, answer.text
                request = seen.pop()
                assert (request.tenant or "", request.session) == (tenant, session), path
