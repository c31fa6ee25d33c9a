"""The script with OpenAI's client and no server."""

from __future__ import annotations

import pytest
from examples.conftest import load


async def test_it_answers_streams_leaves_and_tells_of_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    await load("openai_in_process").main()
    told = capsys.readouterr().out.splitlines()
    assert told[:6] == [f"What is {number} + 7? {number} + 7 = {number + 7}." for number in range(3, 9)]
    story = "\n".join(told[6:-3])
    assert "Ruby" in story
    assert story.endswith(" […]")
    assert told[-3] == "0 requests run now"
    assert told[-2].startswith("a time limit: ")
    assert told[-1] == "a mistake: context_length_exceeded"
