"""How often the shipped demo model is right, over seeded questions, with `demo_model.evaluate`.

Each bound lies well below what was measured: sums in another order, on another machine, turn an answer here and there.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from aioengine.models.folder import DEMO_MODEL
from demo_model.evaluate import (
    DemoModel,
    calls_in,
    name_shares,
    new_tool_shares,
    schema_shares,
    share_of_right_answers,
    share_of_right_sums,
    share_of_valid_json,
    thinking_shares,
    tool_shares,
)
from demo_model.tool_chats import Chat
from demo_model.world import Dice

NUM_QUESTIONS = 60


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return DemoModel(DEMO_MODEL)


def too_low(shares: Mapping[str, float], bounds: Mapping[str, float]) -> dict[str, float]:
    assert shares.keys() == bounds.keys()
    return {kind: share for kind, share in shares.items() if share < bounds[kind]}


@pytest.mark.nightly
def test_a_common_tool_is_called_with_the_numbers_of_the_question(demo: DemoModel) -> None:
    properties = {name: {"type": "number"} for name in ("a", "b")}
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
    add = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    clock = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
    dice = Dice("numbers")
    pairs = [(dice.between(21, 999), dice.between(1, 999)) for _ in range(NUM_QUESTIONS)]
    chats = [Chat([{"role": "user", "content": f"What is {a} + {b}?"}], [add, clock]) for a, b in pairs]
    right = [
        calls_in(answer) == [("add", {"a": a, "b": b})]
        for answer, (a, b) in zip(demo.answer(chats), pairs, strict=True)
    ]
    assert sum(right) >= 0.85 * NUM_QUESTIONS


@pytest.mark.nightly
def test_calls_name_the_right_tools_and_have_the_right_arguments(demo: DemoModel) -> None:
    bounds = {
        "one call: the tools": 0.7,
        "one call": 0.5,
        "two or three calls: the tools": 0.45,
        "two or three calls": 0.3,
        "no call is needed": 0.8,
        "answer from the result": 0.75,
        "call after a result: the tools": 0.8,
        "call after a result": 0.7,
    }
    assert too_low(tool_shares(demo, NUM_QUESTIONS), bounds) == {}


@pytest.mark.nightly
def test_tools_with_names_that_it_has_never_seen_are_called_too(demo: DemoModel) -> None:
    bounds = {
        "of its words: the tool": 0.65,
        "of its words": 0.45,
        "of other words: the tool": 0.5,
        "of other words": 0.25,
    }
    assert too_low(new_tool_shares(demo, NUM_QUESTIONS), bounds) == {}


@pytest.mark.nightly
def test_a_schema_gets_the_values_that_answer_the_question() -> None:
    bounds = {"animals": 0.9, "people": 0.7, "sums": 0.45, "answers": 0.85}
    assert too_low(schema_shares(DEMO_MODEL, NUM_QUESTIONS), bounds) == {}


@pytest.mark.nightly
def test_what_is_thought_about_ends_with_the_right_answer(demo: DemoModel) -> None:
    bounds = {"sums of two digits": 0.5, "sums of three numbers": 0.65, "other questions": 0.75}
    assert too_low(thinking_shares(demo, NUM_QUESTIONS), bounds) == {}


@pytest.mark.nightly
def test_small_talk_facts_and_names_are_right_with_tools_learned(demo: DemoModel) -> None:
    facts = {"animals": 0.9, "opposites, colours, calendar": 0.9, "small talk": 0.95}
    assert too_low(share_of_right_answers(demo, NUM_QUESTIONS), facts) == {}
    assert too_low(name_shares(demo), {"its own": 0.9, "the user's": 0.95}) == {}
    assert too_low(share_of_valid_json(demo, NUM_QUESTIONS), {"parses": 0.95, "animal facts exact": 0.85}) == {}


@pytest.mark.nightly
def test_every_small_sum_is_right(demo: DemoModel) -> None:
    assert too_low(share_of_right_sums(demo), {"sums": 0.97, "differences": 0.97, "products": 0.94}) == {}
