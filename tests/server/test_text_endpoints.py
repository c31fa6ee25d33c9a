"""What is there beside generating: tokens and texts, aborting, and what tells of the server itself."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from server.conftest import Adapter, both_adapters, events_of, on_both_adapters, serving_fake
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from waiting import Tasks, until

import aioengine
from aioengine import Engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello! Who are you?"}]
TEXTS = ["", "Once upon a time", "naïve café 🦊 日本", "\x00\n\t ", "<|im_start|>user", " a" * 3000]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:12]))
async def test_a_text_becomes_the_engines_tokens_and_a_text_again(
    engine: Engine, http: httpx.AsyncClient, text: str
) -> None:
    answer = await http.post("/tokenize", json={"model": "demo", "prompt": text})
    ids = await engine.tokenize(text)
    told = {"count": len(ids), "max_model_len": engine.info.max_model_len, "token_strs": None, "tokens": ids}
    assert answer.json() == told
    without = await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    assert without.json()["tokens"] == await engine.tokenize(text, add_special_tokens=False)
    back = await http.post("/detokenize", json={"model": "demo", "tokens": ids})
    assert back.json() == {"prompt": text}


async def test_tokens_are_told_as_the_vocabulary_writes_them(engine: Engine, http: httpx.AsyncClient) -> None:
    text = "naïve 🦊 fox"
    told = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert len(told["token_strs"]) == told["count"]
    assert told["token_strs"] == engine.get_tokenizer().convert_ids_to_tokens(told["tokens"])
    assert "".join(told["token_strs"]).startswith("na")
    assert "Ġ" in "".join(told["token_strs"]), "a space, as byte-level vocabularies have it"


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ],
    ids=",".join,
)
async def test_a_chat_becomes_tokens_by_its_template(
    engine: Engine, http: httpx.AsyncClient, told: dict[str, Any]
) -> None:
    answer = await http.post("/tokenize", json={"messages": HELLO, **told})
    kwargs = told.get("chat_template_kwargs", told)
    assert answer.json()["tokens"] == await engine.tokenize(HELLO, chat_template_kwargs=kwargs or None)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": [5]}, "prompt", "invalid_type"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"prompt": "a" * 100_000, "return_token_strs": True}, "return_token_strs", "invalid_value"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "invalid_value"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, "model", "model_not_found"),
        ("/detokenize", {"tokens": "a"}, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [2048]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [5] * 70_000}, "tokens", "context_length_exceeded"),
        ("/abort", {"request_ids": "a"}, "request_ids", "invalid_type"),
        ("/abort", {"request_ids": []}, "request_id", "missing_required_parameter"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, path: str, body: Any, param: str, code: str) -> None:
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404 if param == "model" else 400, param, code)


@both_adapters
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prefix", "body"),
    [
        ("/v1/completions", "cmpl-", {"prompt": "a", "max_tokens": 99}),
        ("/v1/chat/completions", "chatcmpl-", {"messages": HELLO}),
    ],
)
async def test_a_request_is_aborted_by_its_id(
    adapter: Adapter, stream: bool, path: str, prefix: str, body: dict[str, Any]
) -> None:
    in_header = {"headers": {"x-request-id": "cmpl-a"}, "json": {**body, "stream": stream}}
    in_body = {"json": {**body, "stream": stream, "request_id": "cmpl-a"}}
    names = ({"request_id": "cmpl-a"}, {"request_id": f"{prefix}cmpl-a"}, {"request_ids": ["other", f"{prefix}cmpl-a"]})
    async with serving_fake(adapter, is_manual=True) as (engine, executor, _, http):
        for asked, named in itertools.product((in_header, in_body), names):
            async with Tasks() as tasks:
                asking = tasks.start(http.post(path, **asked))
                await until(lambda: engine.stats().running == 1)
                told = await http.post("/abort", json=named)
                assert told.status_code == 200
                assert told.json() == {"request_ids": named.get("request_ids", [named.get("request_id")])}
                while executor.unfinished:
                    executor.complete()
                    await until(lambda: not executor.unfinished or not executor.unfinished[0].is_done)
                answer = await asking
            assert answer.status_code == 200
            last = events_of(answer.content)[-1] if stream else answer.json()
            assert (last["choices"][0]["finish_reason"], last["id"]) == ("abort", f"{prefix}cmpl-a")
            await until(lambda: engine.stats().running == 0)


async def test_version_and_health_of_an_engine_that_is_alive(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": aioengine.__version__}
    answer = await http.get("/health")
    assert answer.status_code == 200
    still = dict.fromkeys(("is_draining", "is_paused", "is_sleeping"), False)
    assert answer.json() == {"status": "ALIVE", "running": 0, "waiting": 0, **still}


@both_adapters
async def test_the_load_is_what_is_being_served(adapter: Adapter) -> None:
    async with (
        serving_fake(adapter, is_manual=True, max_num_seqs=1) as (engine, executor, _, http),
        anyio.create_task_group() as tasks,
    ):
        assert (await http.get("/load")).json() == {
            "server_load": 0, "running": 0, "waiting": 0, "kv_cache_usage": 0.0
        }  # fmt: skip
        for _ in range(3):
            tasks.start_soon(partial(http.post, "/v1/completions", json={"prompt": "a", "max_tokens": 1}))
        await until(lambda: engine.stats().running + engine.stats().waiting == 3)
        told = (await http.get("/load")).json()
        assert (told["server_load"], told["running"], told["waiting"]) == (3, 1, 2)
        assert told["kv_cache_usage"] > 0
        executor.is_manual = False
        executor.complete()


@on_both_adapters
async def test_a_request_id_is_kept_and_what_is_none_is_made_anew(http: httpx.AsyncClient) -> None:
    for path in ("/version", "/nothing", "/health", "/"):
        for given in ("a", "!#$%&'*+-.^_`|~:/?@", "x" * 128):
            answer = await http.get(path, headers={"x-request-id": given})
            assert answer.headers["x-request-id"] == given
    made = []
    for given in (None, b"", b"x" * 129, b"a b", b"\xc3\xa9", b"\xff"):
        answer = await http.get("/version", headers={} if given is None else {b"x-request-id": given})
        assert answer.status_code == 200
        made.append(answer.headers["x-request-id"])
    assert len(set(made)) == len(made)
    assert all(name.startswith("req-") and name.isascii() for name in made)


@both_adapters
async def test_a_panic_of_the_tokenizer_is_an_error_as_any_other(adapter: Adapter) -> None:
    async with serving_fake(adapter) as (engine, _, _, client):
        assert engine._runtime is not None
        tokenizer = engine._runtime.require_tokenizer()
        tokenizer.backend.pre_tokenizer = Split(Regex(r"(\w+\s*)+\d$"), "isolated")
        text = {"model": "demo", "prompt": "hello " * 99}
        for path, body in (
            ("/v1/completions", text),
            ("/tokenize", text),
            ("/v1/completions", {**text, "prompt": "a fox", "bad_words": ["hello " * 99]}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            assert "cannot encode this text" in answer.json()["error"]["message"]
        answer = await client.post("/v1/completions", json={"model": "demo", "prompt": "a fox", "max_tokens": 1})
        assert answer.status_code == 200


async def test_a_request_id_of_the_body_is_the_requests_id_where_no_header_has_one() -> None:
    text = {"prompt": [1, 2, 3], "max_tokens": 3}
    async with serving_fake("starlette") as (*_, client):
        alone = await client.post("/v1/completions", json={**text, "request_id": "mine"})
        both = await client.post(
            "/v1/completions", json={**text, "request_id": "mine"}, headers={"x-request-id": "of-the-header"}
        )
        bad = await client.post("/v1/completions", json={**text, "request_id": "two\nlines"})
    assert (alone.json()["id"], alone.headers["x-request-id"]) == ("cmpl-mine", "mine")
    assert (both.json()["id"], both.headers["x-request-id"]) == ("cmpl-mine", "of-the-header")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "request_id")


async def test_a_prompt_that_turns_out_too_long_takes_those_before_it_along() -> None:
    async with serving_fake("starlette", is_manual=True) as (engine, executor, _, client):
        body = {"prompt": ["a", "a b " * engine.info.max_model_len], "max_tokens": 9}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        for step in list(executor.unfinished):
            step.complete()
        await until(lambda: engine.stats().running == 0)
