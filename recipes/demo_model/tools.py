# ruff: noqa: E501 -- a template reads best on one line
"""Tools with what is asked of them: calculators, clocks, errands and answers with a shape, each named in many ways.

A tool is made together with the questions that it answers. A call's arguments stand in its question, or are facts of the
little world; what a tool returns is invented, so that an answer has to copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from demo_model.definitions import (
    NUMBER,
    ODD_WORDS,
    TEXT,
    TEXTS,
    WHOLE,
    YES_OR_NO,
    Field,
    JsonSchema,
    cased,
    field_names,
    tool_definition,
    tool_name,
)
from demo_model.people import PERSON_KEYS, make_city, make_full_name, make_person, person_value, told
from demo_model.questions import animal_questions, as_json, describe_animal, roll_sum, small_facts, sum_question
from demo_model.world import ANIMALS, COLOURS, PLACES, THINGS, Animal, Dice, fix_articles, plural


class Use(NamedTuple):
    """One question for a tool: what to call it with, what it returns, what to say then.

    ``about`` is for a thought, ``value`` is the bare number where there is one.
    """

    question: str
    arguments: dict[str, Any]
    result: str
    answer: str
    about: str
    value: Any = None


@dataclass(frozen=True)
class Tool:
    """A tool of a request.

    Attributes:
        takes: the kinds of questions that are for this tool, so that no other answer to them is learned beside it.
        is_final: its arguments are the answer: the assistant calls it instead of answering.
        finish: the arguments of a final tool's call, given a question's answer and its bare value; None: it cannot
            take them.
    """

    name: str
    definition: dict[str, Any]
    takes: frozenset[str]
    ask: Callable[[Dice], Use]
    is_final: bool = False
    finish: Callable[[str, Any], dict[str, Any]] | None = None


def _told_by_tool(dice: Dice, value: Any, *keys: str) -> str:
    """A result as programs return it: bare, or in an object under one of the usual keys."""
    roll = dice.between(1, 20)
    if roll <= 9:
        return value if isinstance(value, str) else as_json(value)
    key = dice.pick((*keys, "result", "output"))
    if roll <= 16:
        return as_json({key: value})
    if roll <= 18:
        return as_json({"status": "ok", key: value})
    return as_json(value)


def _tool(
    dice: Dice,
    names: Sequence[str],
    descriptions: Sequence[str],
    fields: Sequence[Field],
    takes: Sequence[str],
    ask: Callable[[Dice], Use],
) -> Tool:
    """A tool that its name or its description tells to be one of its kind, or both."""
    name = tool_name(dice, names)
    is_usual = any(name == cased(words, case) for words in names for case in ("snake", "Camel", "camel", "kebab"))
    is_described = not is_usual or dice.chance(0.75)
    description = dice.spin(dice.pick(descriptions)) if is_described else ""
    if is_usual and dice.chance(0.08):
        description = " ".join(dice.sample(ODD_WORDS, dice.between(3, 9))).capitalize() + "."
    definition = tool_definition(dice, name, description, fields)
    required = definition["function"].get("parameters", {}).get("required", ())

    def ask_in_full(dice: Dice) -> Use:
        """What must be there without a value is null."""
        use = ask(dice)
        names = [field.name for field in fields if field.name in use.arguments or field.name in required]
        return use._replace(arguments={name: use.arguments.get(name) for name in names})

    return Tool(name, definition, frozenset(takes), ask_in_full)


_NUMBER_PAIRS = (
    ("a", "x", "first", "left", "number1", "n", "num1", "first_number", "lhs", "one"),
    ("b", "y", "second", "right", "number2", "m", "num2", "second_number", "rhs", "two"),
)
_OPERATORS: tuple[dict[str, str], ...] = (
    {"+": "+", "-": "-", "*": "*", "/": "/"},
    {"+": "+", "-": "-", "*": "*"},
    {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"},
    {"+": "plus", "-": "minus", "*": "times"},
)
_ONE_SIGN: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "+",
        ("add", "add numbers", "sum", "plus", "get sum"),
        (
            "Add two numbers.",
            "The sum of two numbers.",
            "Adds a and b.",
            "Return the sum of a and b.",
            "Addition.",
            "[Compute|Calculate] the sum.",
        ),
    ),
    (
        "-",
        ("subtract", "minus", "difference"),
        (
            "Subtract the second number from the first.",
            "The difference of two numbers.",
            "Subtraction.",
            "Return a minus b.",
        ),
    ),
    (
        "*",
        ("multiply", "times", "product", "multiply numbers"),
        (
            "Multiply two numbers.",
            "The product of two numbers.",
            "Multiplication.",
            "[Compute|Return] the product of a and b.",
            "Multiplies a and b.",
        ),
    ),
    (
        "/",
        ("divide", "division"),
        ("Divide the first number by the second.", "Divides two numbers.", "Division.", "Return a divided by b."),
    ),
)


def _roll_numbers(dice: Dice, signs: Sequence[str]) -> tuple[int | float, str, int | float, int | float]:
    """Two numbers of any size, a sign out of ``signs``, and the result, which is exact to two places."""
    sign = dice.pick(signs)
    roll = dice.between(1, 20)
    limit = 20 if roll <= 8 else 99 if roll <= 13 else 999 if roll <= 17 else 9999
    a: int | float = dice.between(0, limit)
    b: int | float = dice.between(1, limit)
    if roll == 20 and sign != "/":
        a, b = dice.between(1, 99) / 10, dice.between(1, 99) / 10
    if sign == "/":
        return a, sign, b, a // b if a % b == 0 else round(a / b, 2)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return a, sign, b, result if isinstance(result, int) else round(result, 2)


def calculator(dice: Dice) -> Tool:
    """Two numbers and an operator, an expression, or a tool for one kind of sum."""
    roll = dice.between(1, 100)
    number = dice.pick((NUMBER, NUMBER, WHOLE))
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    described = dice.chance(0.25)
    if roll <= 45:
        words = dice.pick(_OPERATORS)
        op_names = ("operator", "op", "operation", "sign")
        a_name, b_name, op_name = field_names(dice, *_NUMBER_PAIRS, (dice.pick(op_names),))
        is_enum = dice.chance(0.75)
        op_schema: JsonSchema = {"type": "string", "enum": list(words.values())} if is_enum else TEXT
        op_text = "" if is_enum and not described else f"One of {', '.join(words.values())}."
        fields = [
            Field("a", a_name, number, "The first number." if described else ""),
            Field("b", b_name, number, "The second number." if described else ""),
        ]
        fields.insert(dice.pick((2, 2, 0, 1)), Field("operator", op_name, op_schema, op_text))
        signs, names = tuple(words), ("calculator", "calculate", "calc", "compute", "math", "arithmetic")
        descriptions = (
            "[A|A small|A simple] calculator[.| for two numbers.]",
            "Calculate with two numbers.",
            "Add, subtract and multiply numbers.",
            "Does [sums|arithmetic|maths].",
            "[Perform|Do] a calculation[.| on two numbers.]",
            "Apply an operator to two numbers.",
            "[Basic arithmetic|Math operations][.| on a and b.]",
        )
    elif roll <= 65:
        [name] = field_names(dice, ("expression", "expr", "formula", "query", "calculation", "input"))
        fields = [
            Field("expression", name, TEXT, dice.pick(("", "", "What to calculate, as 2 + 3.", "The expression.")))
        ]
        words = {sign: sign for sign in "+-*/"}
        signs, names = tuple(words), ("calculator", "calculate", "evaluate", "calc", "eval expression", "compute")
        descriptions = (
            "Evaluate an expression.",
            "[A|A simple] calculator[.| for expressions.]",
            "Calculate the value of an expression.",
            "Does [sums|arithmetic|maths].",
            "[Perform|Do] a calculation.",
            "[Basic arithmetic|Math operations].",
            "Compute what the expression is.",
        )
    else:
        sign, names, descriptions = dice.pick(_ONE_SIGN[:1] + _ONE_SIGN)
        a_name, b_name = field_names(dice, *_NUMBER_PAIRS)
        fields = [Field("a", a_name, number), Field("b", b_name, number)]
        if described:
            fields = [
                fields[0]._replace(description="The first number."),
                fields[1]._replace(description="The second number."),
            ]
        words, signs = {sign: sign}, (sign,)

    def ask(dice: Dice) -> Use:
        a, sign, b, result = _roll_numbers(dice, signs)
        values = {"a": a, "b": b, "operator": words[sign], "expression": f"{a} {sign} {b}"}
        return Use(
            dice.spin(sum_question(dice, sign)).format(a=a, b=b),
            {field.name: values[field.role] for field in fields},
            _told_by_tool(dice, result, "value", "answer"),
            f"{a} {sign} {b} = {result}.",
            "a sum",
            result,
        )

    return _tool(dice, names, descriptions, fields, [f"sum {sign}" for sign in signs], ask)


_TIME_QUESTIONS = (
    "What time is it[| now]",
    "What is the time[| now]",
    "Tell me the time",
    "How late is it",
    "Which time is it",
    "Do you know what time it is",
    "Can you tell me the time",
)


def _mark(question: str) -> str:
    return question + ("." if question.split()[0] in ("Tell", "Please", "Give", "Show", "Look", "Get") else "?")


def clock(dice: Dice) -> Tool:
    """The time, here or somewhere."""
    roll = dice.between(1, 10)
    fields = []
    if roll > 5:
        role = dice.pick(("city", "city", "city", "timezone", "location", "place", "zone"))
        text = dice.pick(("", "", "Where.", "The name of the place.", "The city or time zone."))
        fields = [Field("city", field_names(dice, (role,))[0], TEXT, text, is_required=roll <= 8)]

    def ask(dice: Dice) -> Use:
        time = f"{dice.between(0, 23)}:{dice.between(0, 59):02}"
        if dice.chance(0.5):
            time = time.zfill(5)
        if dice.chance(0.08):
            time += dice.pick((":00", " am", " pm", f":{dice.between(10, 59)}"))
        question = dice.spin(dice.pick(_TIME_QUESTIONS))
        city = ""
        if fields and (fields[0].is_required or dice.chance(0.6)):
            city = "UTC" if dice.chance(0.06) else make_city(dice)
            question = dice.pick((question, "What is the time", "What time is it")) + f" in {city}"
        arguments = {fields[0].name: city} if city else {}
        where = f" in {city}" if city else ""
        return Use(
            _mark(question), arguments, _told_by_tool(dice, time, "time", "now"), f"It is {time}{where}.", "the time"
        )

    names = (
        "get time",
        "clock",
        "current time",
        "get current time",
        "time",
        "time now",
        "what time",
        "now",
        "get the time",
    )
    descriptions = (
        "[Get|Return|Tells] the [current |]time.",
        "A clock.",
        "The time [now|of day].",
        "What time it is[.| now.]",
        "Current time[.| in a city.]",
        "[Gives|Returns] the [local |][date and |]time[.| of a city or zone.]",
        "Return the time as a text, such as 12:30.",
        "Tells [the hour|what time it is].",
    )
    return _tool(dice, names, descriptions, fields, ["time"], ask)


def weather(dice: Dice) -> Tool:
    role = dice.pick(("city", "city", "location", "place", "town"))
    fields = [Field("city", field_names(dice, (role,))[0], TEXT, dice.pick(("", "", "The city.", "Where.")))]
    if dice.chance(0.25):
        unit: JsonSchema = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        fields.append(Field("unit", "unit", unit, "", is_required=False))

    def ask(dice: Dice) -> Use:
        city, sky = make_city(dice), dice.pick(("sunny", "cloudy", "rainy", "windy", "warm", "cold", "foggy", "snowy"))
        question = dice.spin(
            f"[What is the weather like in {city}?|What is the weather in {city}?|How is the weather in {city}?|Tell me the weather in {city}.|What is the weather in {city} today?]"
        )
        result, answer = _told_by_tool(dice, sky, "weather", "sky"), f"It is {sky} in {city}."
        if dice.chance(0.4):
            degrees = dice.between(0, 35)
            answer = f"It is {sky} in {city}, {degrees} degrees."
            result = dice.pick(
                (
                    as_json({"temperature": degrees, "condition": sky}),
                    as_json({"weather": sky, "degrees": degrees}),
                    f"{sky}, {degrees} degrees",
                )
            )
        return Use(question, {fields[0].name: city}, result, answer, "the weather")

    names = ("get weather", "weather", "current weather", "get current weather", "forecast", "weather report")
    descriptions = (
        "[Get|Return] the [current |]weather[.| in a city.]",
        "The weather [in a place|somewhere].",
        "What the weather is like.",
    )
    return _tool(dice, names, descriptions, fields, ["weather"], ask)


def animal_lookup(dice: Dice) -> Tool:
    """An encyclopaedia: what it says goes, even where the model knows better."""
    [name] = field_names(dice, ("animal", "name", "kind", "animal_name", "species"))
    fields = [Field("animal", name, TEXT, dice.pick(("", "", "Which animal.", "The name of the animal.")))]

    def ask(dice: Dice) -> Use:
        known = dice.pick(ANIMALS)
        animal = known if dice.chance(0.5) else Animal(known.animal, *dice.pick(ANIMALS)[1:])
        question, sentence, key, value = dice.pick(animal_questions(animal))
        if dice.chance(0.2):
            [(question, sentence)], shown = describe_animal(dice, "plain", animal), animal._asdict()
            result = as_json({key: shown[key] for key in ("animal", "size", "colour", "legs", "home", "food")})
        else:
            keys = dice.sample(Animal._fields[1:], dice.between(1, 3))
            shown = {key: getattr(animal, key) for key in keys} | {key: value}
            result = as_json(shown if dice.chance(0.8) else value)
        return Use(
            fix_articles(dice.spin(question)),
            {name: animal.animal},
            result,
            fix_articles(sentence),
            f"the {animal.animal}",
        )

    names = ("get animal", "animal lookup", "lookup animal", "animal info", "find animal", "get animal facts")
    descriptions = (
        "[Look up|Find|Get] [facts|what is known] about an animal.",
        "A book of animals.",
        "Facts about animals[.| by name.]",
    )
    return _tool(dice, names, descriptions, fields, ["animal"], ask)


def _phrase(dice: Dice) -> str:
    return dice.spin(f"[the|a {dice.pick(COLOURS)}|my] {dice.pick(THINGS)}[| in {dice.pick(PLACES)}]")


def _errand(
    dice: Dice,
    kind: str,
    names: Sequence[str],
    descriptions: Sequence[str],
    fields: Sequence[tuple[str, tuple[str, ...], JsonSchema]],
    ask: Callable[[Dice], tuple[str, dict[str, Any], Any, str, str]],
) -> Tool:
    """A tool for one sort of errand; ``ask`` gives question, arguments by role, bare result, its key, and answer."""
    chosen = field_names(dice, *(usual for _, usual, _ in fields)) if fields else []
    named = {role: Field(role, name, schema) for (role, _, schema), name in zip(fields, chosen, strict=True)}

    def use(dice: Dice) -> Use:
        question, values, result, key, answer = ask(dice)
        arguments = {named[role].name: value for role, value in values.items()}
        return Use(question, arguments, _told_by_tool(dice, result, key), answer, f"the {kind}")

    return _tool(dice, names, descriptions, list(named.values()), [kind], use)


_OK = ("ok", "done", "OK", "saved", "success", True)


def roll_dice(dice: Dice) -> Tool:
    def ask(dice: Dice) -> tuple[str, dict[str, Any], Any, str, str]:
        sides = dice.pick((4, 6, 6, 8, 10, 12, 20, 100))
        rolled = dice.between(1, sides)
        return (
            dice.spin(f"[Roll|Throw|Please roll] a die with {sides} sides."),
            {"sides": sides},
            rolled,
            "rolled",
            f"You rolled {rolled}.",
        )

    fields = (("sides", ("sides", "num_sides", "faces", "n"), WHOLE),)
    return _errand(
        dice,
        "die",
        ("roll dice", "roll die", "throw dice", "roll"),
        ("Roll a die.", "Throws a die with many sides."),
        fields,
        ask,
    )


def send_message(dice: Dice) -> Tool:
    def ask(dice: Dice) -> tuple[str, dict[str, Any], Any, str, str]:
        name = make_full_name(dice)
        text = dice.spin(
            f"[I am late|See you at {dice.pick(PLACES)}|I have found {_phrase(dice)}|Happy birthday|Good night|Please bring {_phrase(dice)}]"
        )
        question = dice.spin(f"[Send a message to {name}|Write to {name}|Send {name} a message|Message {name}]: {text}")
        return question, {"to": name, "text": text}, dice.pick(_OK), "status", "I have sent the message."

    fields = (
        ("to", ("to", "recipient", "name", "person", "receiver"), TEXT),
        ("text", ("text", "message", "body", "content", "words"), TEXT),
    )
    return _errand(
        dice,
        "message",
        ("send message", "send", "message", "write message", "send text"),
        ("Send a message to somebody.", "Sends a text."),
        fields,
        ask,
    )


def save_note(dice: Dice) -> Tool:
    def ask(dice: Dice) -> tuple[str, dict[str, Any], Any, str, str]:
        text = dice.spin(f"[bring|buy|look for|find|paint|bring back] {_phrase(dice)}")
        return (
            dice.spin(f"[Remember|Save a note|Note|Write down]: {text}"),
            {"text": text},
            dice.pick(_OK),
            "status",
            "I have saved it.",
        )

    fields = (("text", ("text", "note", "content", "what", "todo"), TEXT),)
    return _errand(
        dice,
        "note",
        ("save note", "remember", "note", "add note", "add todo"),
        ("Save a note.", "Remember a text.", "Keeps a note for later."),
        fields,
        ask,
    )


def search(dice: Dice) -> Tool:
    def ask(dice: Dice) -> tuple[str, dict[str, Any], Any, str, str]:
        wanted = dice.pick(
            (_phrase(dice).split(" ", 1)[1], plural(dice.pick(ANIMALS).animal), make_full_name(dice), make_city(dice))
        )
        found = dice.spin(
            f"[{dice.pick(THINGS)}s at {dice.pick(PLACES)}|{_phrase(dice)}|nothing at all|{dice.between(2, 99)} books]"
        )
        return (
            dice.spin(f"[Search for|Look up|Find|Please search for] {wanted}."),
            {"query": wanted},
            found,
            "found",
            f"I found this: {found}.",
        )

    fields = (("query", ("query", "q", "search", "text", "words", "term"), TEXT),)
    return _errand(
        dice,
        "search",
        ("search", "search web", "find", "lookup", "web search", "search library"),
        ("Search for something.", "[Search|Look in] the library.", "Finds texts."),
        fields,
        ask,
    )


def set_timer(dice: Dice) -> Tool:
    unit = dice.pick(("minutes", "minutes", "seconds", "hours"))

    def ask(dice: Dice) -> tuple[str, dict[str, Any], Any, str, str]:
        length = dice.between(2, 90)
        return (
            dice.spin(f"[Set|Start|Please set] a timer [for|of] {length} {unit}."),
            {"length": length},
            dice.pick(_OK),
            "status",
            "The timer is set.",
        )

    fields = (("length", (unit, unit, "duration", "length", "time"), WHOLE),)
    return _errand(
        dice,
        "timer",
        ("set timer", "start timer", "timer", "set alarm"),
        (f"Set a timer[.| in {unit}.]", "Starts a timer."),
        fields,
        ask,
    )


def switch_light(dice: Dice) -> Tool:
    def ask(dice: Dice) -> tuple[str, dict[str, Any], Any, str, str]:
        room, is_on = (
            dice.pick(("kitchen", "garden", "library", "cellar", "bedroom", "hall", "stable", "bathroom")),
            dice.chance(0.5),
        )
        question = dice.spin(f"[Turn|Switch|Please turn] {'on' if is_on else 'off'} the light in the {room}.")
        return (
            question,
            {"room": room, "on": is_on},
            dice.pick(_OK),
            "status",
            f"The light in the {room} is {'on' if is_on else 'off'}.",
        )

    fields = (
        ("room", ("room", "place", "where", "location"), TEXT),
        ("on", ("on", "is_on", "state", "enabled"), YES_OR_NO),
    )
    return _errand(
        dice,
        "light",
        ("switch light", "set light", "light", "turn light", "lamp"),
        ("Turn a light on or off.", "Switches the light in a room."),
        fields,
        ask,
    )


def price(dice: Dice) -> Tool:
    def ask(dice: Dice) -> tuple[str, dict[str, Any], Any, str, str]:
        thing, cost = dice.pick(THINGS), dice.between(1, 250)
        question = fix_articles(
            dice.spin(f"[What does a~ {thing} cost?|How much is a~ {thing}?|What is the price of a~ {thing}?]")
        )
        return question, {"item": thing}, cost, "price", fix_articles(f"A~ {thing} costs {cost}.")

    fields = (("item", ("item", "thing", "product", "name", "what"), TEXT),)
    return _errand(
        dice,
        "price",
        ("get price", "price", "find price", "price of", "shop"),
        ("The price of a thing.", "What a thing costs.", "Get the price of an item."),
        fields,
        ask,
    )


def age_lookup(dice: Dice) -> Tool:
    def ask(dice: Dice) -> tuple[str, dict[str, Any], Any, str, str]:
        name, age = make_full_name(dice), dice.between(2, 99)
        question = dice.spin(f"[How old is {name}?|What is the age of {name}?|What age is {name}?]")
        return question, {"name": name}, age, "age", f"{name} is {age} years old."

    fields = (("name", ("name", "person", "user", "who"), TEXT),)
    return _errand(
        dice,
        "age",
        ("get age", "age", "get user", "lookup person", "age of"),
        ("The age of a person.", "How old somebody is.", "Get the age of a user."),
        fields,
        ask,
    )


def secret(dice: Dice) -> Tool:
    """A tool without parameters for one named thing that only it knows."""
    what = dice.spin("[secret |magic |lucky |player |user |]") + dice.pick(
        ("word", "number", "name", "colour", "code", "place", "score")
    )

    def ask(dice: Dice) -> tuple[str, dict[str, Any], Any, str, str]:
        value = (
            dice.between(1, 999)
            if what.split()[-1] in ("number", "code", "score")
            else dice.pick((dice.pick(THINGS), make_full_name(dice), dice.pick(COLOURS)))
        )
        question = dice.spin(f"[What is the {what}?|Tell me the {what}.|Do you know the {what}?|Give me the {what}.]")
        return question, {}, value, what.split()[-1], f"The {what} is {value}."

    return _errand(
        dice,
        what,
        (f"get {what}", what, f"get {what}", f"find {what}"),
        (f"[Get|Return|Tells] the {what}.", f"The {what}."),
        (),
        ask,
    )


ANIMAL_KEYS: dict[str, tuple[str, ...]] = {
    "animal": ("animal", "animal", "name", "name", "kind", "species", "animal_name"),
    "home": ("home", "home", "habitat", "lives_in", "place"),
    "food": ("food", "food", "diet", "eats", "favourite_food"),
    "sound": ("sound", "says", "noise"),
    "legs": ("legs", "legs", "num_legs", "number_of_legs", "leg_count"),
    "colour": ("colour", "colour", "color"),
    "size": ("size",),
    "can_fly": ("can_fly", "can_fly", "flies", "is_able_to_fly", "able_to_fly"),
}
_KEY_TYPES: dict[str, JsonSchema] = {"legs": WHOLE, "can_fly": YES_OR_NO, "age": WHOLE}
_KEY_TEXTS = {
    "legs": "How many legs.",
    "can_fly": "Can it fly?",
    "food": "What it eats.",
    "home": "Where it lives.",
    "age": "In years.",
}
_FINAL_NAMES = ("final result", "final result", "final answer", "output", "result", "answer", "respond", "finish")
_FINAL_TEXTS = (
    "The [final|last] answer[.|, which ends the talk.]",
    "Give the answer with this.",
    "The right {type}, with all that is required.",
    "Answer in this form.",
    "",
    "",
)
SUM_KEYS: dict[str, tuple[str, ...]] = {
    "a": _NUMBER_PAIRS[0], "b": _NUMBER_PAIRS[1], "operator": ("operator", "op", "sign"), "result": ("result", "result", "answer", "value", "total"),
}  # fmt: skip


def pick_keys(dice: Dice, usual: dict[str, tuple[str, ...]], roles: Sequence[str]) -> dict[str, str]:
    """A name for the key of each role; a pair of numbers gets names that go together."""
    place, case = dice.between(0, 99), "camel" if dice.chance(0.08) else "snake"
    names = {
        role: usual[role][place % len(usual[role])] if role in ("a", "b") else dice.pick(usual[role]) for role in roles
    }
    names = {role: cased(name.replace("_", " "), case) for role, name in names.items()}
    return names if len(set(names.values())) == len(names) else {role: usual[role][0] for role in roles}


def pick_roles(dice: Dice, roles: Sequence[str], low: int, high: int) -> list[str]:
    """Some of the roles, mostly in their usual order."""
    chosen = dice.sample(roles, dice.between(low, min(high, len(roles))))
    return chosen if dice.chance(0.35) else sorted(chosen, key=list(roles).index)


def about_animal(dice: Dice, animal: Animal) -> str:
    if dice.chance(0.35):
        return fix_articles(dice.spin(dice.pick(animal_questions(animal))[0]))
    return describe_animal(dice, "plain", animal)[0][0]


def facts_form(dice: Dice) -> Tool:
    """A final tool whose arguments are facts of the world: an animal's, a sum's, or a person's out of a text."""
    sort = dice.pick(("animal", "animal", "animal", "sum", "person", "person"))
    usual = {"animal": ANIMAL_KEYS, "sum": SUM_KEYS, "person": PERSON_KEYS}[sort]
    roles = ["result"] if sort == "sum" and dice.chance(0.4) else pick_roles(dice, list(usual), 2, 5)
    if sort == "sum" and "result" not in roles:
        roles.append("result")
    if sort != "sum" and dice.chance(0.6) and next(iter(usual)) not in roles:
        roles.insert(0, next(iter(usual)))
    keys = pick_keys(dice, usual, roles)
    as_list = dice.chance(0.6)
    types = (
        _KEY_TYPES
        | dict.fromkeys(("a", "b", "result"), dice.pick((WHOLE, WHOLE, NUMBER)))
        | ({"likes": TEXTS} if as_list else {})
    )
    is_described = dice.chance(0.2)
    fields = [
        Field(role, keys[role], types.get(role, TEXT), _KEY_TEXTS.get(role, "") if is_described else "")
        for role in roles
    ]
    class_names = {
        "animal": ("animal facts", "animal", "animal info", "facts", "creature", "animal card", "animal record"),
        "sum": ("sum", "sum result", "calculation", "result", "math answer", "number answer"),
        "person": ("person", "user", "user info", "user detail", "character", "person record", "contact"),
    }[sort]
    type_name = tool_name(dice, class_names, is_type=True)
    is_framework = dice.chance(0.4)
    name = tool_name(dice, _FINAL_NAMES) if is_framework else type_name
    description = dice.spin(dice.pick(_FINAL_TEXTS)).replace("{type}", type_name)
    if not is_framework and dice.chance(0.4):
        description = dice.spin(
            {
                "animal": "[Facts about|What is known about] an animal.",
                "sum": "A sum and its result.",
                "person": "[A person|A user|Facts about a person].",
            }[sort]
        )

    def ask(dice: Dice) -> Use:
        if sort == "animal":
            animal = dice.pick(ANIMALS)
            values: dict[str, Any] = animal._asdict()
            question = about_animal(dice, animal)
        elif sort == "sum":
            a, sign, b = roll_sum(dice)
            result = {"+": a + b, "-": a - b, "*": a * b}[sign]
            values = {"a": a, "b": b, "operator": sign, "result": result}
            question = dice.spin(sum_question(dice, sign)).format(a=a, b=b)
        else:
            person = make_person(dice)
            values = {role: person_value(person, role, as_list=as_list) for role in PERSON_KEYS}
            question = dice.spin("[|||Extract: |Extract the person: |Read this: |Save this person: ]") + told(
                dice, person, {*roles, *dice.sample(("age", "likes"), 1)}
            )
        arguments = {field.name: values[field.role] for field in fields}
        result_text = dice.pick(
            ("ok", "Final result processed.", "done", "saved", as_json({"status": "ok"}), as_json(arguments))
        )
        return Use(question, arguments, result_text, "Done.", "an answer in this form")

    takes = {"animal": ["animal"], "sum": ["sum +", "sum -", "sum *"], "person": ["person"]}[sort]
    finish = None
    if sort == "sum" and roles == ["result"]:

        def finish(answer: str, value: Any) -> dict[str, Any]:
            return {fields[0].name: value}

    return Tool(
        name, tool_definition(dice, name, description, fields), frozenset(takes), ask, is_final=True, finish=finish
    )


def answer_form(dice: Dice) -> Tool:
    """A final tool with one text: the answer itself."""
    [key] = field_names(dice, ("answer", "response", "text", "message", "reply", "content", "result"))
    name = tool_name(dice, _FINAL_NAMES, is_type=dice.chance(0.4))
    fields = [Field("answer", key, TEXT, dice.pick(("", "", "The answer.")))]
    definition = tool_definition(dice, name, dice.spin(dice.pick(_FINAL_TEXTS[:2])), fields)

    def ask(dice: Dice) -> Use:
        if dice.chance(0.5):
            question, answer = small_facts(dice, "plain")[0]
        elif dice.chance(0.5):
            question, answer, _, _ = dice.pick(animal_questions(dice.pick(ANIMALS)))
            question, answer = fix_articles(dice.spin(question)), fix_articles(answer)
        else:
            a, sign, b = roll_sum(dice)
            question = dice.spin(sum_question(dice, sign)).format(a=a, b=b)
            answer = f"{a} {sign} {b} = { {'+': a + b, '-': a - b, '*': a * b}[sign] }."
        return Use(
            question,
            {key: answer},
            dice.pick(("ok", "Final result processed.", "done")),
            "Done.",
            "an answer in this form",
        )

    return Tool(
        name,
        definition,
        frozenset(("sum +", "sum -", "sum *", "animal", "answer")),
        ask,
        is_final=True,
        finish=lambda answer, _: {key: answer},
    )


Maker = Callable[[Dice], Tool]
SERVANTS: tuple[Maker, ...] = (
    *(calculator,) * 5, *(clock,) * 4, *(weather,) * 2, *(animal_lookup,) * 2, roll_dice, send_message, save_note, search,
    set_timer, switch_light, price, age_lookup, secret, secret,
)  # fmt: skip
"""Makers of tools that do something, the frequent ones more than once."""
