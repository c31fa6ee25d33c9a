"""Programs that were written for vLLM: its calls work where they can, and else hear what to do."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from aioengine import ConfigError, Engine, EngineConfig, InvalidRequest, RequestOutput, SamplingParams
from aioengine.config import NEUTRAL_CONFIG
from aioengine.sampling_params import NEUTRAL_ARGUMENTS
from aioengine.testing import FakeExecutor

IDS = [5, 6, 7]
PARAMS = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)

BOTH_LOOPS = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


def ids_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


# One output, or a stream


@BOTH_LOOPS
async def test_async_for_over_generate_names_stream(serve: Any) -> None:
    async with serve() as served:
        with pytest.raises(TypeError, match=r"async with engine\.stream\(\.\.\.\) as stream"):
            [output async for output in served.engine.generate(IDS, PARAMS, "request-1")]
        gc.collect()  # a coroutine that was never awaited would be an error
        served.assert_nothing_is_held()


async def in_a_task(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    return await asyncio.create_task(work)  # noqa: TID251


async def in_gather(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    (output,) = await asyncio.gather(work)
    return output


async def in_a_task_group(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work, name="named")
    return task.result()


async def with_a_timeout(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    return await asyncio.wait_for(work, 1000)  # noqa: TID251


async def from_another_thread(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(work, loop).result(30))


@BOTH_LOOPS
@pytest.mark.parametrize("is_debugged", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("run", [in_a_task, in_gather, in_a_task_group, with_a_timeout, from_another_thread])
async def test_generate_gives_a_coroutine_to_all_that_want_one(
    serve: Any, run: Callable[[Any], Coroutine[Any, Any, RequestOutput]], is_debugged: bool
) -> None:
    asyncio.get_running_loop().set_debug(is_debugged)
    async with serve() as served:
        expected = ids_of(await served.engine.generate(IDS, PARAMS))
        assert ids_of(await run(served.engine.generate(IDS, PARAMS))) == expected


@BOTH_LOOPS
async def test_task_groups_and_frameworks_take_the_function(serve: Any) -> None:
    async with serve() as served:
        assert asyncio.iscoroutinefunction(served.engine.generate)
        assert list(inspect.signature(served.engine.generate).parameters)[:3] == ["prompt", "params", "request_id"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(served.engine.generate, IDS, PARAMS)
        assert sum(served.engine.stats().finished.values()) == 1

        work = served.engine.generate(IDS, PARAMS)
        assert inspect.iscoroutine(work)
        assert inspect.isawaitable(work)
        assert "Engine.generate" in repr(work)
        assert inspect.getcoroutinestate(work) == inspect.CORO_CREATED
        work.close()


async def test_one_that_was_never_awaited_is_told(serve: Any) -> None:
    async with serve() as served:
        with pytest.warns(RuntimeWarning, match=r"Engine\.generate.* was never awaited"):
            served.engine.generate(IDS)  # dropped at once


# Arguments


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [
        ((IDS, PARAMS, "mine"), {}),
        ((IDS,), {"sampling_params": PARAMS, "request_id": "mine"}),
        ((), {"prompt": IDS, "sampling_params": PARAMS, "request_id": "mine", "lora_request": None, "priority": 0}),
        ((IDS, PARAMS), {"request_id": "mine", "trace_headers": None, "tokenization_kwargs": {}, "best_of": 1}),
    ],
)
async def test_arguments_may_come_in_vllms_order_and_names(serve: Any, positional: Any, keywords: Any) -> None:
    assert list(inspect.signature(Engine.generate).parameters)[1:4] == ["prompt", "params", "request_id"]
    async with serve() as served:
        output = await served.engine.generate(*positional, **keywords)
        assert output.request_id == "mine"
        assert ids_of(output) == ids_of(await served.engine.generate(IDS, PARAMS))
        async with served.engine.stream(*positional, **keywords) as stream:
            assert stream.request_id == "mine"
            assert stream.params == PARAMS


@pytest.mark.parametrize(
    ("keywords", "param", "message"),
    [
        ({"params": PARAMS, "sampling_params": PARAMS}, "params", "two names of one argument"),
        ({"params": PARAMS, "max_tokns": 3}, "max_tokns", "did you mean 'max_tokens'"),
        ({"sampling_params": PARAMS, "lora_requests": None}, "lora_requests", "unknown parameter 'lora_requests'"),
        ({"sampling_params": PARAMS, "max_tokens": 3}, "params", "not both"),
        ({"sampling_params": {"max_tokens": 3}}, "params", "must be a SamplingParams"),
        ({"lora_request": "adapter"}, "lora_request", "cannot do it yet"),
        ({"params": PARAMS, "tools": [1]}, "tools", "give a function"),
        ({"continue_final_message": True}, "continue_final_message", "chat_template_kwargs"),
        ({"best_of": 2}, "best_of", "give n"),
        ({"max_completion_tokens": 4}, "max_completion_tokens", "give max_tokens"),
        ({"stream": True}, "stream", "engine.stream"),
    ],
)
async def test_what_cannot_be_meant_is_named(serve: Any, keywords: Any, param: str, message: str) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest, match=message) as error:
            await served.engine.generate(IDS, **keywords)
        assert error.value.param == param
        served.assert_nothing_is_held()


async def test_other_arguments_of_vllms_are_taken_where_they_ask_for_nothing(serve: Any) -> None:
    async with serve() as served:
        for name, neutral in NEUTRAL_ARGUMENTS.items():
            for value in neutral.values or (None, "anything"):
                served.engine.stream(IDS, **{name: value})
            if neutral.values is not None:
                with pytest.raises(InvalidRequest, match=f"{name}='other' is not supported"):
                    served.engine.stream(IDS, **{name: "other"})


# Prompts


@pytest.mark.parametrize("text", ["Once upon a time"])
async def test_a_prompt_dict_is_what_is_in_it(serve: Any, text: str) -> None:
    async with serve() as served:
        ids = served.tokenizer.encode(text)
        expected = ids_of(await served.engine.generate(text, PARAMS))
        for prompt in (
            {"prompt": text},
            {"prompt_token_ids": ids},
            {"prompt_token_ids": ids, "prompt": "is not looked at", "token_type_ids": None},
            {"prompt": text, "multi_modal_data": None, "mm_processor_kwargs": {}, "cache_salt": None},
        ):
            assert ids_of(await served.engine.generate(prompt, PARAMS)) == expected


async def test_a_prompt_dict_may_bring_its_salt(serve: Any) -> None:
    async with serve() as served:
        prompt = {"prompt_token_ids": list(range(100, 140)), "cache_salt": "mine"}
        cached = [
            (await served.engine.generate(prompt, PARAMS, cache_salt=salt)).num_cached_tokens
            for salt in (None, "mine", "other", None)
        ]
        assert cached == [0, 32, 0, 32]


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ({}, "prompt", "needs a prompt"),
        ({"prompt": None}, "prompt", "needs a prompt"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": {"prompt": "a"}}, "prompt", "prompt is a dict"),
        ({"prompt": 7}, "prompt", "prompt is an int"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "prompt", "multi_modal_data"),
        ({"prompt_embeds": [0.5]}, "prompt", "prompt_embeds"),
        ({"role": "user", "content": "hi"}, "prompt", "a chat is a list of messages"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt", "cache_salt"),
    ],
    ids=repr,
)
async def test_a_bad_prompt_dict_is_refused_at_the_call(serve: Any, prompt: Any, param: str, message: str) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest, match=message) as error:
            await served.engine.generate(prompt)
        assert error.value.param == param
        served.assert_nothing_is_held()


# The engine


def test_engine_arguments_of_vllms_are_taken_where_they_ask_for_nothing() -> None:
    for name, neutral in NEUTRAL_CONFIG.items():
        assert name not in EngineConfig.__struct_fields__
        for value in neutral.values or (None, 3):
            assert Engine(**{name: value}).config == EngineConfig()
        if neutral.values is not None:
            with pytest.raises(ConfigError, match=f"{name}='other' is not supported: .*{neutral.instead[-20:]}"):
                Engine(**{name: "other"})  # type: ignore[arg-type]


def test_the_tokenizer_may_be_said_to_be_the_models() -> None:
    assert Engine("some/model", tokenizer="some/model").config == EngineConfig(model="some/model")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="tokenizer"):
        Engine("some/model", tokenizer="other/model")  # type: ignore[call-arg]


async def test_an_engines_seed_gives_each_request_one_in_the_order_of_calls(serve: Any) -> None:
    async def run(seed: int | None) -> list[int]:
        executor = FakeExecutor(vocab_size=2048)
        async with Engine(executor=executor, seed=seed) as engine:
            streams = [engine.stream(IDS, max_tokens=2) for _ in range(3)]
            streams.append(engine.stream(IDS, seed=7, max_tokens=2))
            return [stream.params.seed or 0 for stream in streams]

    first, other, none = await run(3), await run(4), await run(None)
    assert first == await run(3)
    assert len({*first, *other}) == 7
    assert first[-1] == 7
    assert none == [0, 0, 0, 7]
    for bad in (True, "1", 1.5):
        with pytest.raises(ConfigError, match="seed="):
            Engine(seed=bad)  # type: ignore[arg-type]


async def test_the_tokenizer_may_be_awaited(serve: Any) -> None:
    async with serve() as served:
        tokenizer = await served.engine.get_tokenizer()
        assert (
            tokenizer.encode("a fox")
            == served.engine.get_tokenizer().encode("a fox")
            == served.tokenizer.encode("a fox")
        )
