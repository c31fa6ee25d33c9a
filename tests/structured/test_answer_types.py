"""Types as answers: what they admit is read as their values, and what cannot be asked for exactly is refused."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import pathlib
import random
import sys
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired

import annotated_types
import msgspec
import pydantic
import pytest
from pydantic import Field
from structured.walks import compile_schema, is_admitted, walk
from typing_extensions import TypedDict

from aioengine import Engine, InvalidRequest, Json, OutputNotParsed, Regex, SamplingParams
from aioengine.frontend.output_type import OutputType
from aioengine.schemas.type_schema import describe

NUM_WALKS = 12

Hundreds = Annotated[int, Field(ge=100, le=200)]


class Kid(pydantic.BaseModel):
    age: int = Field(ge=3, le=5)


class Class(TypedDict):
    kids: list[Kid]


class Counted(TypedDict):
    number: Hundreds


class Pair(NamedTuple):
    first: Hundreds
    second: Annotated[str, annotated_types.MaxLen(3)]


@dataclasses.dataclass
class Plain:
    number: Hundreds


@dataclasses.dataclass
class WithDefault:
    number: int = Field(default=100, ge=100, le=200)


@pydantic.dataclasses.dataclass
class OfPydantic:
    number: int = Field(ge=100, le=200)


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Hour(msgspec.Struct, tag=True):
    at: datetime.datetime
    lasts: datetime.timedelta | None = None


class Day(msgspec.Struct, tag=True):
    hours: list[Hour | datetime.time | None]
    next: Day | Hour | None = None
    names: dict[Literal["a", "b"], Hour] = {}


class Rest(pydantic.BaseModel):
    price: decimal.Decimal
    when: datetime.time
    lasts: datetime.timedelta
    by_number: dict[int, bool]
    by_colour: dict[Colour, bool]


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    meows: int = 1


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "hound"] = "dog"
    pups: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []


class Home(pydantic.BaseModel):
    pet: Cat | Dog | None = Field(default=None, discriminator="kind")
    share: float = Field(default=float("nan"), ge=0, le=1)


class Kept(pydantic.BaseModel):
    secret: pydantic.SecretStr
    path: pathlib.Path
    raw: bytes
    encoded: pydantic.Base64Bytes
    id: pydantic.UUID4
    site: pydantic.HttpUrl
    socket: pydantic.WebsocketUrl
    large: Annotated[int, Field(ge=-(2**63), lt=2**63)]


class First(msgspec.Struct, array_like=True, tag=True):
    number: int


class Second(msgspec.Struct, array_like=True, tag=True):
    at: datetime.datetime


OF_PYDANTIC = [
    *(
        Hundreds,
        pydantic.conint(gt=500, lt=700),
        pydantic.constr(pattern="^[A-Z]{3}$"),
        list[Hundreds],
        Hundreds | None,
    ),
    *(Annotated[int, annotated_types.Ge(500)], NewType("Number", Hundreds), Kid, Class, Counted, Pair, Plain),
    *(WithDefault, OfPydantic, Home, Kept, Annotated[Cat | Dog, Field(discriminator="kind")]),
    *(Rest, set[Hundreds], frozenset[Annotated[str, Field(max_length=2)]]),
    dict[Annotated[str, Field(pattern="^[a-c]{1,3}$")], Hundreds],
]
OF_MSGSPEC = [
    *(datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, Hour, Day, list[Day | Hour]),
    *(First, First | Second, list[Second | First | None]),
    *(dict[Literal["a", "b"], bool], dict[int, bool], dict[Colour, bool], dict[str, bool]),
    *(dict[Annotated[str, msgspec.Meta(pattern="^[a-c]+$")], bool], set[Literal[1, 2]], frozenset[bool]),
]


@pytest.mark.parametrize("kind", [*OF_PYDANTIC, *OF_MSGSPEC], ids=str)
def test_what_a_type_admits_is_read_as_its_value(kind: Any) -> None:
    schema, read = describe(kind)
    grammar = compile_schema(schema, whitespace=False)
    texts = [walk(grammar, random.Random(seed), num_free_tokens=40, max_tokens=600) for seed in range(NUM_WALKS)]
    ended = [one.text for one in texts if one.has_ended]
    assert len(ended) > NUM_WALKS // 2
    for text in ended:
        read(text.decode(errors="replace"))  # a walk may draw half of a letter


COMMON = [int, str, bool, None, bytes, datetime.datetime, datetime.date, uuid.UUID, decimal.Decimal, Colour]
LEAVES: dict[str, list[Any]] = {
    "pydantic": [*COMMON, Literal["x", 1, None], Kid, Plain, Pair, Hundreds, pydantic.HttpUrl, pydantic.PositiveInt],
    "msgspec": [*COMMON, Literal["x", 1, None], Hour, First, Annotated[int, msgspec.Meta(ge=5, lt=90)]],
}


def draw_type(chance: random.Random, leaves: list[Any], depth: int) -> Any:
    """A type that people might write for an answer, of these at the bottom."""
    leaf = chance.choice(leaves)
    if not depth:
        return leaf
    inner = draw_type(chance, leaves, depth - 1)
    optional, name = {"f": inner, "g": NotRequired[leaf]}, f"Drawn{chance.getrandbits(32)}"
    makers: list[Callable[[], Any]] = [
        *(lambda: list[inner], lambda: tuple[inner, leaf], lambda: tuple[inner, ...], lambda: (inner or int) | None),
        *(lambda: dict[str, inner], lambda: dict[Literal["p", "q"], inner], lambda: dict[int, inner]),
        *(lambda: TypedDict(name, optional), lambda: NamedTuple(name, [("f", inner), ("g", leaf)])),
        lambda: dataclasses.make_dataclass(name, [("f", inner), ("g", leaf)]),
        lambda: set[chance.choice([int, str, bool, datetime.date, Colour, tuple[int, str]])],
    ]
    return chance.choice(makers)()


@pytest.mark.parametrize("library", LEAVES)
def test_types_made_of_common_ones_are_read(library: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(15):
        kind = draw_type(chance, LEAVES[library], chance.randrange(1, 4))
        if library == "pydantic":
            kind = pydantic.create_model("Drawn", answer=(kind, ...))
        schema, read = describe(kind)
        grammar = compile_schema(schema, whitespace=False)
        for _ in range(3):
            walked = walk(grammar, random.Random(chance.random()), num_free_tokens=30, max_tokens=300)
            if walked.has_ended:
                read(walked.text.decode(errors="replace"))


@pytest.mark.parametrize("kind", OF_PYDANTIC[:6], ids=str)
def test_constraints_of_pydantic_are_in_the_schema_and_in_the_reading(kind: Any) -> None:
    schema, read = describe(kind)
    assert any(word in str(schema) for word in ("minimum", "exclusiveMinimum", "pattern"))
    with pytest.raises(pydantic.ValidationError):
        read("[5]" if schema.get("type") == "array" else "5")


def test_types_without_anything_of_pydantic_stay_with_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert describe(list[Annotated[int, msgspec.Meta(ge=3), "a word"]]).read("[3]") == [3]
    with pytest.raises(TypeError, match="pydantic reads, and that is not installed"):
        describe(Annotated[int, annotated_types.Ge(3)])


def test_what_neither_library_takes_is_refused() -> None:
    class Arbitrary(pydantic.BaseModel, arbitrary_types_allowed=True):
        hour: Hour

    class Bounded(msgspec.Struct):
        number: Annotated[int, annotated_types.Ge(3)]

    for kind in (Arbitrary, Bounded, list[Kid | Hour], Annotated[Kid, msgspec.Meta()]):
        with pytest.raises(InvalidRequest, match=r"which pydantic reads, and .* msgspec reads") as raised:
            OutputType(kind)
        assert raised.value.param == "output_type"


class Inner(pydantic.BaseModel):
    net: list[ipaddress.IPv4Network]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (set[Any], "take a list"),
        (list[frozenset[dict[str, int] | None]], "take a list"),
        (set[Annotated[Kid | int, "a word"]], "take a list"),
        (set[Hour], "take a list"),
        (list[Inner], "the texts of ipv4network cannot be asked for; take str"),
        (Any, "says nothing"),
        (object, "says nothing"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_exactly_is_refused_at_the_call(kind: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        OutputType(kind)
    with pytest.raises(InvalidRequest, match=said):
        SamplingParams(structured=kind)


# What else is said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Regex("a|b"), "give it as structured="),
        (Json(), "give it as structured="),
        ({}, "an empty schema"),
        (lambda: None, "it is a function, and no type"),
        ("int", "it is a str, and no type"),
    ],
)
def test_what_is_no_type_is_refused(given: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as raised:
        OutputType(given)
    assert raised.value.param == "output_type"


def test_a_type_in_place_of_a_schema_is_refused() -> None:
    given: Any = Kid
    with pytest.raises(InvalidRequest, match=r"give .*Kid.* itself, or its schema"):
        Json(given)


def test_a_tag_that_has_a_default_is_written() -> None:
    grammar = compile_schema(describe(Home).schema, whitespace=False)
    assert is_admitted(grammar, '{"pet": {"kind": "cat"}}')
    assert not is_admitted(grammar, '{"pet": {"meows": 1}}')
    assert not is_admitted(grammar, '{"pet": {}}')


def test_a_struct_that_is_a_list_has_no_more_items_than_fields() -> None:
    grammar = compile_schema(describe(First).schema, whitespace=False)
    assert is_admitted(grammar, '["First", 1]')
    assert not is_admitted(grammar, '["First", 1, 2]')


async def test_a_type_that_cannot_be_enforced_is_named_as_it_was_given() -> None:
    async with Engine() as engine:
        with pytest.raises(InvalidRequest, match=r"^output_type: .*: a control") as raised:
            await engine.generate("A kid:", output_type=Literal["\x00"])
        assert raised.value.param == "output_type"
        with pytest.raises(InvalidRequest, match=r"^output_type: .*uniqueItems") as raised:
            await engine.generate("A kid:", output_type={"type": "array", "uniqueItems": True})
        assert "lenient" not in str(raised.value)


async def test_an_answer_without_its_text_is_refused_and_a_stop_string_that_cuts_it_is_named() -> None:
    async with Engine() as engine:
        for call in ({"detokenize": False}, {"sampling_params": SamplingParams(detokenize=False)}):
            with pytest.raises(InvalidRequest, match="leave out detokenize=False"):
                await engine.generate("A kid:", output_type=Kid, **call)
        with pytest.raises(OutputNotParsed, match="cut at the stop string 'age'"):
            await engine.generate("A kid:", output_type=Kid, stop="age", max_tokens=50)
