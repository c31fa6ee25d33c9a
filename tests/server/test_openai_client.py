"""The official client, over a socket, hears what the engine itself says: texts, reasons, usage, log-probabilities.

That a stream's events add up to the whole answer, whatever is in them, is `test_answers`'.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from nightly import nightly
from openai import AsyncOpenAI
from server.conftest import events_of, on_both_adapters, plain_client, read, serving

from aioengine import Engine
from aioengine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from aioengine.server import ServerConfig
from aioengine.server.generation import StreamGroup

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOX, OWL = "Once upon a time, there was a fox", "The owl said"
HELLO: list[Any] = [{"role": "user", "content": "Hello! Who are you?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a short story about a fox named Ruby."}]
CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO}
TEXT: dict[str, Any] = {"model": "demo", "prompt": FOX}


def text_of(choice: Any) -> str:
    """The text of a choice, or of a part of one, of either kind."""
    if hasattr(choice, "text"):
        return str(choice.text)
    return (choice.message if hasattr(choice, "message") else choice.delta).content or ""


def texts_of(chunks: list[Any]) -> dict[int, str]:
    """Each choice's text, put together."""
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + text_of(choice)
    return texts


def check_usage(usage: Any, expected: Sequence[RequestOutput]) -> None:
    assert usage.prompt_tokens == sum(len(result.prompt_token_ids) for result in expected)
    assert usage.completion_tokens == sum(len(output.token_ids) for result in expected for output in result.outputs)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def check_same(answer: Any, *expected: RequestOutput, echoed: str = "", has_stop_reason: bool = True) -> None:
    """The answer is the engine's: for each prompt its choices, which begin with what is echoed."""
    outputs = [output for result in expected for output in result.outputs]
    assert [choice.index for choice in answer.choices] == list(range(len(outputs)))
    for choice, output in zip(answer.choices, outputs, strict=True):
        assert text_of(choice) == echoed + output.text
        assert choice.finish_reason == output.finish_reason
        if has_stop_reason:
            assert (choice.model_extra or {})["stop_reason"] == output.stop_reason
    check_usage(answer.usage, expected)


def check_positions(content: Any, output: CompletionOutput, num_top: int, engine: Engine) -> None:
    """A chat's log-probabilities are the engine's, position by position."""
    assert output.logprobs is not None
    for position, token_id, line in zip(content, output.token_ids, output.logprobs, strict=True):
        sampled = line[token_id]
        assert position.token == sampled.decoded_token
        assert position.logprob == pytest.approx(sampled.logprob, abs=1e-4)
        (data,) = engine.token_bytes([token_id], is_start=False, skip_special_tokens=False)
        assert bytes(position.bytes) == data
        likeliest = sorted((entry for entry in line.values() if entry.rank <= num_top), key=lambda entry: entry.rank)
        assert [top.token for top in position.top_logprobs] == [entry.decoded_token for entry in likeliest]
        expected = pytest.approx([entry.logprob for entry in likeliest], abs=1e-4)
        assert [top.logprob for top in position.top_logprobs] == expected


def check_columns(logprobs: Any, lines: Sequence[TokenLogprobs | None], text: str) -> None:
    """A completion's log-probabilities are the engine's, in four columns; the sampled token is a line's first."""
    columns = (logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs, logprobs.top_logprobs)
    for token, begin, logprob, top, line in zip(*columns, lines, strict=True):
        assert text[begin:].startswith(token) or token.startswith("<|")
        if line is None:  # a prompt's first token follows nothing
            assert logprob is top is None
            continue
        sampled = next(iter(line.values()))
        assert token == sampled.decoded_token
        assert logprob == pytest.approx(sampled.logprob, abs=1e-4)
        by_text: dict[str, float] = {}
        for entry in line.values():
            by_text.setdefault(entry.decoded_token or "", entry.logprob)
        assert top == pytest.approx(by_text, abs=1e-4)


@on_both_adapters
async def test_an_answer_is_the_engines(engine: Engine, client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(**CHAT, seed=1, max_completion_tokens=40)
    check_same(chat, await engine.generate(HELLO, seed=1, max_tokens=40))
    message = chat.choices[0].message
    assert (message.role, message.refusal, message.tool_calls, chat.choices[0].logprobs) == ("assistant", *[None] * 3)
    text = await client.completions.create(**TEXT, seed=1, max_tokens=20)
    check_same(text, await engine.generate(FOX, seed=1, max_tokens=20))
    assert text.choices[0].logprobs is None
    for answer, kind, prefix in ((chat, "chat.completion", "chatcmpl-"), (text, "text_completion", "cmpl-")):
        assert (answer.object, answer.model) == (kind, "demo")
        assert answer.id.startswith(prefix)
        assert abs(answer.created - time.time()) < 60


async def test_without_a_limit_a_text_has_sixteen_tokens_and_a_chat_its_own_end(
    engine: Engine, client: AsyncOpenAI
) -> None:
    expected = await engine.generate(FOX, seed=1, max_tokens=16)
    check_same(await client.completions.create(**TEXT, seed=1), expected)
    chat = await client.chat.completions.create(**CHAT, seed=3)
    check_same(chat, await engine.generate(HELLO, seed=3))
    assert chat.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_p": 0.4},
        {"ignore_eos": True, "skip_special_tokens": False},
        {"stop": ["."], "include_stop_str_in_output": True},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"logit_bias": {40: 100.0}},
        {"temperature": 1.0, "n": 3},
        *nightly(
            {"top_k": 1},
            {"top_k": -1},
            {"ignore_eos": True},
            {"min_tokens": 10},
            {"stop_token_ids": list(range(3, 400))},
            {"stop": " a"},
            {"repetition_penalty": 1.5},
            {"bad_words": [" fox", " Ruby"]},
            {"allowed_token_ids": [20, 40, 60, 80]},
            {"top_p": 0.3, "temperature": 1.9},
            {"temperature": 0, "n": 2},
            {"spaces_between_special_tokens": False, "skip_special_tokens": False},
            {"cache_salt": "mine"},
            {"priority": -3},
        ),
    ],
    ids=",".join,
)
async def test_every_way_of_sampling_gets_to_the_engine(
    engine: Engine, client: AsyncOpenAI, sampling: dict[str, Any]
) -> None:
    asked = {"seed": 11, "max_tokens": 12, **sampling}
    chat = await client.chat.completions.create(model="demo", messages=STORY, extra_body=asked)
    check_same(chat, await engine.generate(STORY, **asked))
    check_same(await client.completions.create(**TEXT, extra_body=asked), await engine.generate(FOX, **asked))


@pytest.mark.parametrize("num_top", [None, 0, 4, 20])
async def test_log_probabilities_are_the_engines(engine: Engine, client: AsyncOpenAI, num_top: int | None) -> None:
    asked: dict[str, Any] = {"seed": 2, "temperature": 1.3, "max_tokens": 12}
    top: dict[str, Any] = {} if num_top is None else {"top_logprobs": num_top}
    chat = await client.chat.completions.create(**CHAT, **asked, logprobs=True, **top)
    expected = await engine.generate(HELLO, **asked, logprobs=num_top or 0)
    check_same(chat, expected)
    assert chat.choices[0].logprobs is not None
    check_positions(chat.choices[0].logprobs.content, expected.outputs[0], num_top or 0, engine)
    text = await client.completions.create(**TEXT, **asked, logprobs=num_top or 0)
    expected = await engine.generate(FOX, **asked, logprobs=num_top or 0)
    check_same(text, expected)
    check_columns(text.choices[0].logprobs, expected.outputs[0].logprobs or (), text.choices[0].text)


# Chats


async def test_a_template_is_told_what_is_given(engine: Engine, client: AsyncOpenAI) -> None:
    kwargs = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [*STORY, {"role": "assistant", "content": "Once there was a"}]
    asked: dict[str, Any] = {"messages": messages, "seed": 1, "max_tokens": 20}
    expected = await engine.generate(messages, seed=1, max_tokens=20, chat_template_kwargs=kwargs)
    for extra in (kwargs, {"chat_template_kwargs": {**kwargs, "enable_thinking": False}}):
        check_same(await client.chat.completions.create(model="demo", **asked, extra_body=extra), expected)


# Prompts


@pytest.mark.parametrize("kind", ["texts", "ids", "lists of ids", "one text in a list"])
async def test_prompts_are_texts_or_ids_one_or_several(engine: Engine, client: AsyncOpenAI, kind: str) -> None:
    fox, owl = await engine.tokenize(FOX), await engine.tokenize(OWL)
    all_prompts: dict[str, list[Any]] = {"texts": [FOX, OWL], "ids": [fox], "lists of ids": [fox, owl, fox]}
    prompts = all_prompts.get(kind, [FOX])
    asked: dict[str, Any] = {"seed": 3, "max_tokens": 8, "n": 2, "temperature": 1.2}
    expected = [await engine.generate(prompt, **asked) for prompt in prompts]
    given = prompts[0] if kind == "ids" else prompts
    check_same(await client.completions.create(model="demo", prompt=given, **asked), *expected)


@pytest.mark.parametrize("is_ids", [False, True], ids=["text", "ids"])
async def test_an_echo_begins_with_the_prompt_and_its_log_probabilities(
    engine: Engine, client: AsyncOpenAI, is_ids: bool
) -> None:
    prompt: Any = await engine.tokenize(FOX) if is_ids else FOX
    expected = await engine.generate(prompt, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=2)
    asked: dict[str, Any] = {"model": "demo", "prompt": prompt, "seed": 1, "max_tokens": 6, "echo": True}
    check_same(await client.completions.create(**asked), expected, echoed=FOX)
    answer = await client.completions.create(**asked, logprobs=2)
    check_same(answer, expected, echoed=FOX)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    check_columns(
        logprobs, [*(expected.prompt_logprobs or ()), *(expected.outputs[0].logprobs or ())], answer.choices[0].text
    )
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text


async def test_an_echo_alone_gives_the_prompt_and_its_log_probabilities(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(FOX, seed=1, max_tokens=1, prompt_logprobs=1)
    answer = await client.completions.create(model="demo", prompt=[FOX, OWL], max_tokens=0, echo=True, logprobs=1)
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [(FOX, "length"), (OWL, "length")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    check_columns(answer.choices[0].logprobs, expected.prompt_logprobs or (), answer.choices[0].text)


# Streams


@on_both_adapters
@pytest.mark.parametrize("n", [1, 3])
async def test_a_chats_stream_adds_up_to_the_engines_answer(engine: Engine, client: AsyncOpenAI, n: int) -> None:
    asked: dict[str, Any] = {"seed": 4, "n": n, "max_tokens": 25, "temperature": 1.0}
    expected = await engine.generate(STORY, **asked, logprobs=3)
    chunks = await read(
        await client.chat.completions.create(
            model="demo", messages=STORY, **asked, logprobs=True, top_logprobs=3, stream=True
        )
    )
    assert {(chunk.id, chunk.model, chunk.object, chunk.created) for chunk in chunks} == {
        (chunks[0].id, "demo", "chat.completion.chunk", chunks[0].created)
    }
    assert texts_of(chunks) == {output.index: output.text for output in expected.outputs}
    assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == n
    for output in expected.outputs:
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == output.index]
        assert (parts[0].delta.role, parts[0].delta.content) == ("assistant", "")
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [output.finish_reason]
        content = [position for part in parts if part.logprobs for position in part.logprobs.content or ()]
        check_positions(content, output, 3, engine)


@on_both_adapters
async def test_several_prompts_stream_side_by_side_and_usage_comes_last(engine: Engine, client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"seed": 9, "max_tokens": 9, "n": 2, "temperature": 1.0}
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    expected = [await engine.generate(prompt, **asked) for prompt in (FOX, OWL)]
    texts = {place * 2 + part.index: part.text for place, out in enumerate(expected) for part in out.outputs}
    for prompt in ([FOX, OWL], [await engine.tokenize(FOX), await engine.tokenize(OWL)]):
        *chunks, last = await read(await client.completions.create(model="demo", prompt=prompt, **asked, **options))
        assert texts_of(chunks) == texts
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)
        assert last.choices == []
        check_usage(last.usage, expected)


async def test_usage_may_be_told_all_along(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StreamGroup] = []
    outputs = StreamGroup.outputs
    monkeypatch.setattr(StreamGroup, "outputs", lambda group: made.append(group) or outputs(group))
    options = {"include_usage": True, "continuous_usage_stats": True}
    text: dict[str, Any] = {"prompt": FOX, "max_tokens": 9, "echo": True}
    for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", text)):
        answer = await http.post(path, json={**body, "seed": 1, "stream": True, "stream_options": options})
        usages = [event["usage"] for event in events_of(answer.content)]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[0] == 0
        assert counts[-1] == counts[-2] > 5
        assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert len(made) == 2 * 3, "outputs are as long as their prompts, and are not made for each event"
    alone = {**text, "max_tokens": 0, "stream": True, "stream_options": options}
    events = events_of((await http.post("/v1/completions", json=alone)).content)
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 0, 0]


@on_both_adapters
async def test_events_are_one_line_of_json_each(http: httpx.AsyncClient) -> None:
    body = {"prompt": FOX, "seed": 1, "max_tokens": 5, "stream": True}
    answer = await http.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    *events, last = events_of(answer.content)
    assert all(event["usage"] is None for event in events)
    assert all(set(event["choices"][0]) >= {"index", "text", "logprobs", "finish_reason"} for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert {event["id"] for event in [*events, last]} == {f"cmpl-{answer.headers['x-request-id']}"}


@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}]
)
async def test_events_say_nothing_of_usage_unasked(http: httpx.AsyncClient, options: Any) -> None:
    body = {"prompt": FOX, "max_tokens": 2, "stream": True, "stream_options": options}
    answer = await http.post("/v1/completions", json=body)
    assert all("usage" not in event for event in events_of(answer.content))


async def test_a_server_may_add_usage_to_streams_that_do_not_say(engine: Engine) -> None:
    config = ServerConfig(enable_force_include_usage=True)
    async with serving(engine, "starlette", config) as served, plain_client(served.url) as http:
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": FOX})):
            for options in (None, {}, {"include_usage": True}, {"include_usage": False}):
                asked = {**body, "max_tokens": 2, "stream": True, "stream_options": options}
                *events, last = events_of((await http.post(path, json=asked)).content)
                assert (last["choices"] == []) == (options != {"include_usage": False}), options
                assert all("usage" in event for event in events) == (options != {"include_usage": False})


# Beside the answer


async def test_the_request_has_an_id_in_header_answer_and_error(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(**CHAT, max_tokens=2)
    answer = raw.parse()
    assert answer.id == f"chatcmpl-{raw.headers['x-request-id']}"
    assert answer._request_id == raw.headers["x-request-id"]
    assert raw.headers["content-type"] == "application/json"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**CHAT, temperature=9, extra_headers={"X-Request-Id": "mine-18"})
    assert caught.value.request_id == "mine-18"
