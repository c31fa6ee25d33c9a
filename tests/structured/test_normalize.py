"""Schemas that are said anew: the same instances fit them, judged by jsonschema; and fewer where the page says so."""

from __future__ import annotations

import itertools
import json
import random
import sys
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for
from nightly import few, seeds
from structured.schema_sample import SAMPLE, SchemaCase
from structured.walks import ExactValidator, Refused, compile_schema, is_admitted

from aioengine.structured import options
from aioengine.structured.forced import longest_text
from aioengine.structured.json_schema import LISTS, MAPS, MAX_EXACT_INTEGER, ONES, subschemas, unsound_keywords
from aioengine.structured.normalize import normalized
from aioengine.tool_calls.grammars import types_of

NUM_INSTANCES = 120
NUM_RANDOM_SCHEMAS = 60
DRAFT_4 = "http://json-schema.org/draft-04/schema#"

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}, "c": {}},
}
CLOSED: dict[str, Any] = {**OBJECT, "additionalProperties": False}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "a": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "hound"]}, "b": {}}, "required": ["kind"]}
DEFINED = {"$defs": {"cat": CAT, "dog": DOG}}

EXACT: dict[str, Any] = {
    "an unknown $schema": {"$schema": "http://json-schema.org/schema", **OBJECT},
    "a draft that knows no const": {"$schema": DRAFT_4, "enum": [1, 2]},
    "names of any text": {**OBJECT, "propertyNames": {"type": "string"}},
    "names of a pattern": {"propertyNames": {"pattern": "^[ab]"}, "additionalProperties": {"type": "integer"}},
    "names of a length": {"type": "object", "propertyNames": {"maxLength": 1}},
    "names that are listed": {**OBJECT, "propertyNames": {"enum": ["a", "d"]}},
    "names by reference": {
        "$defs": {"names": {"$ref": "#/$defs/few"}, "few": {"enum": ["a", "c"], "title": "Few", "type": "string"}},
        "propertyNames": {"$ref": "#/$defs/names"},
        "additionalProperties": {"oneOf": [CAT, {"type": "integer"}, {"type": "null"}, {"enum": ["x", "y", "z"]}]},
    },
    "no names": {"type": "object", "propertyNames": False},
    "nothing": {"type": "object", "properties": {"a": {"not": {}}}},
    "one of tags": {"oneOf": [CAT, DOG]},
    "one of tags by reference": {**DEFINED, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
    "one of tags that are required around": {
        "required": ["kind"],
        "oneOf": [{"type": "object", "properties": {"kind": {"const": kind}}} for kind in ("cat", "dog")],
    },
    "one of tags that are of a reference": {
        "$defs": {"C": {"const": "cat"}, "D": {"allOf": [{"$ref": "#/$defs/E"}]}, "E": {"enum": ["dog", "hound"]}},
        "oneOf": [
            {"type": "object", "properties": {"kind": {"$ref": f"#/$defs/{name}"}, "a": {}}, "required": ["kind"]}
            for name in "CD"
        ],
    },
    "one of types": {"oneOf": [{"type": ["string", "null"]}, {"type": ["boolean", "integer"]}]},
    "one of lists": {"oneOf": [{"enum": [1, 2, "a"]}, {"enum": [3, "ab"]}, {"type": ["null", "object"]}]},
    "one of many": {"oneOf": [{"const": number} for number in range(40)]},
    "one of an option of options": {
        "oneOf": [{"anyOf": [CAT, {"type": "null"}]}, {"oneOf": [DOG, {"type": "string"}]}]
    },
    "references that are not escaped": {"$ref": "#/definitions/A<b>", "definitions": {"A<b>": {"type": "integer"}}},
    "recursive": {
        "oneOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]
    },
    "annotations": {"type": "string", "format": "phone", "default": {"oneOf": []}, "readOnly": True},
    "formats of other types": {"type": ["integer", "null"], "format": "int32"},
    "not unique": {"type": "array", "uniqueItems": False},
}
STILL = frozenset({"$schema", "not", "oneOf", "propertyNames", "uniqueItems", "format"})
"""What none of these has any more."""


def instances(schema: Any, rng: random.Random, count: int) -> list[Any]:
    """Random ones of the names and constants in a schema."""
    words, scalars = ["a", "b", "c"] * 3 + ["", "ab"], [None, True, False, 1, 1, 2, 3, 5, 1.5, "x", "a", "ab", ""]

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            words.extend(name for name in value if name in ("d", "kind"))
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(inner)
        if not isinstance(value, dict | list):
            scalars.append(value)

    def value(share: float) -> Any:
        kind = rng.random()
        if kind < share:
            names = {rng.choice(words) for _ in range(rng.randrange(5))}
            return {name: value(share / 8) for name in sorted(names)}
        if kind < share * 1.4:
            return [value(share / 8) for _ in range(rng.randrange(4))]
        return rng.choice(scalars)

    collect(schema)
    return [value(0.6) for _ in range(count)]


def is_fit(schema: Any, instance: Any) -> bool:
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema).is_valid(instance))


@pytest.mark.parametrize("name", few([*EXACT][::2], of=EXACT))
def test_a_schema_that_is_said_anew_admits_the_same_instances(name: str) -> None:
    schema = EXACT[name]
    before = json.dumps(schema)
    better = normalized(schema)
    assert json.dumps(schema) == before
    assert not STILL & {keyword for node in subschemas(better) for keyword in node}
    found = {is_fit(schema, one) for one in _agreeing(schema, better, random.Random(name), 4 * NUM_INSTANCES)}
    assert found == {True, False}
    assert json.dumps(normalized(better)) == json.dumps(better)


@pytest.mark.parametrize("name", few([*EXACT][::3], of=EXACT))
def test_a_grammar_of_it_admits_no_others(name: str) -> None:
    grammar = compile_schema(EXACT[name], whitespace=False)
    for instance in instances(EXACT[name], random.Random(name), NUM_INSTANCES):
        orders = (
            [dict(order) for order in itertools.permutations(instance.items())]
            if isinstance(instance, dict)
            else [instance]
        )
        is_in = any(is_admitted(grammar, json.dumps(order)) for order in orders)
        is_of_one_order = "}" not in json.dumps(instance)[:-1]
        assert is_in == is_fit(EXACT[name], instance) or (not is_in and not is_of_one_order), instance


def _agreeing(schema: Any, better: Any, rng: random.Random, count: int) -> list[Any]:
    found = instances(schema, rng, count)
    for instance in found:
        assert is_fit(schema, instance) == is_fit(better, instance), (instance, better)
    return found


def random_schema(rng: random.Random, depth: int) -> Any:
    def inner() -> Any:
        return random_schema(rng, depth - 1)

    def some() -> list[Any]:
        return [inner() for _ in range(rng.randrange(1, 4))]

    leaves: list[Any] = [
        *(
            {"type": rng.sample(["null", "string", "integer", "number", "boolean", "object", "array"], 2)},
            {"const": "a"},
        ),
        *(
            {"enum": rng.sample(["a", "b", "ab", 1, 2, 3, None, True], 3)},
            {"minimum": rng.randrange(4)},
            {"type": "object"},
        ),
        *({"exclusiveMaximum": rng.randrange(5)}, {"minLength": 1}, {"maxLength": 1}, True, {"maxItems": 1}),
        {"required": rng.sample("abc", rng.randrange(1, 3))},
    ]
    if depth <= 0:
        return rng.choice(leaves)
    parts: list[Any] = [
        {"properties": {name: inner() for name in rng.sample("abc", 2)}},
        *({"not": {}}, {"oneOf": some()}, {"anyOf": some()}, {"allOf": some()}, rng.choice(leaves)),
        *({"propertyNames": {"enum": ["a", "c"]}}, {"additionalProperties": False}, {"additionalProperties": inner()}),
        *({"$ref": "#/$defs/d"}, {"propertyNames": {"pattern": "^[ab]"}}, {"propertyNames": {"$ref": "#/$defs/d"}}),
        {"properties": {"kind": {"const": rng.choice("ab")}}, "required": ["kind"]},
    ]
    schema: dict[str, Any] = {}
    for part in rng.sample(parts, rng.randrange(1, 4)):
        schema |= part if isinstance(part, dict) else {}
    return schema


@pytest.mark.parametrize("seed", seeds(200))
def test_schemas_of_chance_say_the_same_when_they_are_said_anew(seed: int) -> None:
    rng = random.Random(f"schemas {seed}")
    for _ in range(NUM_RANDOM_SCHEMAS):
        schema = {"$defs": {"d": random_schema(rng, 0)}, **random_schema(rng, 2)}
        better = normalized(schema)
        _agreeing(schema, better, rng, NUM_INSTANCES // 4)


@pytest.mark.parametrize("case", few(SAMPLE[::4], of=SAMPLE), ids=lambda case: case.name)
def test_the_sample_says_the_same_when_it_is_said_anew(case: SchemaCase) -> None:
    better = normalized(case.schema)
    if isinstance(better.get("items"), list) or "dependencies" in better:
        return  # keywords of older drafts, which jsonschema knows by $schema
    for instance in case.valid:
        assert not ExactValidator(better).faults(json.dumps(instance)), instance
    for instance in case.invalid:
        text = json.dumps(instance)
        # Formats that the library knows are not checked of a number that jsonschema reads otherwise.
        assert ExactValidator(better).faults(text), instance


# What is narrower


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"type": "integer", "maximum": 2**63 - 1}, [str(MAX_EXACT_INTEGER)], [str(2**63 - 1), str(2**63)]),
        ({"type": "integer", "minimum": -(2**63), "exclusiveMinimum": -3}, ["-2"], ["-3", f"-{2**62}"]),
        ({"type": "number", "maximum": 1e300, "minimum": 0}, ["5", "5.5"], ["-1"]),
        ({"format": "byte", "type": "string"}, ['"aGk="', '""'], ['"aGk"', '"-"']),
        ({"format": "base64url", "type": "string"}, ['"aG-_"'], ['"+aaa"']),
        ({"format": "uuid4", "type": "string"}, ['"2eb8aa08-aa98-41ea-b4aa-73b441d16380"'], ['"x"']),
        ({"format": "ipvanyaddress", "type": "string"}, ['"1.2.3.4"', '"::1"'], ['"1.2.3"', '"x"']),
        ({"format": "url", "type": "string"}, ['"http://a.b"'], ['"a b"']),
        ({"format": "int-or-string"}, ["1", '"x"'], []),
        (
            {
                "discriminator": {"propertyName": "t"},
                "oneOf": [
                    {"type": "object", "properties": {"t": {"const": tag}, "v": {"type": "integer"}}}
                    for tag in ("a", "b")
                ],
            },
            ['{"t": "a"}', '{"t": "b", "v": 1}'],
            ["{}", '{"v": 1}', '{"t": "c"}'],
        ),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_is_narrower_admits_nothing_else(schema: Any, texts: list[str], others: list[str]) -> None:
    grammar = compile_schema(schema, whitespace=False)
    for text in texts:
        assert is_admitted(grammar, text), text
        assert not ExactValidator(schema).faults(text), text
    for text in others:
        assert not is_admitted(grammar, text), text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "divisibleBy": 5}, "divisibleBy: it is draft 3's"),
        ({"disallow": "integer"}, "disallow: it is draft 3's"),
        ({"extends": {"type": "integer"}}, "extends: it is draft 3's"),
        ({"type": "object", "properties": {"a": {"required": True}}}, "required: it is draft 3's"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "if"),
        ({"$schema": DRAFT_4, "type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
        ({**OBJECT, "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$recursiveRef": "#"}, "recursiveRef"),
        ({"$schema": DRAFT_4, "minimum": 2, "exclusiveMinimum": True}, "exclusiveMinimum: true and false"),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"enum": [str(n) for n in range(300)]}}, "propertyNames"),
        ({"type": "integer", "minimum": 2**60}, "minimum: numbers beyond"),
        ({"type": "string", "format": "iri"}, "Unknown format: iri"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf: its options cannot be told apart"),
        ({"$ref": "#/x/y", "x": {"y": {"type": "object"}}}, "leads to where no schema stands"),
        ({"$defs": {"a": {"$id": "b"}}, "type": "integer"}, "within a schema it changes"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_cannot_be_said_anew_is_refused_by_its_name(schema: Any, said: str) -> None:
    with pytest.raises(Refused, match=said):
        compile_schema(schema)


# What grows


def listing(depth: int, names: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {
            "type": "object",
            "propertyNames": {"enum": [chr(97 + n) for n in range(names)]},
            "additionalProperties": schema,
        }
    return schema


def doubling(keyword: str, depth: int, leaf: Any, *, beside: Any = ()) -> dict[str, Any]:
    definitions = {
        f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}, *beside, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": leaf}}


TAGGED = {"properties": {"a": {}}, "required": ["a"]}
MULTIPLYING: dict[str, Any] = {
    "names within names": listing(8, 12),
    "names of a large schema": {
        "propertyNames": {"enum": [str(n) for n in range(250)]},
        "additionalProperties": {"anyOf": [{"x": 1}] * 20_000},
    },
    "references to a large enum": {"oneOf": [{"$ref": "#/$defs/E"}] * 8000, "$defs": {"E": {"enum": [*range(12_000)]}}},
    "large enums behind references": {
        "$defs": {**{f"d{n}": {"oneOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"const": -n}]} for n in range(2000)}},
        "enum": [*range(12_000)],
    },
    "oneOf of many": {"oneOf": [{"allOf": [{"properties": {"a": {"enum": [n, "x"]}}}, TAGGED]} for n in range(2000)]},
    "circles": {
        "$defs": {str(n): {"oneOf": [{"$ref": f"#/$defs/{m % 30}"} for m in range(n, n + 9)]} for n in range(30)},
        "$ref": "#/$defs/0",
    },
    "oneOf that doubles": doubling("oneOf", 50, {"const": 1}, beside=[{"type": "string"}]),
    "anyOf that doubles": {"oneOf": [doubling("anyOf", 50, {"enum": [*range(9)]}), {"type": "string"}]},
    "allOf that doubles": {"oneOf": [{"$ref": "#/$defs/d0"}], **doubling("allOf", 50, TAGGED)},
    "names by references in a circle": {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "names that are what they are of": {"$defs": {"a": {"propertyNames": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    "references in a chain": doubling("anyOf", 3000, {"type": "string"}),
    "names by references in a chain": {
        "properties": {
            f"p{n}": {"propertyNames": {"$ref": f"#/$defs/d{n}"}, "additionalProperties": {}} for n in range(1000)
        },
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1000)},
    },
}


@pytest.mark.parametrize("name", MULTIPLYING)
def test_rewriting_takes_time_and_room_in_proportion_to_the_schema(name: str) -> None:
    schema = MULTIPLYING[name]
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        better = normalized(schema)
    finally:
        sys.setprofile(before)
    size = len(json.dumps(schema))
    assert calls < 20 * size + 200 * options.MAX_STEPS
    assert len(json.dumps(better)) < 8 * size + 100_000


def test_names_within_names_take_no_time_of_their_own() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        schema = {"propertyNames": schema}
    assert "propertyNames" in normalized(schema)


ODD = (None, True, 5, -1.5, "a", [], [[]], {}, [{}], {"a": [1]}, {"$ref": []}, ["a", {"b": 1}], 2**70)


@pytest.mark.parametrize("seed", seeds(100))
def test_schemas_with_odd_values_are_looked_through_without_an_error(seed: int) -> None:
    rng = random.Random(f"odd {seed}")
    keywords = (*MAPS, *LISTS, *ONES, "$ref", "$id", "const", "enum", "type", "required", "discriminator", "format")
    for _ in range(200):
        root: dict[str, Any] = {}
        nodes = [root]
        for _ in range(8):
            inner: dict[str, Any] = {}
            keyword = rng.choice(
                (*keywords, "pattern", "minLength", "minItems", "multipleOf", "maximum", "minProperties")
            )
            value = rng.choice((rng.choice(ODD), inner, [inner], {"a": inner}))
            nodes[rng.randrange(len(nodes))][keyword] = value
            nodes.append(inner)
        better = normalized(root)
        unsound_keywords(better)
        longest_text(better)
        types_of(root, root)
