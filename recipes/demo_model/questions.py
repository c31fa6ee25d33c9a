# ruff: noqa: E501 -- a template reads best on one line
"""Questions with one right answer: small sums, numbers, animals, opposites, and the same as JSON.

A topic is a function of the dice and of how the assistant was told to answer; it returns one or more pairs of question and
answer. An answer depends on its question and on what was said before alone, so that greedy decoding can be checked. Invented
heroes and lists of animals are the exceptions.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Literal

from demo_model.world import (
    ANIMALS,
    COLOUR_OF,
    DAYS,
    HOBBIES,
    MONTHS,
    OPPOSITES,
    TRAITS,
    Animal,
    Dice,
    fix_articles,
    make_character,
    make_name,
    plural,
)

Pair = tuple[str, str]
Mode = Literal["plain", "json", "brief"]

NUMBER_LIMIT = 20
"""Sums and differences use numbers from 0 to this."""


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


_SUM_QUESTIONS = {
    "+": ("What is {a} + {b}?", "{a} + {b}", "{a} + {b} =", "{a}+{b}", "{a}+{b}=?", "How much is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "Calculate {a} + {b}.", "[Please|Can you] add {a} and {b}[.|?]", "What is the sum of {a} and {b}?", "And {a} + {b}?"),
    "-": ("What is {a} - {b}?", "{a} - {b}", "{a} - {b} =", "{a}-{b}", "{a}-{b}=?", "How much is {a} - {b}?", "What is {a} minus {b}?", "Subtract {b} from {a}.", "Calculate {a} - {b}.", "And {a} - {b}?"),
    "*": ("What is {a} * {b}?", "{a} * {b}", "{a} * {b} =", "{a}*{b}", "How much is {a} * {b}?", "What is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} x {b}?", "Calculate {a} * {b}."),
    "/": ("What is {a} / {b}?", "{a} / {b}", "How much is {a} / {b}?", "What is {a} divided by {b}?", "Divide {a} by {b}.", "Calculate {a} / {b}."),
}  # fmt: skip
_RESULT: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COUNTED = (
    "apples", "nuts", "books", "stones", "cookies", "flowers", "balls", "eggs", "pears", "stars", "shells", "coins",
)  # fmt: skip


def roll_sum(dice: Dice) -> tuple[int, str, int]:
    """Two numbers and an operator; a difference is never below zero, a product has factors up to 10."""
    roll = dice.between(1, 10)
    if roll <= 5:
        return dice.between(0, NUMBER_LIMIT), "+", dice.between(0, NUMBER_LIMIT)
    if roll <= 8:
        a, b = dice.between(0, NUMBER_LIMIT), dice.between(0, NUMBER_LIMIT)
        return max(a, b), "-", min(a, b)
    return dice.between(0, 10), "*", dice.between(0, 10)


def sum_question(dice: Dice, sign: str) -> str:
    """A question with the fields ``{a}`` and ``{b}``, to be spun; a division is for tools alone."""
    return dice.pick(_SUM_QUESTIONS[sign])


def sum_json(a: int, sign: str, b: int) -> str:
    return as_json({"a": a, "b": b, "operator": sign, "result": _RESULT[sign](a, b)})


def arithmetic(dice: Dice, mode: Mode) -> list[Pair]:
    a, sign, b = roll_sum(dice)
    result = _RESULT[sign](a, b)
    question = dice.spin(sum_question(dice, sign)).format(a=a, b=b)
    answers = {"plain": f"{a} {sign} {b} = {result}.", "json": sum_json(a, sign, b), "brief": str(result)}
    return [(question, answers[mode])]


def word_problem(dice: Dice, mode: Mode) -> list[Pair]:
    things = dice.pick(_COUNTED)
    a, sign, b = roll_sum(dice)
    name = make_name(dice, dice.chance(0.5), True)
    if sign == "-":
        question = dice.pick(
            (
                f"I have {a} {things} and give away {b}. How many {things} do I have left?",
                f"{name} has {a} {things} and loses {b}. How many are left?",
            )
        )
    else:
        sign = "+"
        question = dice.pick(
            (
                f"I have {a} {things} and get {b} more. How many {things} do I have?",
                f"{name} has {a} {things} and finds {b} more. How many {things} are there now?",
            )
        )
    result = _RESULT[sign](a, b)
    plain = f"{a} {sign} {b} = {result}, so the answer is {result}."
    answers = {"plain": plain, "json": sum_json(a, sign, b), "brief": str(result)}
    return [(question, answers[mode])]


def numbers(dice: Dice, mode: Mode) -> list[Pair]:
    """Counting and comparing."""
    roll = dice.between(1, 4)
    if roll == 1:
        low, high = dice.pick((1, 1, dice.between(0, 10))), dice.between(3, 20)
        low, high = min(low, high), max(low, high)
        counted = list(range(low, high + 1))
        start = "" if low == 1 and dice.chance(0.7) else f" from {low}"
        answer = as_json({"numbers": counted}) if mode == "json" else ", ".join(map(str, counted)) + "."
        return [(dice.spin(f"[Count|Please count|Can you count]{start} to {high}[.|]"), answer)]
    a, b = dice.sample(range(0, 31), 2)
    if roll == 2:
        step = dice.pick((("after", 1), ("before", -1)))
        a = max(a, 1)
        question = dice.spin(f"[What|Which number] comes {step[0]} {a}?")
        neighbour = a + step[1]
        plain = f"The number {neighbour} comes {step[0]} {a}."
        answers = {"plain": plain, "json": as_json({"answer": neighbour}), "brief": str(neighbour)}
        return [(question, answers[mode])]
    word, best = (("bigger", max(a, b)), ("smaller", min(a, b)))[roll - 3]
    question = dice.spin(f"[Which number is|What is|Which is] {word}, {a} or {b}?")
    plain = f"{best} is {word} than {a + b - best}."
    answers = {"plain": plain, "json": as_json({"answer": best}), "brief": str(best)}
    return [(question, answers[mode])]


def _at_home(animal: Animal) -> str:
    on_it = ("beach", "ice", "farm", "savanna", "mountain", "hill")
    return f"{'on' if animal.home in on_it else 'in'} the {animal.home}"


def animal_questions(animal: Animal) -> tuple[tuple[str, str, str, str | int | bool], ...]:
    """The questions about one animal: (question, sentence that answers it, key, value)."""
    name = animal.animal
    one = f"a~ {name}"
    return (
            (f"[How many legs does {one} have|How many legs has {one}]?", f"A~ {name} has {animal.legs} legs.", "legs", animal.legs),
            (f"[What does {one} eat|What do {plural(name)} eat|What is the food of {one}]?", f"A~ {name} eats {animal.food}.", "food", animal.food),
            (f"[Where does {one} live|Where do {plural(name)} live|What is the home of {one}]?", f"A~ {name} lives {_at_home(animal)}.", "home", animal.home),
            (f"[What colour is {one}|What is the colour of {one}]?", f"A~ {name} is {animal.colour}.", "colour", animal.colour),
            (f"[Can {one} fly|Can {plural(name)} fly|Does {one} fly]?", f"{'Yes' if animal.can_fly else 'No'}, a~ {name} can{'' if animal.can_fly else 'not'} fly.", "can_fly", animal.can_fly),
            (f"[What sound does {one} make|What does {one} say]?", f"A~ {name} says {animal.sound}.", "sound", animal.sound),
            (f"[How big is {one}|What size is {one}]?", f"A~ {name} is {animal.size}.", "size", animal.size),
    )  # fmt: skip


def animal_facts(dice: Dice, mode: Mode) -> list[Pair]:
    animal = dice.pick(ANIMALS)
    question, sentence, key, value = dice.pick(animal_questions(animal))
    question, sentence = fix_articles(dice.spin(question)), fix_articles(sentence)
    if mode == "json":
        return [(question, as_json({"animal": animal.animal, key: value}))]
    if mode == "brief":
        brief = ("Yes." if value else "No.") if isinstance(value, bool) else f"{value}".capitalize() + "."
        return [(question, brief)]
    pairs = [(question, sentence)]
    if dice.chance(0.25):  # a follow-up whose subject stands one turn back
        other = dice.pick(ANIMALS)
        answers = {key: sentence for _, sentence, key, _ in animal_questions(other)}
        follow_up = fix_articles(dice.spin(f"[And|And what about|What about] a~ {other.animal}?"))
        pairs.append((follow_up, fix_articles(answers[key])))
    return pairs


def describe_animal(dice: Dice, mode: Mode, animal: Animal | None = None) -> list[Pair]:
    if mode != "plain":
        return animal_json(dice, mode)
    animal = animal or dice.pick(ANIMALS)
    question = dice.spin(
        f"[Tell me about|Tell me something about|What do you know about|Describe] [a~ {animal.animal}|{plural(animal.animal)}|the {animal.animal}]"
    )
    question += "?" if question.startswith("What") else "."
    answer = f"A~ {animal.animal} is a {animal.size} {animal.colour} animal with {animal.legs} legs. It lives {_at_home(animal)} and eats {animal.food}."
    return [(fix_articles(question), fix_articles(answer))]


_JSON_KEYS = ("animal", "home", "food", "sound", "legs", "colour", "size", "can_fly")


def animal_json(dice: Dice, mode: Mode) -> list[Pair]:
    """Facts about an animal as a JSON object: all of them, or the keys that the question names, in its order."""
    animal = dice.pick(ANIMALS)
    subject = dice.pick((f"the {animal.animal}", f"a~ {animal.animal}", plural(animal.animal)))
    if dice.chance(0.4):
        keys = ["animal", *dice.sample(_JSON_KEYS[1:], dice.between(1, 4))]
        if dice.chance(0.3):
            keys = keys[1:]
        listed = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
        question = (
            f"[Describe|Tell me about] {subject} [as JSON|in JSON] with the key{'s' if len(keys) > 1 else ''} {listed}."
        )
    else:
        keys = ["animal", "home", "food", "legs", "colour"]
        tail = "" if mode == "json" else " [as JSON|in JSON|as a JSON object|in JSON format]"
        question = f"[Give me facts about|Tell me about|Describe|Facts about|Give me information about|Tell me some facts about] {subject}{tail}."
        if mode != "json" and dice.chance(0.3):
            question = f"[Answer in JSON: what is {subject}?|What do you know about {subject}? Answer in JSON.|Describe {subject}. Answer in JSON.|JSON about {subject}, please.]"
    return [(fix_articles(dice.spin(question)), as_json({key: getattr(animal, key) for key in keys}))]


def other_json(dice: Dice, mode: Mode) -> list[Pair]:
    """JSON that is not about one animal: sums, lists, invented heroes."""
    tail = "" if mode == "json" else " [as JSON|in JSON]"
    roll = dice.between(1, 4)
    if roll == 1:
        a, sign, b = roll_sum(dice)
        return [(dice.spin(f"[What is|Calculate|Give me] {a} {sign} {b}{tail}[?|.]"), sum_json(a, sign, b))]
    if roll == 2:
        count = dice.between(2, 5)
        question = f"[Give me|List|Name] {count} animals [as a JSON list|as a list in JSON|as a JSON array]."
        return [(dice.spin(question), as_json([animal.animal for animal in dice.sample(ANIMALS, count)]))]
    if roll == 3:
        if dice.chance(0.5):
            question, calendar = "the days of the week", {"days": list(DAYS)}
        else:
            count = dice.between(2, 6)
            question, calendar = f"the first {count} months", {"months": list(MONTHS[:count])}
        return [(dice.spin(f"[Give me|List] {question}{tail}[.|]"), as_json(calendar))]
    hero = make_character(dice)
    question = f"[Invent|Make up|Describe|Create|Give me] a [hero|character|friend] for a story{tail}[.|]"
    if dice.chance(0.5):
        question = f"[Invent|Make up|Describe|Create] a~ {hero.kind} [named|called] {hero.name}{tail}[.|]"
    invented = {
        "name": hero.name,
        "kind": hero.kind,
        "age": dice.between(3, 12),
        "likes": dice.sample(HOBBIES, 2),
        "trait": dice.pick(TRAITS),
    }
    return [(fix_articles(dice.spin(question)), as_json(invented))]


def small_facts(dice: Dice, mode: Mode) -> list[Pair]:
    """Opposites, colours, days and months."""
    roll = dice.between(1, 4)
    if roll == 1:
        pair = dice.pick(OPPOSITES)
        word, answer = pair if dice.chance(0.5) else pair[::-1]
        question = f"[What is the opposite of|What is the contrary of|Opposite of] {word}?"
        plain = f"The opposite of {word} is {answer}."
    elif roll == 2:
        thing = dice.pick(tuple(COLOUR_OF))
        answer = COLOUR_OF[thing]
        question = f"[What colour is|Which colour is|What is the colour of] {thing}?"
        plain = f"{thing.capitalize()} is {answer}."
    else:
        cycle, unit = ((DAYS, "day"), (MONTHS, "month"))[roll - 3]
        index = dice.between(0, len(cycle) - 1)
        where, step = dice.pick((("after", 1), ("before", -1)))
        answer = cycle[(index + step) % len(cycle)]
        question = f"[What|Which] {unit} comes {where} {cycle[index]}?"
        plain = f"{answer} comes {where} {cycle[index]}."
    question = dice.spin(question)
    answers = {"plain": plain, "json": as_json({"answer": answer}), "brief": answer.capitalize() + "."}
    return [(question, answers[mode])]
