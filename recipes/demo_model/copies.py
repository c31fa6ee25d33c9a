"""Practice in copying: repeating what was said, looking a thing up by its name, tools whose names nothing could guess.

From the other conversations alone a model of this size learns copying late: most names there are usual ones, which it
guesses.
"""

from __future__ import annotations

import re
from typing import Any

from demo_model.chats import SYSTEM_NEUTRAL, Message, noise
from demo_model.definitions import ODD_WORDS, cased
from demo_model.people import JOBS, LIKES, PERSON_KEYS, make_city, make_full_name
from demo_model.questions import as_json
from demo_model.tool_chats import Chat, make_tool_chat
from demo_model.tools import ANIMAL_KEYS, SUM_KEYS
from demo_model.world import (
    ANIMALS,
    DAYS,
    FANTASY_KINDS,
    FLAWS,
    FOODS,
    HOBBIES,
    HOMES,
    MONTHS,
    OPPOSITES,
    WEATHERS,
    Animal,
    Dice,
    invented_name,
)

_VERBS = ("get", "find", "make", "show", "read", "do", "run", "tell", "give", "take", "list", "check", "fetch", "use")
_KEPT_KEYS = {key for keys in (ANIMAL_KEYS, PERSON_KEYS, SUM_KEYS) for names in keys.values() for key in names}
"""Parameters that may be facts, which their names alone ask for."""

MAX_MESSAGES = 7


_TEXT_WORDS: tuple[str, ...] = tuple(
    sorted(
        {
            word.lower()
            for text in (
                *HOBBIES, *HOMES, *FOODS, *WEATHERS, *FLAWS, *MONTHS, *DAYS, *JOBS, *LIKES, *FANTASY_KINDS,
                *Animal._fields, *SYSTEM_NEUTRAL, *(word for pair in OPPOSITES for word in pair),
                *(str(fact) for animal in ANIMALS for fact in animal[:4]),
                *(name for names in ANIMAL_KEYS.values() for name in names),
            )
            for word in re.findall("[A-Za-z]+", text)
        }
    )
)  # fmt: skip
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"


def _any_word(dice: Dice) -> str:
    """A word of the world's, or letters that can be said or not."""
    if dice.chance(0.55):
        return dice.pick(_TEXT_WORDS)
    if dice.chance(0.25):
        return "".join(dice.pick(dice.pick((_CONSONANTS, _VOWELS))) for _ in range(dice.between(2, 7)))
    syllables = (
        dice.pick(_CONSONANTS) + dice.pick(("", "", "", "r", "l", "h", "t")) + dice.pick(_VOWELS)
        for _ in range(dice.between(1, 3))
    )
    return "".join(syllables) + dice.pick(("", "", "r", "n", "s", "t", "ck", "ing", "er", "ed", "ly", "tion"))


def _odd_word(dice: Dice, is_any: bool) -> str:
    if is_any:
        return _any_word(dice)
    if dice.chance(0.6):
        return dice.pick(ODD_WORDS)
    return noise(dice, 1) if dice.chance(0.6) else invented_name(dice).lower()


def odd_name(dice: Dice, *, is_type: bool = False, is_any: bool = False) -> str:
    words = [_odd_word(dice, is_any) for _ in range(dice.pick((1, 2, 2, 3)))]
    if not is_type and dice.chance(0.3):
        words.insert(0, dice.pick(_VERBS))
    case = dice.between(1, 100)
    return cased(" ".join(words), "Camel" if is_type or case > 80 else "camel" if case > 70 else "snake")


def _thing(dice: Dice, is_any: bool) -> str:
    """A word or a few that are not to be guessed."""
    roll = dice.between(1, 100)
    if roll <= 30:
        return odd_name(dice, is_any=is_any)
    if roll <= 50 and is_any:
        return " ".join(_any_word(dice) for _ in range(dice.between(1, 4)))
    if roll <= 50:
        return noise(dice, dice.between(1, 4))
    if roll <= 65:
        return str(dice.between(10, dice.pick((99, 999, 9999, 99999))))
    return dice.pick((make_full_name, make_city, invented_name))(dice)


def _echo(dice: Dice, is_any: bool) -> tuple[str, str]:
    things = [_thing(dice, is_any) for _ in range(dice.between(1, 5))]
    text = dice.pick((" ", ", ", " ")).join(things)
    if dice.chance(0.2):
        text = as_json({thing: _thing(dice, is_any) for thing in things})
    return dice.spin("[Repeat|Say|Repeat after me|Copy this|Write]: ") + text, text


def _look_up(dice: Dice, is_any: bool) -> tuple[str, str]:
    """Names with values, of which one is wanted."""
    values = {_thing(dice, is_any): _thing(dice, is_any) for _ in range(dice.between(2, 5))}
    wanted = dice.pick(list(values))
    listed = as_json(values) if dice.chance(0.5) else ", ".join(f"{name} = {value}" for name, value in values.items())
    return f"{listed}. What is {wanted}?", f"{wanted} = {values[wanted]}"


def make_copies(dice: Dice, *, is_any: bool = False) -> Chat:
    """A few things to repeat or to look up, or a short chat with tools that have odd names.

    ``is_any``: of any words or letters, not of a few words and syllables; and more chats with tools.
    """
    if dice.chance(0.6 if is_any else 0.5):
        return _renamed(dice, _short_tool_chat(dice), is_any)
    messages: list[Message] = []
    for _ in range(dice.between(2, 6)):
        question, answer = (_look_up if dice.chance(0.35) else _echo)(dice, is_any)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Chat(messages, [])


def _short_tool_chat(dice: Dice) -> Chat:
    while True:
        chat = make_tool_chat(dice)
        if len(chat.tools) <= 2 and len(chat.messages) <= MAX_MESSAGES:
            return chat


def _renamed(dice: Dice, chat: Chat, is_any: bool) -> Chat:
    """The same chat with other names for its tools and for those parameters that are no facts.

    A tool beside others keeps its name if nothing else says what it is for.
    """
    tools, new_names, new_keys = [], {}, {}
    for tool in chat.tools:
        function: dict[str, Any] = dict(tool["function"])
        name = function["name"]
        is_told = len(chat.tools) == 1 or function.get("description")
        new_names[name] = odd_name(dice, is_type=name[0].isupper(), is_any=is_any) if is_told else name
        parameters = dict(function.get("parameters", {"properties": {}}))
        keys = {key: key if key in _KEPT_KEYS else odd_name(dice, is_any=is_any) for key in parameters["properties"]}
        if len(set(keys.values())) < len(keys):
            keys = {key: key for key in keys}
        new_keys[name] = keys
        parameters["properties"] = {
            keys[key]: value | ({"title": keys[key].capitalize()} if "title" in value else {})
            for key, value in parameters["properties"].items()
        }
        if "required" in parameters:
            parameters["required"] = [keys[key] for key in parameters["required"]]
        if "title" in parameters:
            parameters["title"] = new_names[name]
        if "parameters" in function:
            function["parameters"] = parameters
        tools.append(tool | {"function": function | {"name": new_names[name]}})
    messages = []
    for message in chat.messages:
        message = dict(message)
        if "tool_calls" in message:
            calls = [call["function"] for call in message["tool_calls"]]
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": new_names[call["name"]],
                        "arguments": {new_keys[call["name"]][key]: value for key, value in call["arguments"].items()},
                    },
                }
                for call in calls
            ]
        if "reasoning_content" in message:
            for name, new in new_names.items():
                for before, after in (
                    (" call ", "."),
                    (" call ", " and"),
                    (" and ", "."),
                    (" with ", "."),
                    (" into ", "."),
                ):
                    message["reasoning_content"] = message["reasoning_content"].replace(
                        before + name + after, before + new + after
                    )
        messages.append(message)
    return Chat(messages, tools, chat.is_thinking)
