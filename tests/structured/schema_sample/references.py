"""``$ref`` to definitions, recursion, and the spellings of drafts."""

from __future__ import annotations

from structured.schema_sample.case import DRAFT_7, DRAFT_2020, SchemaCase, case

CASES: tuple[SchemaCase, ...] = (
    case(
        "a definition used twice",
        "$ref $defs",
        {
            "$defs": {"name": {"type": "string", "minLength": 1}},
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/name"}, "last": {"$ref": "#/$defs/name"}},
            "required": ["first", "last"],
            "additionalProperties": False,
        },
        [{"first": "Ada", "last": "L"}],
        [{"first": "", "last": "L"}, {"first": "Ada"}],
    ),
    case(
        "draft 7 definitions",
        "$ref definitions draft-7",
        {
            "$schema": DRAFT_7,
            "definitions": {"id": {"type": "integer", "minimum": 1}},
            "type": "array",
            "items": {"$ref": "#/definitions/id"},
        },
        [[], [1, 2]],
        [[0], ["1"]],
    ),
    case(
        "a reference and nothing else",
        "$ref $defs root",
        {"$ref": "#/$defs/Flag", "$defs": {"Flag": {"type": "boolean"}}},
        [True],
        [0, "true"],
    ),
    case(
        "references in a row",
        "$ref $defs chain",
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": {"enum": ["end"]}},
            "$ref": "#/$defs/a",
        },
        ["end"],
        ["a", None],
    ),
    case(
        "reference with siblings",
        "$ref sibling",
        {"$defs": {"word": {"type": "string", "pattern": "^[a-z]+$"}}, "$ref": "#/$defs/word", "maxLength": 3},
        ["abc"],
        ["abcd", "AB"],
    ),
    case(
        "reference with a description",
        "$ref annotation",
        {
            "$defs": {"n": {"type": "integer"}},
            "type": "object",
            "properties": {"count": {"$ref": "#/$defs/n", "description": "How many", "default": 1}},
            "required": ["count"],
        },
        [{"count": 2}],
        [{"count": "2"}, {}],
    ),
    case(
        "reference to a property",
        "$ref pointer",
        {
            "type": "object",
            "properties": {"low": {"type": "integer", "minimum": 0}, "high": {"$ref": "#/properties/low"}},
            "required": ["low", "high"],
            "additionalProperties": False,
        },
        [{"low": 0, "high": 9}],
        [{"low": 0, "high": -9}, {"low": 1}],
    ),
    case(
        "escaped pointers",
        "$ref pointer escapes",
        {
            "$defs": {"a/b": {"const": 1}, "c~d": {"const": 2}, "e f": {"const": 3}, "g%h": {"const": 4}},
            "anyOf": [
                {"$ref": "#/$defs/a~1b"},
                {"$ref": "#/$defs/c~0d"},
                {"$ref": "#/$defs/e%20f"},
                {"$ref": "#/$defs/g%25h"},
            ],
        },
        [1, 2, 3, 4],
        [5, "1"],
    ),
    case(
        "anchor",
        "$ref $anchor",
        {"$defs": {"a": {"$anchor": "length", "type": "number", "minimum": 0}}, "$ref": "#length"},
        [0, 2.5],
        [-1, "0"],
    ),
    case(
        "identified definition",
        "$ref $id refused",
        {
            "$schema": DRAFT_2020,
            "$id": "https://example.org/schemas/order",
            "$defs": {"sku": {"$id": "sku", "type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}},
            "type": "array",
            "items": {"$ref": "sku"},
        },
        [["AB123"]],
        [["ab123"], [1]],
    ),
    case(
        "linked list",
        "$ref recursion",
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                    },
                    "required": ["value", "next"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        [{"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": None}}],
        [{"value": 1}, {"value": 1, "next": {"value": "2", "next": None}}],
    ),
    case(
        "tree",
        "$ref recursion",
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["name"],
            "additionalProperties": False,
        },
        [{"name": "root"}, {"name": "a", "children": [{"name": "b", "children": []}, {"name": "c"}]}],
        [{"children": []}, {"name": "a", "children": [{"nam": "b"}]}],
    ),
    case(
        "binary tree",
        "$ref recursion",
        {
            "$defs": {
                "tree": {
                    "anyOf": [
                        {"type": "integer"},
                        {
                            "type": "array",
                            "prefixItems": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}],
                            "items": False,
                            "minItems": 2,
                        },
                    ]
                }
            },
            "$ref": "#/$defs/tree",
        },
        [1, [1, 2], [[1, 2], [3, [4, 5]]]],
        [[1], [1, 2, 3], [[1, "2"], 3]],
    ),
    case(
        "nested lists of integers",
        "$ref recursion root",
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]},
        [1, [], [1, [2, [3]], []]],
        ["1", [1, [None]]],
    ),
    case(
        "expressions",
        "$ref recursion anyOf",
        {
            "$defs": {
                "expr": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/name"}, {"$ref": "#/$defs/call"}]},
                "name": {"type": "string", "pattern": "^[a-z]$"},
                "call": {
                    "type": "object",
                    "properties": {
                        "op": {"enum": ["+", "-", "*", "/"]},
                        "args": {"type": "array", "items": {"$ref": "#/$defs/expr"}, "minItems": 1, "maxItems": 2},
                    },
                    "required": ["op", "args"],
                    "additionalProperties": False,
                },
            },
            "$ref": "#/$defs/expr",
        },
        [1.5, "x", {"op": "+", "args": [1, {"op": "-", "args": ["y"]}]}],
        ["xy", {"op": "%", "args": [1]}, {"op": "+", "args": []}],
    ),
    case(
        "two definitions that need each other",
        "$ref recursion mutual",
        {
            "$defs": {
                "folder": {
                    "type": "object",
                    "properties": {"entries": {"type": "array", "items": {"$ref": "#/$defs/entry"}}},
                    "required": ["entries"],
                    "additionalProperties": False,
                },
                "entry": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/folder"}]},
            },
            "$ref": "#/$defs/folder",
        },
        [{"entries": []}, {"entries": ["a", {"entries": ["b"]}]}],
        [{}, {"entries": [1]}, {"entries": [{"entries": None}]}],
    ),
    case(
        "any JSON, said in full",
        "$ref recursion union",
        {
            "$defs": {
                "json": {
                    "anyOf": [
                        {"type": ["null", "boolean", "number", "string"]},
                        {"type": "array", "items": {"$ref": "#/$defs/json"}},
                        {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
                    ]
                }
            },
            "type": "object",
            "properties": {"payload": {"$ref": "#/$defs/json"}},
            "required": ["payload"],
            "additionalProperties": False,
        },
        [{"payload": None}, {"payload": {"a": [1, {"b": False}]}}],
        [{}, {"payload": 1, "x": 2}],
    ),
    case(
        "a map of itself",
        "$ref recursion map",
        {"type": "object", "additionalProperties": {"$ref": "#"}},
        [{}, {"a": {}, "b": {"c": {}}}],
        [{"a": 1}, {"a": {"b": []}}],
    ),
    case(
        "a definition of a definition",
        "$ref $defs nested",
        {
            "$defs": {"geo": {"$defs": {"lat": {"type": "number", "maximum": 90}}, "type": "object"}},
            "type": "object",
            "properties": {"lat": {"$ref": "#/$defs/geo/$defs/lat"}},
            "required": ["lat"],
            "additionalProperties": False,
        },
        [{"lat": 48.2}],
        [{"lat": 91}, {"lat": None}],
    ),
    case(
        "twelve definitions in a chain of objects",
        "$ref $defs nested large",
        {
            "$defs": {
                f"level_{depth}": {
                    "type": "object",
                    "properties": {
                        "depth": {"const": depth},
                        "inner": {"$ref": f"#/$defs/level_{depth + 1}"} if depth < 11 else {"type": "null"},
                    },
                    "required": ["depth"],
                    "additionalProperties": False,
                }
                for depth in range(12)
            },
            "$ref": "#/$defs/level_0",
        },
        [{"depth": 0}, {"depth": 0, "inner": {"depth": 1, "inner": {"depth": 2}}}],
        [{"depth": 1}, {"depth": 0, "inner": {"depth": 2}}],
    ),
    case(
        "unused definitions",
        "$defs noise",
        {"$defs": {"unused": {"type": "string"}}, "definitions": {"too": False}, "type": "integer"},
        [1],
        ["1"],
    ),
    case(
        "dynamic reference",
        "$dynamicRef refused",
        {
            "$dynamicAnchor": "node",
            "type": "object",
            "properties": {"next": {"$dynamicRef": "#node"}},
            "additionalProperties": False,
        },
        [{}, {"next": {}}],
        [{"next": 1}],
    ),
    case(
        "recursive reference with siblings",
        "$ref recursion sibling refused",
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/$defs/node", "maxProperties": 1}},
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        [{}, {"next": {}}],
        [{"next": 1}, {"nxt": {}}],
    ),
)
