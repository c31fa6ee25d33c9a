"""What is wrong with a request is said at the call, by name, and nothing is queued."""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np
import pytest
import torch

from aioengine import InvalidRequest, PromptTooLong, SamplingParams
from aioengine.frontend.call import Call
from aioengine.validation import shorten

IDS = [5, 6, 7]

NAN, INF = float("nan"), float("inf")
BAD_FIELDS: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, NAN, INF, "hot", None, True],
    "top_p": [0.0, 1.01, NAN],
    "top_k": [-2, 1.5, 2**31],
    "min_p": [-0.01, 1.01],
    "seed": [1.5, "7", 2**63, -(2**63) - 1, 10**30],
    "max_tokens": [0, -1, 1.5, "many", True, NAN],
    "min_tokens": [-1, None, 9],  # 9 is more than max_tokens
    "ignore_eos": ["yes", 1],
    "stop": ["", ["a", ""], 7, [7], "s" * 10_000_000, ["s"] * 10_000],
    "stop_token_ids": [[-1], [2048], [1.5], 3, ["a"], [2**31], list(range(200_000))],
    "logprobs": [-1, 21, True, 1.5],
    "n": [0, 129, 10**30, True],
    "presence_penalty": [2.1, NAN],
    "frequency_penalty": [-INF],
    "repetition_penalty": [0, INF],
    "logit_bias": [{2048: 1.0}, {-1: 1.0}, {5: NAN}, {"5": 1.0}, [5], dict.fromkeys(range(200_000), 1.0)],
    "allowed_token_ids": [[], [2048], [1.5]],
    "bad_words": [[""], ["  "], 7, ["w"] * 10_000],
    "logprob_token_ids": [[2048], list(range(200_000))],
    "prompt_logprobs": [-1, 21],
    "detokenize": [1],
    "logits_processors": [[7], 7],
}

BAD_ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "prompt": [
        {"prompt": prompt} for prompt in ("", [], None, 7, b"bytes", (1, "a"), {"role": "user", "content": "hi"})
    ],
    "request_id": [{"request_id": ""}, {"request_id": 7}],
    "on_full": [{"on_full": "explode"}, {"on_full": None}, {"on_full": []}],
    "params": [{"params": {"max_tokens": 3}}, {"params": 3}, {"params": SamplingParams(), "max_tokens": 3}],
    "logprobs": [{"params": SamplingParams(logprobs=21)}],
    "stop_token_ids": [{"params": SamplingParams(stop_token_ids=(2048,))}],
    "n": [{"params": SamplingParams(n=129)}],
    "max_token": [{"max_token": 3}],
    "max_tokn": [{"max_tokn": 3}],
    "priority": [{"priority": priority} for priority in (1.5, None, True, 10**30)],
    "cache_salt": [{"cache_salt": salt} for salt in ("", 7, "s" * 1025, "\ud800")],
    "session": [{"session": session} for session in ("", 7, "s" * 257, "\ud800")],
    "tenant": [{"tenant": tenant} for tenant in ("", 7, "t" * 257, "\ud800")],
}

BAD_PROMPTS = [
    [-1],
    [5, 2048],
    [5, 2**40],
    [5, 10**30],
    [5, 10**5000],
    [5, -(10**5000)],
    [1.5],
    [True],
    ["text"],
    [None],
    [5, "text"],
    [5, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "hi"}, 5],
    [{}],
    [{"role": "user"}],
    [{"content": "hi"}],
    [{"role": "user", "content": 7}],
    [{"role": "jester", "content": "hi"}],  # the demo's template refuses it
    "a lone \ud800 surrogate",
    np.zeros((2, 2), np.int32),
    np.array([0.5]),
    np.array([True]),
    np.array(7),
    np.zeros(0, np.int32),
]


def assert_nothing_was_queued(served: Any) -> None:
    served.assert_nothing_is_held()
    assert served.executor.plans == []


@pytest.mark.parametrize("name", {**BAD_FIELDS, **BAD_ARGUMENTS})
async def test_a_bad_value_is_named_at_the_call(serve: Any, name: str) -> None:
    calls = [{"max_tokens": 4, name: value} for value in BAD_FIELDS.get(name, [])] + BAD_ARGUMENTS.get(name, [])
    async with serve() as served:
        for call in calls:
            arguments = {"prompt": IDS} | call
            with pytest.raises(InvalidRequest, match=name if name in BAD_FIELDS else None) as at_stream:
                served.engine.stream(**arguments)
            with pytest.raises(InvalidRequest) as at_generate:
                await served.engine.generate(**arguments)
            assert at_stream.value.param == at_generate.value.param == name, call
            assert_nothing_was_queued(served)


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda prompt: ascii(shorten(prompt)))
async def test_a_bad_prompt_is_refused_before_it_is_queued(serve: Any, prompt: Any) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest) as error:
            await served.engine.generate(prompt)
        with pytest.raises(InvalidRequest):
            async with served.engine.stream(prompt):
                raise AssertionError("entered")
        if isinstance(prompt, np.ndarray) or (isinstance(prompt, list) and not isinstance(prompt[0], dict)):
            with pytest.raises(InvalidRequest) as at_stream:  # ids are looked at in the call
                served.engine.stream(prompt)
            assert at_stream.value.param == "prompt"

        assert error.value.param == "prompt"
        assert len(str(error.value)) < 300
        assert not isinstance(error.value, PromptTooLong)
        assert_nothing_was_queued(served)


async def test_a_model_without_a_tokenizer_says_what_it_cannot_take(serve: Any, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with serve(model=str(tmp_path)) as served:
        with pytest.raises(InvalidRequest, match="no tokenizer") as text:
            served.engine.stream("hi")
        with pytest.raises(InvalidRequest, match="no tokenizer") as chat:
            served.engine.stream([{"role": "user", "content": "hi"}])
        with pytest.raises(InvalidRequest, match="tokenizer") as stop:
            served.engine.stream(IDS, stop="x")

        assert (text.value.param, chat.value.param, stop.value.param) == ("prompt", "prompt", "stop")
        for work in (served.engine.tokenize("hi"), served.engine.detokenize([5])):
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                await work
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            served.engine.token_bytes([5])
        assert_nothing_was_queued(served)


# Too long


@pytest.mark.parametrize(
    "prompt",
    [
        [5] * 20,
        [5] * 100_000,
        "fox " * 20,
        "fox " * 2000,
        [{"role": "user", "content": "fox " * 20}],
        [{"role": "user", "content": "fox " * 2000}],
    ],
    ids=["ids", "many ids", "text", "long text", "chat", "long chat"],
)
async def test_a_prompt_that_leaves_no_room_is_too_long(serve: Any, prompt: Any) -> None:
    async with serve(max_model_len=20) as served:
        with pytest.raises(PromptTooLong) as error:
            await served.engine.generate(prompt)

        assert error.value.length > error.value.limit == 19
        assert error.value.param == "prompt"
        assert str(error.value.limit) in str(error.value)
        assert_nothing_was_queued(served)


async def test_a_text_of_long_special_tokens_is_counted_by_its_tokens(serve: Any) -> None:
    text = "<|im_start|>" * 200
    async with serve() as served:
        output = await served.engine.generate(text, max_tokens=1)
        assert len(output.prompt_token_ids) == 200


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
@pytest.mark.parametrize("prompt", ["text", "chat"])
async def test_thirty_megabytes_are_refused_in_a_thread_and_never_tokenized(
    serve: Any, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    text = "megabyte" * (30 * 2**20 // 8)
    prompts: dict[str, Any] = {"text": text, "chat": [{"role": "user", "content": text}]}
    threads = []

    def prepare_and_note(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return prepare(*arguments, **named)

    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenized")

    prepare = Call.prepare
    monkeypatch.setattr(Call, "prepare", prepare_and_note)
    async with serve() as served:
        monkeypatch.setattr(served.tokenizer, "encode", encode)
        with pytest.raises(PromptTooLong):
            await served.engine.generate(prompts[prompt])
        assert_nothing_was_queued(served)

    assert threads
    assert threading.current_thread() not in threads


class Unread(np.ndarray):
    def tolist(self) -> Any:
        raise AssertionError("read")


@pytest.mark.parametrize(
    "prompt",
    [
        [5] * 5_000_000,
        (5,) * 5_000_000,
        np.zeros(20, np.int32).view(Unread),
        np.broadcast_to(np.int32(5), 50_000_000).view(Unread),
        torch.tensor(5, dtype=torch.int32).expand(50_000_000),
    ],
    ids=["list", "tuple", "array", "long array", "tensor"],
)
async def test_too_many_ids_are_refused_by_their_number_alone(serve: Any, prompt: Any) -> None:
    async with serve(max_model_len=20) as served:
        with pytest.raises(PromptTooLong) as error:
            served.engine.stream(prompt)
        assert error.value.length == len(prompt)
        assert_nothing_was_queued(served)


# What can hardly be shown


class Untold:
    def __repr__(self) -> str:
        raise AssertionError("shown")


HARD_TO_SHOW = {
    "long negative int": -(10**5000),
    "long int": 10**5000,
    "array": np.array([1, 2]),
    "ten megabytes": "x" * 10_000_000,
    "many": [Untold()] * 100,
    "many in a deque": collections.deque([Untold()] * 100),
}


@pytest.mark.parametrize("value", HARD_TO_SHOW.values(), ids=HARD_TO_SHOW)
@pytest.mark.parametrize("name", ["priority", "on_full", "max_unread_tokens", "stream_interval", "request_id"])
async def test_a_bad_value_that_is_hard_to_show_is_named_in_few_words(serve: Any, name: str, value: Any) -> None:
    if name in ("max_unread_tokens", "stream_interval") and isinstance(value, int):
        value = -abs(value)
    async with serve() as served:
        with pytest.raises(InvalidRequest) as error:
            served.engine.stream(IDS, **{name: value})
        assert error.value.param == name
        assert len(str(error.value)) < 200
        assert_nothing_was_queued(served)


async def test_numpys_integers_are_as_good_as_pythons(serve: Any) -> None:
    async with serve() as served:
        async with served.engine.stream(
            IDS,
            max_tokens=4,
            priority=np.int64(-3),
            max_unread_tokens=np.int32(2),
            stream_interval=np.uint8(2),
        ) as stream:
            call = stream._call.options
            assert [type(value) for value in (call.priority, call.max_unread_tokens, call.stream_interval)] == [int] * 3
            assert sum([len(delta.token_ids) async for delta in stream]) == 4
        for bad in (np.int64(0), np.float64(3), np.bool_(True)):
            with pytest.raises(InvalidRequest):
                served.engine.stream(IDS, stream_interval=bad)


# What the caller goes on with


async def test_messages_that_hold_themselves_are_refused(serve: Any) -> None:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    async with serve() as served:
        with pytest.raises(InvalidRequest, match="deeper than 32 levels"):
            served.engine.stream([{"role": "user", "content": "a fox", "cycle": cycle}])


async def test_an_object_in_a_message_is_the_templates_business(serve: Any) -> None:
    class Odd:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    async with serve() as served:
        expected = await served.engine.tokenize([{"role": "user", "content": "a fox"}])
        output = await served.engine.generate([{"role": "user", "content": "a fox", "odd": [Odd()]}], max_tokens=1)
        assert output.prompt_token_ids == expected
