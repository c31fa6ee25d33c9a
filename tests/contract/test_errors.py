"""Errors are the same of all: bad values, steps that fail, devices that are lost, engines that are closed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from contract.ways import BOTH_LOOPS, DEADLINE_S, error_of, has_load, reasons_of, same_error, told
from hostile_errors import HOSTILE
from nightly import nightly
from waiting import until

from aioengine import (
    Engine,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    StepFailed,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 140))
TEXT = "Once upon a time"
CHAT = [{"role": "user", "content": "Who lives here?"}]
CONTINUED = {"continue_final_message": True}

BAD_CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "an id that the model lacks": ([5, 2048], {}),
    "too many ids": ([5] * 512, {}),
    "too long a text": ("happily " * 3000, {}),
    "a chat without roles": ([{"content": "Hello"}], {}),
    "a variable that is the engine's own": (CHAT, {"chat_template_kwargs": {"tools": []}}),
    "an unknown keyword": (PROMPT, {"temprature": 1.0}),
    "n": (PROMPT, {"n": 129}),
    "logprobs": (PROMPT, {"logprobs": 21}),
    "prompt_logprobs": (PROMPT, {"prompt_logprobs": 21}),
    "logprob_token_ids": (PROMPT, {"logprob_token_ids": [2048]}),
    "stop_token_ids": (PROMPT, {"stop_token_ids": [5000]}),
    "logit_bias": (PROMPT, {"logit_bias": {4096: 1.0}}),
    "allowed_token_ids": (PROMPT, {"allowed_token_ids": []}),
    "allowed_token_ids that all end": (PROMPT, {"allowed_token_ids": [2], "min_tokens": 1}),
    "bad_words": (PROMPT, {"bad_words": [" "]}),
    "logits_processors": (PROMPT, {"logits_processors": [7]}),
}
"""Refused by what the engine or its model has; what is refused whatever these have is so on the caller's side."""


@pytest.mark.parametrize("bad", BAD_CALLS)
async def test_a_bad_request_is_refused_in_the_same_words(engine: Engine, reference: Engine, bad: str) -> None:
    prompt, options = BAD_CALLS[bad]
    kind, *_ = await same_error(engine, reference, lambda each: each.generate(prompt, **options))
    assert issubclass(kind, InvalidRequest)


async def test_any_other_bad_call_is_refused_in_the_same_words(engine: Engine, reference: Engine) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda each: each.pause("gently"),
        lambda each: each.sleep(3),
        lambda each: each.sleep(True),
        lambda each: each.sleep(1, mode="never"),
        lambda each: each.wake_up(["everything"]),
        lambda each: each.detokenize([5, 2048]),
    ]
    for call in calls:
        assert (await same_error(engine, reference, call))[0] is InvalidRequest
    assert not await engine.is_sleeping()
    assert reasons_of(await engine.generate(PROMPT, max_tokens=2)) == ["length"], "it is not paused"


async def test_functions_do_not_travel(engine: Engine, way: str) -> None:
    work = engine.generate(PROMPT, max_tokens=2, logits_processors=[lambda row: row.logits])
    if way == "in_process":
        assert reasons_of(await work) == ["length"]
    else:
        with pytest.raises(InvalidRequest, match="logits_processors") as refused:
            await work
        assert refused.value.param == "logits_processors"


def without_numbers(error: Exception) -> str:
    """Its text but for the number of the step."""
    return re.sub(r"\d+", "#", str(error))


# Steps that fail


@BOTH_LOOPS
async def test_a_failed_step_fails_its_requests_with_a_report_and_nobody_else(
    make_engine: Any, make_local: Any, tasks: Any, quiet_log: None
) -> None:
    errors = []
    for engine in (await make_engine(), await make_local()):
        before = told(await engine.generate(PROMPT, seed=1, max_tokens=9))
        async with engine.stream(PROMPT, seed=2, max_unread_tokens=1, max_tokens=9) as blocked:
            await anext(blocked)
            await engine.generate([7], max_tokens=9)
            await engine.collective_rpc("contract.fail_next_step", ["it went wrong"])
            error = await error_of(engine.generate(PROMPT, seed=3, max_tokens=9))
            assert isinstance(error, StepFailed)
            assert "it went wrong" in error.dump
            errors.append((without_numbers(error), [line.split(":")[0] for line in error.dump.splitlines()][:3]))
            assert reasons_of(await blocked.finish()) == ["length"]
        assert told(await engine.generate(PROMPT, seed=1, max_tokens=9)) == before
        assert engine.health().status == "ALIVE"
        assert engine.stats().finished["error"] == 1
    assert errors[0] == errors[1]


@BOTH_LOOPS
async def test_one_row_that_fails_ends_its_request_with_a_report_and_no_other(
    make_engine: Any, make_local: Any, tasks: Any, quiet_log: None
) -> None:
    errors = []
    for engine in (await make_engine(), await make_local()):
        await engine.pause()
        first = tasks.start(engine.generate(PROMPT, seed=5, max_tokens=9))
        await until(has_load(engine, waiting=1))
        second = tasks.start(engine.generate(PROMPT, seed=6, max_tokens=9))
        await until(has_load(engine, waiting=2))
        await engine.collective_rpc("contract.fail_row_of_next_step", [0, "a row went wrong"])
        await engine.resume()
        [error, output] = await tasks.end(first, second)
        assert isinstance(error, StepFailed)
        assert "a row went wrong" in error.dump
        assert reasons_of(output) == ["length"]
        errors.append(without_numbers(error))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("what", HOSTILE)
async def test_an_error_that_breaks_those_who_look_at_it_is_heard_like_any_other(
    engine: Engine, what: str, quiet_log: None
) -> None:
    with anyio.fail_after(DEADLINE_S):
        assert await error_of(engine.collective_rpc("contract.fail_hostilely", [what, "here"])) is not None
        for where in ("step", "row"):
            await engine.collective_rpc("contract.fail_hostilely", [what, where])
            error = await error_of(engine.generate(PROMPT, max_tokens=9))
            assert isinstance(error, StepFailed)
            assert len(str(error)) < 20_000
        assert reasons_of(await engine.generate(PROMPT, max_tokens=9)) == ["length"]
    assert engine.health().status == "ALIVE"


@pytest.mark.parametrize("what", ["its own cause", *nightly("its text raises")])
async def test_a_device_that_is_lost_by_such_an_error_is_everyones_end(
    make_engine: Any, what: str, quiet_log: None
) -> None:
    engine = await make_engine()
    await engine.collective_rpc("contract.fail_hostilely", [what, "device"])
    with anyio.fail_after(DEADLINE_S):
        assert isinstance(await error_of(engine.generate(PROMPT, max_tokens=9)), EngineDead)
    assert engine.health().status == "DEAD"


# The end


async def everything_of(engine: Engine) -> list[Exception]:
    """What each method says of an engine that is no more."""
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(PROMPT),
        engine.drain,
        engine.pause,
        engine.resume,
        engine.reset_prefix_cache,
        engine.sleep,
        engine.wake_up,
        engine.is_sleeping,
        engine.supported_tasks,
        engine.start_profile,
        lambda: engine.stop_profile("trace.json"),
        lambda: engine.save_sharded_state("/nowhere"),
        lambda: engine.update_weights("/nowhere"),
        lambda: engine.collective_rpc("contract.echo"),
        lambda: engine.apply_model(len),
        engine.execute_dummy_batch,
        lambda: engine.tokenize(TEXT),
        lambda: engine.detokenize([5]),
    ]
    errors = [await error_of(call()) for call in calls]
    for synchronous in (
        engine.check_accepting,
        lambda: engine.token_bytes([5]),
        engine.stats,
        engine.get_tokenizer,
        engine.describe,
        lambda: engine.info,
        lambda: engine.metrics,
        lambda: engine.stream(PROMPT),
        lambda: engine.add_observer(object()),
        lambda: engine.profile("trace.json"),
    ):
        with pytest.raises((EngineClosed, EngineDead)) as ended:
            synchronous()
        errors.append(ended.value)
    return errors


@BOTH_LOOPS
async def test_a_lost_device_is_everyones_end_once_in_the_same_words(
    make_engine: Any, make_local: Any, tasks: Any, quiet_log: None
) -> None:
    messages = []
    for engine in (await make_engine("make_slow"), await make_local("make_slow")):
        running = [tasks.start(engine.generate(PROMPT, seed=seed, n=2, max_tokens=3000)) for seed in range(3)]
        await until(has_load(engine, running=6))
        await engine.collective_rpc("contract.lose_device", ["the device is gone"])
        errors = [*await tasks.end(*running), *await everything_of(engine)]
        assert {type(error) for error in errors} == {EngineDead}
        assert len(set(map(id, errors))) == len(errors), "each has an error of its own"
        assert len({str(error) for error in errors}) == 1
        assert "the device is gone" in errors[0].dump
        health = engine.health()
        assert (health.status, health.reason) == ("DEAD", str(errors[0]))
        messages.append(str(errors[0]))
        await engine.aclose()
        assert (engine.health().status, engine.health().reason) == ("DEAD", str(errors[0]))
        assert {type(error) for error in await everything_of(engine)} == {EngineDead}
    assert messages[0] == messages[1]


@BOTH_LOOPS
async def test_a_closed_engine_says_so_to_everyone(make_engine: Any, make_local: Any, tasks: Any) -> None:
    heard = []
    for engine in (await make_engine("make_slow"), await make_local("make_slow")):
        running = [tasks.start(engine.generate(PROMPT, seed=seed, max_tokens=3000)) for seed in range(3)]
        await until(has_load(engine, running=3))
        await engine.aclose()
        await engine.aclose()
        errors = [*await tasks.end(*running), *await everything_of(engine)]
        assert {type(error) for error in errors} == {EngineClosed}
        engine.abort("anything")
        engine.abort_all()
        heard.append(([str(error) for error in errors], engine.health().status, engine.health().reason))
    assert heard[0] == heard[1]
    assert heard[0][1] == "DEAD"


async def test_what_is_asked_while_it_closes_is_told_so(make_engine: Any, tasks: Any) -> None:
    engine = await make_engine("make_slow")
    calls = [tasks.start(engine.pause("wait")), tasks.start(engine.drain())]
    running = tasks.start(engine.generate(PROMPT, max_tokens=3000))
    await asyncio.sleep(0)
    await engine.aclose()
    outcomes = await tasks.end(*calls, running)
    assert all(outcome is None or isinstance(outcome, EngineClosed) for outcome in outcomes)
