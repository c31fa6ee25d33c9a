"""Conversations: the commands alone, the shell over a fake device, and the program in a terminal of its own."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import COMMAND, DEADLINE_S, ENVIRONMENT, CallMain, Script, Terminal

from aioengine import Engine, PromptTooLong
from aioengine.cli.chat import Talk
from aioengine.cli.conversation import COMMAND_NAMES, HELP, KNOBS, Conversation, Message, Todo, TurnEnd
from aioengine.cli.terminal import Interrupts, Screen
from aioengine.models.folder import DEMO_MODEL
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import RowSampling
from aioengine.testing import FakeExecutor
from aioengine.text.tokenizer import Tokenizer
from aioengine.tool_calls.calls import ToolCall

# Commands


def test_a_line_is_a_question_and_the_answer_joins_the_conversation() -> None:
    conversation = Conversation(system="Be kind.")
    assert conversation.take_line("  Hello!\n") is Todo.ASK
    assert conversation.add_answer("Hi.", TurnEnd.WHOLE) == ""
    assert conversation.take_line("  ") is None
    assert conversation.take_line("//etc") is Todo.ASK
    assert conversation.prompt() == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "/etc"},
    ]


@pytest.mark.parametrize("end", list(TurnEnd))
def test_an_answer_that_was_cut_is_kept_and_marked(end: TurnEnd) -> None:
    conversation = Conversation()
    conversation.take_line("A story, please.")
    assert conversation.add_answer("Once upon", end) == end.value
    message = conversation.messages[-1]
    assert (message["role"], message["content"]) == ("assistant", "Once upon")
    assert message.get("cut", False) is (end is not TurnEnd.WHOLE)


def test_a_question_without_an_answer_is_taken_back_and_one_that_is_too_long_says_what_to_do() -> None:
    conversation = Conversation()
    conversation.take_line("A story, please.")
    assert "taken back" in conversation.add_answer("", TurnEnd.STOPPED)
    conversation.take_line("long")
    said = conversation.drop_question(PromptTooLong(3000, 1023))
    assert "shorten it" in said
    assert "/reset" not in said
    assert conversation.messages == []
    conversation.take_line("short")
    conversation.add_answer("Yes.", TurnEnd.WHOLE)
    conversation.take_line("more")
    said = conversation.drop_question(PromptTooLong(1030, 1023))
    assert [word for word in ("1030 tokens", "1023", "/reset") if word not in said] == []
    assert [message["content"] for message in conversation.messages] == ["short", "Yes."]


def test_the_system_message_is_set_replaced_and_taken_away_and_stays_when_the_turns_are_forgotten() -> None:
    conversation = Conversation(sampling={"seed": 1})
    assert conversation.take_line("/system") == "there is no system message"
    assert conversation.take_line("/system You are  Ruby.") == "the system message is set"
    conversation.take_line("Hello!")
    conversation.add_answer("Hi.", TurnEnd.WHOLE)
    assert conversation.take_line("/reset") == "2 messages forgotten; the system message stays"
    assert conversation.messages == [{"role": "system", "content": "You are  Ruby."}]
    assert conversation.sampling == {"seed": 1}
    assert conversation.take_line("/system") == "the system message is taken away"
    assert conversation.messages == []


@pytest.mark.parametrize("name", KNOBS)
def test_each_setting_is_shown_set_and_taken_back(name: str) -> None:
    conversation = Conversation()
    assert conversation.take_line(f"/{name}") == f"{name} is the default"
    assert conversation.take_line(f"/{name} 1") == f"{name} is {KNOBS[name](1)}"
    assert conversation.sampling == {name: 1}
    SamplingParams(**conversation.sampling)
    conversation.take_line(f"/{name} default")
    assert conversation.sampling == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/temperature hot", "a number is needed"),
        ("/temperature 3", "temperature=3.0: expected `float` <= 2.0"),
        ("/temperature nan", "temperature=nan"),
        ("/seed 1.5", "a whole number is needed"),
        ("/seed 99999999999999999999", "64-bit"),
        ("/max_tokens 0", "max_tokens=0"),
        ("/wizard", "there is no command /wizard; /help lists them"),
        ("/", "there is no command /; /help lists them"),
        ("/save", "needs the name of a file"),
        ("/load", "needs the name of a file"),
        ("/load /no/where", "there is no file"),
    ],
)
def test_what_is_wrong_is_one_clear_line_and_changes_nothing(line: str, says: str) -> None:
    conversation = Conversation(sampling={"temperature": 0.5})
    text = conversation.take_line(line)
    assert isinstance(text, str)
    assert says in text
    assert "\n" not in text
    assert conversation.sampling == {"temperature": 0.5}
    assert conversation.messages == []


def test_saving_writes_the_messages_as_json_and_leaves_files_that_exist_alone(tmp_path: Path) -> None:
    conversation, path = Conversation(system="Be kind."), tmp_path / "my file.json"
    conversation.take_line("Grüße 🙂")
    conversation.add_answer("Hi", TurnEnd.STOPPED)
    assert conversation.take_line(f"/save {path}") == f"3 messages saved in {path}"
    saved = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Grüße 🙂"},
        {"role": "assistant", "content": "Hi", "cut": True},
    ]
    assert json.loads(path.read_text()) == saved
    conversation.take_line("/system")
    assert conversation.take_line(f"/save {path}") == f"{path} exists and is left as it is: give another name"
    assert json.loads(path.read_text()) == saved
    assert str(conversation.take_line(f"/save {tmp_path}/no/where")).startswith("not saved: ")


def test_a_saved_conversation_is_loaded_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    saved = Conversation(system="Be brief.")
    saved.take_line("What is 8 + 7?")
    saved.add_calls("I add.", [ToolCall(id="1", name="add", arguments='{"a": 8}')])
    saved.add_result(ToolCall(id="1", name="add", arguments='{"a": 8}'), "15")
    saved.add_answer("15", TurnEnd.MAX_TOKENS)
    saved.take_line(f"/save {path}")
    conversation = Conversation()
    conversation.take_line("Another one")
    assert conversation.take_line(f"/load {path}") == f"5 messages loaded from {path}"
    assert conversation.messages == saved.messages


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"role": "user"}]', '[{"role": "fox", "content": ""}]', "[" * 99999]
)
def test_a_file_that_holds_no_conversation_changes_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    conversation = Conversation(system="Be brief.")
    conversation.take_line("Hi")
    assert str(conversation.take_line(f"/load {tmp_path}/bad.json")).startswith("not loaded: ")
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "Hi"]


def test_the_last_question_is_asked_again_without_its_answer() -> None:
    conversation = Conversation()
    for text in ("One", "Two"):
        conversation.take_line(text)
        conversation.add_answer(f"{text}!", TurnEnd.WHOLE)
    assert conversation.take_line("/retry") is Todo.ASK
    assert [message["content"] for message in conversation.prompt()] == ["One", "One!", "Two"]


def test_help_names_every_command_and_exit_leaves() -> None:
    conversation = Conversation()
    assert conversation.take_line("/help") == HELP
    assert [name for name in COMMAND_NAMES if name not in HELP and name != "/quit"] == []
    assert conversation.take_line("/exit") is conversation.take_line("/quit") is Todo.LEAVE


# The shell, over a device that says what it is told to

TOKENIZER = Tokenizer.load(DEMO_MODEL)
REPLY = "Pip says hello to you, and to all the others."


def talker(reply: str) -> Callable[[list[int], RowSampling], int]:
    """A sampler that gives ``reply`` to each message, whatever it is."""
    header = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)
    answer = TOKENIZER.encode(reply + "<|im_end|>", add_special_tokens=False)

    def sample(token_ids: list[int], sampling: RowSampling) -> int:
        last = len(token_ids) - 1 - token_ids[::-1].index(header[0])
        return answer[len(token_ids) - last - len(header)]

    return sample


async def say(*lines: str, executor: FakeExecutor, interrupts: Interrupts | None = None) -> list[Message]:
    """The messages of a conversation in which these lines are typed."""
    conversation, screen = Conversation(), Screen(is_terminal=False)
    async with Engine(executor=executor) as engine:
        await Talk(engine, conversation, Script(*lines), screen, interrupts or Interrupts()).run()  # type: ignore[arg-type]
    return conversation.messages


def talking_device(**options: object) -> FakeExecutor:
    return FakeExecutor(vocab_size=2048, sampler=talker(REPLY), step_time_s=0.02, **options)  # type: ignore[arg-type]


@pytest.mark.virtual_clock(seeds=1)
async def test_answers_go_to_stdout_one_a_line_and_notes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    messages = await say("Hello!", "/nonsense", "", "And you?", "/exit", "never", executor=talking_device())
    out, err = capsys.readouterr()
    assert out == f"{REPLY}\n{REPLY}\n"
    assert err == "there is no command /nonsense; /help lists them\n"
    assert [message["content"] for message in messages] == ["Hello!", REPLY, "And you?", REPLY]


@pytest.mark.virtual_clock
async def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    interrupts = Interrupts()
    reply = talker(REPLY)
    calls = 0

    def sample(token_ids: list[int], sampling: RowSampling) -> int:
        nonlocal calls
        calls += 1
        if calls == 6:
            interrupts.receive(signal.SIGINT)
        return reply(token_ids, sampling)

    executor = FakeExecutor(vocab_size=2048, sampler=sample, step_time_s=0.02)
    messages = await say("Hello!", "Go on.", executor=executor, interrupts=interrupts)
    first, second = [message for message in messages if message["role"] == "assistant"]
    assert first["cut"]
    assert first["content"]
    assert REPLY.startswith(first["content"])
    assert second == {"role": "assistant", "content": REPLY}
    out, err = capsys.readouterr()
    assert out == f"{first['content']}\n{REPLY}\n"
    assert "stopped" in err


@pytest.mark.virtual_clock(seeds=1)
async def test_answers_that_are_cut_by_length_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    question = TOKENIZER.render_chat([{"role": "user", "content": "Hi"}])
    longest = len(TOKENIZER.encode(question, add_special_tokens=False)) + 5
    executor = talking_device(max_model_len=longest)
    messages = await say("/max_tokens 3", "Hi", "/max_tokens default", "/reset", "Hi", "Hi", executor=executor)
    err = capsys.readouterr().err
    assert "[cut at max_tokens]" in err
    assert "[cut: the conversation is as long as the model allows; /reset starts a new one]" in err
    assert f"shorten it to {longest - 1} or fewer" in err
    assert "(your message is taken back; /reset starts a new conversation)" in err
    assert [message["role"] for message in messages] == ["user", "assistant"]


@pytest.mark.virtual_clock(seeds=1)
async def test_a_failed_step_is_one_line_and_the_next_message_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    executor = talking_device()
    executor.make_step_fail(3, RuntimeError("out of luck"))
    messages = await say("Hello!", "Again?", executor=executor)
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "your message is taken back" in err
    assert [message["content"] for message in messages] == ["Again?", REPLY]


def test_control_characters_do_not_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (Screen(is_terminal=True).write, Screen(is_terminal=True).think):
        show("a\x1b[2Jb\n\tc\x9b é🙂")
        assert "a�[2Jb\n\tc� é🙂" in capsys.readouterr().out


# The program

PROMPT = r">[^>\n]*\x1b\[\?25h"
"""The prompt, and then the cursor is shown."""
STORY = "Tell me a short story about a fox named Ruby.\r"
UNENDING = ("--seed", "1", "--ignore-eos")


def test_in_a_terminal_ctrl_c_stops_an_answer_clears_a_line_or_tells_how_to_leave(
    open_terminal: Callable[..., Terminal],
) -> None:
    terminal = open_terminal("chat", *UNENDING)
    terminal.wait_for(r"Ctrl-D leaves")
    terminal.wait_for(PROMPT)
    terminal.type(STORY)
    terminal.wait_for(r"Once upon a time")
    terminal.type("\x03")
    terminal.wait_for(r"\[stopped; what came so far stays in the conversation\]")
    terminal.wait_for(PROMPT)
    terminal.type("not to be sent\x03")
    terminal.type("/temper\t0\r")
    terminal.wait_for(r"temperature is 0\.0")
    terminal.wait_for(PROMPT)
    terminal.type("\x03")
    terminal.wait_for(r"Ctrl-D or /exit leaves")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.ends() == 0


@pytest.mark.nightly
def test_a_terminated_chat_leaves_the_terminal_as_it_was(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("chat", *UNENDING)
    terminal.wait_for(PROMPT)
    terminal.type(STORY)
    terminal.wait_for(r"Once upon a time")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.ends() == 128 + signal.SIGTERM


@pytest.mark.nightly
def test_through_a_pipe_each_line_is_a_message_and_ctrl_c_between_them_ends_it() -> None:
    process = subprocess.Popen(
        [*COMMAND, "chat", "--temperature", "0"], env=ENVIRONMENT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Who are you?\n/system You are Ruby.\nWhat is your name?\n")
    process.stdin.flush()
    assert process.stdout.readline() == "I am Pip, the tiny demo model of aioengine.\n"
    assert process.stdout.readline() == "I am Ruby, the tiny demo model of aioengine.\n"
    process.send_signal(signal.SIGINT)
    code = process.wait(DEADLINE_S)  # while stdin is open: the end of the lines would end it too
    _, err = process.communicate()
    assert code == 130, err
    assert "the system message is set" in err
    assert "Traceback" not in err


def test_what_cannot_work_is_said_before_a_model_is_loaded(call_main: CallMain) -> None:
    for args, says in (
        (["--n", "2"], "leave --n out"),
        (["--temperature", "3"], "temperature=3.0"),
    ):
        code, _, stderr = call_main("chat", *args)
        assert code == 2, stderr
        assert says in stderr
        assert "KV cache" not in stderr
