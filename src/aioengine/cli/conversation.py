"""A conversation and its commands, without a terminal: a line goes in, what is to be done comes out."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

import msgspec

from aioengine.errors import AioEngineError, InvalidRequest, PromptTooLong
from aioengine.sampling_params import SamplingParams
from aioengine.tool_calls.calls import ToolCall

KNOBS: dict[str, type[int] | type[float]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "max_tokens": int, "seed": int,
}  # fmt: skip
"""The fields of `SamplingParams` that have a command, and what each is read as."""

HELP = f"""\
/system TEXT       set the system message; without TEXT: take it away
/reset             forget the conversation; the system message and the settings stay
/retry             ask the last question again, and forget its answer
/save FILE         write the conversation as JSON, to a new file
/load FILE         go on with a conversation that /save wrote, in place of this one
/temperature X     likewise {", ".join(f"/{name}" for name in KNOBS if name != "temperature")};
                   without a value: show it; "default": the model's
/help              this list
/exit              leave; so does Ctrl-D
//TEXT             a message that begins with a slash
Ctrl-C stops an answer that is being written."""


Message = dict[str, Any]
""""role", "content", what calls and their results have, and of an answer that did not end by itself "cut", as it is
saved."""


class SavedMessage(TypedDict, total=False):
    """A message in a file of ``/save``; other fields are left out when the file is read."""

    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: Required[str]
    cut: bool
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str


class Todo(enum.Enum):
    """The work that a line may ask for.

    ASK: stream the answer to `Conversation.prompt`, then call `add_answer` or `drop_question`. LEAVE: end.
    """

    ASK = enum.auto()
    LEAVE = enum.auto()


class TurnEnd(enum.Enum):
    """How an answer ended; the value is the note for the user."""

    WHOLE = ""
    STOPPED = "stopped; what came so far stays in the conversation"
    MAX_TOKENS = "cut at max_tokens"
    CALLS = "stopped: it goes on asking for calls"
    FULL = "cut: the conversation is as long as the model allows; /reset starts a new one"


class Conversation:
    """The messages so far, and how the next answer is sampled.

    Args:
        system: the system message.
        sampling: fields of `SamplingParams`; the model's defaults hold for all others.
    Attributes:
        sampling: what to give the engine as keywords.
    """

    def __init__(self, *, system: str | None = None, sampling: dict[str, Any] | None = None) -> None:
        self.sampling = dict(sampling or {})
        self._system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The system message, if there is one, then questions and answers in turn."""
        before = [{"role": "system", "content": self._system}] if self._system is not None else []
        return before + self._turns

    def prompt(self) -> list[Message]:
        """The messages for the engine."""
        return [{name: value for name, value in message.items() if name != "cut"} for message in self.messages]

    def take_line(self, line: str) -> Todo | str | None:
        """Do what a line of the user's asks for; a question is part of the conversation from now on. May use a file.

        Returns:
            the work to do, or a note for the user; None: nothing.
        """
        line = line.strip()
        if not line:
            return None
        if not line.startswith("/") or line.startswith("//"):
            self._turns.append({"role": "user", "content": line.removeprefix("/")})
            return Todo.ASK
        name, *rest = line.removeprefix("/").split(maxsplit=1) or [""]
        argument = rest[0] if rest else ""
        match name:
            case "system":
                had_one, self._system = self._system is not None, argument or None
                if argument:
                    return "the system message is set"
                return "the system message is taken away" if had_one else "there is no system message"
            case "reset":
                count = len(self._turns)
                self._turns.clear()
                stays = "; the system message stays" if self._system is not None else ""
                return f"{_messages(count)} forgotten{stays}"
            case "retry":
                questions = [at for at, message in enumerate(self._turns) if message["role"] == "user"]
                if not questions:
                    return "there is no question to ask again"
                del self._turns[questions[-1] + 1 :]
                return Todo.ASK
            case "save" | "load":
                return self._save(argument) if name == "save" else self._load(argument)
            case "help":
                return HELP
            case "exit" | "quit":
                return Todo.LEAVE
            case _:
                is_knob = name in KNOBS
                return self._set(name, argument) if is_knob else f"there is no command /{name}; /help lists them"

    def add_answer(self, text: str, end: TurnEnd) -> str:
        """Add the answer to the last question; returns a note for the user on how it ended."""
        if end is TurnEnd.STOPPED and not text:
            self._take_back()
            return "stopped before a word came; your message is taken back"
        self._turns.append({"role": "assistant", "content": text} | ({} if end is TurnEnd.WHOLE else {"cut": True}))
        return end.value

    def add_calls(self, text: str, calls: list[ToolCall]) -> None:
        """Add an answer to the last question that asks for these calls; `add_result` adds what they return."""
        self._turns.append({"role": "assistant", "content": text, "tool_calls": [call.as_openai() for call in calls]})

    def add_result(self, call: ToolCall, result: str) -> None:
        """Add what came of a call."""
        self._turns.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})

    def _take_back(self) -> None:
        """Forget the last question, and the calls that were made for it."""
        while self._turns.pop()["role"] != "user":
            pass

    def drop_question(self, error: AioEngineError) -> str:
        """Take the last question back, since there is no answer; returns one line on it for the user."""
        self._take_back()
        advice = "; /reset starts a new conversation" if isinstance(error, PromptTooLong) and self._turns else ""
        return f"{' '.join(str(error).split())} (your message is taken back{advice})"

    def _set(self, name: str, argument: str) -> str:
        if not argument:
            return f"{name} is {self.sampling.get(name, 'the default')}"
        if argument == "default":
            self.sampling.pop(name, None)
            return f"{name} is the default again"
        kind = KNOBS[name]
        try:
            value = kind(argument)
        except ValueError:
            return f"/{name} {argument}: {'a whole number' if kind is int else 'a number'} is needed"
        try:
            SamplingParams(**{**self.sampling, name: value})
        except InvalidRequest as error:
            return str(error)
        self.sampling[name] = value
        return f"{name} is {value}"

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs the name of a file"
        path = Path(name).expanduser()
        text = msgspec.json.format(msgspec.json.encode(self.messages), indent=2).decode() + "\n"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return f"{path} exists and is left as it is: give another name"
        except OSError as error:
            return f"not saved: {error}"
        return f"{_messages(len(self.messages))} saved in {path}"

    def _load(self, name: str) -> str:
        if not name:
            return "/load needs the name of a file that /save wrote"
        path = Path(name).expanduser()
        if not path.is_file():
            return f"not loaded: there is no file {path}"
        try:
            messages: list[Message] = msgspec.json.decode(path.read_bytes(), type=list[SavedMessage])
        except OSError as error:
            return f"not loaded: {error}"
        except msgspec.MsgspecError as error:
            return f"not loaded: {path} holds no conversation of /save: {error}"
        has_system = bool(messages) and messages[0]["role"] == "system"
        self._system = messages.pop(0)["content"] if has_system else None
        self._turns = messages
        return f"{_messages(len(self.messages))} loaded from {path}"


def _messages(count: int) -> str:
    return f"{count} message{'' if count == 1 else 's'}"


COMMAND_NAMES = tuple(
    f"/{name}" for name in ("system", "reset", "save", "load", "retry", "help", "exit", "quit", *KNOBS)
)
