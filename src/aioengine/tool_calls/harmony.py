"""The messages of gpt-oss, which are reasoning, content or a call.

    <|channel|>analysis<|message|>The user asks for the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Paris"}<|call|>

(On one line.) "analysis" is reasoning. "final" is content, and so is "commentary" without a function, which is meant
for the user, too. A second message of one kind begins on a new line. The model stops after a call. Prompts end in
``<|start|>assistant``, so that an answer's first header may begin with its recipient: `` to=functions.f<|channel|>…``.
"""

from __future__ import annotations

import re

from aioengine.tool_calls.grammars import GrammarWriter, StepFormat, properties_of, quoted
from aioengine.tool_calls.reading import MAX_KEYWORD_CHARS, Markers, NotACall, Reading, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
_MARKERS, _HEADER_ENDS = Markers(START, CHANNEL, END, RETURN, CALL), Markers(MESSAGE, END, RETURN, CALL)
_TO = "to="
_RECIPIENT = re.compile(rf"\b{_TO}(?:functions\.)?([^\s<]+)")


def _read(reading: Reading) -> Steps[None]:
    kinds: set[bool] = set()
    yield from reading.skip_space()
    if (yield from reading.literal(_TO)):
        yield from reading.attempt(_read_message(reading, _TO, kinds))
    while marker := (yield from reading.show_until(_MARKERS)):
        reading.shown = reading.content
        if marker in (START, CHANNEL):
            yield from reading.attempt(_read_message(reading, marker, kinds))
        else:
            reading.drop()


def _read_message(reading: Reading, marker: str, kinds: set[bool]) -> Steps[None]:
    """Read a call, or the header of a message to show; ``kinds``: whether earlier messages were reasoning."""
    header = marker + (yield from reading.read_until(_HEADER_ENDS, longest=MAX_KEYWORD_CHARS))
    reading.drop()
    if reading.marker != MESSAGE:
        return
    recipient = _RECIPIENT.search(header)
    if recipient and (tool := reading.tools.get(recipient[1])):
        first = yield from reading.skip_space()
        # The engine's text ends before the token <|call|> if that has ended the answer.
        is_empty = (yield from reading.literal(CALL)) or (not first and not properties_of(tool))
        if first == "{" or is_empty:
            reading.begin_call(tool.name, "{}" if is_empty else "")
            if not is_empty:
                yield from reading.json_value(reading.add_arguments)
            reading.end_call()
            yield from reading.close()
            return
        if reading.is_over:
            raise NotACall
    is_reasoning = f"{CHANNEL}analysis" in header
    reading.shown = reading.reasoning if is_reasoning else reading.content
    reading.shown += ["\n"] if is_reasoning in kinds else []
    kinds.add(is_reasoning)


def _write(writer: GrammarWriter) -> str:
    channel, message, start = map(writer.marker, (CHANNEL, MESSAGE, START))
    text = f"{message} {writer.text_until(END, *_MARKERS.texts)} {start} {quoted('assistant')}"
    before = writer.rule(f"{channel} ({quoted('analysis')} | {quoted('commentary')}) {text}")
    head = writer.rule(f"{quoted(' ')} {writer.marker(CONSTRAIN)} {quoted('json')} {message}")
    last = [
        f"{channel} {quoted(f'commentary to=functions.{tool.name}')} {head} {writer.json(tool.parameters, tool)}"
        for tool in writer.tools
    ]
    if writer.is_free:
        last.append(f"{channel} {quoted('final')} {message} {writer.text_without(*_MARKERS.texts)}")
    return writer.finish(f"{before}* {writer.one_of(last)}")


HARMONY = StepFormat("harmony", _read, _write)
