# ruff: noqa: E501 -- a template reads best on one line
"""Invented people, in a sentence that states their facts and as the facts themselves: something to extract."""

from __future__ import annotations

from typing import Any, NamedTuple

from demo_model.world import BOYS, Dice, invented_name, make_name

CITIES = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Tokyo", "Oslo", "Vienna", "Lisbon", "Dublin", "Athens", "Prague",
    "Cairo", "Lima", "Delhi", "Sydney", "Boston", "Chicago", "New York", "San Francisco", "Toronto", "Zurich",
    "Munich", "Amsterdam", "Warsaw", "Seoul", "Beijing", "Mumbai", "Nairobi", "Helsinki",
)  # fmt: skip
SURNAMES = (
    "Doe", "Smith", "Brown", "Miller", "Jones", "Green", "Fischer", "Weber", "Hill", "Stone", "Baker", "Young", "Lee",
    "Garcia", "Novak", "Rossi", "Silva", "Khan", "Wood", "King",
)  # fmt: skip
FIRST_NAMES = ("John", "Jane", "Jason", "Alice", "Peter", "Mary", "James", "Susan", "Robert", "Linda", "Michael")
JOBS = ("baker", "teacher", "doctor", "farmer", "pilot", "painter", "gardener", "cook", "singer", "nurse", "engineer", "tailor")  # fmt: skip
LIKES = ("apples", "books", "cats", "dogs", "music", "pizza", "football", "honey", "stars", "tea", "trains", "flowers", "cheese", "chess", "stories", "ice cream")  # fmt: skip


class Person(NamedTuple):
    name: str
    age: int
    likes: list[str]
    city: str
    job: str


def make_full_name(dice: Dice) -> str:
    name = dice.pick(FIRST_NAMES) if dice.chance(0.25) else make_name(dice, dice.chance(0.5), True)
    if dice.chance(0.3):
        name += " " + (dice.pick(SURNAMES) if dice.chance(0.8) else invented_name(dice))
    return name


def make_city(dice: Dice) -> str:
    return invented_name(dice) if dice.chance(0.12) else dice.pick(CITIES)


def make_person(dice: Dice) -> Person:
    age = dice.between(1, 99) if dice.chance(0.7) else dice.between(3, 30)
    likes = dice.sample(LIKES, 2 if dice.chance(0.3) else 1)
    return Person(make_full_name(dice), age, likes, make_city(dice), dice.pick(JOBS))


def told(dice: Dice, person: Person, roles: set[str]) -> str:
    """A sentence or two that state the facts ``roles`` of a person and its name."""
    he = "He" if person.name.split()[0] in BOYS else dice.pick(("He", "She"))
    age, likes = f"{person.age} years old", " and ".join(person.likes)
    job = ("an " if person.job[0] in "aeiou" else "a ") + person.job
    verbs = {
        "age": dice.pick((f"is {age}", f"is {age}", f"is {person.age}")),
        "likes": dice.pick((f"likes {likes}", f"likes {likes}", f"loves {likes}")),
        "city": dice.pick((f"lives in {person.city}", f"lives in {person.city}", f"is from {person.city}")),
        "job": dice.pick((f"is {job}", f"works as {job}")),
    }
    order = [role for role in ("age", "likes", "city", "job") if role in roles]
    if dice.chance(0.3):
        order = dice.sample(order, len(order))
    phrases = [verbs[role] for role in order]
    if not phrases:
        return dice.spin(f"[This is {person.name}|My friend is called {person.name}|Here comes {person.name}].")
    if dice.chance(0.12) and "age" in roles:
        rest = [phrase for role, phrase in zip(order, phrases, strict=True) if role != "age"]
        return f"{person.name}, {person.age}" + "".join(", " + phrase for phrase in rest) + "."
    subject = dice.spin(
        f"[{person.name}|{person.name}|{person.name}|My friend {person.name}|My name is {person.name}. I]"
    )
    if subject.endswith(" I"):
        swaps = {"is": "am", "likes": "like", "loves": "love", "lives": "live", "works": "work"}
        phrases = [" ".join([swaps[phrase.split()[0]], *phrase.split()[1:]]) for phrase in phrases]
        he = "I"
    cut = 2 if len(phrases) > 2 or dice.chance(0.7) else 1
    first, second = phrases[:cut], phrases[cut:]
    text = f"{subject} {' and '.join(first)}."
    return text + (f" {he} {' and '.join(second)}." if second else "")


PERSON_KEYS: dict[str, tuple[str, ...]] = {
    "name": ("name", "name", "name", "person", "full_name", "user", "user_name"),
    "age": ("age", "age", "age", "years", "age_in_years", "how_old"),
    "likes": ("likes", "likes", "hobby", "hobbies", "interests", "loves"),
    "city": ("city", "city", "home", "town", "location", "lives_in"),
    "job": ("job", "job", "work", "occupation", "profession"),
}


def person_value(person: Person, role: str, *, as_list: bool) -> Any:
    """The fact as JSON has it; what somebody likes may be a list of texts or one text."""
    value = getattr(person, role)
    return value if role != "likes" or as_list else " and ".join(value)
