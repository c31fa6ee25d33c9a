"""Reasoning, which a model writes before its answer and between markers."""

from __future__ import annotations

from aioengine.errors import ConfigError
from aioengine.plain_struct import PlainStruct
from aioengine.tool_calls.calls import AnswerParser, Piece, ToolCall
from aioengine.tool_calls.harmony import HARMONY
from aioengine.tool_calls.reading import NEWLINES, SPACE, Markers, Reading, StepParser, Steps
from aioengine.validation import nearest, shorten


class ReasoningFormat(PlainStruct, frozen=True):
    """How a family of models marks its reasoning.

    Attributes:
        begin, end: the markers.
        is_always_begun: an answer begins with reasoning, with the marker or without, unless the prompt has ended it.
        keeps_special_tokens: an answer must be decoded with special tokens, also where the markers are none.
        has_own_parser: the tool format of this name tells reasoning apart by itself.
    """

    name: str
    begin: str
    end: str
    is_always_begun: bool = False
    keeps_special_tokens: bool = False
    has_own_parser: bool = False

    def is_begun_by_prompt(self, prompt_text: str) -> bool:
        """Whether an answer to the rendered prompt begins inside the reasoning: templates write the marker, or none."""
        prompt = prompt_text.rstrip()
        return prompt.endswith(self.begin) or (self.is_always_begun and not prompt.endswith(self.end))


_formats = {
    format.name: format
    for format in (  # noqa: A001
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", is_always_begun=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", keeps_special_tokens=True),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", keeps_special_tokens=True),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
        ReasoningFormat(
            "harmony", "<|channel|>analysis<|message|>", "<|end|>", keeps_special_tokens=True, has_own_parser=True
        ),
    )
}


def register_reasoning_format(name: str, format: ReasoningFormat) -> None:  # noqa: A002
    """Make a format known by a name; one that had it is replaced."""
    _formats[name] = format


def find_reasoning_format(name: str) -> ReasoningFormat:
    """
    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _formats:
        known = ", ".join(sorted(_formats))
        raise ConfigError(f"no reasoning format is called {shorten(name)}{nearest(name, _formats)}; known: {known}")
    return _formats[name]


def detect_reasoning_format(chat_template: str) -> str | None:
    """The format of the reasoning that a chat template speaks of, where its text leaves no doubt; else None."""
    found = {
        "think": "<think>" in chat_template,
        "deepseek_r1": "</think>" in chat_template and "<think>" not in chat_template,
        "mistral": "[THINK]" in chat_template,
        "seed_oss": "<seed:think>" in chat_template,
        "granite": "Here is my thought process:" in chat_template,
        "harmony": "<|channel|>" in chat_template and "analysis" in chat_template,
    }
    names = [name for name, is_found in found.items() if is_found]
    return names[0] if len(names) == 1 else None


class ReasoningParser:
    """An `AnswerParser` that splits reasoning off the beginning of an answer, and hands the rest on.

    Newlines beside the markers are dropped, as templates write them: after the first, and on both sides of the last.
    Reasoning that does not end goes on to the end of the text. Markers further on are text.

    Args:
        inner: takes what follows; None: that is content.
        is_begun: the prompt has begun the reasoning; the marker may follow all the same.
    """

    def __init__(self, format: ReasoningFormat, inner: AnswerParser | None, is_begun: bool) -> None:  # noqa: A002
        self._format = format
        self._is_begun = is_begun
        self._splitter: AnswerParser | None = None
        if not format.has_own_parser:
            self._splitter = StepParser(self._read, (), str)
        elif inner is None:
            inner = HARMONY.make_parser((), str)
        self._inner = inner

    @property
    def calls(self) -> list[ToolCall]:
        return self._inner.calls if self._inner else []

    @property
    def is_cut(self) -> bool:
        return self._inner is not None and self._inner.is_cut

    def feed(self, text: str) -> Piece:
        split = self._splitter.feed(text) if self._splitter else Piece(text)
        return _joined(split, self._inner.feed(split.content)) if self._inner else split

    def finish(self) -> Piece:
        split = self._splitter.finish() if self._splitter else Piece()
        return _joined(split, self._inner.feed(split.content), self._inner.finish()) if self._inner else split

    def _read(self, reading: Reading) -> Steps[None]:
        is_begun = self._is_begun
        yield from reading.skip_space(NEWLINES if is_begun else SPACE)
        if (yield from reading.literal(self._format.begin)) or is_begun:
            yield from reading.skip_space(NEWLINES)
            reading.drop()
            reading.shown = reading.reasoning
            yield from reading.show_until(Markers(self._format.end), space="\n")
            reading.shown = reading.content
            yield from reading.skip_space(NEWLINES)
            reading.drop()
        reading.release()
        while True:
            reading.shown.append(reading.text[reading.at :])
            reading.at = len(reading.text)
            if reading.is_over:
                return
            yield


def _joined(split: Piece, *rest: Piece) -> Piece:
    """The reasoning that was split off, and what the inner parser made of the rest."""
    reasoning = "".join(piece.reasoning for piece in (split, *rest))
    return Piece("".join(piece.content for piece in rest), reasoning, sum((piece.calls for piece in rest), ()))
