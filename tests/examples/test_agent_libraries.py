"""The scripts with libraries for agents: their calls, typed answers and streams are those of the model in the loop."""

from __future__ import annotations

import pytest
from examples.conftest import load

FOX = "AnimalFacts(name='fox', food='berries', legs=4)"


async def told_by(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    await load(name).main()
    return capsys.readouterr().out.splitlines()


async def test_pydantic_ai(capsys: pytest.CaptureFixture[str]) -> None:
    sums = [f"{number} + 45 = {number + 45}." for number in (123, 200, 317)]
    assert await told_by("pydantic_ai_agents", capsys) == [*sums, FOX, FOX, sums[0]]


@pytest.mark.nightly
async def test_langchain(capsys: pytest.CaptureFixture[str]) -> None:
    told = await told_by("langchain_chat", capsys)
    assert told == ["[('add', {'a': 123, 'b': 45})]", "123 + 45 = 168.", FOX, FOX, "8 + 7 = 15."]


@pytest.mark.nightly
async def test_openai_agents(capsys: pytest.CaptureFixture[str]) -> None:
    told = await told_by("openai_agents_tools", capsys)
    called = "['tool_call_item', 'tool_call_output_item', 'message_output_item'] 123 + 45 = 168."
    kinds = ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")
    assert told == [line for kind in kinds for line in (kind, called, FOX, "8 + 7 = 15.")]


async def test_instructor(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("instructor", reason="its newest release and openai's ask for different jiters")
    told = await told_by("instructor_facts", capsys)
    assert told[:3] == [FOX] * 3
    assert told[3].endswith("the last: AnimalFacts(name='owl', food='mice', legs=2)")
    assert int(told[3].split()[0]) > 3, "the answer came at once"
