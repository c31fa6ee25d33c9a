# ruff: noqa: E501 -- a template reads best on one line
"""Thinking before an answer: a sentence or three that lead to it, for sums in steps also what cannot be said at once."""

from __future__ import annotations

from typing import NamedTuple

from demo_model.chats import NOT_MY_WORLD, SMALL_TALK, outside
from demo_model.questions import (
    NUMBER_LIMIT,
    animal_json,
    animal_questions,
    describe_animal,
    roll_sum,
    small_facts,
    sum_question,
    word_problem,
)
from demo_model.world import ANIMALS, Dice, fix_articles


class Thought(NamedTuple):
    question: str
    thought: str
    answer: str


def long_sum(a: int, b: int) -> str:
    """How to add two numbers of two digits on paper."""
    ones = a % 10 + b % 10
    carry = f"I write {ones - 10} and carry 1. " if ones > 9 else ""
    tens = a // 10 + b // 10 + (ones > 9)
    plus_one = " + 1" if ones > 9 else ""
    return f"The ones are {a % 10} + {b % 10} = {ones}. {carry}The tens are {a // 10} + {b // 10}{plus_one} = {tens}. So {a} + {b} = {a + b}."


def long_difference(a: int, b: int) -> str:
    """How to subtract ``b`` from ``a``, which is not smaller; both have two digits."""
    ones = a % 10 - b % 10
    if ones < 0:
        return f"{a % 10} is less than {b % 10}, so I borrow: 1{a % 10} - {b % 10} = {ones + 10}. The tens are {a // 10} - 1 - {b // 10} = {a // 10 - 1 - b // 10}. So {a} - {b} = {a - b}."
    return f"The ones are {a % 10} - {b % 10} = {ones}. The tens are {a // 10} - {b // 10} = {a // 10 - b // 10}. So {a} - {b} = {a - b}."


def _sum_of_three(dice: Dice) -> Thought:
    a, b, c = dice.between(0, 12), dice.between(0, 12), dice.between(0, 12)
    sign = "-" if c <= a + b and dice.chance(0.3) else "+"
    result = a + b + c if sign == "+" else a + b - c
    question = dice.spin(f"[What is|How much is|Calculate] {a} + {b} {sign} {c}")
    question += "." if question.startswith("Calc") else "?"
    thought = f"First {a} + {b} = {a + b}. Then {a + b} {sign} {c} = {result}."
    return Thought(question, thought, f"{a} + {b} {sign} {c} = {result}.")


def _long(dice: Dice) -> Thought:
    a = b = 0
    while max(a, b) <= NUMBER_LIMIT:
        a, b = dice.between(10, 99), dice.between(10, 99)
    if dice.chance(0.65):
        return Thought(dice.spin(sum_question(dice, "+")).format(a=a, b=b), long_sum(a, b), f"{a} + {b} = {a + b}.")
    a, b = max(a, b), min(a, b)
    return Thought(dice.spin(sum_question(dice, "-")).format(a=a, b=b), long_difference(a, b), f"{a} - {b} = {a - b}.")


def think(dice: Dice) -> Thought:
    """A question, the thoughts on it and its answer."""
    roll = dice.between(1, 100)
    if roll <= 30:
        return _long(dice)
    if roll <= 45:
        return _sum_of_three(dice)
    if roll <= 55:
        a, sign, b = roll_sum(dice)
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        question = dice.spin(sum_question(dice, sign)).format(a=a, b=b)
        return Thought(question, f"This is a small sum. {a} {sign} {b} = {result}.", f"{a} {sign} {b} = {result}.")
    if roll <= 60:
        [(question, answer)] = word_problem(dice, "plain")
        return Thought(question, f"I have to calculate {answer.split(' = ')[0]}. That is {answer.split()[-1]}", answer)
    animal = dice.pick(ANIMALS)
    if roll <= 73:
        question, answer, _, _ = dice.pick(animal_questions(animal))
        question, answer = fix_articles(dice.spin(question)), fix_articles(answer)
        return Thought(question, f"The user asks about the {animal.animal}. {answer}", answer)
    if roll <= 77:
        [(question, answer)] = describe_animal(dice, "plain", animal)
        return Thought(
            question,
            f"The user wants to know about the {animal.animal}. I say how it looks, where it lives and what it eats.",
            answer,
        )
    if roll <= 81:
        [(question, answer)] = animal_json(dice, "plain")
        return Thought(question, "The user wants JSON. I give the keys that are wanted and nothing else.", answer)
    if roll <= 88:
        [(question, answer)] = small_facts(dice, "plain")
        return Thought(question, f"I know this. {answer}", answer)
    if roll <= 95:
        question, answer = dice.pick(SMALL_TALK)
        return Thought(dice.spin(question), "This is small talk. I give a friendly answer.", answer)
    [(question, _)] = outside(dice, "plain")
    return Thought(question, "This is not about stories, small numbers or animals. I do not know it.", NOT_MY_WORLD)
