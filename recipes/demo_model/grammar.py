"""The corpus of the demo model: documents made by a seeded grammar, the same text on every machine and Python release.

A document is a list of segments, each with a flag that says whether the model learns to produce it. A story is learned
whole; of a chat only what the assistant says is, and of an answer with forced keys only its values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from demo_model.chats import Message, make_chat, make_facts, make_sums
from demo_model.copies import make_copies
from demo_model.questions import as_json
from demo_model.stories import make_story
from demo_model.template import END_OF_TEXT, IM_END, IM_START, TOOLS_HEAD, TOOLS_TAIL
from demo_model.tool_chats import Chat, make_shaped_chat, make_thinking_chat, make_tool_chat
from demo_model.world import Dice

STORY_SHARE = 0.21
TOOL_SHARE = 0.21
SHAPE_SHARE = 0.11
THINKING_SHARE = 0.08
LONG_CHAT_SHARE = 0.03


class Segment(NamedTuple):
    text: str
    is_target: bool


class Document(NamedTuple):
    """One training document; without messages it is a plain story."""

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    is_thinking: bool = False

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


def story_document(text: str) -> Document:
    return Document((Segment(text + END_OF_TEXT, True),))


def _calls(message: Message) -> str:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    written = (f'{{"name": {as_json(f["name"])}, "arguments": {as_json(f["arguments"])}}}' for f in functions)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def _said(message: Message) -> list[Segment]:
    """What an assistant says, up to the end of its turn."""
    content, calls = message["content"] or "", _calls(message)
    if "values" in message:
        segments, end = [], 0
        for first, last in message["values"]:
            segments += [Segment(content[end:first], False), Segment(content[first:last], True)]
            end = last
        return [*segments, Segment(content[end:], False), Segment(IM_END, True)]
    return [Segment(content + ("\n" if content and calls else "") + calls + IM_END, True)]


def chat_document(chat: Chat) -> Document:
    """Lay a conversation out as the chat template does, and end it with the end-of-text token."""
    messages = chat.messages
    segments: list[Segment] = []
    if chat.tools:
        system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
        tools = "\n".join(as_json(tool) for tool in chat.tools)
        segments.append(Segment(f"{IM_START}system\n{system}{TOOLS_HEAD}\n{tools}\n{TOOLS_TAIL}{IM_END}\n", False))
        messages = messages[1:] if system else messages
    for index, message in enumerate(messages):
        head = f"{IM_START}{message['role']}\n"
        if message["role"] == "tool":
            follows = index > 0 and messages[index - 1]["role"] == "tool"
            is_followed = index + 1 < len(messages) and messages[index + 1]["role"] == "tool"
            text = f"\n<tool_response>\n{message['content']}\n</tool_response>"
            segments.append(
                Segment(("" if follows else f"{IM_START}user") + text + ("" if is_followed else f"{IM_END}\n"), False)
            )
        elif message["role"] == "assistant":
            segments.append(Segment(head, False))
            if "reasoning_content" in message:
                segments.append(Segment("<think>\n", False))
                segments.append(Segment(f"{message['reasoning_content']}\n</think>\n\n", True))
            segments += [*_said(message), Segment("\n", False)]
        else:
            segments.append(Segment(f"{head}{message['content']}{IM_END}\n", False))
    segments.append(Segment(END_OF_TEXT, False))
    return Document(tuple(segments), tuple(chat.messages), tuple(chat.tools), chat.is_thinking)


def documents(
    seed: int | str,
    count: int,
    *,
    sums_share: float = 0.0,
    copies_share: float = 0.0,
    any_share: float = 0.0,
    facts_share: float = 0.0,
) -> Iterator[Document]:
    """``count`` documents, a function of the arguments alone; a longer corpus begins with the shorter one.

    Args:
        sums_share: the share of documents that are chats of nothing but sums.
        copies_share: the share of the others that are practice in copying names of a few words and syllables.
        any_share: the share of what is left that is practice in copying any names.
        facts_share: the share of the rest that are chats of nothing but facts, half of them behind forced keys.
    """
    dice = Dice(seed)
    for _ in range(count):
        roll = dice.between(0, 9999) / 10000
        if sums_share and dice.chance(sums_share):
            yield chat_document(Chat(make_sums(dice), []))
        elif copies_share and dice.chance(copies_share):
            yield chat_document(make_copies(dice))
        elif any_share and dice.chance(any_share):
            yield chat_document(make_copies(dice, is_any=True))
        elif facts_share and dice.chance(facts_share):
            yield chat_document(make_shaped_chat(dice) if dice.chance(0.5) else Chat(make_facts(dice), []))
        elif roll < STORY_SHARE:
            yield story_document(make_story(dice).text)
        elif (roll := roll - STORY_SHARE) < TOOL_SHARE:
            yield chat_document(make_tool_chat(dice))
        elif (roll := roll - TOOL_SHARE) < SHAPE_SHARE:
            yield chat_document(make_shaped_chat(dice))
        elif (roll := roll - SHAPE_SHARE) < THINKING_SHARE:
            yield chat_document(make_thinking_chat(dice))
        elif dice.chance(LONG_CHAT_SHARE):
            yield chat_document(Chat(make_chat(dice, min_pairs=10, max_pairs=24), []))
        else:
            yield chat_document(Chat(make_chat(dice), []))


def corpus_hash(corpus: Iterable[Document]) -> str:
    """blake2b (16 bytes, hex) over the texts of all documents, each closed by a zero byte."""
    digest = hashlib.blake2b(digest_size=16)
    for document in corpus:
        digest.update(document.text.encode())
        digest.update(b"\0")
    return digest.hexdigest()
