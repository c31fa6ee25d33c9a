"""Fields that vLLM's server has beside OpenAI's: what they ask for is in the answer, whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from server.conftest import (
    events_of,
    fake_engine,
    on_both_adapters,
    openai_client,
    plain_client,
    serving,
)

from aioengine import Engine
from aioengine.outputs import TokenLogprobs
from aioengine.server import ServerConfig
from aioengine.server.generation import MAX_CUT_IDS, MAX_TEMPLATE_CHARS

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOX = "Once upon a time, there was a fox"
HELLO: list[Any] = [{"role": "user", "content": "Hello! Who are you?"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PATHS: dict[str, tuple[dict[str, Any], Any]] = {
    CHAT: ({"messages": HELLO}, HELLO),
    COMPLETION: ({"prompt": FOX}, FOX),
}
both_paths = pytest.mark.parametrize("path", PATHS)


async def ask(http: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    answer = await http.post(path, json={**PATHS[path][0], **fields})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def refused(http: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    answer = await http.post(path, json={**PATHS[path][0], **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# Log-probabilities


def check_prompt_logprobs(told: list[Any], expected: list[TokenLogprobs | None], num_top: int) -> None:
    """Of each position as many as were asked for, and the prompt's own token first."""
    assert len(told) == len(expected)
    assert told[0] is expected[0] is None
    for position, line in zip(told[1:], expected[1:], strict=True):
        assert line is not None
        own = next(iter(line))
        assert list(position) == [str(i) for i, entry in line.items() if i == own or entry.rank <= num_top]
        for token_id, entry in position.items():
            wanted = line[int(token_id)]
            assert (entry["rank"], entry["decoded_token"]) == (wanted.rank, wanted.decoded_token)
            assert entry["logprob"] == pytest.approx(wanted.logprob, abs=1e-4)


@on_both_adapters
@pytest.mark.parametrize("num_top", [0, 3])
async def test_the_prompts_log_probabilities_are_in_the_body(
    engine: Engine, http: httpx.AsyncClient, num_top: int
) -> None:
    for path, (_, prompt) in PATHS.items():
        expected = await engine.generate(prompt, max_tokens=2, seed=1, prompt_logprobs=num_top)
        told = await ask(http, path, max_tokens=2, seed=1, prompt_logprobs=num_top)
        of = told if path == CHAT else told["choices"][0]
        check_prompt_logprobs(of["prompt_logprobs"], expected.prompt_logprobs or [], num_top)


async def test_an_echo_and_the_body_may_have_different_numbers_of_them(engine: Engine, http: httpx.AsyncClient) -> None:
    expected = await engine.generate(FOX, max_tokens=2, seed=1, prompt_logprobs=4)
    for num_top, num_prompt_top in ((1, 4), (4, 1)):
        asked = {"logprobs": num_top, "prompt_logprobs": num_prompt_top, "echo": True}
        (choice,) = (await ask(http, COMPLETION, max_tokens=2, seed=1, **asked))["choices"]
        check_prompt_logprobs(choice["prompt_logprobs"], expected.prompt_logprobs or [], num_prompt_top)
        assert max(len(top) for top in choice["logprobs"]["top_logprobs"] if top) <= num_top + 1
        assert choice["text"].startswith(FOX)


@both_paths
async def test_the_prompts_log_probabilities_are_not_in_streams(http: httpx.AsyncClient, path: str) -> None:
    for num_top in (0, 2):
        error = await refused(http, path, prompt_logprobs=num_top, stream=True)
        assert (error["param"], error["code"]) == ("prompt_logprobs", "invalid_value")
        assert "not in streams" in error["message"]
    for num_top in (-1, 1000):
        assert (await refused(http, path, prompt_logprobs=num_top))["param"] == "prompt_logprobs"


@both_paths
async def test_tokens_may_be_named_by_their_ids(engine: Engine, http: httpx.AsyncClient, path: str) -> None:
    prompt = PATHS[path][1]
    expected = (await engine.generate(prompt, max_tokens=6, seed=1, logprobs=2)).outputs[0]
    asks = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    asked: Any = {**asks, "max_tokens": 6, "seed": 1}
    named, plain = [await ask(http, path, **asked, return_tokens_as_token_ids=is_by_ids) for is_by_ids in (True, False)]
    streamed = await http.post(
        path, json={**PATHS[path][0], **asked, "return_tokens_as_token_ids": True, "stream": True}
    )
    choices = [choice for event in events_of(streamed.content) for choice in event["choices"] if choice["logprobs"]]
    names = [f"token_id:{token_id}" for token_id in expected.token_ids]
    if path == CHAT:
        content = named["choices"][0]["logprobs"]["content"]
        assert [position["token"] for position in content] == names
        assert [position["token"] for part in choices for position in part["logprobs"]["content"]] == names
        for position, line in zip(content, expected.logprobs or (), strict=True):
            likeliest = sorted((entry.rank, token_id) for token_id, entry in line.items() if entry.rank <= 2)
            assert [top["token"] for top in position["top_logprobs"]] == [f"token_id:{i}" for _, i in likeliest]
        of_plain = plain["choices"][0]["logprobs"]["content"]
        assert [position["bytes"] for position in content] == [position["bytes"] for position in of_plain]
    else:
        columns = named["choices"][0]["logprobs"]
        assert columns["tokens"] == names == [name for part in choices for name in part["logprobs"]["tokens"]]
        assert [set(top) for top in columns["top_logprobs"]] == [
            {f"token_id:{token_id}" for token_id in line} for line in expected.logprobs or ()
        ]
        assert columns["text_offset"] == plain["choices"][0]["logprobs"]["text_offset"]


async def test_a_server_may_name_tokens_by_their_ids_unless_a_request_says_otherwise(engine: Engine) -> None:
    config = ServerConfig(return_tokens_as_token_ids=True)
    async with serving(engine, "starlette", config) as served, plain_client(served.url) as http:
        asked: Any = {"max_tokens": 3, "logprobs": 0}
        by_id = (await ask(http, COMPLETION, **asked))["choices"][0]["logprobs"]["tokens"]
        by_text = (await ask(http, COMPLETION, **asked, return_tokens_as_token_ids=False))["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for name in by_id)
    assert not any(name.startswith("token_id:") for name in by_text["tokens"])


SHARP: dict[str, Any] = {"seed": 2, "temperature": 0.5, "top_p": 0.8, "max_tokens": 30}


@both_paths
async def test_modes_of_log_probabilities_by_both_names_and_no_others(http: httpx.AsyncClient, path: str) -> None:
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    told = {
        mode: (await ask(http, path, **SHARP, **logprobs, logprobs_mode=mode))["choices"][0]["logprobs"]
        for mode in (None, "raw", "raw_logprobs", "processed", "processed_logprobs")
    }
    assert told[None] == told["raw"] == told["raw_logprobs"]
    assert told["processed"] == told["processed_logprobs"] != told["raw"]
    error = await refused(http, path, max_tokens=1, logprobs_mode="processed_logits")
    assert error["param"] == "logprobs_mode"
    assert "choose one of" in error["message"]


@both_paths
async def test_named_tokens_have_their_log_probabilities_at_each_position(
    engine: Engine, http: httpx.AsyncClient, path: str
) -> None:
    """Instead of the likeliest ones, beside the sampled one; whole and streamed."""
    named = [7, 300, 41]
    asks: Any = {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5}
    asked: Any = {**asks, "logprob_token_ids": named, "max_tokens": 4, "seed": 1, "return_tokens_as_token_ids": True}
    expected = await engine.generate(PATHS[path][1], max_tokens=4, seed=1, logprob_token_ids=named)
    lines = [{i: entry.logprob for i, entry in line.items()} for line in expected.outputs[0].logprobs or ()]
    assert all(set(named) <= line.keys() and len(line) <= 4 for line in lines)
    whole = await ask(http, path, **asked)
    streamed = events_of((await http.post(path, json={**PATHS[path][0], **asked, "stream": True})).content)
    for choices in (whole["choices"], [choice for event in streamed for choice in event["choices"]]):
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        if path == CHAT:
            content = [position for part in logprobs for position in part["content"]]
            told = [{top["token"]: top["logprob"] for top in position["top_logprobs"]} for position in content]
        else:
            told = [top for part in logprobs for top in part["top_logprobs"]]
        for line, position in zip(lines, told, strict=True):
            assert position == pytest.approx({f"token_id:{i}": logprob for i, logprob in line.items()}, abs=1e-4)
    alone: dict[str, Any] = (
        {"echo": True, "max_tokens": 0, "logprobs": 1} if path == COMPLETION else {"logprobs": False}
    )
    for more in ({}, alone):
        assert (await refused(http, path, logprob_token_ids=named, **more))["param"] == "logprob_token_ids"
    assert (await refused(http, path, **asks, logprob_token_ids=[10**6]))["param"] == "logprob_token_ids"


# Token ids


@on_both_adapters
@pytest.mark.parametrize("n", [1, 3])
async def test_token_ids_are_told_whole_and_streamed(engine: Engine, http: httpx.AsyncClient, n: int) -> None:
    for path, (fields, prompt) in PATHS.items():
        asked: Any = {"max_tokens": 9, "seed": 1, "n": n, "temperature": 1.0}
        expected = await engine.generate(prompt, **asked)
        wanted = {choice.index: choice.token_ids for choice in expected.outputs}
        told = await ask(http, path, **asked, return_token_ids=True)
        assert {choice["index"]: choice["token_ids"] for choice in told["choices"]} == wanted
        of_prompt = [told] if path == CHAT else told["choices"]
        assert all(of["prompt_token_ids"] == expected.prompt_token_ids for of in of_prompt)

        body = {**fields, **asked, "return_token_ids": True, "stream": True}
        events = events_of((await http.post(path, json=body)).content)
        streamed: dict[int, list[int]] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            streamed.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
        assert streamed == wanted
        places = events if path == CHAT else [event["choices"][0] for event in events]
        prompts = [place["prompt_token_ids"] for place in places if "prompt_token_ids" in place]
        assert prompts == [expected.prompt_token_ids] * (1 if path == CHAT else n)
        assert "prompt_token_ids" in places[0]

        plain = await ask(http, path, **asked)
        assert all(choice["token_ids"] is None for choice in plain["choices"])
        for place in [plain] if path == CHAT else plain["choices"]:
            assert (place["prompt_token_ids"], place["prompt_logprobs"]) == (None, None), "as vLLM has them"


async def test_several_prompts_have_their_own_ids(engine: Engine, http: httpx.AsyncClient) -> None:
    prompts = [FOX, "The owl said", FOX]
    ids = [await engine.tokenize(prompt) for prompt in prompts]
    asked = {"prompt": prompts, "max_tokens": 2, "return_token_ids": True, "n": 2, "temperature": 1.0}
    told = await ask(http, COMPLETION, **asked)
    assert [choice["prompt_token_ids"] for choice in told["choices"]] == [of for of in ids for _ in range(2)]
    events = events_of((await http.post(COMPLETION, json={**asked, "stream": True})).content)
    choices = [choice for event in events for choice in event["choices"] if "prompt_token_ids" in choice]
    assert [choice["prompt_token_ids"] for choice in choices] == [of for of in ids for _ in range(2)]


# A prompt that is cut


@both_paths
async def test_the_last_tokens_of_a_prompt_are_kept(engine: Engine, http: httpx.AsyncClient, path: str) -> None:
    prompt = PATHS[path][1]
    whole = (await engine.generate(prompt, max_tokens=1)).prompt_token_ids
    for num_kept in (1, 5, len(whole), len(whole) + 1, -1):
        asked: Any = {"max_tokens": 5, "seed": 1, "truncate_prompt_tokens": num_kept}
        expected = await engine.generate(prompt, **asked)
        assert expected.prompt_token_ids == (whole if num_kept == -1 else whole[-num_kept:])
        told = await ask(http, path, **asked, return_token_ids=True)
        assert told["choices"][0]["token_ids"] == expected.outputs[0].token_ids
        assert told["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    for bad in (0, -2):
        assert (await refused(http, path, truncate_prompt_tokens=bad))["param"] == "truncate_prompt_tokens"


async def test_as_many_as_fit_leave_room_for_the_answer(engine: Engine, http: httpx.AsyncClient) -> None:
    limit = engine.info.max_model_len
    text = "the fox and the hare " * limit
    ids = await engine.tokenize(text)
    assert len(ids) > 2 * limit
    for given in (text, ids):
        body = {"prompt": given, "truncate_prompt_tokens": -1, "max_tokens": 3}
        assert (await http.post(COMPLETION, json=body)).json()["usage"]["prompt_tokens"] == limit - 3
    too_many = [7] * (MAX_CUT_IDS + 1)
    answer = await http.post(COMPLETION, json={"prompt": too_many, "truncate_prompt_tokens": -1})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


# Templates and special tokens


TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}{{ tail }}"


async def test_a_requests_template_is_used_where_the_operator_allows_it(engine: Engine) -> None:
    asked: Any = {"max_tokens": 4, "seed": 1}
    text = f"[user] {HELLO[0]['content']}\nso"
    ids = await engine.tokenize(text, add_special_tokens=False)
    options: Any = {"chat_template": TEMPLATE, "chat_template_kwargs": {"tail": "so"}}
    expected = await engine.generate(HELLO, **asked, **options)
    assert (expected.prompt, expected.prompt_token_ids) == (text, ids)
    for is_trusted in (True, False):
        config = ServerConfig(trust_request_chat_template=is_trusted)
        async with serving(engine, "starlette", config) as served, openai_client(served.url) as client:
            asks = client.chat.completions.create(model="demo", messages=HELLO, **asked, extra_body=options)
            if is_trusted:
                answer = await asks
                assert answer.choices[0].message.content == expected.text
                assert answer.usage is not None
                assert answer.usage.prompt_tokens == len(ids)
            else:
                with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template") as caught:
                    await asks
                assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it takes longer"),
        ("{% if %}", "Expected an expression"),
        ("a" * (MAX_TEMPLATE_CHARS + 1), "give a shorter one"),
    ],
    ids=["loops", "is none", "is long"],
)
async def test_a_requests_template_has_the_bounds_of_a_models(template: str, said: str) -> None:
    config = ServerConfig(trust_request_chat_template=True)
    async with (
        fake_engine(chat_template_timeout_s=0.2) as (engine, _),
        serving(engine, "starlette", config) as served,
        plain_client(served.url) as http,
    ):
        error = await refused(http, CHAT, chat_template=template)
        assert said in error["message"]
        assert (await http.post(CHAT, json={"messages": HELLO, "max_tokens": 1})).status_code == 200


async def test_a_models_own_template_is_asked_for_by_its_name(engine: Engine) -> None:
    async with serving(engine, "starlette") as served, plain_client(served.url) as http:
        named = {"messages": HELLO, "max_tokens": 1, "chat_template": "default"}
        assert (await http.post(CHAT, json=named)).status_code == 200
        error = await refused(http, CHAT, chat_template="rag")
        assert error["param"] == "chat_template"
        assert "no chat template 'rag'" in error["message"]
        assert "'default'" in error["message"]


async def test_special_tokens_are_added_or_not(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = engine.get_tokenizer()
    encode = type(tokenizer).encode
    adds: list[bool] = []

    def noting(self: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
        adds.append(add_special_tokens)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(type(tokenizer), "encode", noting)
    async with serving(engine, "starlette") as served, plain_client(served.url) as http:
        for path, absent in ((CHAT, False), (COMPLETION, True)):
            for given, expected in ((None, absent), (True, True), (False, False)):
                await ask(http, path, max_tokens=1, add_special_tokens=given)
                assert adds.pop() == expected
        answer = await http.post(COMPLETION, json={"prompt": [5, 6], "max_tokens": 1, "add_special_tokens": True})
        assert answer.status_code == 200
        assert not adds
