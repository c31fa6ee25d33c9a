"""``python examples/...``: each app starts, answers, and ends cleanly on Ctrl-C."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest
from examples.conftest import NO_TLS, Process, until

SUM = {"messages": [{"role": "user", "content": "What is 8 + 7?"}]}
QUESTION = {"question": "What is 8 + 7?"}
PATHS = {
    "starlette_app": "/ai/v1/chat/completions",
    "fastapi_dependency": "/ai/v1/chat/completions",
    "aiohttp_app": "/ai/v1/chat/completions",
    "websocket_chat": "/",
    "flask_app": "/ask",
}
WHERE = re.compile(r"[Rr]unning on (http://127\.0\.0\.1:\d+)")


@pytest.mark.nightly
async def test_each_serves_and_ends_on_ctrl_c(run: Callable[..., Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL")  # as a reader runs it
    # All at once: what takes the time is that each of them imports torch.
    processes = {name: run(name) for name in PATHS}
    for name, process in processes.items():
        await until(lambda process=process: WHERE.search(process.output()) or not process.is_running())
        where = WHERE.search(process.output())
        assert where is not None, process.output()
        async with httpx.AsyncClient(base_url=where[1], verify=NO_TLS, timeout=60.0, trust_env=False) as http:
            path, body = PATHS[name], QUESTION if name == "flask_app" else SUM
            answer = await (http.get("/") if path == "/" else http.post(path, json=body))
        assert answer.status_code == 200, process.output()
        process.interrupt()
    for process in processes.values():
        assert await process.ended() == 0, process.output()
        assert "Traceback" not in process.output()
        assert "Warning" not in process.output()
