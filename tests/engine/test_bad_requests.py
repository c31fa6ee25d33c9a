"""What is wrong with a request is said at the call, by name, and nothing is queued."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from aioengine import EngineOverloaded, InvalidRequest, PromptTooLong, SamplingParams

IDS = [5, 6, 7]

BAD_FIELDS = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("seed", 1.5),
    ("seed", "7"),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 10**30),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "many"),
    ("max_tokens", True),
    ("max_tokens", float("nan")),
    ("min_tokens", -1),
    ("min_tokens", None),
    ("min_tokens", 9),  # more than max_tokens
    ("ignore_eos", "yes"),
    ("ignore_eos", 1),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 7),
    ("stop", [7]),
    ("stop", None),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2048]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", 3),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [2**31]),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("logprobs", 1.5),
    ("n", 0),
    ("n", 129),
    ("n", 10**30),
    ("n", True),
    ("presence_penalty", 2.1),
    ("presence_penalty", float("nan")),
    ("frequency_penalty", float("-inf")),
    ("repetition_penalty", 0),
    ("repetition_penalty", float("inf")),
    ("logit_bias", {2048: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {5: float("nan")}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", [5]),
    ("logit_bias", dict.fromkeys(range(200_000), 1.0)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [2048]),
    ("allowed_token_ids", [1.5]),
    ("bad_words", [""]),
    ("bad_words", ["  "]),
    ("bad_words", 7),
    ("bad_words", ["w"] * 10_000),
    ("stop", "s" * 10_000_000),
    ("stop", ["s"] * 10_000),
    ("logprob_token_ids", [2048]),
    ("logprob_token_ids", list(range(200_000))),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("detokenize", 1),
    ("stop_token_ids", list(range(200_000))),
    ("logits_processors", [7]),
    ("logits_processors", 7),
]

BAD_ARGUMENTS = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": 7}),
    ("prompt", {"prompt": b"bytes"}),
    ("prompt", {"prompt": (1, "a")}),
    ("prompt", {"prompt": {"role": "user", "content": "hi"}}),
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": 7}),
    ("on_full", {"on_full": "explode"}),
    ("on_full", {"on_full": None}),
    ("on_full", {"on_full": []}),
    ("params", {"params": {"max_tokens": 3}}),
    ("params", {"params": 3}),
    ("params", {"params": SamplingParams(), "max_tokens": 3}),
    ("logprobs", {"params": SamplingParams(logprobs=21)}),
    ("stop_token_ids", {"params": SamplingParams(stop_token_ids=(2048,))}),
    ("max_token", {"max_token": 3}),
    ("max_tokn", {"max_tokn": 3}),
    ("priority", {"priority": 1.5}),
    ("priority", {"priority": None}),
    ("priority", {"priority": True}),
    ("priority", {"priority": 10**30}),
    ("cache_salt", {"cache_salt": ""}),
    ("cache_salt", {"cache_salt": 7}),
    ("cache_salt", {"cache_salt": "s" * 1025}),
    ("cache_salt", {"cache_salt": "\ud800"}),
    ("n", {"params": SamplingParams(n=129)}),
]

BAD_PROMPTS = [
    [-1],
    [5, 2048],
    [5, 2**40],
    [5, 10**30],
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
]


def assert_nothing_was_queued(served: Any) -> None:
    served.assert_nothing_is_held()
    assert served.executor.plans == []


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=str)
async def test_a_bad_sampling_value_is_named_at_the_call(serve: Any, name: str, value: Any) -> None:
    sampling = {"max_tokens": 4} | {name: value}
    async with serve() as served:
        with pytest.raises(InvalidRequest, match=name) as at_stream:
            served.engine.stream(IDS, **sampling)
        with pytest.raises(InvalidRequest) as at_generate:
            await served.engine.generate(IDS, **sampling)

        assert at_stream.value.param == at_generate.value.param == name
        assert_nothing_was_queued(served)


@pytest.mark.parametrize(("name", "arguments"), BAD_ARGUMENTS, ids=str)
async def test_a_bad_argument_is_named_at_the_call(serve: Any, name: str, arguments: dict[str, Any]) -> None:
    arguments = {"prompt": IDS} | arguments
    async with serve() as served:
        with pytest.raises(InvalidRequest) as at_stream:
            served.engine.stream(**arguments)
        with pytest.raises(InvalidRequest) as at_generate:
            await served.engine.generate(**arguments)

        assert at_stream.value.param == at_generate.value.param == name
        assert_nothing_was_queued(served)


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=ascii)
async def test_a_bad_prompt_is_refused_before_it_is_queued(serve: Any, prompt: Any) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest) as error:
            await served.engine.generate(prompt)
        with pytest.raises(InvalidRequest):
            async with served.engine.stream(prompt):
                raise AssertionError("entered")

        assert error.value.param == "prompt"
        assert not isinstance(error.value, PromptTooLong)
        assert_nothing_was_queued(served)


@pytest.mark.parametrize(
    "prompt",
    [prompt for prompt in BAD_PROMPTS if isinstance(prompt, list) and not isinstance(prompt[0], dict)],
    ids=ascii,
)
async def test_bad_ids_are_refused_at_the_call_of_stream(serve: Any, prompt: Any) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest) as error:
            served.engine.stream(prompt)
        assert error.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [np.zeros((2, 2), np.int32), np.array([0.5]), np.array([True]), np.array(7), np.zeros(0, np.int32)],
    ids=["matrix", "floats", "booleans", "scalar", "empty"],
)
async def test_an_array_that_holds_no_list_of_ids_is_refused(serve: Any, prompt: Any) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest) as error:
            served.engine.stream(prompt)
        assert error.value.param == "prompt"


async def test_an_unknown_keyword_comes_with_the_nearest_one(serve: Any) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest, match="did you mean 'max_tokens'"):
            served.engine.stream(IDS, max_toknes=3)


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


async def test_too_many_ids_are_refused_before_a_place_is_waited_for(serve: Any) -> None:
    async with serve(max_model_len=20) as served:
        with pytest.raises(PromptTooLong):
            served.engine.stream([5] * 20)


async def test_a_text_of_long_special_tokens_is_counted_by_its_tokens(serve: Any) -> None:
    text = "<|im_start|>" * 200
    async with serve() as served:
        output = await served.engine.generate(text, max_tokens=1)
        assert len(output.prompt_token_ids) == 200


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
@pytest.mark.parametrize("prompt", ["text", "chat", "ids"])
async def test_thirty_megabytes_are_refused_while_the_loop_goes_on(serve: Any, tasks: Any, prompt: str) -> None:
    text = "megabyte" * (30 * 2**20 // 8)
    prompts: dict[str, Any] = {
        "text": text,
        "chat": [{"role": "user", "content": text}],
        "ids": [5] * (30 * 2**20 // 8),
    }
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest_s, before = max(longest_s, now - before), now

    async with serve() as served:
        ticker = tasks.start(tick())
        await asyncio.sleep(0)
        with pytest.raises(PromptTooLong):
            await served.engine.generate(prompts[prompt])
        ticker.cancel()
        await tasks.end()
        assert_nothing_was_queued(served)

    # Tokenizing it takes seconds. Generous: other processes may have the cores.
    assert longest_s < 0.5


async def test_many_long_prompts_are_prepared_in_their_order(serve: Any) -> None:
    async with serve(max_model_len=1000, config={"max_num_batched_tokens": 4096}) as served:
        texts = [f"{number} " + "fox and owl " * 100 for number in range(8)]
        outputs = await asyncio.gather(*(served.engine.generate(text, seed=1, max_tokens=2) for text in texts))

        assert [output.prompt for output in outputs] == texts
        started = [added.token_ids.tolist() for plan in served.executor.plans for added in plan.added]
        assert started == [served.tokenizer.encode(text) for text in texts]


async def test_overload_is_heard_before_anything_is_tokenized(
    serve: Any, tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(is_manual=True, config={"max_waiting": 1, "max_num_seqs": 1}) as served:
        tasks.start(served.engine.generate(IDS, max_tokens=1))
        await served.until(lambda: served.executor.plans)
        tasks.start(served.engine.generate(IDS, max_tokens=1))
        await served.turn()

        def encode(*_: Any, **__: Any) -> list[int]:
            raise AssertionError("tokenized")

        monkeypatch.setattr(served.tokenizer, "encode", encode)
        for prompt in ("a short text", "a long text " * 1000, [{"role": "user", "content": "hi"}]):
            with pytest.raises(EngineOverloaded) as error:
                await served.engine.generate(prompt, on_full="raise")
            assert error.value.retry_after_s > 0
        await served.rest()
        assert all(output.finished for output in await tasks.end())
