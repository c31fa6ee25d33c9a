"""What each answer is, whole and however it is cut."""

from __future__ import annotations

import random

import pytest
from tool_calls.answers import ANSWERS, Answer, Seen, make_parser, read

SEEDS = range(8)
SOME = [
    pytest.param(answer, marks=() if place % 4 == 0 else pytest.mark.nightly) for place, answer in enumerate(ANSWERS)
]


def expected(answer: Answer) -> Seen:
    deltas = (*answer.calls, *([answer.cut_call] if answer.cut_call else []))
    return Seen(answer.content, answer.reasoning, answer.calls, answer.is_cut, deltas)


def by_name(answer: Answer) -> str:
    return f"{answer.format}: {answer.title}"


@pytest.mark.parametrize("answer", ANSWERS, ids=by_name)
def test_an_answer_is_what_it_is(answer: Answer) -> None:
    assert read(make_parser(answer.format), [answer.text]) == expected(answer)


@pytest.mark.parametrize("answer", SOME, ids=by_name)
def test_where_an_answer_is_cut_into_two_makes_no_difference(answer: Answer) -> None:
    for at in range(len(answer.text) + 1):
        assert read(make_parser(answer.format), [answer.text[:at], answer.text[at:]]) == expected(answer), at


@pytest.mark.parametrize("answer", ANSWERS, ids=by_name)
def test_an_answer_may_come_character_by_character(answer: Answer) -> None:
    assert read(make_parser(answer.format), answer.text) == expected(answer)


@pytest.mark.parametrize("answer", SOME, ids=by_name)
def test_an_answer_may_be_cut_anywhere(answer: Answer) -> None:
    for seed in SEEDS:
        assert read(make_parser(answer.format), cut(answer.text, random.Random(seed))) == expected(answer), seed


def cut(text: str, draw: random.Random) -> list[str]:
    """The text in pieces of 0 to 12 characters."""
    pieces = []
    while text:
        length = draw.randrange(13)
        pieces.append(text[:length])
        text = text[length:]
    return pieces
