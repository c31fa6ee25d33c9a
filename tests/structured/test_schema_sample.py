"""The sample of schemas is what it says, and what the grammars of it admit fits the schemas: always."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for
from nightly import few, nightly, seeds
from structured.schema_sample import COUNTS, SAMPLE, SchemaCase
from structured.soundness import UNSOUND, Unsound
from structured.walks import ExactValidator, Grammar, Refused, compile_as_is, compile_schema, is_admitted, walk

from aioengine.structured.json_schema import unsound_keywords
from aioengine.structured.normalize import normalized

# Of a class with && in it, Python's `re` warns that it may mean something else one day.
pytestmark = pytest.mark.filterwarnings("ignore:Possible set intersection:FutureWarning")

# What is refused, and a word of the refusal that names the reason.
REFUSED = {
    "at least two keys of a map": "minProperties",
    "contains": "contains",
    "contains some": "contains",
    "draft 7 condition on a country": "if",
    "draft 7 dependencies": "dependencies",
    "dynamic reference": "$dynamicAnchor",
    "false": "Unsatisfiable",
    "identified definition": "$id: within",
    "if, then, else": "if",
    "instructions for the compiler": "x-guidance",
    "no item twice": "uniqueItems",
    "no unevaluated items": "unevaluatedItems",
    "no unevaluated properties": "unevaluatedProperties",
    "not a string": "not",
    "not this word": "not",
    "one key asks for a schema": "dependentSchemas",
    "one key asks for another": "dependentRequired",
    "one of disjoint ranges": "oneOf",
    "one of overlapping ranges": "oneOf",
    "overlapping patterns": "patternProperty",
    "pydantic decimal": "look-around",
    "pydantic tuple and set": "uniqueItems",
    "recursive reference with siblings": "circular references with sibling keys",
    "regular expression": "format: regex",
    "json pointer": "format: json-pointer",
    "relative uri": "format: uri-reference",
    "two of three optional ones": "minProperties",
}
# Their strings need a word that chance does not write. The examples of them hold.
ENDLESS = {
    "alternatives of which each has its anchor",
    "pattern for an end",
    "pattern that may match anywhere",
    "pattern with quotes and slashes",
}
NUM_FREE_TOKENS = 60
MAX_TOKENS = 3000

TAKEN = [case for case in SAMPLE if case.name not in REFUSED]

# With whitespace: compact, and with all the spaces that JSON admits. Without: as Python writes it.
LAYOUTS: list[dict[str, Any]] = [{"separators": (",", ":")}, {"indent": 2, "separators": (" ,", ": ")}]
LINES: list[dict[str, Any]] = [{}]

_grammars: dict[tuple[str, bool], Grammar] = {}


def name_of(case: SchemaCase | Unsound) -> str:
    return case.name


def grammar_of(case: SchemaCase, *, whitespace: bool) -> Grammar:
    if (case.name, whitespace) not in _grammars:
        _grammars[case.name, whitespace] = compile_schema(case.schema, whitespace=whitespace)
    return _grammars[case.name, whitespace]


def texts_of(instance: Any, *, whitespace: bool) -> list[str]:
    return [json.dumps(instance, ensure_ascii=False, **layout) for layout in (LAYOUTS if whitespace else LINES)]


def test_the_sample_is_large_and_without_twins() -> None:
    assert len(SAMPLE) >= 290
    assert len({case.name for case in SAMPLE}) == len(SAMPLE)
    assert len({json.dumps(case.schema) for case in SAMPLE}) == len(SAMPLE)
    assert COUNTS["realistic"] >= 45
    assert {case.name for case in SAMPLE} >= REFUSED.keys() | ENDLESS
    assert {case.name for case in SAMPLE if case.tags & {"refused", "unsound"}} == REFUSED.keys()


@pytest.mark.parametrize("case", few(SAMPLE[::4], of=SAMPLE), ids=name_of)
def test_its_examples_are_for_and_against_the_schema(case: SchemaCase) -> None:
    validator_for(case.schema, jsonschema.Draft202012Validator).check_schema(case.schema)
    exact = ExactValidator(case.schema)
    for instance in case.valid:
        assert not exact.faults(json.dumps(instance)), instance
    for instance in case.invalid:
        assert exact.faults(json.dumps(instance)), instance


@pytest.mark.parametrize("whitespace", [*nightly(False), True])
@pytest.mark.parametrize("case", TAKEN, ids=name_of)
def test_a_grammar_admits_the_examples_for_its_schema_and_no_others(case: SchemaCase, whitespace: bool) -> None:
    grammar = grammar_of(case, whitespace=whitespace)
    for instance in case.valid:
        for text in texts_of(instance, whitespace=whitespace):
            assert is_admitted(grammar, text), text
    for instance in case.invalid:
        for text in texts_of(instance, whitespace=whitespace):
            assert not is_admitted(grammar, text), text


@pytest.mark.parametrize("seed", seeds(40))
@pytest.mark.parametrize("case", TAKEN, ids=name_of)
def test_whatever_a_grammar_lets_end_fits_its_schema(case: SchemaCase, seed: int) -> None:
    walked = walk(
        grammar_of(case, whitespace=seed % 2 == 1),
        random.Random(f"{case.name} {seed}"),
        num_free_tokens=NUM_FREE_TOKENS,
        max_tokens=MAX_TOKENS // 4 if case.name in ENDLESS else MAX_TOKENS,
    )
    if case.name in ENDLESS:
        return
    assert walked.has_ended, walked.text
    assert ExactValidator(case.schema).faults(walked.text) == [], walked.text


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_held_to_is_refused_by_its_keyword(name: str) -> None:
    [case] = [case for case in SAMPLE if case.name == name]
    with pytest.raises(Refused) as refusal:
        compile_schema(case.schema)
    assert REFUSED[name] in str(refusal.value)


@pytest.mark.parametrize("case", UNSOUND, ids=name_of)
def test_what_the_library_gets_wrong_is_refused_or_normalized(case: Unsound) -> None:
    assert is_admitted(compile_as_is(case.schema), case.wrong_text), "the library has learnt it: take it off the list"
    assert not fits(case), "the text fits the schema: no example"
    if case.keyword:
        assert [reason.split(":")[0] for reason in unsound_keywords(case.schema)] == [case.keyword]
    else:
        assert not is_admitted(compile_schema(case.schema), case.wrong_text)


def fits(case: Unsound) -> bool:
    try:
        return not ExactValidator(case.schema).faults(case.wrong_text)
    except json.JSONDecodeError:
        return False


def test_dates_that_are_put_right_are_those_of_the_calendar() -> None:
    exact = compile_schema({"type": "string", "format": "date"})
    for year in (1, 4, 1900, 2000, 2023, 2024, 2100, 2400, 9999):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f'"{year:04}-{month:02}-{day:02}"'
                is_day = not ExactValidator({"type": "string", "format": "date"}).faults(text)
                assert is_admitted(exact, text) == is_day, text


def test_nothing_is_put_right_where_no_schema_stands() -> None:
    schema = {
        "const": {"format": "date"},
        "properties": {"format": {"type": "string"}, "items": {"format": "date", "pattern": "^2"}},
        "default": {"oneOf": [{"$ref": "#"}]},
    }
    better = normalized(schema)
    assert better["const"] == schema["const"]
    assert "default" not in better
    assert better["properties"]["format"] == {"type": "string"}
    assert better["properties"]["items"]["pattern"] == "^2"
    assert "format" not in better["properties"]["items"]


@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_control_character_of_a_constant_is_refused_and_not_left_out(keyword: str) -> None:
    for text in ("a\x01b", "\x00", "a\x7f"):
        with pytest.raises(Refused, match=f"{keyword}: a control character"):
            compile_schema({keyword: [{"a": text}]})
    for text in ("a\n\t\b\f\r", "\x80\u2028", '"\\/'):
        written = json.dumps([{"a": text}], ensure_ascii=False)
        constant = {keyword: [{"a": text}] if keyword == "const" else [[{"a": text}]]}
        assert is_admitted(compile_schema(constant), written)


def test_texts_that_are_encoded_are_whole() -> None:
    schema = {"type": "string", "contentEncoding": "base64"}
    grammar = compile_schema(schema)
    for text, is_whole in (('"aGk="', True), ('""', True), ('"aGkh"', True), ('"aGk"', False), ('", "', False)):
        assert is_admitted(grammar, text) == is_whole, text


def chained(depth: int, width: int) -> dict[str, Any]:
    """Schemas of one text within each other, each beside others."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"allOf": [schema, *({"allOf": [{"minimum": 1}]} for _ in range(width))]}
    return schema


@pytest.mark.parametrize(
    "make",
    [
        lambda size: chained(size, 10),
        lambda size: {"anyOf": [{"multipleOf": number + 1} for number in range(20 * size)]},
        lambda size: {
            "anyOf": [{bound: n + 0.5 * n % 2} for n in range(20 * size) for bound in ("maximum", "minimum")]
        },
    ],
    ids=["nested", "multiples", "bounds"],
)
def test_the_time_to_look_through_a_schema_grows_with_its_size_alone(make: Callable[[int], dict[str, Any]]) -> None:
    def num_calls(schema: dict[str, Any]) -> int:
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            unsound_keywords(schema)
        finally:
            sys.setprofile(before)
        return calls

    assert num_calls(make(80)) < 2.5 * num_calls(make(40))
