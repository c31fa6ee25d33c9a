"""The closed little world that the demo model knows: names, animals with their facts, places, things and feelings.

Only data and the seeded dice live here. Every fact that an answer states is looked up in these tables, so that a
test can check the answer against them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_INNERMOST_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])~ (\w)")


class Dice:
    """A seeded source of choices built on ``random.Random.random`` alone.

    Python promises that ``random()`` keeps its sequence for a seed from release to release; it does not promise that of
    ``choice``, ``shuffle`` and ``randrange``.
    """

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]

    def between(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""
        return low + int(self._random() * (high - low + 1))

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` different items, in random order (Fisher-Yates)."""
        pool = list(items)
        for i in range(count):
            j = i + int(self._random() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def spin(self, template: str) -> str:
        """Replace every ``[one|another|]`` in ``template`` by one of its alternatives; they may be nested."""
        while "[" in template:
            template = _INNERMOST_CHOICE.sub(lambda found: self.pick(found.group(1).split("|")), template)
        return template


def fix_articles(text: str) -> str:
    """Turn ``a~ apple`` into ``an apple`` and ``a~ pear`` into ``a pear``."""
    return _ARTICLE.sub(
        lambda found: found.group(1) + ("n " if found.group(2) in "aeiouAEIOU" else " ") + found.group(2), text
    )


class Animal(NamedTuple):
    """What the world knows about one kind of animal; the field names are the keys of the JSON answers."""

    animal: str
    home: str
    food: str
    sound: str
    legs: int
    colour: str
    size: str
    can_fly: bool


ANIMALS = tuple(
    Animal(*row)
    for row in (
        ("fox", "forest", "berries", "yip", 4, "red", "small", False),
        ("owl", "tree", "mice", "hoot", 2, "brown", "small", True),
        ("bear", "cave", "honey", "growl", 4, "brown", "big", False),
        ("rabbit", "burrow", "carrots", "squeak", 4, "white", "small", False),
        ("duck", "pond", "bread", "quack", 2, "yellow", "small", True),
        ("frog", "pond", "flies", "croak", 4, "green", "tiny", False),
        ("cat", "house", "fish", "meow", 4, "black", "small", False),
        ("dog", "house", "bones", "woof", 4, "brown", "big", False),
        ("mouse", "burrow", "cheese", "squeak", 4, "grey", "tiny", False),
        ("horse", "stable", "hay", "neigh", 4, "brown", "big", False),
        ("cow", "farm", "grass", "moo", 4, "white", "big", False),
        ("pig", "farm", "corn", "oink", 4, "pink", "big", False),
        ("sheep", "farm", "grass", "baa", 4, "white", "big", False),
        ("goat", "mountain", "leaves", "bleat", 4, "white", "big", False),
        ("hen", "farm", "seeds", "cluck", 2, "red", "small", True),
        ("bee", "hive", "nectar", "buzz", 6, "yellow", "tiny", True),
        ("ant", "hill", "crumbs", "tick", 6, "black", "tiny", False),
        ("spider", "web", "flies", "hush", 8, "black", "tiny", False),
        ("elephant", "savanna", "leaves", "toot", 4, "grey", "huge", False),
        ("lion", "savanna", "meat", "roar", 4, "yellow", "big", False),
        ("tiger", "jungle", "meat", "roar", 4, "orange", "big", False),
        ("monkey", "jungle", "bananas", "chatter", 2, "brown", "small", False),
        ("parrot", "jungle", "nuts", "squawk", 2, "green", "small", True),
        ("whale", "sea", "shrimp", "song", 0, "blue", "huge", False),
        ("dolphin", "sea", "fish", "click", 0, "grey", "big", False),
        ("turtle", "beach", "seaweed", "hiss", 4, "green", "small", False),
        ("penguin", "ice", "fish", "honk", 2, "black", "small", False),
        ("squirrel", "tree", "nuts", "chirp", 4, "red", "small", False),
        ("hedgehog", "garden", "beetles", "snuffle", 4, "brown", "small", False),
        ("deer", "forest", "grass", "bell", 4, "brown", "big", False),
        ("wolf", "forest", "meat", "howl", 4, "grey", "big", False),
        ("snail", "garden", "leaves", "hush", 0, "brown", "tiny", False),
    )
)
ANIMAL_BY_NAME = {animal.animal: animal for animal in ANIMALS}
PLURALS = {"mouse": "mice", "sheep": "sheep", "fox": "foxes", "deer": "deer", "wolf": "wolves"}

GIRLS = (
    "Lily", "Mia", "Anna", "Emma", "Nora", "Zoe", "Ella", "Rosa", "Ivy", "Ruby", "Clara", "Maya", "Lucy", "Sara",
    "Tilda", "Wendy", "Hana", "Olga", "Daisy", "Poppy", "Flora", "Greta", "Ines", "Jana", "Kira", "Luna", "Nina",
    "Pia", "Stella", "Tara", "Vera", "Amy", "Bella", "Cora", "Edith", "Faye", "Grace", "Holly", "Iris", "June",
    "Lena", "Molly",
)  # fmt: skip
BOYS = (
    "Tom", "Ben", "Max", "Leo", "Sam", "Finn", "Oscar", "Jack", "Tim", "Hugo", "Otto", "Paul", "Noah", "Milo",
    "Felix", "Theo", "Emil", "Anton", "Bruno", "Carl", "David", "Eli", "Fred", "Gus", "Henry", "Ivan", "Jonas",
    "Karl", "Luke", "Mark", "Nico", "Oliver", "Pete", "Ravi", "Simon", "Toby", "Victor", "Will", "Yusuf", "Zack",
    "Arlo", "Bob",
)  # fmt: skip
PET_NAMES = (
    "Pip", "Bubbles", "Pepper", "Ginger", "Biscuit", "Cinnamon", "Pebble", "Button", "Whisker", "Sunny", "Coco",
    "Nutmeg", "Clover", "Hazel", "Maple", "Olive", "Willow", "Rusty", "Fuzzy", "Dusty", "Patch", "Pumpkin", "Snowy",
    "Spot", "Star", "Teddy", "Toffee", "Waffle", "Ziggy", "Momo", "Kiko", "Lulu", "Nibbles", "Puff", "Bramble", "Moss",
)  # fmt: skip
_SYLLABLES = (
    "ba", "be", "bi", "bo", "da", "di", "do", "fa", "fi", "ga", "go", "ka", "ki", "ko", "la", "le", "li", "lo", "ma",
    "mi", "mo", "na", "ne", "no", "pa", "po", "ra", "ri", "ro", "sa", "so", "ta", "ti", "to", "va", "vi", "wa", "zi",
    "zo", "zu",
)  # fmt: skip
_ENDINGS = (
    "n", "r", "l", "s", "x", "k", "m", "nd", "lla", "tta", "ra", "ko", "ny", "rin", "",
)  # fmt: skip

FANTASY_KINDS = ("dragon", "robot", "giant", "elf", "wizard", "unicorn", "troll", "mermaid", "knight", "pirate")
CHILD_ADJECTIVES = ("little", "young", "kind", "clever", "brave", "curious", "cheerful", "quiet", "shy")
ANIMAL_ADJECTIVES = (
    "little",
    "small",
    "young",
    "clever",
    "brave",
    "curious",
    "gentle",
    "shy",
    "friendly",
    "funny",
    "old",
)

HOMES = (
    "a small village by the sea", "a little house near the forest", "a warm cottage on a hill", "a quiet valley",
    "a busy town", "a small house at the edge of the woods", "a green valley between two mountains",
    "an old mill by the river", "a tiny house with a red door", "a village full of flowers",
    "a castle on a high hill", "a sunny garden", "a cosy cave", "a deep, dark forest", "a land far away",
    "a little boat on the lake",
)  # fmt: skip
PLACES = (
    "the forest", "the park", "the river", "the beach", "the meadow", "the garden", "the old bridge", "the lake",
    "the hill", "the market", "the farm", "the pond", "the big oak tree", "the playground", "the library",
    "the windmill",
)  # fmt: skip
THINGS = (
    "ball", "kite", "hat", "book", "drum", "scarf", "bell", "lantern", "spoon", "key", "boat", "doll", "blanket",
    "ring", "flute", "basket", "teapot", "umbrella", "whistle", "necklace", "map", "cup", "button", "paintbrush",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "golden", "silver", "purple", "orange", "white", "pink")
FOODS = (
    "an apple pie", "a loaf of bread", "a bowl of soup", "a bag of nuts", "a chocolate cake", "a basket of berries",
    "a jar of honey", "a big sandwich", "a plate of cookies", "a bunch of grapes", "a sweet melon",
    "a piece of cheese",
)  # fmt: skip
HOBBIES = (
    "singing", "painting", "climbing trees", "reading books", "looking at the stars", "dancing in the rain",
    "baking bread", "swimming", "telling jokes", "collecting shells", "building towers", "playing the drum",
    "watching the clouds", "running fast", "picking flowers", "asking questions", "making new friends",
    "flying kites", "jumping in puddles",
)  # fmt: skip
WEATHERS = (
    "The sun was shining", "The sky was blue", "A soft wind was blowing", "It was a warm day", "It was a cold morning",
    "Snow lay on the ground", "The birds were singing", "White clouds moved across the sky",
    "It was a bright spring day", "The leaves were falling", "It was raining a little",
)  # fmt: skip
TRAITS = ("kind", "brave", "clever", "curious", "patient", "careful", "strong", "cheerful", "gentle", "honest")
FLAWS = ("shy", "lonely", "clumsy", "slow", "noisy", "forgetful", "bored", "afraid of the dark", "stubborn", "sleepy")

OPPOSITES = (
    ("big", "small"), ("hot", "cold"), ("up", "down"), ("day", "night"), ("fast", "slow"), ("happy", "sad"),
    ("old", "young"), ("wet", "dry"), ("light", "dark"), ("hard", "soft"), ("open", "closed"), ("left", "right"),
    ("loud", "quiet"), ("full", "empty"), ("tall", "short"), ("early", "late"), ("near", "far"), ("clean", "dirty"),
    ("summer", "winter"), ("strong", "weak"), ("yes", "no"), ("good", "bad"),
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a tomato": "red", "coal": "black",
    "a carrot": "orange", "the sun": "yellow", "a lemon": "yellow", "a cherry": "red", "chocolate": "brown",
    "milk": "white", "a leaf": "green", "the sea": "blue", "a strawberry": "red", "a pumpkin": "orange",
}  # fmt: skip


class Character(NamedTuple):
    """Who a story is about, with the pronouns that go with it."""

    name: str
    kind: str
    adjective: str
    is_female: bool

    def fields(self, prefix: str = "") -> dict[str, str]:
        """Template fields: ``{n}``, ``{kind}``, ``{adj}``, ``{he}``, ``{him}``, ``{his}`` and the capitalised ones."""
        he, him, his = ("she", "her", "her") if self.is_female else ("he", "him", "his")
        fields = {"n": self.name, "kind": self.kind, "adj": self.adjective, "he": he, "him": him, "his": his}
        fields |= {"He": he.capitalize(), "His": his.capitalize()}
        return {prefix + key: value for key, value in fields.items()}


def invented_name(dice: Dice) -> str:
    """A name from syllables, so that the model learns to copy names that it has never seen."""
    syllables = "".join(dice.pick(_SYLLABLES) for _ in range(dice.between(1, 2)))
    return (syllables + dice.pick(_ENDINGS)).capitalize()


def make_name(dice: Dice, is_female: bool, is_child: bool) -> str:
    if dice.chance(0.12):
        return invented_name(dice)
    if not is_child and dice.chance(0.55):
        return dice.pick(PET_NAMES)
    return dice.pick(GIRLS if is_female else BOYS)


def make_character(dice: Dice, *, kind: str | None = None, name: str | None = None, other_than: str = "") -> Character:
    """A random character; its name is never ``other_than``, which is how two characters of a story stay apart."""
    is_female = dice.chance(0.5)
    if kind is None:
        roll = dice.between(1, 10)
        if roll <= 4:
            kind = "girl" if is_female else "boy"
        else:
            kind = dice.pick(ANIMALS).animal if roll <= 8 else dice.pick(FANTASY_KINDS)
    if kind in ("girl", "boy"):
        is_female = kind == "girl"
    is_child = kind in ("girl", "boy")
    adjective = dice.pick(CHILD_ADJECTIVES if is_child else ANIMAL_ADJECTIVES)
    while name is None or name == other_than:
        name = make_name(dice, is_female, is_child)
    return Character(name, kind, adjective, is_female)


def plural(noun: str) -> str:
    return PLURALS.get(noun, noun + "s")
