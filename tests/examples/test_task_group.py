"""The script with a task group: all answers, those that were cut short, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from examples.conftest import Process, load, until

STORY = "Tell me a short story about a fox named Ruby."
SUM = "What is 8 + 7?"


def ends_of(output: str) -> list[str]:
    """The column of how each prompt has ended."""
    rows = output[output.index("prompt   ") :].splitlines()[1:]
    return [row[51:59].strip() for row in rows]


async def test_all_answers(capsys: pytest.CaptureFixture[str]) -> None:
    module = load("task_group")
    await module.main(1000.0, module.PROMPTS)
    table = capsys.readouterr().out
    assert ends_of(table) == ["stop"] * 24
    assert "'2 + 3 = 5.'" in table


async def test_a_time_limit_keeps_what_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    module = load("task_group")
    await module.main(0.0, [STORY, SUM])
    assert ends_of(capsys.readouterr().out) == ["timeout", "timeout"]


@pytest.mark.nightly
async def test_ctrl_c_prints_what_there_is(run: Callable[..., Process], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{STORY}\n" * 500)
    process = run("task_group", "1000", str(prompts))
    await until(lambda: "KV cache" in process.output())
    process.interrupt()
    assert await process.ended() == 130, process.output()
    ends = ends_of(process.output())
    assert len(ends) == 500
    assert ends[-1] == "not run"
    assert "Traceback" not in process.output()
    assert "Warning" not in process.output()
