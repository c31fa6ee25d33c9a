"""Objects: which keys they have, may have and must have, and how many."""

from __future__ import annotations

from structured.schema_sample.case import DRAFT_7, SchemaCase, case

_NAME = {"type": "string"}
_AGE = {"type": "integer"}

CASES: tuple[SchemaCase, ...] = (
    case(
        "open object",
        "object properties open",
        {"type": "object", "properties": {"name": _NAME}},
        [{}, {"name": "a"}, {"name": "a", "more": [1]}],
        [{"name": 1}, []],
    ),
    case(
        "closed object",
        "object additionalProperties-false",
        {"type": "object", "properties": {"name": _NAME, "age": _AGE}, "additionalProperties": False},
        [{}, {"age": 3}, {"name": "a", "age": 3}],
        [{"other": 1}, {"name": "a", "age": 3, "x": 0}],
    ),
    case(
        "all required",
        "object required additionalProperties-false",
        {
            "type": "object",
            "properties": {"name": _NAME, "age": _AGE},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        [{"name": "", "age": 0}],
        [{"name": "a"}, {"age": 1}, {}],
    ),
    case(
        "first optional, last required",
        "object required optional",
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
            "required": ["c"],
            "additionalProperties": False,
        },
        [{"c": None}, {"a": None, "c": None}, {"a": None, "b": None, "c": None}],
        [{}, {"a": None}, {"b": None}],
    ),
    case(
        "required among eight optional ones",
        "object required optional",
        {
            "type": "object",
            "properties": {f"p{index}": {"type": "boolean"} for index in range(9)},
            "required": ["p4"],
            "additionalProperties": False,
        },
        [{"p4": True}, {"p0": True, "p4": False, "p8": True}],
        [{"p0": True}, {"p4": 1}, {"p4": True, "p9": True}],
    ),
    case(
        "required in another order than the properties",
        "object required order",
        {
            "type": "object",
            "properties": {"x": _AGE, "y": _AGE},
            "required": ["y", "x"],
            "additionalProperties": False,
        },
        [{"x": 1, "y": 2}],
        [{"x": 1}, {"y": 2}],
    ),
    case(
        "required without a property of its name",
        "object required untyped-property",
        {"type": "object", "properties": {"a": _AGE}, "required": ["a", "free"]},
        [{"a": 1, "free": [None]}, {"a": 1, "free": 2, "more": 3}],
        [{"a": 1}, {"free": 1}],
    ),
    case(
        "map to integers",
        "object additionalProperties-schema",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1, "b": -1}],
        [{"a": "1"}, {"a": 1, "b": None}],
    ),
    case(
        "named key and a map beside it",
        "object additionalProperties-schema properties",
        {
            "type": "object",
            "properties": {"total": {"type": "number"}},
            "required": ["total"],
            "additionalProperties": {"type": "string"},
        },
        [{"total": 1.5}, {"total": 2, "note": "x", "unit": "kg"}],
        [{"note": "x"}, {"total": "2"}, {"total": 2, "note": 1}],
    ),
    case(
        "additional ones allowed aloud",
        "object additionalProperties-true",
        {"type": "object", "properties": {"id": _AGE}, "required": ["id"], "additionalProperties": True},
        [{"id": 1}, {"id": 1, "x": {"y": []}}],
        [{}, {"id": "1"}],
    ),
    case(
        "no keys",
        "object additionalProperties-false",
        {"type": "object", "additionalProperties": False},
        [{}],
        [{"a": 1}],
    ),
    case(
        "a key that must not be",
        "object property-false",
        {"type": "object", "properties": {"a": _AGE, "b": False}},
        [{}, {"a": 1}],
        [{"b": 1}, {"a": 1, "b": None}],
    ),
    case(
        "a key of anything",
        "object property-true",
        {"type": "object", "properties": {"a": True}, "required": ["a"], "additionalProperties": False},
        [{"a": None}, {"a": {"b": [1, {}]}}],
        [{}, {"b": 1}],
    ),
    case(
        "keys by pattern",
        "object patternProperties additionalProperties-false",
        {"type": "object", "patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": False},
        [{}, {"x-a": "1", "x-b": ""}],
        [{"x-a": 1}, {"y": "1"}],
    ),
    case(
        "two disjoint patterns",
        "object patternProperties",
        {
            "type": "object",
            "patternProperties": {"^n_": {"type": "number"}, "^s_": {"type": "string"}},
            "additionalProperties": False,
        },
        [{"n_a": 1.5, "s_a": "x"}, {"s_": "", "n_": 0}],
        [{"n_a": "x"}, {"s_a": 1}, {"a": 1}],
    ),
    case(
        "patterns and names",
        "object patternProperties properties",
        {
            "type": "object",
            "properties": {"version": {"type": "integer"}},
            "required": ["version"],
            "patternProperties": {
                "^/": {"type": "object", "properties": {"get": _NAME}, "additionalProperties": False}
            },
            "additionalProperties": False,
        },
        [{"version": 1}, {"version": 2, "/": {}, "/users": {"get": "list"}}],
        [{}, {"version": 1, "users": {}}, {"version": 1, "/": {"put": "x"}}],
    ),
    case(
        "patterns with a rest",
        "object patternProperties additionalProperties-schema",
        {
            "type": "object",
            "patternProperties": {"^[0-9]+$": {"type": "integer"}},
            "additionalProperties": {"type": "boolean"},
        },
        [{"1": 1, "a": True}, {}],
        [{"1": True}, {"a": 1}],
    ),
    case(
        "a name that a pattern narrows",
        "object patternProperties properties overlap",
        {
            "type": "object",
            "properties": {"size_max": {"type": "integer"}},
            "patternProperties": {"^size_": {"minimum": 1}},
            "additionalProperties": False,
        },
        [{}, {"size_max": 1}, {"size_max": 4, "size_min": 2}],
        [{"size_max": 0}, {"size_max": 1.5}, {"size_min": 0}],
    ),
    case(
        "at least one key of a map",
        "object minProperties",
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": "x"}],
    ),
    case(
        "at most two keys of a map",
        "object maxProperties",
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        [{}, {"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "c": 3}],
    ),
    case(
        "one to three keys of a map",
        "object minProperties maxProperties",
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 3},
        [{"a": None}, {"a": None, "b": None, "c": None}],
        [{}, {"a": None, "b": None, "c": None, "d": None}],
    ),
    case(
        "at least two keys of a map",
        "object minProperties unsound",
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
        [{"a": 1, "b": 2}],
        [{}, {"a": 1}],
    ),
    case(
        "any one of three",
        "object minProperties optional",
        {
            "type": "object",
            "properties": {"email": _NAME, "phone": _NAME, "fax": _NAME},
            "minProperties": 1,
            "additionalProperties": False,
        },
        [{"email": "a"}, {"phone": "1", "fax": "2"}],
        [{}, {"post": "x"}],
    ),
    case(
        "at most one of two",
        "object maxProperties optional",
        {"type": "object", "properties": {"a": _AGE, "b": _AGE}, "maxProperties": 1, "additionalProperties": False},
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    case("no keys by number", "object maxProperties", {"type": "object", "maxProperties": 0}, [{}], [{"a": 1}]),
    case(
        "required names and a bounded rest",
        "object minProperties maxProperties required",
        {
            "type": "object",
            "properties": {"id": _AGE},
            "required": ["id"],
            "additionalProperties": {"type": "string"},
            "minProperties": 2,
            "maxProperties": 3,
        },
        [{"id": 1, "a": "x"}, {"id": 1, "a": "x", "b": "y"}],
        [{"id": 1}, {"id": 1, "a": "1", "b": "2", "c": "3"}],
    ),
    case(
        "two of three optional ones",
        "object minProperties optional refused",
        {"type": "object", "properties": {"a": _AGE, "b": _AGE, "c": _AGE}, "minProperties": 2},
        [{"a": 1, "b": 1}],
        [{}, {"a": 1}],
    ),
    case(
        "four objects deep",
        "object nested",
        {
            "type": "object",
            "properties": {
                "a": {
                    "type": "object",
                    "properties": {
                        "b": {
                            "type": "object",
                            "properties": {
                                "c": {"type": "object", "properties": {"d": {"const": 1}}, "required": ["d"]}
                            },
                            "required": ["c"],
                        }
                    },
                    "required": ["b"],
                }
            },
            "required": ["a"],
        },
        [{"a": {"b": {"c": {"d": 1}}}}],
        [{"a": {"b": {"c": {}}}}, {"a": {"b": {"c": {"d": 2}}}}, {"a": {}}],
    ),
    case(
        "map of maps",
        "object additionalProperties-schema nested",
        {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": {"type": "array", "items": _AGE}},
        },
        [{}, {"a": {"b": [1, 2], "c": []}}],
        [{"a": 1}, {"a": {"b": ["1"]}}],
    ),
    case(
        "sixty keys",
        "object required large",
        {
            "type": "object",
            "properties": {f"field_{index}": {"type": "integer", "minimum": 0} for index in range(60)},
            "required": [f"field_{index}" for index in range(60)],
            "additionalProperties": False,
        },
        [{f"field_{index}": index for index in range(60)}],
        [{f"field_{index}": index for index in range(59)}, {f"field_{index}": -1 for index in range(60)}],
    ),
    case(
        "eighty optional keys",
        "object optional large",
        {
            "type": "object",
            "properties": {f"o{index}": {"type": ["integer", "null"]} for index in range(80)},
            "additionalProperties": False,
        },
        [{}, {"o79": 1}, {"o0": None, "o40": 7}],
        [{"o80": 1}, {"o1": "1"}],
    ),
    case(
        "keys that begin alike",
        "object properties prefixes",
        {
            "type": "object",
            "properties": {"a": _AGE, "ab": _NAME, "abc": {"type": "null"}},
            "required": ["a", "ab", "abc"],
            "additionalProperties": False,
        },
        [{"a": 1, "ab": "x", "abc": None}],
        [{"a": 1, "ab": "x"}, {"a": "x", "ab": 1, "abc": None}],
    ),
    case(
        "properties without type",
        "object properties untyped",
        {"properties": {"a": {"type": "string"}}, "required": ["a"]},
        [{"a": "x"}, 5, None],
        [{}, {"a": 5}],
    ),
    case(
        "property names by pattern",
        "object propertyNames",
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        [{"abc": 1}],
        [{"A": 1}],
    ),
    case(
        "one key asks for another",
        "object dependentRequired refused",
        {"type": "object", "properties": {"card": _NAME, "cvc": _NAME}, "dependentRequired": {"card": ["cvc"]}},
        [{}, {"card": "1", "cvc": "2"}],
        [{"card": "1"}],
    ),
    case(
        "one key asks for a schema",
        "object dependentSchemas refused",
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        [{}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    case(
        "draft 7 dependencies",
        "object dependencies draft-7 refused",
        {"$schema": DRAFT_7, "type": "object", "dependencies": {"a": ["b"]}},
        [{}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    case(
        "no unevaluated properties",
        "object unevaluatedProperties refused",
        {"type": "object", "properties": {"a": _AGE}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    case(
        "overlapping patterns",
        "object patternProperties refused",
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "z$": {"minimum": 3}}},
        [{"a": 1, "z": 3}],
        [{"a": "x"}, {"az": 1}],
    ),
)
