"""A plan is plain data: an executor in another process runs it from its bytes, grammars included."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from executor.plans import PlanWriter
from seams.far_device import FarExecutor

from aioengine import Choice, Engine, EngineConfig, Json, Regex
from aioengine.errors import InvalidRequest, WireError
from aioengine.scheduler.plan import GrammarHandle, Handles, ProcessorHandle, StepPlan, decode_plan, encode_plan, int32
from aioengine.structured.grammar import Thinking

CONFIG: dict[str, Any] = {"kv_cache_memory_bytes": 2**24, "max_in_flight": 1, "num_threads": 1}
ANIMAL = {
    "type": "object",
    "properties": {"animal": {"enum": ["a cat", "a dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "Two cats": {"structured": Json(ANIMAL), "n": 2, "temperature": 1.0, "seed": 4, "max_tokens": 40},
    "A word of a and b": {"structured": Regex("[ab]{5,9}"), "temperature": 0.7, "seed": 1, "top_k": 20},
    "Yes or no?": {"structured": Choice(["yes, certainly", "no, never"]), "temperature": 0.0},
    "Once upon a time": {"temperature": 1.0, "seed": 9, "bad_words": ["the"], "logit_bias": {300: 4.0}},
    "The same again": {"structured": Json(ANIMAL), "temperature": 0.0, "presence_penalty": 0.5, "max_tokens": 40},
}


async def outputs_of(engine: Engine) -> list[list[list[int]]]:
    """The token ids of each request's choices; all requests at once."""
    calls = [engine.generate(prompt, **{"max_tokens": 16, **sampling}) for prompt, sampling in REQUESTS.items()]
    return [[choice.token_ids for choice in output.outputs] for output in await asyncio.gather(*calls)]


async def test_an_executor_in_another_process_brings_the_same_tokens() -> None:
    far = FarExecutor()
    with anyio.fail_after(120):
        async with Engine(device="cpu", **CONFIG) as engine:
            expected = await outputs_of(engine)
        await far.start(EngineConfig(device="cpu", **CONFIG))
        async with Engine(executor=far, device="cpu", **CONFIG) as engine:
            assert await outputs_of(engine) == expected
    assert far.num_bytes > 0


def plan_of_everything() -> StepPlan:
    """A plan with every kind of column, a grammar and a processor."""
    writer = PlanWriter(64, 4, handles=Handles())
    thinking = Thinking(end_ids=(5,), forced_end_ids=(4, 5), max_tokens=3)
    writer.add(0, [3, 4, 5, 6, 7], grammar=GrammarHandle(Json(ANIMAL), thinking), logits_processors=(print,))
    writer.add(1, [8] * 9, bad_words=((3,), (4, 5)), stop_ids=(7,), logit_bias=((3, 0.5),), temperature=0.25)
    writer.plan({0: None, 1: 2})
    writer.remove(1)
    writer.add(1, [9] * 3, grammar=GrammarHandle(None, thinking))
    plan = writer.plan({0: None, 1: 2})
    return msgspec.structs.replace(plan, copied_from=int32([3]), copied_to=int32([4]))


def test_a_plan_decoded_is_the_plan_encoded_and_shares_the_message() -> None:
    plan = plan_of_everything()
    message = encode_plan(plan)
    decoded = decode_plan(message)
    assert encode_plan(decoded) == message
    assert decoded.describe() == plan.describe()
    for array in (decoded.rows, decoded.purposes, decoded.added[0].token_ids, decoded.added[0].block_ids[0]):
        assert not array.flags.writeable
        assert not array.flags.owndata
    assert decoded.rows.dtype == np.int32
    assert decoded.purposes.dtype == np.int8


def test_a_description_hides_what_a_grammar_is_compiled_from() -> None:
    plan = plan_of_everything()
    assert plan.describe()["added"][0]["sampling"]["grammar"] == "Thinking"
    assert "a cat" not in str([plan.describe(), decode_plan(encode_plan(plan)).describe()])


def test_what_is_no_plan_is_refused() -> None:
    plan = plan_of_everything()
    message = encode_plan(plan)
    changes: list[dict[str, Any]] = [
        {"rows": int32([0])},
        {"rows": int32([0, 1]).astype(np.int8)},
        {"starts": int32([-1, 0])},
        {"num_tokens": int32([0, 1])},
        {"purposes": np.array([0, 9], np.int8)},
        {"grown_blocks": int32([1, 2, 3])},
        {"step": "one"},
        {"added": (msgspec.structs.replace(plan.added[0], num_prompt_tokens=99),)},
    ]
    bad = [message[:length] for length in range(len(message))] + [message + b"\0", b"\xc1"]
    bad += [encode_plan(msgspec.structs.replace(plan, **change)) for change in changes]
    for each in bad:
        with pytest.raises(WireError):
            decode_plan(each)


def test_a_handle_lasts_as_long_as_what_has_it_and_means_a_processor_in_its_own_process_alone() -> None:
    handles = Handles()
    made = handles.add_processors([print, len])
    assert handles.get_processors(made) == (print, len)
    with pytest.raises(InvalidRequest, match="in another process"):
        handles.get_processors([ProcessorHandle(made[0].number)])
    del made
    assert not handles._processors
