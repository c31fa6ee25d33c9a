"""What the official client raises, retries and gives up, and what becomes of its requests in the engine."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import openai
import pytest
from openai import AsyncOpenAI
from server.conftest import NO_TLS, Adapter, all_ended, both_adapters, serving_fake
from waiting import until

from aioengine import Engine
from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import WAIT, EngineClosed, EngineOverloaded
from aioengine.server import ServerConfig
from aioengine.server.errors import api_error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]


class Impatient(AsyncOpenAI):
    """Does at once what the client would do after a while; ``waits`` are those times."""

    waits: list[float]

    def _calculate_retry_timeout(self, *args: Any, **kwargs: Any) -> float:
        self.waits.append(super()._calculate_retry_timeout(*args, **kwargs))
        return 0.0


def finished(engine: Engine) -> dict[str, int]:
    """The choices that have ended, by how."""
    return {reason: count for reason, count in engine.stats().finished.items() if count}


async def test_what_is_not_here_is_not_found_and_hears_what_is(client: AsyncOpenAI) -> None:
    for call, code, said in (
        (client.chat.completions.create(model="gpt-9", messages=HELLO), "model_not_found", "'gpt-9'.*there is 'demo'"),
        (client.completions.create(model="gpt-9", prompt="Hello!"), "model_not_found", "there is 'demo'"),
        (client.models.retrieve("gpt-9"), "model_not_found", "there is 'demo'"),
        (client.embeddings.create(model="demo", input="Hello!"), "unsupported_endpoint", "embedding model"),
        (client.moderations.create(input="Hello!"), "unsupported_endpoint", "another one for that"),
        (client.files.list(), "unsupported_endpoint", "send texts and tools"),
    ):
        with pytest.raises(openai.NotFoundError, match=said) as caught:
            await call
        assert (caught.value.code, caught.value.param) == (code, "model" if code == "model_not_found" else None)


@both_adapters
async def test_the_served_name_is_the_one_to_ask_for(adapter: Adapter) -> None:
    config = ServerConfig(served_model_name=("tiny", "fox/demo"))
    async with serving_fake(adapter, config) as (_, _, client, _):
        assert [model.id async for model in client.models.list()] == ["tiny", "fox/demo"]
        assert (await client.models.retrieve("fox/demo")).id == "fox/demo"
        for name in config.served_model_name:
            answer = await client.completions.create(model=name, prompt="a", max_tokens=1)
            assert answer.model == name
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="demo", prompt="a")


@both_adapters
async def test_a_full_server_is_come_back_to_when_it_said(adapter: Adapter) -> None:
    async with (
        all_ended(),
        serving_fake(adapter, ServerConfig(max_concurrent_requests=1), is_manual=True) as (engine, executor, client, _),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(client.completions.create, model="demo", prompt="a", max_tokens=1))
        await until(lambda: engine.stats().running == 1)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="demo", prompt="b", max_tokens=1)
        assert caught.value.status_code == 503
        assert caught.value.code == "overloaded"
        assert caught.value.type == "server_error"
        assert caught.value.response.headers["retry-after"] == "1"

        inner = openai.DefaultAsyncHttpxClient(verify=NO_TLS)
        async with Impatient(base_url=client.base_url, api_key="x", max_retries=2, http_client=inner) as patient:
            patient.waits = []
            with pytest.raises(openai.InternalServerError):
                await patient.completions.create(model="demo", prompt="c", max_tokens=1)
            assert patient.waits == [1.0, 1.0]
            executor.is_manual = False
            executor.complete()
            await until(lambda: engine.stats().running == 0)
            answer = await patient.completions.create(model="demo", prompt="c", max_tokens=1, seed=1)
            assert answer.choices[0].finish_reason == "length"


@both_adapters
async def test_a_full_engine_says_so_before_it_reads_the_prompt(adapter: Adapter) -> None:
    config = ServerConfig(max_concurrent_requests=99)
    async with (
        serving_fake(adapter, config, is_manual=True, max_num_seqs=1, max_waiting=1) as (engine, executor, client, _),
        anyio.create_task_group() as tasks,
    ):
        ask = partial(client.chat.completions.create, model="demo", messages=HELLO, max_tokens=1, seed=1)
        tasks.start_soon(ask)
        await until(lambda: engine.stats().running == 1)
        tasks.start_soon(ask)
        await until(lambda: engine.stats().waiting == 1)
        with pytest.raises(openai.InternalServerError) as caught:
            # No model of this name, no such field: what is wrong with it was not looked at.
            await client.chat.completions.create(model="gpt-9", messages=HELLO, extra_body={"zzz": 1})
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        executor.is_manual = False
        executor.complete()
        await until(lambda: finished(engine) == {"length": 2})


@both_adapters
async def test_a_failed_step_is_an_error_of_the_server(adapter: Adapter) -> None:
    async with serving_fake(adapter) as (_, executor, client, _):
        executor.make_step_fail(1, RuntimeError("secret of the device"))
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="demo", prompt="a", max_tokens=2, seed=1)
        assert (caught.value.status_code, caught.value.code) == (500, "step_failed")
        assert "secret" not in caught.value.response.text
        answer = await client.completions.create(model="demo", prompt="a", max_tokens=2, seed=1)
        assert answer.choices[0].finish_reason == "length"


@both_adapters
async def test_a_step_that_fails_amid_a_stream_ends_it_with_an_error(adapter: Adapter) -> None:
    async with serving_fake(adapter) as (_, executor, client, _):
        executor.make_step_fail(5, RuntimeError("secret of the device"))
        chunks = []

        async def read() -> None:
            options: dict[str, Any] = {"max_tokens": 9, "logprobs": True, "extra_body": {"ignore_eos": True}}
            async for chunk in await client.chat.completions.create(
                model="demo", messages=HELLO, stream=True, **options
            ):
                chunks.append(chunk)

        with pytest.raises(openai.APIError) as caught:
            await read()
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert {choice.finish_reason for choice in choices} == {None}
        assert sum(len(choice.logprobs.content or ()) for choice in choices if choice.logprobs is not None) == 5
        assert (caught.value.code, caught.value.type) == ("step_failed", "server_error")
        assert "secret" not in str(caught.value.body)


@both_adapters
async def test_a_lost_device_ends_everything_but_what_tells_of_it(adapter: Adapter) -> None:
    async with serving_fake(adapter) as (_, executor, client, http):
        executor.make_step_fail(3, DeviceLost("secret of the device"))

        async def read() -> None:
            options: dict[str, Any] = {"max_tokens": 9, "stream": True, "extra_body": {"ignore_eos": True}}
            async for _ in await client.completions.create(model="demo", prompt="a", **options):
                pass  # to the step that fails: a token drawn without a seed may be one that ends it before

        with pytest.raises(openai.APIError) as caught:
            await read()
        assert caught.value.code == "engine_dead"
        for path, body in {
            "/v1/completions": {"prompt": "a"},
            "/v1/chat/completions": {"messages": HELLO},
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [5]},
            "/v1/models": None,
            "/v1/models/demo": None,
            "/load": None,
            "/version": None,
            "/health": None,
        }.items():
            answer = await (http.get(path) if body is None else http.post(path, json=body))
            assert answer.status_code == 503, path
            assert "secret" not in answer.text
            if path != "/health":
                assert answer.json()["error"]["code"] == "engine_dead"
                assert answer.json()["error"]["type"] == "server_error"
        assert (await http.get("/health")).json()["status"] == "DEAD"
        assert (await http.get("/metrics")).status_code == 200


@both_adapters
async def test_a_client_passes_over_what_only_says_that_the_server_is_there(adapter: Adapter) -> None:
    async with (
        serving_fake(adapter, ServerConfig(keepalive_s=0.02), is_manual=True) as (engine, executor, client, http),
        anyio.create_task_group() as tasks,
    ):
        texts: list[str] = []

        async def ask() -> None:
            async for chunk in await client.completions.create(model="demo", prompt="a", max_tokens=1, stream=True):
                texts.append(chunk.choices[0].text)

        tasks.start_soon(ask)
        asked = {"prompt": "a", "max_tokens": 1, "stream": True}
        async with http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith(": "):
                pass
            await until(lambda: engine.stats().running + engine.stats().waiting == 2)
            executor.is_manual = False
            while executor.unfinished:
                executor.complete()
                await anyio.lowlevel.checkpoint()
            assert [line async for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    assert len(texts) == 1


def shaped(schema: Any) -> Any:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (shaped({"type": "array", "uniqueItems": True}), "response_format"),
        (shaped({"type": "zorp"}), "response_format"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_names_what_the_client_has_sent_and_nothing_of_python(
    http: httpx.AsyncClient, fields: Any, param: str, stream: bool
) -> None:
    answer = await http.post("/v1/chat/completions", json={"messages": HELLO, "stream": stream, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(param)
    assert not re.search(r"structured: |extra_args|Json\(|lenient|Engine\(|on_full|=True", error["message"])
    if "uniqueItems" in error["message"]:
        assert error["message"].endswith('; "strict": false passes it over')


async def test_a_full_engine_says_when_to_come_again_and_nothing_of_python() -> None:
    full = EngineOverloaded("full; try again later", retry_after_s=1.0).with_hint(WAIT)
    assert str(full) == "full; try again later; or wait with on_full='wait'"
    told = api_error_of(full)
    assert (told.status, told.message) == (503, "full; try again later")
    with pytest.raises(EngineClosed, match=r"has not been started; use `async with Engine\(...\)`") as closed:
        await Engine().drain()
    assert api_error_of(closed.value).message == "no requests are taken now: the engine has not been started"
