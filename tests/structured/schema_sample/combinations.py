"""``allOf``, ``anyOf``, ``oneOf``, ``not`` and conditions."""

from __future__ import annotations

from structured.schema_sample.case import DRAFT_7, SchemaCase, case

_SQUARE = {
    "type": "object",
    "properties": {"kind": {"const": "square"}, "side": {"type": "number", "exclusiveMinimum": 0}},
    "required": ["kind", "side"],
    "additionalProperties": False,
}
_CIRCLE = {
    "type": "object",
    "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}},
    "required": ["kind", "radius"],
    "additionalProperties": False,
}

CASES: tuple[SchemaCase, ...] = (
    case(
        "any of two types",
        "anyOf",
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 100}]},
        ["abc", 100],
        ["abcd", 99, None],
    ),
    case(
        "any of overlapping ranges",
        "anyOf range",
        {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3, "maximum": 9}]},
        [-1, 4, 9],
        [10, "4"],
    ),
    case(
        "any of two shapes",
        "anyOf object",
        {"anyOf": [_SQUARE, _CIRCLE]},
        [
            {"kind": "square", "side": 2},
            {"kind": "circle", "radius": 0.5},
        ],
        [{"kind": "square", "radius": 2}, {"kind": "circle", "radius": 0}, {"kind": "line"}],
    ),
    case(
        "any of and a sibling",
        "anyOf sibling",
        {"type": "string", "anyOf": [{"pattern": "^a"}, {"pattern": "z$"}], "maxLength": 4},
        ["abc", "xyz", "az"],
        ["bcd", "abcde", 1],
    ),
    case(
        "any of required keys",
        "anyOf required",
        {
            "type": "object",
            "properties": {"email": {"type": "string"}, "phone": {"type": "string"}},
            "anyOf": [{"required": ["email"]}, {"required": ["phone"]}],
            "additionalProperties": False,
        },
        [{"email": "a"}, {"phone": "1"}, {"email": "a", "phone": "1"}],
        [{}, {"fax": "1"}],
    ),
    case("any of with an impossible branch", "anyOf false", {"anyOf": [False, {"type": "boolean"}]}, [True], [1, None]),
    case("any of with an open branch", "anyOf true", {"anyOf": [True, {"type": "boolean"}]}, [1, None, {"a": []}], []),
    case(
        "any of any of",
        "anyOf nested",
        {"anyOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"anyOf": [{"const": "a"}, {"type": "null"}]}]},
        [1, "a", None],
        [3, "b"],
    ),
    case(
        "fifty branches",
        "anyOf large",
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"op": {"const": f"op_{index}"}, "arg": {"type": "integer", "maximum": index}},
                    "required": ["op", "arg"],
                    "additionalProperties": False,
                }
                for index in range(50)
            ]
        },
        [{"op": "op_0", "arg": -1}, {"op": "op_49", "arg": 49}],
        [{"op": "op_50", "arg": 1}, {"op": "op_3", "arg": 4}],
    ),
    case(
        "all of bounds",
        "allOf range",
        {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 12}, {"multipleOf": 3}]},
        [3, 9, 12],
        [0, 15, 4],
    ),
    case(
        "all of objects",
        "allOf object",
        {
            "allOf": [
                {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
                {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            ]
        },
        [{"id": 1, "name": "a"}, {"id": 1, "name": "a", "more": None}],
        [{"id": 1}, {"name": "a"}, {"id": "1", "name": "a"}],
    ),
    case(
        "all of with siblings",
        "allOf sibling",
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "allOf": [{"required": ["a"]}, {"properties": {"a": {"minLength": 2}}}],
            "additionalProperties": False,
        },
        [{"a": "xy"}, {"a": "xyz", "b": ""}],
        [{"b": "x"}, {"a": "x"}, {"a": "xy", "c": 1}],
    ),
    case(
        "all of patterns",
        "allOf pattern",
        {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "a"}, {"minLength": 2}, {"maxLength": 6}]},
        ["ab", "banana"],
        ["a", "bcd", "aB", "bananas"],
    ),
    case(
        "all of one",
        "allOf",
        {"allOf": [{"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
        [[], [None, None]],
        [[1], [None] * 3],
    ),
    case(
        "all of any of",
        "allOf anyOf",
        {
            "allOf": [
                {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
            ]
        },
        [5, -1],
        ["a", True, None],
    ),
    case(
        "tuples intersected",
        "allOf prefixItems",
        {
            "allOf": [
                {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "integer"}},
                {"type": "array", "items": {"minimum": 0}, "minItems": 1, "maxItems": 3},
            ]
        },
        [[0], [1, 2, 3]],
        [[], [-1], [1, -2], [1, 2, 3, 4]],
    ),
    case(
        "one of two types",
        "oneOf disjoint",
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        ["a", 1],
        [None, 1.5],
    ),
    case(
        "one of two shapes",
        "oneOf disjoint object",
        {"oneOf": [_SQUARE, _CIRCLE]},
        [
            {"kind": "square", "side": 1},
            {"kind": "circle", "radius": 2},
        ],
        [{"kind": "oval", "radius": 2}, {"kind": "square"}],
    ),
    case(
        "one of tagged values",
        "oneOf disjoint const",
        {
            "type": "object",
            "oneOf": [
                {"properties": {"t": {"const": "int"}, "v": {"type": "integer"}}, "required": ["t", "v"]},
                {"properties": {"t": {"const": "str"}, "v": {"type": "string"}}, "required": ["t", "v"]},
                {"properties": {"t": {"enum": ["none", "nil"]}}, "required": ["t"]},
            ],
        },
        [{"t": "int", "v": 1}, {"t": "str", "v": "1"}, {"t": "nil"}],
        [{"t": "int", "v": "1"}, {"t": "other"}, {}],
    ),
    case(
        "one of constants", "oneOf disjoint const", {"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c", ""]
    ),
    case(
        "one of null and a string",
        "oneOf disjoint null",
        {"oneOf": [{"type": "null"}, {"type": "string"}]},
        [None, "a"],
        [1],
    ),
    case(
        "one of overlapping ranges",
        "oneOf overlapping refused",
        {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
        [2, 3],
        [6, 1],
    ),
    case(
        "one of disjoint ranges",
        "oneOf range refused",
        {"oneOf": [{"type": "integer", "maximum": 0}, {"type": "integer", "minimum": 10}]},
        [-1, 10],
        [5],
    ),
    case(
        "one of two references",
        "oneOf $ref discriminator",
        {
            "oneOf": [{"$ref": "#/$defs/Square"}, {"$ref": "#/$defs/Circle"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {"Square": _SQUARE, "Circle": _CIRCLE},
        },
        [{"kind": "square", "side": 1}],
        [{"kind": "oval"}],
    ),
    case("not a string", "not refused", {"not": {"type": "string"}}, [1, None], ["a"]),
    case("not this word", "not refused", {"type": "string", "not": {"const": "admin"}}, ["user"], ["admin"]),
    case(
        "if, then, else",
        "if refused",
        {"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}, "else": {"minimum": 0}},
        [5, 20],
        [15, -1],
    ),
    case(
        "draft 7 condition on a country",
        "if draft-7 refused",
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {"country": {"enum": ["US", "NL"]}, "code": {"type": "string"}},
            "required": ["country", "code"],
            "if": {"properties": {"country": {"const": "US"}}},
            "then": {"properties": {"code": {"pattern": "^[0-9]{5}$"}}},
            "else": {"properties": {"code": {"pattern": "^[0-9]{4} [A-Z]{2}$"}}},
        },
        [{"country": "US", "code": "12345"}, {"country": "NL", "code": "1234 AB"}],
        [{"country": "US", "code": "1234 AB"}],
    ),
)
