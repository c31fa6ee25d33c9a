"""What may be given as a constraint, what it becomes, and what is refused with its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, TypedDict

import msgspec
import pydantic
import pytest
from structured.conftest import compile_grammar, tokenizer, vocabulary

from aioengine import (
    LLM,
    Choice,
    Engine,
    Grammar,
    InvalidRequest,
    Json,
    OutputNotParsed,
    Regex,
    SamplingParams,
    StructuralTags,
    Tag,
)
from aioengine.structured.constraints import MAX_CONSTRAINT_BYTES, Constraint, Either, as_constraint, from_vllm


class Animal(pydantic.BaseModel):
    animal: str = pydantic.Field(max_length=12)
    legs: int


class Zoo(pydantic.BaseModel):
    animals: list[Animal]
    name: str | None = None


class AnimalStruct(msgspec.Struct):
    animal: str
    legs: int


@dataclasses.dataclass
class AnimalData:
    animal: str
    legs: int


class AnimalDict(TypedDict):
    animal: str
    legs: int


TYPES = [Animal, AnimalStruct, AnimalData, AnimalDict]


def test_a_dict_is_a_schema_and_types_have_theirs() -> None:
    assert as_constraint({"type": "integer"}) == Json({"type": "integer"})
    assert as_constraint(Regex("a")) == Regex("a")
    assert SamplingParams(structured={"type": "integer"}).structured == Json({"type": "integer"})
    assert SamplingParams(structured=bool).structured == Json({"type": "boolean"})
    assert as_constraint(list[int]) == Json({"type": "array", "items": {"type": "integer"}})
    assert as_constraint(Literal["a", "b"]) == Json({"enum": ["a", "b"]})


@pytest.mark.parametrize("kind", TYPES)
def test_objects_of_a_type_have_no_other_properties(kind: type) -> None:
    schema = as_constraint(kind).schema
    inner = schema if "properties" in schema else next(iter(schema["$defs"].values()))
    assert inner["additionalProperties"] is False
    assert list(inner["properties"]) == ["animal", "legs"]


def test_a_type_that_says_so_may_have_others() -> None:
    class Open(pydantic.BaseModel, extra="allow"):
        properties: dict[str, int]

    schema = as_constraint(Open).schema
    assert schema["additionalProperties"] is True
    assert schema["properties"]["properties"]["additionalProperties"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"json": {"type": "integer"}}, Json({"type": "integer"})),
        ({"json": '{"type": "integer"}', "disable_any_whitespace": True}, Json({"type": "integer"})),
        ({"json": {"type": "integer"}, "disable_any_whitespace": False}, Json({"type": "integer"}, whitespace=True)),
        ({"json_object": True}, Json()),
        ({"regex": "a+"}, Regex("a+")),
        ({"choice": ["a", "b"]}, Choice(("a", "b"))),
        (SimpleNamespace(json=None, regex=None, choice=None, grammar='start: "a"'), Grammar('start: "a"')),
        (
            {"structural_tag": '{"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<"]}'},
            StructuralTags((Tag("<f>", "</f>", schema={}),), ("<",)),
        ),
        ({}, None),
        (None, None),
    ],
)
def test_vllms_forms_are_taken(given: Any, wanted: Any) -> None:
    assert from_vllm(given) == wanted
    assert SamplingParams(structured_outputs=given).structured == wanted
    assert SamplingParams(guided_decoding=given).structured == wanted


@pytest.mark.parametrize(
    "bad",
    [
        5,
        "text",
        [1],
        object(),
        {"type": {1, 2}},
        {"a": float("nan")},
        {"description": "x" * MAX_CONSTRAINT_BYTES},
        lambda: None,
        type("Odd", (), {"model_json_schema": lambda: 1 / 0}),
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_what_is_no_constraint_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(structured=bad)
    assert raised.value.param == "structured"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Regex(""),
        lambda: Regex(5),
        lambda: Choice([]),
        lambda: Choice(["a", ""]),
        lambda: Choice(["a"] * 5000),
        lambda: Grammar("x" * (MAX_CONSTRAINT_BYTES + 1)),
        lambda: Json([]),
        lambda: Json({}, whitespace="no"),
        lambda: StructuralTags((Tag("<f>", schema={}),), ("[",)),
        lambda: StructuralTags((Tag("<f>"),), ("<",)),
        lambda: Tag("<f>", {"type": "boolean"}, "</f>"),
        lambda: StructuralTags((Tag("<f>", schema={}, pattern="a"),), ("<",)),
        lambda: SamplingParams(structured_outputs={"json": {}, "regex": "a"}),
        lambda: SamplingParams(structured_outputs=7),
        lambda: SamplingParams(structured_outputs={"json": "{"}),
    ],
)
def test_bad_fields_are_refused_when_they_are_given(make: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        make()
    assert raised.value.param == "structured"


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: Choice("a", "b"), r'write Choice\(\["a", "b"\]\)'),
        (lambda: Choice(), r'write Choice\(\["a", "b"\]\)'),
        (lambda: Regex("a", "b"), r"write Regex\(pattern\)"),
        (lambda: Grammar(grammar="start: /a/"), r"write Grammar\(text, is_forcing\)"),
    ],
)
def test_arguments_that_a_constraint_has_not_are_refused_with_how_it_is_written(make: Any, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        make()


def test_what_is_too_deep_or_holds_itself_is_refused() -> None:
    deep: dict[str, Any] = {}
    deep["items"] = deep
    with pytest.raises(InvalidRequest, match="Circular reference"):
        Json(deep)
    for levels in (300, 100_000):
        deep = {}
        for _ in range(levels):
            deep = {"items": deep}
        with pytest.raises(InvalidRequest, match="deeper"):
            Json(deep)


def test_text_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidRequest, match="1,000,000 characters of JSON; at most 262,144 bytes"):
        from_vllm({"json": "[" * 1_000_000})


@pytest.mark.parametrize(
    "given",
    [
        Json({"type": "integer"}, lenient=True),
        Regex("a"),
        Choice(["a"]),
        Grammar('start: "a"'),
        StructuralTags((Tag("<", schema={}),), ("<",)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_constraint_travels_with_its_parameters(given: Any) -> None:
    params = SamplingParams(structured=given)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


# Values


FOX = [{"role": "user", "content": "Tell me about the fox as JSON."}]


async def test_an_answer_is_a_value_of_its_type() -> None:
    async with Engine() as engine:
        for kind in TYPES:
            out = await engine.generate(FOX, output_type=kind, temperature=0, max_tokens=60)
            value = out.parsed
            fields = value if isinstance(value, dict) else {"animal": value.animal, "legs": value.legs}
            assert fields == {"animal": "fox", "legs": 4}
            assert isinstance(value, dict if kind is AnimalDict else kind)
            assert out.to_dict()["outputs"][0]["parsed"] == fields
        out = await engine.generate(FOX, output_type={"enum": ["red", "green"]}, max_tokens=20)
        assert out.parsed in ("red", "green")
        out = await engine.generate(FOX, SamplingParams(n=3, max_tokens=60), output_type=Animal)
        assert [type(choice.parsed) for choice in out.outputs] == [Animal] * 3


async def test_an_answer_that_is_cut_or_not_valid_is_an_error_with_its_text() -> None:
    class Impossible(pydantic.BaseModel):
        legs: int

        @pydantic.field_validator("legs")
        @classmethod
        def never(cls, legs: int) -> int:
            raise ValueError("no animal has legs")

    async with Engine() as engine:
        with pytest.raises(OutputNotParsed, match=r"the answer is no Animal: .*max_tokens") as raised:
            await engine.generate(FOX, output_type=Animal, temperature=0, max_tokens=5)
        assert raised.value.text.startswith('{"animal')
        with pytest.raises(OutputNotParsed, match="no animal has legs") as raised:
            await engine.generate(FOX, output_type=Impossible, max_tokens=20)
        assert raised.value.output.text == raised.value.text
        with pytest.raises(OutputNotParsed) as raised:
            await engine.generate("A", output_type=Animal, n=8, seed=2, max_tokens=14)
        choices = raised.value.output.outputs
        assert {(choice.finish_reason, type(choice.parsed)) for choice in choices} == {
            ("stop", Animal), ("length", type(None)),
        }  # fmt: skip
        for call in ({"structured": Regex("a")}, {"params": SamplingParams(structured=Regex("a"))}):
            with pytest.raises(InvalidRequest, match="output_type"):
                await engine.generate(FOX, output_type=Animal, **call)
        with pytest.raises(InvalidRequest, match="no JSON schema"):
            await engine.generate(FOX, output_type=Engine)


def test_an_answer_of_several_that_is_cut_takes_no_other_with_it() -> None:
    llm = LLM()
    params = [SamplingParams(max_tokens=count, seed=1) for count in (30, 1, 30)]
    with pytest.raises(OutputNotParsed, match="max_tokens") as raised:
        llm.generate(["A", "B", "C"], params, output_type=list[Literal[1, 2]] | bool)
    assert [output.parsed is None for output in raised.value.outputs] == [False, True, False]
    assert raised.value.output == raised.value.outputs[1]
    assert raised.value.__notes__ == ["prompt 1 of 3, counted from 0"]
    llm.close()


@pytest.mark.parametrize("name", ["bogus", "json_schema", "Regex"])
def test_a_field_that_is_no_constraint_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is no constraint; known: json, regex"):
        from_vllm({name: ["a", "b"]})
    assert from_vllm({"json": False, "json_object": False}) == Json(False)
    assert from_vllm({"regex": "a+", "backend": "auto", "whitespace_pattern": None}) == Regex("a+")


TAG = Tag("<f>", "</f>", pattern=".*")


@pytest.mark.parametrize(
    ("tags", "triggers", "text"),
    [
        ((TAG,), ("<f>",), "a<f>b</f>c<f></f>"),
        ((TAG, Tag("<g>", "</g>", pattern="[a-z]{2}")), ("<", "<f"), "<f>aa</f><g>aa</g>"),
        ((Tag("<f>", "</f>", pattern=r"y\/z|a/b"),), ("<f>",), "<f>y/z</f><f>a/b</f>"),
        ((Tag("<f>", pattern="[a-z]+"),), ("<f>",), "<f>ab"),
    ],
)
def test_a_tag_is_closed_by_its_first_end(tags: tuple[Tag, ...], triggers: tuple[str, ...], text: str) -> None:
    matcher = compile_grammar(StructuralTags(tags, triggers)).matcher()
    matcher.consume([*tokenizer().encode(text).ids, vocabulary().ending_ids[0]])
    assert matcher.problem == ""
    assert matcher._is_over


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Regex("a\\"), "the expression ends in a backslash"),
        (lambda: Either((Choice(["a"]), Regex("a|\\\\\\"))), "the expression ends in a backslash"),
        (lambda: Json({"type": "string", "pattern": "\\"}), "pattern: it ends in a backslash"),
        (lambda: Json({"patternProperties": {"a\\": {}}}), "pattern: it ends in a backslash"),
        (lambda: StructuralTags((Tag("<f>", pattern="a\\"),), ("<",)), "the expression ends in a backslash"),
        (lambda: Regex("\ud800"), "no valid Unicode"),
        (lambda: Choice(["\ud800"]), "no valid Unicode"),
        (lambda: Json({"const": "\ud800"}), "no valid Unicode"),
        (lambda: Grammar('root ::= "\\ud800"'), "half of a surrogate pair"),
        (lambda: Grammar("root ::= nope"), "enforced: Rule 'nope' not found"),
        (lambda: Grammar("start: nope"), 'at 1(8): unknown name: "nope"'),
        (lambda: StructuralTags((TAG,), ("<f", "<x")), "the trigger '<x' begins no tag"),
        (lambda: Regex("("), 'enforced: invalid regex "(" (in regex)'),
        (lambda: StructuralTags((Tag("<f>", pattern="("),), ("<",)), 'enforced: invalid regex "(" (in regex)'),
    ],
)
def test_a_refusal_says_what_the_caller_can_see(make: Callable[[], Constraint], told: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        compile_grammar(make())
    assert told in str(raised.value)
    assert "start:" not in str(raised.value)
