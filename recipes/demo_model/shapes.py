# ruff: noqa: E501 -- a template reads best on one line
"""Answers with a shape: values for keys that a grammar forces, or that a schema in the prompt asks for.

Where a grammar forces the keys, nothing in the prompt says so: of such an answer only the values are learned, so that the
same question without a grammar keeps its plain answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from demo_model.chats import SMALL_TALK
from demo_model.definitions import NUMBER, TEXT, TEXTS, WHOLE, YES_OR_NO, Field, JsonSchema, object_schema, schema_text
from demo_model.people import PERSON_KEYS, make_person, person_value, told
from demo_model.questions import animal_questions, roll_sum, small_facts, sum_question
from demo_model.tools import ANIMAL_KEYS, about_animal, pick_keys, pick_roles
from demo_model.world import ANIMALS, Animal, Dice, fix_articles, plural

Pieces = Iterator[tuple[str, bool]]
"""Text of an answer in order, each with whether it is a value's own."""


class Shaped(NamedTuple):
    """A question and the object that answers it."""

    question: str
    value: dict[str, Any] | list[Any]


class Layout(NamedTuple):
    """How JSON is written: what stands after a comma and a colon, and how far a level is indented, if at all."""

    comma: str
    colon: str
    indent: int = 0


LAYOUTS = (
    Layout(", ", ": "),
    Layout(", ", ": "),
    Layout(",", ":"),
    Layout(", ", ":"),
    Layout(",", ": ", 2),
    Layout(",", ": ", 4),
)


def pieces(value: Any, layout: Layout, depth: int = 0) -> Pieces:
    """Lay ``value`` out as JSON; braces, keys and opening marks are no value's own, the end of a list is."""
    if isinstance(value, str):
        yield '"', False
        yield json.dumps(value, ensure_ascii=False)[1:], True
    elif isinstance(value, dict | list):
        is_list = isinstance(value, list)
        items: list[Any] = list(value.items()) if isinstance(value, dict) else value
        line = "\n" + " " * layout.indent * (depth + 1) if layout.indent else ""
        yield "[" if is_list else "{", False
        for index, item in enumerate(items):
            yield (layout.comma if index else "") + line, is_list and index > 0
            if not is_list:
                yield json.dumps(item[0]) + layout.colon, False
            yield from pieces(item if is_list else item[1], layout, depth + 1)
        yield "\n" + " " * layout.indent * depth if layout.indent else "", is_list
        yield "]" if is_list else "}", is_list
    else:
        yield json.dumps(value), True


_SUM_KEYS: dict[str, tuple[str, ...]] = {
    "a": ("a", "a", "x", "first", "left", "number1", "first_number"),
    "b": ("b", "b", "y", "second", "right", "number2", "second_number"),
    "operator": ("operator", "operator", "op", "sign", "operation"),
    "result": ("result", "result", "answer", "total", "value", "solution"),
    "expression": ("expression", "sum", "question", "formula"),
    "reasoning": ("reasoning", "explanation", "steps", "thought", "thinking"),
}
_ANSWER_KEYS = ("answer", "answer", "response", "text", "message", "reply", "content", "output", "result")
OPERATORS = {"+": "add", "-": "subtract", "*": "multiply"}
"""Signs, each with the word that may stand for it."""


def _animal_object(dice: Dice, animal: Animal, keys: dict[str, str], listed_food: bool) -> dict[str, Any]:
    values: dict[str, Any] = animal._asdict()
    if listed_food:
        values["food"] = [values["food"]]
    return {key: values[role] for role, key in keys.items()}


def _animal_keys(dice: Dice, high: int) -> dict[str, str]:
    roles = pick_roles(dice, list(ANIMAL_KEYS), 1, high)
    if "animal" not in roles and dice.chance(0.6):
        roles.insert(0, "animal")
    return pick_keys(dice, ANIMAL_KEYS, roles)


def shaped_animal(dice: Dice) -> Shaped:
    animal = dice.pick(ANIMALS)
    return Shaped(about_animal(dice, animal), _animal_object(dice, animal, _animal_keys(dice, 6), dice.chance(0.06)))


def shaped_animals(dice: Dice) -> Shaped:
    """A list of the animals that are named, or of as many as are wanted."""
    count = dice.between(2, 4)
    animals = dice.sample(ANIMALS, count)
    keys = _animal_keys(dice, 2)
    if dice.chance(0.7):
        names = [
            fix_articles(dice.pick((f"the {animal.animal}", f"a~ {animal.animal}", plural(animal.animal))))
            for animal in animals
        ]
        question = (
            dice.spin("[Tell me about|Describe|What do you know about|Compare] ")
            + ", ".join(names[:-1])
            + " and "
            + names[-1]
        )
        question += "?" if question.startswith("What") else "."
    else:
        keys = {"animal": dice.pick(ANIMAL_KEYS["animal"])} | {
            role: key for role, key in keys.items() if role != "animal"
        }
        if len(set(keys.values())) < len(keys):
            keys = {role: ANIMAL_KEYS[role][0] for role in keys}
        question = dice.spin(
            f"[Give me|List|Name|Tell me] {('two', 'three', 'four')[count - 2] if dice.chance(0.5) else count} animals."
        )
    listed: list[Any] = [_animal_object(dice, animal, keys, False) for animal in animals]
    if dice.chance(0.3):
        listed = [animal.animal for animal in animals]
    return Shaped(
        question,
        {dice.pick(("animals", "animals", "list", "items", "result")): listed} if dice.chance(0.75) else listed,
    )


def shaped_person(dice: Dice) -> Shaped:
    person = make_person(dice)
    roles = pick_roles(dice, list(PERSON_KEYS), 1, 4)
    if "name" not in roles and dice.chance(0.7):
        roles.insert(0, "name")
    keys = pick_keys(dice, PERSON_KEYS, roles)
    said = {*roles, *dice.sample(("age", "likes", "city"), 1)}
    text = dice.spin(
        "[||||Extract: |Extract the person: |Read this: |Who is this? |Extract the facts from this text: ]"
    ) + told(dice, person, said)
    as_list = dice.chance(0.5)
    return Shaped(text, {key: person_value(person, role, as_list=as_list) for role, key in keys.items()})


def shaped_sum(dice: Dice) -> Shaped:
    a, sign, b = roll_sum(dice)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    roles = pick_roles(dice, list(_SUM_KEYS)[:4] if dice.chance(0.65) else list(_SUM_KEYS), 1, 4)
    if "result" not in roles and dice.chance(0.6):
        roles.append("result")
    keys = pick_keys(dice, _SUM_KEYS, roles)
    values: dict[str, Any] = {
        "a": a, "b": b, "operator": OPERATORS[sign] if dice.chance(0.25) else sign, "expression": f"{a} {sign} {b}",
        "result": str(result) if dice.chance(0.12) else result, "reasoning": f"{a} {sign} {b} = {result}.",
    }  # fmt: skip
    return Shaped(
        dice.spin(sum_question(dice, sign)).format(a=a, b=b), {key: values[role] for role, key in keys.items()}
    )


def shaped_answer(dice: Dice) -> Shaped:
    """The plain answer under a key, or the bare value of it, after a reason perhaps."""
    roll = dice.between(1, 10)
    key = dice.pick(_ANSWER_KEYS)
    if roll <= 3:
        question, answer = dice.pick(SMALL_TALK)
        return Shaped(dice.spin(question), {key: answer})
    if roll <= 6:
        question, answer = small_facts(dice, "plain")[0]
        return Shaped(question, {key: answer})
    question, answer, _, value = dice.pick(animal_questions(dice.pick(ANIMALS)))
    question, answer = fix_articles(dice.spin(question)), fix_articles(answer)
    if isinstance(value, str) or roll <= 7:
        return Shaped(question, {key: answer})
    reason = {dice.pick(_SUM_KEYS["reasoning"]): answer} if dice.chance(0.4) else {}
    return Shaped(question, {**reason, key: value})


def shaped(dice: Dice) -> Shaped:
    roll = dice.between(1, 100)
    if roll <= 34:
        return shaped_animal(dice)
    if roll <= 60:
        return shaped_person(dice)
    if roll <= 78:
        return shaped_sum(dice)
    return shaped_answer(dice) if roll <= 90 else shaped_animals(dice)


def _schema_of(dice: Dice, value: Any) -> JsonSchema:
    if isinstance(value, dict):
        return object_schema(dice, [Field(key, key, _schema_of(dice, item)) for key, item in value.items()])
    if isinstance(value, list):
        return {"type": "array", "items": _schema_of(dice, value[0])} if not isinstance(value[0], str) else TEXTS
    if isinstance(value, bool):
        return YES_OR_NO
    if isinstance(value, int):
        return dice.pick((WHOLE, WHOLE, NUMBER))
    return TEXT


def asked_for(dice: Dice) -> tuple[str, Shaped]:
    """A question whose prompt names the keys or holds the schema: a system message, perhaps empty, and the question."""
    wanted = shaped(dice)
    while not isinstance(wanted.value, dict) or len(wanted.value) > 5:
        wanted = shaped(dice)
    keys = list(wanted.value)
    if dice.chance(0.5):
        listed = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
        order = dice.spin(f"[Answer|Reply] [in|with|as] JSON with the key{'s' if len(keys) > 1 else ''} {listed}.")
    else:
        schema = schema_text(dice, _schema_of(dice, wanted.value))
        order = (
            dice.spin("[Answer|Reply] [in|with|as] JSON[ that fits this schema|. The schema is| of this schema]:[ |\n]")
            + schema
        )
    if dice.chance(0.5):
        return order, wanted
    question = wanted.question if wanted.question[-1] in ".?!" else wanted.question + "."
    return "", wanted._replace(question=f"{question}{dice.pick((' ', ' ', chr(10)))}{order}")
