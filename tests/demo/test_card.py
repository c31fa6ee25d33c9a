"""The samples in the demo model's card are what its commands and program print, spaces at the ends of lines aside."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from nightly import few, nightly

from aioengine import Engine, EngineConfig, SamplingParams
from aioengine.cli.command import read_flags
from aioengine.cli.generate import generate, make_messages, show_output
from aioengine.models.folder import DEMO_MODEL

DEADLINE_S = 90


def samples() -> dict[str, str]:
    """The commands in the card's console blocks, each with what follows it up to the next."""
    card = (DEMO_MODEL / "README.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for block in re.findall(r"^```console\n(.*?)^```$", card, re.DOTALL | re.MULTILINE):
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            assert command not in found, f"twice in the card: {command}"
            found[command] = output
    return found


def programs() -> list[tuple[str, str]]:
    """The card's programs, each with the text that follows it."""
    card = (DEMO_MODEL / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)


SAMPLES = samples()
FIRST = next(iter(SAMPLES))
GENERATE = [command for command in SAMPLES if command.startswith("aioengine generate ")]


def tidy(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


async def print_of(engine: Engine, command: str) -> str:
    """What an `aioengine generate` command writes to its pipe or terminal: the command's own code, on this engine."""
    line = command.partition(" | ")[0]
    parsed = generate.make_context("generate", shlex.split(line)[2:]).params
    assert not read_flags(EngineConfig, parsed), f"{line} needs an engine of its own"
    is_chat = parsed["is_chat"] or parsed["system"] is not None
    (text,) = parsed["arguments"]
    prompt = make_messages(text, parsed["system"]) if is_chat else text
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        await show_output(engine, prompt, read_flags(SamplingParams, parsed))
    return stdout.getvalue()


def at_the_end_of_its_pipe(command: str, text: str) -> str:
    pipe = shlex.split(command.partition(" | ")[2])
    if not pipe:
        return text
    assert pipe[0] == "fold", "no other programs are run"
    done = subprocess.run(pipe, input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with Engine() as engine:
        yield engine


def test_the_card_shows_stories_chats_a_sum_json_and_what_the_model_does_not_know() -> None:
    stories = [command for command in GENERATE if "--chat" not in command and "--system" not in command]
    chats = [command for command in GENERATE if command not in stories]
    assert len(stories) >= 3
    assert len({re.search(r"--seed (\d+)", command).group(1) for command in stories}) >= 3  # type: ignore[union-attr]
    assert any(re.search(r"What is \d+ \+ \d+", command) for command in chats)
    assert any("JSON" in command for command in chats)
    assert any("I do not know that" in output for output in SAMPLES.values())
    assert any("aioengine chat" in command for command in SAMPLES)
    assert len(programs()) == 2
    assert all(word in programs()[0][1] for word in ("<tool_call>", "</think>"))


@pytest.mark.parametrize("command", few([command for command in GENERATE if len(SAMPLES[command]) < 100], of=GENERATE))
@pytest.mark.asyncio(loop_scope="module")
async def test_a_command_in_the_card_prints_what_stands_there(engine: Engine, command: str) -> None:
    assert tidy(at_the_end_of_its_pipe(command, await print_of(engine, command))) == SAMPLES[command]


@pytest.mark.nightly
@pytest.mark.parametrize("command", [FIRST, *nightly(*(command for command in SAMPLES if command not in GENERATE))])
def test_a_shell_prints_what_stands_in_the_card(command: str) -> None:
    assert "aioengine " in command
    line = command.replace("aioengine ", f"{shlex.quote(sys.executable)} -m aioengine ")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        line, shell=True, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert tidy(done.stdout) == SAMPLES[command]


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "output"), programs())
def test_a_program_in_the_card_prints_what_stands_below_it(program: str, output: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert tidy(done.stdout) == output
