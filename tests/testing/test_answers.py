"""A `FakeExecutor` that answers what a test asks for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from aioengine import Choice, ConfigError, Engine, Regex, StepFailed
from aioengine.testing import FakeExecutor

CHAT = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def serving(answers: Any, **config: Any) -> Engine:
    return Engine(executor=FakeExecutor(answers=answers, **config))


async def test_requests_get_the_answers_in_their_order_and_further_ones_the_last() -> None:
    async with serving(["One,  two — ½ 🦊.", "", "\n\nlast"]) as engine:
        outputs = [await engine.generate(CHAT) for _ in range(4)]
    assert [output.text for output in outputs] == ["One,  two — ½ 🦊.", "", "\n\nlast", "\n\nlast"]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_each_request_takes_one_answer_whatever_its_choices_its_limits_and_the_steps_in_flight(
    max_in_flight: int,
) -> None:
    async with serving(["one and on", "", "three and on", "four"], max_in_flight=max_in_flight) as engine:
        cut = await engine.generate("x", seed=1, max_tokens=2)
        empty = await engine.generate("x", seed=1)
        whole = await engine.generate("x", seed=1, n=3, temperature=1.0)
        last = await engine.generate("x", seed=1)
    assert "one and on".startswith(cut.text)
    assert (empty.text, last.text) == ("", "four")
    assert [choice.text for choice in whole.outputs] == ["three and on"] * 3


async def test_a_tool_call_is_text_in_the_models_format() -> None:
    async with serving([CALL, "3"]) as engine:
        (call,) = (await engine.generate(CHAT, tools=[add])).tool_calls
        assert (call.name, call.arguments) == ("add", '{"a": 1, "b": 2}')
        with pytest.raises(StepFailed, match="the request's constraint does not admit '3', by what follows ''"):
            await engine.generate(CHAT, tools=[add], tool_choice="required")


async def test_an_error_reaches_its_own_request_after_the_text_before_it() -> None:
    cut = ("One, two", RuntimeError("unplugged"))
    answers = {"a": RuntimeError("no power"), "b": "fine", "c": cut}
    async with serving(lambda prompt: answers[prompt]) as engine:
        failed, fine = await asyncio.gather(engine.generate("a"), engine.generate("b"), return_exceptions=True)
        assert isinstance(failed, StepFailed)
        assert "no power" in str(failed)
        assert fine.text == "fine"  # type: ignore[union-attr]
        texts = []
        with pytest.raises(StepFailed, match="unplugged"):
            async with engine.stream("c") as stream:
                texts = [delta.text async for delta in stream]
        assert stream.result.outputs[0].text.startswith("One, tw"), texts


async def test_what_a_request_limits_limits_the_answer() -> None:
    async with serving(["an owl, and a fox"]) as engine:
        assert (await engine.generate("x", structured=Choice(["an owl", "a fox"]))).text == "an owl"
        assert (await engine.generate("x", stop=", and")).text == "an owl"
        cut = (await engine.generate("x", max_tokens=2)).outputs[0]
        assert (len(cut.token_ids), cut.finish_reason) == (2, "length")


class Place(BaseModel):
    name: str
    near: list[Place] = []


PLACE = Place(name="Oslo, 1", near=[Place(name="½ 🦊")])


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_json_answers_a_constraint_in_any_spacing(max_in_flight: int) -> None:
    spelt = [PLACE.model_dump_json(), PLACE.model_dump_json(indent=2), json.dumps(PLACE.model_dump()), " 5 "]
    async with serving(spelt, max_in_flight=max_in_flight) as engine:
        outputs = [await engine.generate("x", output_type=Place, max_tokens=200) for _ in range(3)]
        assert [output.parsed for output in outputs] == [PLACE] * 3
        assert (await engine.generate("x", output_type=int)).parsed == 5


@pytest.mark.parametrize(
    ("answer", "constraint"),
    [
        ('{"name": 5}', Place),
        ("```json\n{}\n```", Place),
        ("", Place),
        ('{"name": "a"', Place),
        ("maybe", Choice(["yes", "no"])),
        ("12", Regex("[0-9]{3}")),
    ],
)
async def test_an_answer_that_a_constraint_does_not_admit_fails_its_request(answer: str, constraint: Any) -> None:
    async with serving([answer]) as engine:
        with pytest.raises(StepFailed, match="constraint does not admit"):
            await engine.generate("x", structured=constraint)


async def test_preemption_changes_no_answer() -> None:
    text = "a long text of very many words " * 14
    executor = FakeExecutor(answers=lambda prompt: f"{prompt}: {text}", num_blocks=24, block_size=8, max_model_len=160)
    async with Engine(executor=executor, block_size=8, max_num_seqs=4, enable_prefix_caching=False) as engine:
        outputs = await asyncio.gather(*(engine.generate(name, max_tokens=150) for name in ("a", "b", "c", "d")))
        assert engine.stats().preemptions
    assert [output.text for output in outputs] == [f"{name}: {text}" for name in ("a", "b", "c", "d")]


async def test_it_has_the_vocabulary_of_the_model() -> None:
    async with Engine(executor=FakeExecutor()) as engine:
        assert engine.info.vocab_size == (await engine.get_tokenizer()).vocab_size
        assert (await engine.generate("Once upon a time", max_tokens=5)).text


@pytest.mark.parametrize("answers", ["a text", [], 3, [3], ["a text", ("a text", "no error")]])
def test_what_are_no_answers_is_refused(answers: Any) -> None:
    with pytest.raises(ConfigError, match="answers"):
        FakeExecutor(answers=answers)
