"""What the tasks ask: facts, sums and stories of the bundled model's own world, drawn by seeds."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, DatasetDict

from demo_model.stories import make_story
from demo_model.world import ANIMALS, Dice, fix_articles

LONG_CHARS = 2500
"""Of a story in front of a question: more tokens than the tests' ``max_length``."""


def asked(question: str, begun: str) -> str:
    """A chat whose answer has begun, as the bundled model's template writes it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{begun}"


def stories(seed: int, num_chars: int) -> str:
    """Stories one after the other, until they are so long."""
    dice, text = Dice(seed), ""
    while len(text) < num_chars:
        text += make_story(dice).text + "\n"
    return text


def animals(**_: Any) -> DatasetDict:
    """Which colour, which food, which home: answers of one token and of several, after short, long and no contexts."""
    dice, rows = Dice(1), []
    for number, animal in enumerate(ANIMALS):
        for field, question, begun in (
            ("colour", "What colour is a~ {}?", "A~ {} is"),
            ("food", "What does a~ {} eat?", "A~ {} eats"),
            ("home", "Where does a~ {} live?", "A~ {} lives in the"),
        ):
            right = getattr(animal, field)
            others = sorted({getattr(other, field) for other in ANIMALS} - {right})
            choices = dice.sample([right, *dice.sample(others, 3)], 4)
            context = asked(*(fix_articles(text.format(animal.animal)) for text in (question, begun)))
            if number % 8 == 0:
                context = stories(number, LONG_CHARS) + context
            if number % 8 == 1:
                context = ""
            rows.append({"context": context, "choices": choices, "right": choices.index(right)})
    return DatasetDict(test=Dataset.from_list(rows))


def told(**_: Any) -> DatasetDict:
    """Stories, some of them longer than the windows in which they are scored."""
    rows = [{"text": stories(seed, 300 if seed % 3 else LONG_CHARS)} for seed in range(9)]
    return DatasetDict(test=Dataset.from_list(rows))


def sums(**_: Any) -> DatasetDict:
    """Sums with their answers, some of which the model gets wrong: they go beyond what it has learned."""
    dice = Dice(2)
    pairs = [(dice.between(0, 20), dice.between(0, 20)) for _ in range(24)]
    pairs += [(dice.between(10, 60), dice.between(10, 60)) for _ in range(8)]
    rows = [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}"} for a, b in pairs]
    return DatasetDict(test=Dataset.from_list(rows))
