"""Tools of a file in `aioengine chat`: their calls shown, asked about, made, and handed back; reasoning beside it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from cli.conftest import CallMain, Script
from waiting import until

from aioengine import Engine
from aioengine.cli.chat import MAX_ROUNDS, REFUSED, STOPPED, Talk
from aioengine.cli.conversation import Conversation, Message, TurnEnd
from aioengine.cli.terminal import Interrupts, Screen
from aioengine.cli.tool_file import ToolFile
from aioengine.models.folder import DEMO_MODEL
from aioengine.tool_calls.calls import ToolCall
from doubles.fake_executor import FakeExecutor
from doubles.saying import Saying

TOOL_FILE = """
import asyncio
from os import path

_seen = []


def add(a: int, b: int) -> int:
    "Add two numbers."
    _seen.append((a, b))
    return a + b


async def wait(seconds: float = 0.0) -> dict:
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def fail(why: str) -> str:
    raise ValueError(why)


def recite() -> str:
    return "la " * 3000


def _hidden() -> None: ...
"""
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %} <tool_call>{"arguments": {}}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def call_of(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model's folder, with a template that tells of tools."""
    for file in DEMO_MODEL.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def tools(tmp_path: Path) -> ToolFile:
    (tmp_path / "my_tools.py").write_text(TOOL_FILE)
    return ToolFile.load(tmp_path / "my_tools.py")


def device(*replies: str) -> FakeExecutor:
    """It gives these answers in a chat, one after the other."""
    sampler = Saying(*replies, is_in_turn=True)
    return FakeExecutor(vocab_size=2048, max_model_len=2048, num_blocks=4096, sampler=sampler)


async def say(
    tools: ToolFile, folder: Path, replies: list[str], *lines: str, is_trusted: bool = True, **config: Any
) -> list[Message]:
    """The messages of a conversation in which these lines are typed."""
    conversation, script = Conversation(), Script(*lines)
    async with Engine(folder, executor=device(*replies), **config) as engine:
        await Talk(engine, conversation, script, Screen(is_terminal=False), Interrupts(), tools, is_trusted).run()  # type: ignore[arg-type]
    return conversation.messages


def test_the_tools_of_a_file_are_its_own_public_functions(tools: ToolFile) -> None:
    assert [tool.name for tool in tools.tools] == ["add", "wait", "fail", "recite"]
    assert tools.tools[0].description == "Add two numbers."
    assert set(tools.tools[0].parameters["properties"]) == {"a", "b"}


async def test_calls_are_shown_and_made_and_their_results_handed_back(
    tools: ToolFile, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = [f"Let me see.\n{call_of('add', a=2, b=3)}\n{call_of('wait')}", call_of("fail", why="no"), "It is 5."]
    messages = await say(tools, folder, replies, "What is 2 + 3?")
    results = ["5", '{"waited":0.0}', "error: ValueError: no"]
    assert [message["content"] for message in messages if message["role"] == "tool"] == results
    roles = ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in messages] == roles
    calls = messages[1]["tool_calls"]
    assert [call["id"] for call in calls] == [message["tool_call_id"] for message in messages[2:4]]
    out, err = capsys.readouterr()
    assert out.split("\n") == ["Let me see.", "It is 5.", ""]
    shown = [
        'add({"a": 2, "b": 3})',
        "-> 5",
        "wait({})",
        '-> {"waited":0.0}',
        'fail({"why": "no"})',
        f"-> {results[2]}",
    ]
    assert err.splitlines() == shown


@pytest.mark.parametrize(
    ("line", "result"), [("y", "5"), (" YES ", "5"), ("n", REFUSED), ("", REFUSED), ("what?", REFUSED)]
)
async def test_a_call_is_made_if_the_user_says_so(
    tools: ToolFile, folder: Path, line: str, result: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = [call_of("add", a=2, b=3), "Well.", "Hello!"]
    messages = await say(tools, folder, replies, "2 + 3?", line, "Hi", is_trusted=False)
    assert [message["content"] for message in messages][2:] == [result, "Well.", "Hi", "Hello!"]
    assert "call it? [y/N]" in capsys.readouterr().err


async def test_calls_come_to_an_end(tools: ToolFile, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = await say(tools, folder, [call_of("add", a=1, b=1)], "2?")
    assert sum(message["role"] == "tool" for message in messages) == MAX_ROUNDS
    assert messages[-1] == {"role": "assistant", "content": "", "cut": True}
    assert f"[{TurnEnd.CALLS.value}]" in capsys.readouterr().err


async def test_a_question_that_fails_after_calls_is_taken_back_with_them(tools: ToolFile, folder: Path) -> None:
    first = [call_of("add", a=1, b=1), "2."]
    messages = await say(tools, folder, [*first, call_of("recite")], "1 + 1?", "And now?")
    assert [message["content"] for message in messages] == ["1 + 1?", "", "2", "2."]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("add", '{"a": 1}'), "missing 1 required"),
        (("add", '{"a": 1, "b": "x"}'), "TypeError"),
        (("add", "[1]"), "ValidationError"),
        (("add", "{"), "DecodeError"),
        (("wait", '{"seconds": 0, "x": 1}'), "unexpected keyword"),
    ],
)
async def test_a_call_that_goes_wrong_is_told_to_the_model(tools: ToolFile, call: tuple[str, str], says: str) -> None:
    result = await tools.call(ToolCall("1", *call))
    assert result.startswith("error: ")
    assert says in result


async def test_a_call_may_be_stopped(tools: ToolFile, folder: Path) -> None:
    conversation, screen, interrupts = Conversation(), Screen(is_terminal=False), Interrupts()

    async def stop() -> None:
        await until(lambda: len(conversation.messages) == 2 and interrupts._stoppable is not None)
        interrupts.receive(signal.SIGINT)

    executor = device(call_of("wait", seconds=10_000), "Stopped.")
    async with Engine(folder, executor=executor) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        script: Any = Script("Wait.")
        await Talk(engine, conversation, script, screen, interrupts, tools, is_trusted=True).run()
    assert [message["content"] for message in conversation.messages][2:] == [STOPPED, "Stopped."]


async def test_reasoning_is_beside_the_answer(
    tools: ToolFile, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = ["<think>\nIs it 5? Yes.\n</think>\n\nIt is 5."]
    messages = await say(tools, folder, replies, "2 + 3?", reasoning_format="think")
    assert messages[-1] == {"role": "assistant", "content": "It is 5."}
    assert capsys.readouterr() == ("It is 5.\n", "Is it 5? Yes.\n")


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("a.txt", "", "ends in .py"),
        ("a.py", "x = 1", "no function"),
        ("a.py", "def f(:", "SyntaxError"),
        ("a.py", "raise RuntimeError('broken')", "RuntimeError: broken"),
        ("a.py", "def f(*args): ...", "cannot be given by name"),
        ("a.py", "def f(x: object()): ...", "no schema"),
    ],
)
def test_a_file_of_no_tools_is_said_before_a_model_is_loaded(
    call_main: CallMain, tmp_path: Path, name: str, source: str, says: str
) -> None:
    (tmp_path / name).write_text(source)
    code, _, stderr = call_main("chat", "--tools", str(tmp_path / name))
    assert code == 2, stderr
    assert says in stderr
    assert "KV cache" not in stderr


def test_trust_is_in_tools_alone(call_main: CallMain) -> None:
    code, _, stderr = call_main("chat", "--yes")
    assert (code, "--yes is for --tools" in stderr) == (2, True)
