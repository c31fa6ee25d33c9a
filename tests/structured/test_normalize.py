"""Schemas that are said anew: the same instances fit them, judged by jsonschema; and fewer where the page says so."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for
from nightly import few, seeds
from structured.schema_sample import SAMPLE, SchemaCase
from structured.walks import ExactValidator, Refused, compile_schema, is_admitted

from aioengine.structured.json_schema import MAX_EXACT_INTEGER, subschemas
from aioengine.structured.normalize import normalized

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
    "draft 4, excluded": {"$schema": DRAFT_4, "minimum": 2, "exclusiveMinimum": True, "maximum": 5},
    "draft 4, not excluded": {"$schema": DRAFT_4, "maximum": 2, "exclusiveMaximum": False},
    "draft 7 dependencies": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **OBJECT,
        "dependencies": {"a": ["b"], "c": {"required": ["a"]}},
    },
    "if alone": {**OBJECT, "if": {"required": ["a"]}},
    "then alone": {**OBJECT, "then": {"required": ["a"]}},
    "if a value": {**OBJECT, "if": {"properties": {"b": {"const": "x"}}}, "then": {"required": ["a"]}},
    "if a value that is required": {
        **OBJECT,
        "if": {"properties": {"b": {"const": "x"}}, "required": ["b"]},
        "then": {"required": ["a"]},
        "else": {"properties": {"a": False}},
    },
    "if a value of any": {
        "type": "object",
        "if": {"properties": {"c": {"const": "x"}}},
        "then": {"required": ["a"]},
        "else": {"required": ["b"]},
    },
    "if one of anything": {"if": {"properties": {"a": {"enum": [1, "x", True, None]}}}, "then": {"required": ["b"]}},
    "if a key": {
        **OBJECT,
        "if": {"required": ["a", "b"]},
        "then": {"required": ["c"]},
        "else": {"properties": {"c": False}},
    },
    "if a type": {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": ["null", "object"]}},
    "if a limit": {"if": {"minLength": 2, "maxLength": 3}, "then": {"const": "ab"}, "else": {"type": "string"}},
    "if never": {"if": False, "then": {"type": "string"}, "else": {"type": "integer"}},
    "several conditions on one property": {
        **OBJECT,
        "allOf": [
            {"if": {"properties": {"b": {"const": value}}}, "then": {"required": [key]}, "else": {"title": "none"}}
            for value, key in (("x", "a"), ("y", "c"), ("z", "d"))
        ],
    },
    "conditions on two properties": {
        "type": "object",
        "required": ["b"],
        "if": {"properties": {"b": {"const": "x"}}, "required": ["b"]},
        "then": {"required": ["a"]},
        "allOf": [{"if": {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}, "then": {"required": ["c"]}}],
    },
    "names of any text": {**OBJECT, "propertyNames": {"type": "string"}},
    "names of a pattern": {"propertyNames": {"pattern": "^[ab]"}, "additionalProperties": {"type": "integer"}},
    "names of a length": {"type": "object", "propertyNames": {"maxLength": 1}},
    "names that are listed": {**OBJECT, "propertyNames": {"enum": ["a", "d"]}},
    "no names": {"type": "object", "propertyNames": False},
    "not a type": {"not": {"type": ["string", "array"]}},
    "not all": {**OBJECT, "not": {"required": ["a", "b"]}},
    "not a key": {**OBJECT, "not": {"required": ["a"]}},
    "not a value": {"not": {"const": "ab"}},
    "not these": {"type": ["string", "boolean", "integer"], "not": {"enum": ["a", "ab", "", True, 3, 5]}},
    "not such a property": {**OBJECT, "not": {"properties": {"b": {"const": "x"}}, "required": ["b"]}},
    "not any of": {"not": {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}, {"const": 3}]}},
    "not not": {"not": {"not": {"enum": ["a", 1]}}},
    "nothing": {"type": "object", "properties": {"a": {"not": {}}}},
    "anything": {"not": {"not": True}},
    "one of tags": {"oneOf": [CAT, DOG]},
    "one of tags by reference": {**DEFINED, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
    "one of ranges": {"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 5}]},
    "one of overlapping ranges": {"type": "integer", "oneOf": [{"maximum": 5}, {"minimum": 3}]},
    "one of overlapping lists": {"oneOf": [{"enum": [1, 2, "a"]}, {"enum": [2, 3]}]},
    "one of types": {"oneOf": [{"type": ["string", "null"]}, {"type": ["boolean", "null"]}]},
    "one of lengths": {"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 2}]},
    "one of keys": {**OBJECT, "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
    "one of keys of anything": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of closed objects": {
        "oneOf": [
            {"type": "object", "properties": {name: {}}, "required": [name], "additionalProperties": False}
            for name in "abc"
        ]
    },
    "one of many": {"oneOf": [{"const": number} for number in range(40)]},
    "one of anything": {"oneOf": [{}, {"type": "string"}]},
    "one of an option of options": {
        "oneOf": [{"anyOf": [CAT, {"type": "null"}]}, {"oneOf": [DOG, {"type": "string"}]}]
    },
    "a key that needs another": {**OBJECT, "dependentRequired": {"a": ["b"], "b": ["c"]}},
    "a key that needs a schema": {**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}, "c": False}},
    "at least two": {**CLOSED, "minProperties": 2},
    "at least two beside one that is needed": {**CLOSED, "minProperties": 3, "required": ["a"]},
    "at least more than there are": {**CLOSED, "minProperties": 4},
    "no others": {**OBJECT, "unevaluatedProperties": False},
    "no others than all of": {"allOf": [OBJECT, {"properties": {"d": {}}}], "unevaluatedProperties": False},
    "no others than those of a reference": {
        **DEFINED,
        "$ref": "#/$defs/cat",
        "unevaluatedProperties": {"type": "null"},
    },
    "all are evaluated": {**OBJECT, "additionalProperties": {"type": "null"}, "unevaluatedProperties": False},
    "no others than patterns": {"allOf": [{"patternProperties": {"^a": {}}}], "unevaluatedProperties": False},
    "no other items": {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    "contains none": {"type": "array", "contains": {"const": 1}, "minContains": 0},
    "a limit of nothing": {"type": "array", "maxContains": 1},
    "unique, of one": {"type": "array", "uniqueItems": True, "maxItems": 1},
    "unique, of three": {"type": "array", "items": {"enum": ["a", 1, 2]}, "uniqueItems": True},
    "unique, of two of three": {"items": {"enum": ["a", 1, 1.0, 2]}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
    "unique flags": {"type": ["array", "null"], "items": {"type": "boolean"}, "uniqueItems": True},
    "unique, of two types": {
        "prefixItems": [{"type": "integer"}, {"type": "string"}],
        "items": False,
        "uniqueItems": True,
    },
    "sizes with a point": {"type": "string", "maxLength": 2.0},
    "references that are not escaped": {"$ref": "#/definitions/A<b>", "definitions": {"A<b>": {"type": "integer"}}},
    "references to elsewhere": {"$ref": "#/x/a~1b", "x": {"a/b": {"oneOf": [CAT, {"$ref": "#/x/a~1b/y"}], "y": DOG}}},
    "recursive": {
        "oneOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]
    },
    "annotations": {"type": "string", "format": "phone", "default": {"oneOf": []}, "readOnly": True},
    "formats of other types": {"type": ["integer", "null"], "format": "int32"},
}
STILL = frozenset(
    {"$schema", "if", "then", "else", "not", "oneOf", "propertyNames", "dependencies", "dependentRequired"}
) | {*("dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "uniqueItems", "contains", "format")}


NONE = frozenset({"at least more than there are"})
ALL = frozenset({"anything", "if alone of anything"})


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
    assert found == ({False} if name in NONE else {True} if name in ALL else {True, False})
    assert json.dumps(normalized(better)) == json.dumps(better)


@pytest.mark.parametrize("name", few([*EXACT][::3], of=EXACT))
def test_a_grammar_of_it_admits_no_others(name: str) -> None:
    if name in NONE:
        with pytest.raises(Refused, match="Unsatisfiable"):
            compile_schema(EXACT[name])
        return
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
        *({"not": inner()}, {"oneOf": some()}, {"anyOf": some()}, {"allOf": some()}, rng.choice(leaves)),
        *({"if": inner(), "then": inner()}, {"if": inner(), "then": inner(), "else": inner()}, rng.choice(leaves)),
        *(
            {"dependentRequired": {"a": ["b"]}},
            {"dependentSchemas": {"b": inner()}},
            {"propertyNames": {"enum": ["a", "c"]}},
        ),
        *({"uniqueItems": True, "items": inner()}, {"minProperties": 2}, {"additionalProperties": False}),
        *({"unevaluatedProperties": False}, {"$ref": "#/$defs/d"}, {"propertyNames": {"pattern": "^[ab]"}}),
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
        # What is left of it is refused, and may have been given other things to be evaluated.
        if '"unevaluated' not in json.dumps(better):
            _agreeing(schema, better, rng, NUM_INSTANCES // 4)


@pytest.mark.parametrize("case", few(SAMPLE[::4], of=SAMPLE), ids=lambda case: case.name)
def test_the_sample_says_the_same_when_it_is_said_anew(case: SchemaCase) -> None:
    better = normalized(case.schema)
    if isinstance(better.get("items"), list):
        return  # tuples as they were written once: the library reads them, and jsonschema knows them by $schema
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
        ({"format": "json-pointer", "type": "string"}, ['"/a~0/b"', '""'], ['"a"', '"/~2"']),
        ({"format": "uri-reference", "type": "string"}, ['"../a?b#c"', '"//h:80/a"', '"x:y"'], ['"a b"', '"1:2"']),
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
        ({"$schema": DRAFT_4, "type": "array", "contains": {"const": 1}}, "contains"),
        ({"$schema": DRAFT_4, "type": "object", "dependentSchemas": 5}, "dependentSchemas"),
        ({"type": "integer", "minimum": 2**60}, "minimum: numbers beyond"),
        ({"type": "string", "format": "iri"}, "Unknown format: iri"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf: its options cannot be told apart"),
        ({"$ref": "#/x/y", "x": {"y": {"type": "object", "minProperties": 2}}}, "minProperties"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_cannot_be_said_anew_is_refused_by_its_name(schema: Any, said: str) -> None:
    with pytest.raises(Refused, match=said):
        compile_schema(schema)


# What grows


def test_a_schema_does_not_blow_up() -> None:
    nested: Any = {"const": 1}
    for level in range(25):
        condition = {"properties": {"a": {"const": level}}, "required": ["a"]}
        nested = {
            "type": "object",
            "allOf": [{"if": condition, "else": nested}, {"if": condition, "then": {"required": ["b"]}}],
            "oneOf": [{"not": {"const": level}}, {"required": ["a"], "not": {"required": ["b"]}}],
        }
    tagged = {"properties": {"a": {}}, "required": ["a"]}
    wide = {"oneOf": [{"allOf": [{"properties": {"a": {"enum": [n, "x"]}}}, tagged]} for n in range(2000)]}
    many = {"allOf": [{"oneOf": [{"maxLength": n}, {"minLength": n}]} for n in range(2000)]}
    loops = {"$defs": {str(n): {"oneOf": [{"$ref": f"#/$defs/{m % 30}"} for m in range(n, n + 9)]} for n in range(30)}}
    for schema in (nested, wide, many, {**loops, "$ref": "#/$defs/0"}):
        began = time.process_time()
        better = normalized(schema)
        assert time.process_time() - began < 3
        assert len(json.dumps(better)) < 20 * len(json.dumps(schema))


def test_names_within_names_take_no_time_of_their_own() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        schema = {"propertyNames": schema}
    assert "propertyNames" in normalized(schema)
