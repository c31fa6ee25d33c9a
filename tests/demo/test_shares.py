"""How often the shipped demo model is right, over seeded questions, with `demo_model.evaluate`.

Each bound lies well below what was measured: sums in another order, on another machine, turn an answer here and there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


SHARES: dict[str, tuple[Callable[[DemoModel], Mapping[str, float]], dict[str, float]]] = {
    "calls": (
        lambda demo: tool_shares(demo, NUM_QUESTIONS),
        {
            "one call: the tools": 0.7,
            "one call": 0.5,
            "two or three calls: the tools": 0.45,
            "two or three calls": 0.3,
            "no call is needed": 0.8,
            "answer from the result": 0.75,
            "call after a result: the tools": 0.8,
            "call after a result": 0.7,
        },
    ),
    "tools with names that it has never seen": (
        lambda demo: new_tool_shares(demo, NUM_QUESTIONS),
        {
            "of its words: the tool": 0.65,
            "of its words": 0.45,
            "of other words: the tool": 0.5,
            "of other words": 0.25,
        },
    ),
    "schemas": (
        lambda _: schema_shares(DEMO_MODEL, NUM_QUESTIONS),
        {"animals": 0.9, "people": 0.7, "sums": 0.45, "answers": 0.85},
    ),
    "thoughts": (
        lambda demo: thinking_shares(demo, NUM_QUESTIONS),
        {"sums of two digits": 0.5, "sums of three numbers": 0.65, "other questions": 0.75},
    ),
    "facts": (
        lambda demo: share_of_right_answers(demo, NUM_QUESTIONS),
        {"animals": 0.9, "opposites, colours, calendar": 0.9, "small talk": 0.95},
    ),
    "names": (name_shares, {"its own": 0.9, "the user's": 0.95}),
    "JSON": (lambda demo: share_of_valid_json(demo, NUM_QUESTIONS), {"parses": 0.95, "animal facts exact": 0.85}),
    "small sums": (share_of_right_sums, {"sums": 0.97, "differences": 0.97, "products": 0.94}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SHARES)
def test_answers_are_right_as_often_as_the_card_says(demo: DemoModel, kind: str) -> None:
    measure, bounds = SHARES[kind]
    shares = measure(demo)
    assert shares.keys() == bounds.keys()
    assert {name: share for name, share in shares.items() if share < bounds[name]} == {}
