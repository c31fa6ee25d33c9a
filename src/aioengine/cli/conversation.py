"""A conversation and its commands, without a terminal: a line goes in, what is to be done comes out."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from aioengine.errors import AioEngineError, InvalidRequest, PromptTooLong
from aioengine.sampling_params import SamplingParams

KNOBS: dict[str, type[int] | type[float]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "max_tokens": int, "seed": int,
}  # fmt: skip
"""The fields of `SamplingParams` that have a command, and what each is read as."""

HELP = f"""\
/system TEXT       set the system message; without TEXT: take it away
/reset             forget the conversation; the system message and the settings stay
/save FILE         write the conversation as JSON; /save! FILE overwrites
/temperature X     likewise {", ".join(f"/{name}" for name in KNOBS if name != "temperature")};
                   without a value: show it; "default": the model's
/help              this list
/exit              leave; so does Ctrl-D
//TEXT             a message that begins with a slash
Ctrl-C stops an answer that is being written."""


class SavedMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the conversation, as it is saved.

    Attributes:
        cut: an answer that did not end by itself.
    """

    role: str
    content: str
    cut: bool = False


class Ask(msgspec.Struct, frozen=True):
    """To be done: stream the answer to `Conversation.prompt`, then call `answered` or `failed`."""


class Say(msgspec.Struct, frozen=True):
    """To be done: tell the user something; the model does not see it."""

    text: str


class Save(msgspec.Struct, frozen=True):
    """To be done: write a file, and say so.

    Attributes:
        may_overwrite: where False, a file that exists is left alone, which is said too.
    """

    path: str
    text: str
    num_messages: int
    may_overwrite: bool


class Leave(msgspec.Struct, frozen=True):
    """To be done: end."""


Effect = Ask | Say | Save | Leave


class TurnEnd(enum.Enum):
    """How an answer ended; the value is what the user is told of it."""

    WHOLE = ""
    STOPPED = "stopped; what came so far stays in the conversation"
    MAX_TOKENS = "cut at max_tokens"
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
        self._turns: list[SavedMessage] = []

    @property
    def messages(self) -> list[SavedMessage]:
        """The system message, if there is one, then questions and answers in turn."""
        return [*([SavedMessage("system", self._system)] if self._system is not None else []), *self._turns]

    def prompt(self) -> list[dict[str, Any]]:
        """The messages for the engine."""
        return [{"role": message.role, "content": message.content} for message in self.messages]

    def take(self, line: str) -> Effect | None:
        """What a line of the user's asks for; a question is part of the conversation from now on. None: nothing."""
        line = line.strip()
        if not line:
            return None
        if not line.startswith("/") or line.startswith("//"):
            self._turns.append(SavedMessage("user", line.removeprefix("/")))
            return Ask()
        name, *rest = line.removeprefix("/").split(maxsplit=1) or [""]
        argument = rest[0] if rest else ""
        if name in KNOBS:
            return self._set(name, argument)
        command = _COMMANDS.get(name)
        if command is None:
            return Say(f"there is no command /{name}; /help lists them")
        return command(self, argument)

    def answered(self, text: str, end: TurnEnd) -> str:
        """Add the answer to the last question; returns what to tell the user of how it ended."""
        if end is TurnEnd.STOPPED and not text:
            self._turns.pop()
            return "stopped before a word came; your message is taken back"
        self._turns.append(SavedMessage("assistant", text, cut=end is not TurnEnd.WHOLE))
        return end.value

    def failed(self, error: AioEngineError) -> str:
        """Take the last question back, since there is no answer; returns one line on it for the user."""
        self._turns.pop()
        if isinstance(error, PromptTooLong):
            count = f"at least {error.length}" if error.is_lower_bound else str(error.length)
            if self._turns:
                return (
                    f"the conversation would have {count} tokens, and {error.limit} are allowed: your last message is "
                    "taken back; /reset starts a new conversation"
                )
            return f"your message has {count} tokens with all around it, and {error.limit} are allowed: shorten it"
        return f"{' '.join(str(error).split())} (your message is taken back)"

    def _set(self, name: str, argument: str) -> Effect:
        if not argument:
            return Say(f"{name} is {self.sampling.get(name, 'the default')}")
        if argument == "default":
            self.sampling.pop(name, None)
            return Say(f"{name} is the default again")
        kind = KNOBS[name]
        try:
            value = kind(argument)
        except ValueError:
            return Say(f"/{name} {argument}: {'a whole number' if kind is int else 'a number'} is needed")
        try:
            SamplingParams(**{**self.sampling, name: value})
        except InvalidRequest as error:
            return Say(str(error))
        self.sampling[name] = value
        return Say(f"{name} is {value}")

    def _set_system(self, text: str) -> Effect:
        had_one, self._system = self._system is not None, text or None
        if text:
            return Say("the system message is set")
        return Say("the system message is taken away" if had_one else "there is no system message")

    def _reset(self, _: str) -> Effect:
        count = len(self._turns)
        self._turns.clear()
        kept = "; the system message stays" if self._system is not None else ""
        return Say(f"{count} message{'' if count == 1 else 's'} forgotten{kept}")

    def _save(self, path: str, *, may_overwrite: bool = False) -> Effect:
        if not path:
            return Say("/save needs the name of a file")
        text = msgspec.json.format(msgspec.json.encode(self.messages), indent=2).decode() + "\n"
        return Save(path, text, len(self.messages), may_overwrite)

    def _save_over(self, path: str) -> Effect:
        return self._save(path, may_overwrite=True)


_COMMANDS: dict[str, Callable[[Conversation, str], Effect]] = {
    "system": Conversation._set_system,
    "reset": Conversation._reset,
    "save": Conversation._save,
    "save!": Conversation._save_over,
    "help": lambda conversation, _: Say(HELP),
    "exit": lambda conversation, _: Leave(),
    "quit": lambda conversation, _: Leave(),
}

COMMAND_NAMES = tuple(f"/{name}" for name in (*_COMMANDS, *KNOBS))
