"""What clients hear of an engine that does not serve: not yet, no more, not now, or never again."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest
from server.conftest import Adapter, api_of, app_of, both_adapters, fake_engine, plain_client, serving_app, serving_fake
from waiting import Tasks, until

from aioengine import Engine
from aioengine.models.folder import ModelFolder
from aioengine.server import ServerConfig, api, create_app, start_server
from aioengine.server.api import Api
from doubles.fake_executor import FakeExecutor

pytestmark = pytest.mark.asyncio(loop_scope="module")

POSTS: dict[str, Any] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
TELLING = ["/v1/models", "/v1/models/demo", "/load", "/version"]


async def check_unavailable(http: httpx.AsyncClient, code: str = "unavailable") -> None:
    """Everything that needs the engine is refused, and says when to come again."""
    for path, body in POSTS.items():
        for stream in (False, True):
            given = {**body, "stream": stream} if path.startswith("/v1") else body
            check_503(await http.post(path, json=given), code)
    for path in TELLING:
        check_503(await http.get(path), code)
    health = await http.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "DEAD"
    assert (await http.get("/")).status_code == 200


def check_503(answer: httpx.Response, code: str) -> None:
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", code, None)
    assert answer.headers["x-request-id"]
    if code == "unavailable":
        assert int(answer.headers["retry-after"]) >= 1


@both_adapters
async def test_an_engine_is_served_before_it_is_started_and_after_it_is_closed(
    adapter: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(seed=1, executor=FakeExecutor(vocab_size=2048))
    async with serving_app(app_of(engine, adapter)) as url, plain_client(url) as http:
        await check_unavailable(http)
        told = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert [("503" in said, "has not been started" in said) for said in told] == [(True, True)], "once"
        metrics = await http.get("/metrics")
        assert metrics.status_code == 200
        assert "vllm:num_requests_running" not in metrics.text
        assert re.search("^process_resident_memory_bytes [1-9]", metrics.text, re.MULTILINE)
        async with engine:
            for path, body in POSTS.items():
                assert (await http.post(path, json=body)).status_code == 200
            for path in [*TELLING, "/metrics", "/health"]:
                assert (await http.get(path)).status_code == 200
            assert "vllm:num_requests_running" in (await http.get("/metrics")).text
        await check_unavailable(http)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds each start, in its thread, until this is set."""
    gate = threading.Event()
    resolve = ModelFolder.resolve

    def gated(*args: Any, **options: Any) -> ModelFolder:
        assert gate.wait(30)
        return resolve(*args, **options)

    monkeypatch.setattr(ModelFolder, "resolve", gated)
    yield gate
    gate.set()


@contextlib.asynccontextmanager
async def starting(
    adapter: Adapter, config: ServerConfig | None = None, *, model: str | None = None
) -> AsyncIterator[tuple[Engine, Api, httpx.AsyncClient, Tasks]]:
    """An engine that is served while it starts, which `gate` holds;
    its API, a client of it, and tasks that end with it."""
    engine = Engine(model, seed=1, executor=FakeExecutor(vocab_size=2048))
    app = app_of(engine, adapter, config)
    async with serving_app(app) as url, plain_client(url) as http, Tasks() as tasks:
        tasks.start(engine.__aenter__())
        await until(lambda: engine._runtime is not None)
        yield engine, api_of(app), http, tasks
        await engine.aclose()


@both_adapters
async def test_what_is_asked_while_the_engine_starts_is_answered_when_it_has(
    adapter: Adapter, gate: threading.Event
) -> None:
    async with starting(adapter) as (_, _, http, tasks):
        streams = [(path, {**body, "stream": True}) for path, body in POSTS.items() if path.startswith("/v1")]
        answers = [tasks.start(http.post(path, json=body)) for path, body in [*POSTS.items(), *streams]]
        for path in ("/v1/models", "/load"):
            check_503(await http.get(path), "unavailable")
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "STARTING")
        assert "aioengine:engine_up 0.0" in strip_labels((await http.get("/metrics")).text)
        assert not any(answer.done() for answer in answers)
        gate.set()
        assert {(await answer).status_code for answer in answers} == {200}
        assert (await http.get("/health")).json()["status"] == "ALIVE"


def strip_labels(metrics: str) -> str:
    return re.sub(r"\{[^}]*\}", "", metrics)


@both_adapters
async def test_what_waits_for_a_start_is_bounded_in_number_and_time(
    adapter: Adapter, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with starting(adapter, ServerConfig(max_concurrent_requests=1)) as (engine, server, http, tasks):
        tasks.start(http.post("/v1/completions", json=POSTS["/v1/completions"]))
        await until(lambda: server._num_open == 1)
        check_503(await http.post("/tokenize", json=POSTS["/tokenize"]), "overloaded")
        gate.set()
        await until(lambda: engine.health().status == "ALIVE")
    gate.clear()
    monkeypatch.setattr(api, "START_TIMEOUT_S", 0.001)
    async with starting(adapter) as (engine, _, http, _):
        answer = await http.post("/v1/completions", json=POSTS["/v1/completions"])
        check_503(answer, "unavailable")
        assert "still starting" in answer.json()["error"]["message"]
        gate.set()
        await until(lambda: engine.health().status == "ALIVE")


@both_adapters
async def test_who_waits_for_a_start_that_fails_hears_that_it_did(
    adapter: Adapter, gate: threading.Event, tmp_path: Path
) -> None:
    async with starting(adapter, model=str(tmp_path / "absent")) as (_, server, http, tasks):
        answers = [tasks.start(http.post(path, json=body)) for path, body in POSTS.items()]
        await until(lambda: server._num_open == len(POSTS))
        gate.set()
        for answer in [await asked for asked in answers]:
            check_503(answer, "unavailable")
            assert answer.json()["error"]["message"] == "the engine could not be started"
        await check_unavailable(http)


async def test_a_server_may_begin_before_its_engine_has(gate: threading.Event) -> None:
    engine = Engine(seed=1, executor=FakeExecutor(vocab_size=2048))
    async with Tasks() as tasks:
        tasks.start(engine.__aenter__())
        await until(lambda: engine._runtime is not None)
        async with await start_server(engine, port=0) as server, plain_client(server.url) as http:
            assert (await http.get("/health")).json()["status"] == "STARTING"
            gate.set()
            assert (await http.post("/tokenize", json=POSTS["/tokenize"])).status_code == 200
        await engine.aclose()


@both_adapters
async def test_a_closing_engine_ends_its_streams_with_an_error(adapter: Adapter) -> None:
    async with serving_fake(adapter, is_manual=True) as (engine, executor, _, http):
        async with Tasks() as tasks:
            asked = [
                tasks.start(http.post("/v1/completions", json={"prompt": "a", "stream": on})) for on in (False, True)
            ]
            await until(lambda: engine.stats().running + engine.stats().waiting == 2)
            executor.is_manual = False
            await engine.aclose()
            whole, stream = await asked[0], await asked[1]
        check_503(whole, "unavailable")
        assert stream.status_code == 200
        assert '"code":"unavailable"' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")


@both_adapters
async def test_a_draining_engine_takes_nothing_new_and_ends_what_it_has(adapter: Adapter) -> None:
    async with serving_fake(adapter, is_manual=True) as (engine, executor, _, http), Tasks() as tasks:
        asking = tasks.start(http.post("/v1/completions", json=POSTS["/v1/completions"]))
        await until(lambda: engine.stats().running == 1)
        tasks.start(engine.drain())
        await anyio.lowlevel.checkpoint()
        for path in ("/v1/completions", "/v1/chat/completions"):
            check_503(await http.post(path, json=POSTS[path]), "unavailable")
        assert (await http.get("/health")).status_code == 200
        executor.is_manual = False
        executor.complete()
        assert (await asking).status_code == 200
        await engine.resume()
        assert (await http.post("/v1/completions", json=POSTS["/v1/completions"])).status_code == 200


async def test_a_draining_server_is_unhealthy_and_takes_no_work() -> None:
    async with fake_engine() as (engine, _):
        app = create_app(engine)
        async with serving_app(app) as url, plain_client(url) as http:
            app.state.api.is_draining = True
            for path, body in POSTS.items():
                answer = await http.post(path, json=body)
                check_503(answer, "unavailable")
                assert answer.headers["connection"] == "close"
            health = await http.get("/health")
            assert health.status_code == 503
            assert health.json()["is_draining"] is True
            assert (await http.get("/metrics")).status_code == 200
            assert (await http.post("/abort", json={"request_id": "a"})).status_code == 200


@both_adapters
async def test_a_paused_engine_is_healthy_and_answers_later(adapter: Adapter) -> None:
    async with serving_fake(adapter) as (engine, _, _, http), Tasks() as tasks:
        await engine.pause()
        asking = tasks.start(http.post("/v1/completions", json=POSTS["/v1/completions"]))
        await until(lambda: engine.stats().waiting == 1)
        health = await http.get("/health")
        assert (health.status_code, health.json()["is_paused"]) == (200, True)
        assert not asking.done()
        await engine.resume()
        assert (await asking).status_code == 200


@both_adapters
async def test_a_device_that_hangs_is_unhealthy(adapter: Adapter) -> None:
    async with (
        serving_fake(adapter, is_manual=True, stall_after_s=0.05) as (engine, executor, _, http),
        Tasks() as tasks,
    ):
        tasks.start(http.post("/v1/completions", json=POSTS["/v1/completions"]))
        await until(lambda: engine.health().status == "STALLED")
        health = await http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "STALLED"
        assert health.json()["step_age_s"] >= 0.05
        executor.is_manual = False
        executor.complete()
        await until(lambda: engine.stats().running == 0)
        assert (await http.get("/health")).status_code == 200
