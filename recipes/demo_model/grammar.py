"""The corpus of the demo model: documents made by a seeded grammar, the same text on every machine and Python release.

A document is a list of segments, each with a flag that says whether the model learns to produce it. A story is learned
whole; of a chat only what the assistant says is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from demo_model.chats import Message, make_chat, make_sums
from demo_model.stories import make_story
from demo_model.world import Dice

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
ROLES = ("system", "user", "assistant")

STORY_SHARE = 0.28
LONG_CHAT_SHARE = 0.02


class Segment(NamedTuple):
    text: str
    is_target: bool


class Document(NamedTuple):
    """One training document; ``messages`` is empty for a plain story."""

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


def story_document(text: str) -> Document:
    return Document((Segment(text + END_OF_TEXT, True),), ())


def chat_document(messages: list[Message]) -> Document:
    """Lay a conversation out as the chat template does, and end it with the end-of-text token."""
    segments: list[Segment] = []
    for message in messages:
        head = f"{IM_START}{message['role']}\n"
        if message["role"] == "assistant":
            segments += [Segment(head, False), Segment(message["content"] + IM_END, True), Segment("\n", False)]
        else:
            segments.append(Segment(f"{head}{message['content']}{IM_END}\n", False))
    segments.append(Segment(END_OF_TEXT, False))
    return Document(tuple(segments), tuple(messages))


def documents(seed: int | str, count: int, *, sums_share: float = 0.0) -> Iterator[Document]:
    """``count`` documents, a function of the arguments alone; a longer corpus begins with the shorter one.

    Args:
        sums_share: the share of documents that are chats of nothing but sums.
    """
    dice = Dice(seed)
    for _ in range(count):
        if sums_share and dice.chance(sums_share):
            yield chat_document(make_sums(dice))
        elif dice.chance(STORY_SHARE):
            yield story_document(make_story(dice).text)
        elif dice.chance(LONG_CHAT_SHARE):
            yield chat_document(make_chat(dice, min_pairs=10, max_pairs=24))
        else:
            yield chat_document(make_chat(dice))


def corpus_hash(corpus: Iterable[Document]) -> str:
    """blake2b (16 bytes, hex) over the texts of all documents, each closed by a zero byte."""
    digest = hashlib.blake2b(digest_size=16)
    for document in corpus:
        digest.update(document.text.encode())
        digest.update(b"\0")
    return digest.hexdigest()
