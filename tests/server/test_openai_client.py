"""The official client chats over a socket, and hears what the engine itself says: text, reasons, usage, numbers."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server.conftest import on_both_adapters, read
from waiting import until

from aioengine import Engine
from aioengine.outputs import CompletionOutput, RequestOutput

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[Any] = [{"role": "user", "content": "Hello! Who are you?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a short story about a fox named Ruby."}]


def check_same(answer: ChatCompletion, expected: RequestOutput, *, has_stop_reason: bool = True) -> None:
    """The answer is the engine's, choice by choice."""
    assert [choice.index for choice in answer.choices] == list(range(len(expected.outputs)))
    for choice, output in zip(answer.choices, expected.outputs, strict=True):
        assert choice.message.role == "assistant"
        assert choice.message.content == output.text
        assert choice.finish_reason == output.finish_reason
        if has_stop_reason:
            assert (choice.model_extra or {})["stop_reason"] == output.stop_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in expected.outputs)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_same_logprobs(content: Any, output: CompletionOutput, num_top: int, engine: Engine) -> None:
    """A choice's log-probabilities are the engine's, position by position."""
    assert output.logprobs is not None
    assert len(content) == len(output.logprobs)
    for position, token_id, line in zip(content, output.token_ids, output.logprobs, strict=True):
        sampled = line[token_id]
        assert position.token == sampled.decoded_token
        assert position.logprob == pytest.approx(sampled.logprob, abs=1e-4)
        (data,) = engine.token_bytes([token_id], is_start=False, skip_special_tokens=False)
        assert bytes(position.bytes) == data
        likeliest = sorted((entry for entry in line.values() if entry.rank <= num_top), key=lambda entry: entry.rank)
        assert [top.token for top in position.top_logprobs] == [entry.decoded_token for entry in likeliest]
        assert [top.logprob for top in position.top_logprobs] == pytest.approx(
            [entry.logprob for entry in likeliest], abs=1e-4
        )


async def check(engine: Engine, client: AsyncOpenAI, messages: list[Any], **sampling: Any) -> ChatCompletion:
    """The answer to this chat, which must be what the engine itself makes of it."""
    answer = await client.chat.completions.create(model="demo", messages=messages, extra_body=sampling)
    check_same(answer, await engine.generate(messages, **sampling))
    return answer


def texts_of(chunks: list[ChatCompletionChunk]) -> dict[int, str]:
    """Each choice's text, put together."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


@on_both_adapters
async def test_a_chat_is_answered_as_the_engine_answers_it(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(HELLO, seed=1, max_tokens=40)
    answer = await client.chat.completions.create(model="demo", messages=HELLO, seed=1, max_completion_tokens=40)
    check_same(answer, expected)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "demo"
    assert abs(answer.created - time.time()) < 60
    assert answer.choices[0].message.refusal is None
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].logprobs is None


async def test_without_a_limit_a_chat_goes_on_to_its_own_end(engine: Engine, client: AsyncOpenAI) -> None:
    answer = await check(engine, client, HELLO, seed=3)
    assert answer.choices[0].finish_reason == "stop"


async def test_the_limit_may_have_its_old_name(engine: Engine, client: AsyncOpenAI) -> None:
    answer = await check(engine, client, STORY, seed=3, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"


async def test_several_choices_share_one_prompt(engine: Engine, client: AsyncOpenAI) -> None:
    answer = await check(engine, client, STORY, seed=5, max_tokens=20, n=3, temperature=1.0)
    assert len({choice.message.content for choice in answer.choices}) == 3


async def test_the_same_seed_repeats_and_another_one_does_not(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": STORY, "max_tokens": 20}
    answers = [await client.chat.completions.create(**asked, seed=seed) for seed in (7, 7, 8)]
    first, again, other = (answer.choices[0].message.content for answer in answers)
    assert first == again
    assert first != other


@pytest.mark.parametrize("stop", [[" demo", "!"], " tiny"])
async def test_a_stop_string_ends_the_text_before_it(engine: Engine, client: AsyncOpenAI, stop: Any) -> None:
    answer = await check(engine, client, HELLO, temperature=0, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].model_extra or {})["stop_reason"] in stop


@pytest.mark.parametrize("top_logprobs", [None, 0, 1, 5, 20])
async def test_log_probabilities_are_the_engines(engine: Engine, client: AsyncOpenAI, top_logprobs: int | None) -> None:
    num_top = top_logprobs or 0
    expected = await engine.generate(HELLO, seed=2, temperature=1.3, max_tokens=12, logprobs=num_top)
    given: dict[str, Any] = {} if top_logprobs is None else {"top_logprobs": top_logprobs}
    answer = await client.chat.completions.create(
        model="demo", messages=HELLO, seed=2, temperature=1.3, max_completion_tokens=12, logprobs=True, **given
    )
    check_same(answer, expected)
    assert answer.choices[0].logprobs is not None
    check_same_logprobs(answer.choices[0].logprobs.content, expected.outputs[0], num_top, engine)


@pytest.mark.parametrize("num_top", [0, 3])
async def test_a_streams_log_probabilities_are_the_engines(engine: Engine, client: AsyncOpenAI, num_top: int) -> None:
    expected = await engine.generate(STORY, seed=2, max_tokens=20, n=2, logprobs=num_top, temperature=1.1)
    chunks = await read(
        await client.chat.completions.create(
            model="demo", messages=STORY, seed=2, max_completion_tokens=20, n=2, temperature=1.1,
            logprobs=True, top_logprobs=num_top, stream=True,
        )
    )  # fmt: skip
    for output in expected.outputs:
        content = [
            position
            for chunk in chunks
            for choice in chunk.choices
            if choice.index == output.index and choice.logprobs is not None
            for position in choice.logprobs.content or ()
        ]
        check_same_logprobs(content, output, num_top, engine)


async def test_no_top_log_probabilities_may_be_asked_for_without_any(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=2, logprobs=False, top_logprobs=0
    )
    assert answer.choices[0].logprobs is None


async def test_a_bias_decides_the_token(engine: Engine, client: AsyncOpenAI) -> None:
    (token_id,) = await engine.tokenize("!")
    expected = await engine.generate(HELLO, temperature=0, max_tokens=3, logit_bias={token_id: 100.0})
    answer = await client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, max_completion_tokens=3, logit_bias={str(token_id): 100}
    )
    check_same(answer, expected)
    assert answer.choices[0].message.content == "!!!"


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 1},
        {"top_k": -1},
        {"min_p": 0.4},
        {"ignore_eos": True},
        {"ignore_eos": True, "skip_special_tokens": False},
        {"min_tokens": 10},
        {"stop_token_ids": list(range(3, 400))},
        {"stop": ["."], "include_stop_str_in_output": True},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"bad_words": [" fox", " Ruby"]},
        {"allowed_token_ids": [20, 40, 60, 80]},
        {"top_p": 0.3, "temperature": 1.9},
        {"temperature": 0, "n": 2},
        {"spaces_between_special_tokens": False, "skip_special_tokens": False},
        {"cache_salt": "mine"},
        {"priority": -3},
    ],
    ids=",".join,
)
async def test_every_way_of_sampling_gets_to_the_engine(
    engine: Engine, client: AsyncOpenAI, sampling: dict[str, Any]
) -> None:
    await check(engine, client, STORY, **{"seed": 11, "max_tokens": 12, **sampling})


async def test_a_stop_token_is_told_of_by_its_id(engine: Engine, client: AsyncOpenAI) -> None:
    plain = await engine.generate(HELLO, temperature=0)
    token_id = plain.outputs[0].token_ids[4]
    answer = await client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, extra_body={"stop_token_ids": [token_id]}
    )
    assert (answer.choices[0].model_extra or {})["stop_reason"] == token_id
    assert answer.choices[0].finish_reason == "stop"


async def test_the_last_message_may_be_continued(engine: Engine, client: AsyncOpenAI) -> None:
    begun: list[Any] = [*STORY, {"role": "assistant", "content": "Once there was a"}]
    told: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    expected = await engine.generate(begun, seed=1, max_tokens=20, chat_template_kwargs=told)
    for extra in (told, {"chat_template_kwargs": told}):
        answer = await client.chat.completions.create(
            model="demo", messages=begun, seed=1, max_tokens=20, extra_body=extra
        )
        check_same(answer, expected)


async def test_a_template_is_told_what_is_given(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(HELLO, seed=1, max_tokens=9, chat_template_kwargs={"add_generation_prompt": False})
    kwargs = {"chat_template_kwargs": {"add_generation_prompt": False, "enable_thinking": False}}
    answer = await client.chat.completions.create(model="demo", messages=HELLO, seed=1, max_tokens=9, extra_body=kwargs)
    check_same(answer, expected)


async def test_content_may_be_parts_of_text(engine: Engine, client: AsyncOpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hello! Who are you?"}]}]
    expected = await engine.generate(HELLO, seed=1, max_tokens=20)
    answer = await client.chat.completions.create(model="demo", messages=parts, seed=1, max_tokens=20)
    check_same(answer, expected)


async def test_an_answer_may_be_sent_back_as_it_came(engine: Engine, client: AsyncOpenAI) -> None:
    name: Any = {"role": "user", "content": "Hi, I am Tom."}
    first = await client.chat.completions.create(model="demo", messages=[name], temperature=0)
    said = first.choices[0].message
    question: Any = {"role": "user", "content": "What is my name?"}
    history: list[Any] = [name, {"role": "assistant", "content": said.content}, question]
    expected = await engine.generate(history, temperature=0)
    for message in (said, said.model_dump(), said.model_dump(exclude_none=True)):
        again: Any = [name, message, question]
        check_same(await client.chat.completions.create(model="demo", messages=again, temperature=0), expected)


async def test_what_says_nothing_is_taken(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(HELLO, seed=1, max_tokens=20)
    answer = await client.chat.completions.create(
        model="demo", messages=HELLO, seed=1, max_tokens=20, user="somebody", tools=[], tool_choice="none", store=False,
        parallel_tool_calls=True, response_format={"type": "text"}, service_tier="auto", modalities=["text"],
        metadata={}, safety_identifier="a", prompt_cache_key="b", stop=None, logit_bias={}, stream=False,
        extra_body={"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "add_special_tokens": False},
    )  # fmt: skip
    check_same(answer, expected)


@on_both_adapters
async def test_a_stream_adds_up_to_the_answer(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(HELLO, seed=4)
    stream = await client.chat.completions.create(model="demo", messages=HELLO, seed=4, stream=True)
    chunks = await read(stream)
    assert texts_of(chunks) == {0: expected.text}
    assert {(chunk.id, chunk.model, chunk.object, chunk.created) for chunk in chunks} == {
        (chunks[0].id, "demo", "chat.completion.chunk", chunks[0].created)
    }
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [expected.outputs[0].finish_reason]
    assert all(chunk.usage is None for chunk in chunks)


@on_both_adapters
async def test_a_streams_choices_come_by_their_numbers(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(STORY, seed=4, n=3, max_tokens=25, temperature=1.0)
    chunks = await read(
        await client.chat.completions.create(
            model="demo", messages=STORY, seed=4, n=3, max_tokens=25, temperature=1.0, stream=True
        )
    )
    assert texts_of(chunks) == {output.index: output.text for output in expected.outputs}
    assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 3
    ended = {chunk.choices[0].index: chunk.choices[0].finish_reason for chunk in chunks}
    assert ended == {output.index: output.finish_reason for output in expected.outputs}


async def test_a_streams_usage_comes_last_and_alone(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(HELLO, seed=1, n=2)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *others, last = await read(
        await client.chat.completions.create(model="demo", messages=HELLO, seed=1, n=2, **options)
    )
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert last.usage.completion_tokens == sum(len(output.token_ids) for output in expected.outputs)
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert all(chunk.usage is None and chunk.choices for chunk in others)


async def test_usage_may_be_told_all_along(client: AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await read(
        await client.chat.completions.create(model="demo", messages=HELLO, seed=1, stream=True, stream_options=options)
    )
    usages = [chunk.usage for chunk in chunks]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == counts[-2] > 1
    assert len({usage.prompt_tokens for usage in usages if usage is not None}) == 1


async def test_usage_tells_what_the_cache_had(client: AsyncOpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "Please tell me of the fox. " * 8}]
    usages = []
    for _ in range(2):
        answer = await client.chat.completions.create(
            model="demo", messages=question, max_tokens=1, extra_body={"cache_salt": f"{id(client)}"}
        )
        assert answer.usage is not None
        usages.append((answer.usage.prompt_tokens, answer.usage.model_dump()["prompt_tokens_details"]["cached_tokens"]))
    assert usages[0][1] == 0
    assert 0 < usages[1][1] < usages[1][0]


async def test_the_clients_stream_helper_has_the_whole_answer(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(HELLO, seed=6, logprobs=2)
    deltas = []
    async with client.chat.completions.stream(
        model="demo", messages=HELLO, seed=6, logprobs=True, top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        async for event in stream:
            if event.type == "content.delta":
                deltas.append(event.delta)
        final = await stream.get_final_completion()
    assert "".join(deltas) == expected.text
    check_same(final, expected, has_stop_reason=False)  # that is none of the client's fields
    assert final.choices[0].logprobs is not None
    check_same_logprobs(final.choices[0].logprobs.content, expected.outputs[0], 2, engine)


async def test_the_models_are_listed(engine: Engine, client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["demo"]
    model = await client.models.retrieve("demo")
    assert model == models[0]
    assert model.object == "model"
    assert model.owned_by == "aioengine"
    assert abs(model.created - time.time()) < 600
    assert (model.model_extra or {})["max_model_len"] == engine.info.max_model_len


async def test_the_request_has_an_id_in_header_and_answer(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model="demo", messages=HELLO, max_tokens=2)
    answer = raw.parse()
    assert answer.id == f"chatcmpl-{raw.headers['x-request-id']}"
    assert answer._request_id == raw.headers["x-request-id"]
    assert raw.headers["content-type"] == "application/json"


async def test_a_stream_that_is_left_is_aborted(engine: Engine, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=STORY, stream=True, extra_body={"ignore_eos": True}
    )
    async with stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    await until(lambda: engine.stats().running == 0)


async def test_an_error_carries_the_requests_id(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="demo", messages=HELLO, temperature=9, extra_headers={"X-Request-Id": "mine-18"}
        )
    assert caught.value.request_id == "mine-18"
