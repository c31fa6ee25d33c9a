"""Reasoning, which a model writes before its answer and between markers."""

from __future__ import annotations

from aioengine.errors import ConfigError
from aioengine.schemas.plain_struct import PlainStruct
from aioengine.tool_calls.calls import AnswerParser, Piece, ToolCall, ToolCallDelta
from aioengine.tool_calls.harmony import HARMONY
from aioengine.tool_calls.marked_json import COHERE_TEXT
from aioengine.tool_calls.reading import NEWLINES, SPACE, Markers, Reading, StepParser, Steps
from aioengine.validation import nearest, shorten


class ReasoningFormat(PlainStruct, frozen=True):
    """The markers of reasoning in a family of models.

    Attributes:
        begin, end: the markers.
        is_always_begun: an answer begins with reasoning, with the marker or without, unless the prompt has ended it.
        keeps_special_tokens: an answer must be decoded with special tokens, also where the markers are none.
        has_own_parser: the tool format of this name separates reasoning by itself.
        markup: further markers, which are neither reasoning nor content.
    """

    name: str
    begin: str
    end: str
    is_always_begun: bool = False
    keeps_special_tokens: bool = False
    has_own_parser: bool = False
    markup: tuple[str, ...] = ()

    def is_begun_by_prompt(self, prompt_text: str) -> bool:
        """Whether an answer to the rendered prompt begins inside the reasoning; not all templates write the marker."""
        prompt = prompt_text.rstrip()
        return prompt.endswith(self.begin) or (self.is_always_begun and not prompt.endswith(self.end))

    def is_begun_by_message(self, prompt_text: str, message: str) -> bool:
        """Whether an answer that continues a message begins inside its reasoning.

        The message's own markers decide; where it has none, the template's text before it does.
        """
        if not (text := message.strip()):
            return self.is_begun_by_prompt(prompt_text)
        if self.begin in text or self.end in text:
            return text.rfind(self.begin) > text.rfind(self.end)
        return prompt_text.rpartition(text)[0].rstrip().endswith(self.begin)


_formats = {
    format.name: format
    for format in (  # noqa: A001
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", is_always_begun=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", keeps_special_tokens=True),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", keeps_special_tokens=True),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", keeps_special_tokens=True),
        ReasoningFormat(
            "cohere", "<|START_THINKING|>", "<|END_THINKING|>", keeps_special_tokens=True, markup=COHERE_TEXT
        ),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
        ReasoningFormat(
            "harmony", "<|channel|>analysis<|message|>", "<|end|>", keeps_special_tokens=True, has_own_parser=True
        ),
    )
}


def find_reasoning_format(name: str) -> ReasoningFormat:
    """Find a format by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _formats:
        known = ", ".join(sorted(_formats))
        raise ConfigError(f"no reasoning format is called {shorten(name)}{nearest(name, _formats)}; known: {known}")
    return _formats[name]


def detect_reasoning_format(chat_template: str) -> str | None:
    """The format of the reasoning in a chat template; None where the template's text leaves doubt."""
    begins, ends, is_deepseek = (text in chat_template for text in ("<think>", "</think>", "｜Assistant｜"))
    found = {
        "think": begins or (ends and not is_deepseek),
        "deepseek_r1": ends and not begins and is_deepseek,
        "harmony": "<|channel|>" in chat_template and "analysis" in chat_template,
    }
    found |= {
        name: _formats[name].begin in chat_template for name in ("gemma4", "cohere", "granite", "mistral", "seed_oss")
    }
    names = [name for name, is_found in found.items() if is_found]
    return names[0] if len(names) == 1 else None


class ReasoningParser:
    """An `AnswerParser` that splits reasoning off the beginning of an answer, and passes the rest to another parser.

    Newlines beside the markers are dropped, as templates write them: after the first, and on both sides of the last.
    Reasoning that does not end goes on to the end of the text. Later markers are text.

    Args:
        inner: parser of the rest; None: the rest is content.
        is_begun: the prompt has begun the reasoning; the marker may still follow.
        probe: parser that finds calls in reasoning that does not end, since models forget to end it. From such a call
            on the reasoning is held back, since it is reasoning if the end comes after all. None: find no such calls.
        max_calls: the most calls in such reasoning; None: any number.
    """

    def __init__(
        self,
        format: ReasoningFormat,  # noqa: A002
        inner: AnswerParser | None,
        is_begun: bool,
        *,
        probe: AnswerParser | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._format = format
        self._is_begun = is_begun
        self._markup = Markers(*format.markup) if format.markup else None
        self._probe, self._max_calls = probe, max_calls
        self._texts: list[str] = []  # all reasoning, and what the probe found to be no call
        self._outside: list[str] = []
        self._num_shown = 0
        self._has_ended = self._has_call = False
        self._splitter: AnswerParser | None = None
        if not format.has_own_parser:
            self._splitter = StepParser(self._read, Reading((), str))
        elif inner is None:
            inner = HARMONY.make_parser((), str)
        self._inner = inner

    @property
    def calls(self) -> list[ToolCall]:
        return self._inner.calls[: self._max_calls] if self._inner else []

    @property
    def is_cut(self) -> bool:
        return self._inner is not None and self._inner.is_cut

    def feed(self, text: str) -> Piece:
        split = self._splitter.feed(text) if self._splitter else Piece(text)
        split = self._watch(split, is_over=False) if self._probe else split
        return _joined(split, self._inner.feed(split.content)) if self._inner else split

    def finish(self) -> Piece:
        split = self._splitter.finish() if self._splitter else Piece()
        split = self._watch(split, is_over=True) if self._probe else split
        if split.calls:
            return split
        return _joined(split, self._inner.feed(split.content), self._inner.finish()) if self._inner else split

    def _watch(self, split: Piece, *, is_over: bool) -> Piece:
        """Return the text that is certainly reasoning, and at the text's end the calls in unended reasoning."""
        assert self._probe is not None
        self._texts.append(split.reasoning)
        if not self._has_ended:
            pieces = [self._probe.feed(split.reasoning), *([self._probe.finish()] if is_over else [])]
            self._outside += [piece.content for piece in pieces]
            self._has_call = self._has_call or any(piece.calls for piece in pieces)
            if not is_over:
                shown = "" if self._has_call else self._outside[-1]
                self._num_shown += len(shown)
                return split._replace(reasoning=shown)
        calls = [] if self._has_ended else self._probe.calls[: self._max_calls]
        reasoning = "".join(self._outside if calls else self._texts)[self._num_shown :]
        if calls:
            self._inner = self._probe
        self._probe = None
        deltas = (ToolCallDelta(place, call.id, call.name, call.arguments) for place, call in enumerate(calls))
        return split._replace(reasoning=reasoning, calls=tuple(deltas))

    def _read(self, reading: Reading) -> Steps[None]:
        is_begun = self._is_begun
        yield from reading.skip_space(NEWLINES if is_begun else SPACE)
        if (yield from reading.literal(self._format.begin)) or is_begun:
            yield from reading.skip_space(NEWLINES)
            reading.drop()
            reading.shown = reading.reasoning
            self._has_ended = bool((yield from reading.show_until(Markers(self._format.end), space="\n")))
            reading.shown = reading.content
            yield from reading.skip_space(NEWLINES)
            reading.drop()
        reading.release()
        while self._markup and (yield from reading.show_until(self._markup, space="")):
            reading.drop()
        while not self._markup:
            reading.shown.append(reading.text[reading.at :])
            reading.at = len(reading.text)
            if reading.is_over:
                return
            yield


def _joined(split: Piece, *rest: Piece) -> Piece:
    """The reasoning that was split off, joined with the inner parser's pieces of the rest."""
    reasoning = "".join(piece.reasoning for piece in (split, *rest))
    return Piece("".join(piece.content for piece in rest), reasoning, sum((piece.calls for piece in rest), ()))
