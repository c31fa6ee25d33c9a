"""For whom a request is, over HTTP: by the body, or by a header that a proxy sets."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from aioengine import Engine
from aioengine.scheduler.waiting_queue import TenantQueues
from aioengine.server import ServerConfig, create_app
from doubles.fake_executor import FakeExecutor

BODY = {"model": "demo", "prompt": "Once", "max_tokens": 2}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("header", "headers", "body", "tenant"),
    [
        (None, {}, {}, ""),
        (None, {"X-Tenant": "red"}, {"tenant": "blue"}, "blue"),
        ("X-Tenant", {"X-Tenant": "red"}, {"tenant": "blue"}, "red"),
        ("X-Tenant", {"x-tenant": "red"}, {}, "red"),
        ("X-Tenant", {}, {"tenant": "blue"}, ""),
    ],
)
async def test_the_header_alone_counts_where_there_is_one(
    header: str | None, headers: dict[str, str], body: dict[str, Any], tenant: str
) -> None:
    async with Engine(executor=FakeExecutor(vocab_size=2048), scheduler="fair") as engine:
        app = create_app(engine, ServerConfig(tenant_header=header))
        waiting = engine._runtime.core.scheduler.waiting  # type: ignore[union-attr]
        assert isinstance(waiting, TenantQueues)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, whole in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
                waiting.served.clear()
                answer = await client.post(path, json={**whole, **body}, headers=headers)
                assert answer.status_code == 200, answer.text
                assert list(waiting.served) == [tenant]
