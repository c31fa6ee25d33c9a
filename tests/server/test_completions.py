"""``/v1/completions`` by the official client, beside what the engine itself says; and its events as they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types import Completion
from server.conftest import events_of, on_both_adapters, read

from aioengine import Engine
from aioengine.outputs import RequestOutput, TokenLogprobs

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOX = "Once upon a time, there was a fox"
OWL = "The owl said"
HELLO: list[Any] = [{"role": "user", "content": "Hello! Who are you?"}]


def check_same(answer: Completion, expected: Sequence[RequestOutput], echoed: Sequence[str] | None = None) -> None:
    """The answer is the engine's, for each prompt its choices; ``echoed`` are the prompts before them."""
    outputs = [
        ("" if echoed is None else echoed[place], output)
        for place, result in enumerate(expected)
        for output in result.outputs
    ]
    assert [choice.index for choice in answer.choices] == list(range(len(outputs)))
    for choice, (before, output) in zip(answer.choices, outputs, strict=True):
        assert choice.text == before + output.text
        assert choice.finish_reason == output.finish_reason
        assert (choice.model_extra or {})["stop_reason"] == output.stop_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(result.prompt_token_ids) for result in expected)
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for _, output in outputs)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_same_logprobs(logprobs: Any, lines: Sequence[TokenLogprobs | None], offset: int = 0) -> None:
    """Four columns that say what the engine's lines do; the sampled token is a line's first."""
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(lines)
    assert len(logprobs.text_offset) == len(lines)
    for place, line in enumerate(lines):
        assert logprobs.text_offset[place] == offset
        offset += len(logprobs.tokens[place])
        if line is None:  # a prompt's first token follows nothing
            assert logprobs.token_logprobs[place] is None
            assert logprobs.top_logprobs[place] is None
            continue
        sampled = next(iter(line.values()))
        assert logprobs.tokens[place] == sampled.decoded_token
        assert logprobs.token_logprobs[place] == pytest.approx(sampled.logprob, abs=1e-4)
        by_text: dict[str, float] = {}
        for entry in line.values():
            by_text.setdefault(entry.decoded_token or "", entry.logprob)
        assert logprobs.top_logprobs[place] == pytest.approx(by_text, abs=1e-4)


def texts_of(chunks: list[Completion]) -> dict[int, str]:
    """Each choice's text, put together."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@on_both_adapters
async def test_a_text_is_completed_as_the_engine_completes_it(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(FOX, seed=1, max_tokens=20)
    answer = await client.completions.create(model="demo", prompt=FOX, seed=1, max_tokens=20)
    check_same(answer, [expected])
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].logprobs is None


async def test_without_a_limit_sixteen_tokens_come(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(FOX, seed=1, max_tokens=16)
    check_same(await client.completions.create(model="demo", prompt=FOX, seed=1), [expected])


@pytest.mark.parametrize("kind", ["texts", "ids", "lists of ids", "one text in a list"])
async def test_prompts_are_texts_or_ids_one_or_several(engine: Engine, client: AsyncOpenAI, kind: str) -> None:
    fox, owl = await engine.tokenize(FOX), await engine.tokenize(OWL)
    prompts: dict[str, list[Any]] = {"texts": [FOX, OWL], "ids": [fox], "lists of ids": [fox, owl, fox]}
    prompts["one text in a list"] = [FOX]
    expected = [await engine.generate(prompt, seed=1, max_tokens=8) for prompt in prompts[kind]]
    given = prompts[kind][0] if kind == "ids" else prompts[kind]
    check_same(await client.completions.create(model="demo", prompt=given, seed=1, max_tokens=8), expected)


async def test_choices_are_numbered_through_all_prompts(engine: Engine, client: AsyncOpenAI) -> None:
    expected = [await engine.generate(prompt, seed=3, max_tokens=8, n=2, temperature=1.2) for prompt in (FOX, OWL)]
    answer = await client.completions.create(
        model="demo", prompt=[FOX, OWL], seed=3, max_tokens=8, n=2, temperature=1.2
    )
    check_same(answer, expected)
    assert len({choice.text for choice in answer.choices}) == 4


@pytest.mark.parametrize("logprobs", [0, 1, 4])
async def test_log_probabilities_have_their_columns(engine: Engine, client: AsyncOpenAI, logprobs: int) -> None:
    expected = await engine.generate(FOX, seed=2, temperature=1.3, max_tokens=10, logprobs=logprobs)
    answer = await client.completions.create(
        model="demo", prompt=FOX, seed=2, temperature=1.3, max_tokens=10, logprobs=logprobs
    )
    check_same(answer, [expected])
    check_same_logprobs(answer.choices[0].logprobs, expected.outputs[0].logprobs or ())


@pytest.mark.parametrize("is_ids", [False, True], ids=["text", "ids"])
async def test_an_echo_begins_with_the_prompt(engine: Engine, client: AsyncOpenAI, is_ids: bool) -> None:
    prompt: Any = await engine.tokenize(FOX) if is_ids else FOX
    expected = await engine.generate(prompt, seed=1, max_tokens=8)
    answer = await client.completions.create(model="demo", prompt=prompt, seed=1, max_tokens=8, echo=True)
    check_same(answer, [expected], [FOX])


async def test_an_echo_has_the_prompts_log_probabilities_too(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(FOX, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=2)
    answer = await client.completions.create(model="demo", prompt=FOX, seed=1, max_tokens=6, echo=True, logprobs=2)
    check_same(answer, [expected], [FOX])
    lines = [*(expected.prompt_logprobs or ()), *(expected.outputs[0].logprobs or ())]
    check_same_logprobs(answer.choices[0].logprobs, lines)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text


async def test_an_echo_alone_gives_the_prompt_and_its_log_probabilities(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(FOX, seed=1, max_tokens=1, prompt_logprobs=1)
    answer = await client.completions.create(model="demo", prompt=[FOX, OWL], max_tokens=0, echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == [FOX, OWL]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    check_same_logprobs(answer.choices[0].logprobs, expected.prompt_logprobs or ())


@on_both_adapters
async def test_a_stream_adds_up_to_the_answer(engine: Engine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(FOX, seed=1, max_tokens=20)
    chunks = await read(await client.completions.create(model="demo", prompt=FOX, seed=1, max_tokens=20, stream=True))
    assert texts_of(chunks) == {0: expected.text}
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(chunks[0].id, "text_completion")}
    assert all(chunk.usage is None for chunk in chunks)


async def test_several_prompts_stream_side_by_side(engine: Engine, client: AsyncOpenAI) -> None:
    ids = await engine.tokenize(OWL)
    expected = [await engine.generate(prompt, seed=9, max_tokens=9, n=2, temperature=1.0) for prompt in (FOX, OWL)]
    texts = {place * 2 + part.index: part.text for place, out in enumerate(expected) for part in out.outputs}
    for second in (OWL, None):
        prompt: Any = [FOX, second] if second else [await engine.tokenize(FOX), ids]
        *chunks, last = await read(
            await client.completions.create(
                model="demo", prompt=prompt, seed=9, max_tokens=9, n=2, temperature=1.0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        assert texts_of(chunks) == texts
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.prompt_tokens == sum(len(result.prompt_token_ids) for result in expected)
        assert last.usage.completion_tokens == 36


@on_both_adapters
@pytest.mark.parametrize("max_tokens", [0, 6])
async def test_a_streamed_echo_adds_up_to_the_whole_one(client: AsyncOpenAI, max_tokens: int) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "prompt": [FOX, OWL], "seed": 4, "max_tokens": max_tokens, "echo": True, "logprobs": 2,
    }  # fmt: skip
    whole = await client.completions.create(**asked)
    chunks = await read(await client.completions.create(**asked, stream=True))
    assert texts_of(chunks) == {choice.index: choice.text for choice in whole.choices}
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert parts[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        for column in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            streamed = [item for part in parts if part.logprobs for item in getattr(part.logprobs, column)]
            expected = getattr(choice.logprobs, column)
            if column in ("token_logprobs", "top_logprobs"):
                expected = [None if one is None else pytest.approx(one, abs=1e-4) for one in expected]
            assert streamed == expected


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 3, "ignore_eos": True}, {"stop": ["fox", "a"]}, {"stop_token_ids": list(range(3, 400))}, {"min_p": 0.5}],
    ids=",".join,
)
async def test_every_way_of_sampling_gets_to_the_engine(
    engine: Engine, client: AsyncOpenAI, sampling: dict[str, Any]
) -> None:
    asked = {"seed": 1, "max_tokens": 10, **sampling}
    answer = await client.completions.create(model="demo", prompt=FOX, extra_body=asked)
    check_same(answer, [await engine.generate(FOX, **asked)])


@on_both_adapters
async def test_events_are_one_line_of_json_each(http: httpx.AsyncClient) -> None:
    answer = await http.post(
        "/v1/completions",
        json={"prompt": FOX, "seed": 1, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"]
    *events, last = events_of(answer.content)
    for event in events:
        assert event["usage"] is None
        (choice,) = event["choices"]
        assert set(choice) >= {"index", "text", "logprobs", "finish_reason"}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert {event["id"] for event in [*events, last]} == {f"cmpl-{answer.headers['x-request-id']}"}


async def test_events_say_nothing_of_usage_unasked(http: httpx.AsyncClient) -> None:
    given: list[dict[str, Any]] = [{}, {"stream_options": None}, {"stream_options": {}}]
    for options in [*given, {"stream_options": {"include_usage": False}}]:
        answer = await http.post("/v1/completions", json={"prompt": FOX, "max_tokens": 2, "stream": True, **options})
        assert all("usage" not in event for event in events_of(answer.content))


async def test_a_chats_events_begin_with_the_role_and_end_with_the_reason(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={"messages": HELLO, "n": 2, "seed": 1, "stream": True})
    events = events_of(answer.content)
    first, second, *others = [event["choices"][0] for event in events]
    role = {"role": "assistant", "content": "", "refusal": None}
    for index, choice in enumerate((first, second)):
        assert choice == {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
    ended: set[int] = set()
    for choice in others:
        assert choice["index"] not in ended
        assert "role" not in choice["delta"]
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] == "stop"
            ended.add(choice["index"])
    assert ended == {0, 1}


async def test_usage_goes_along_with_an_echo_as_well(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await http.post(
        "/v1/completions",
        json={"prompt": FOX, "max_tokens": 3, "seed": 1, "echo": True, "stream": True, "stream_options": options},
    )
    counts = [event["usage"]["completion_tokens"] for event in events_of(answer.content)]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 3
