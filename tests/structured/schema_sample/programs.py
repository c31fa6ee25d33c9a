"""Syntax trees, plans and screens: what is recursive in practice."""

from __future__ import annotations

from typing import Any

from structured.schema_sample.case import SchemaCase, case


def _node(kind: str, **properties: Any) -> dict[str, Any]:
    """A closed object with a constant ``kind`` and these properties, all required."""
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, **properties},
        "required": ["kind", *properties],
        "additionalProperties": False,
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


_IDENTIFIER = {"type": "string", "pattern": "^[a-z_][a-z0-9_]*$"}

CASES: tuple[SchemaCase, ...] = (
    case(
        "SQL query",
        "realistic ast recursion",
        {
            "$defs": {
                "column": _node("column", name=_IDENTIFIER, table={"anyOf": [_IDENTIFIER, {"type": "null"}]}),
                "literal": _node("literal", value={"type": ["string", "number", "boolean", "null"]}),
                "binary": _node(
                    "binary",
                    op={"enum": ["=", "<>", "<", "<=", ">", ">=", "AND", "OR", "LIKE"]},
                    left=_ref("expression"),
                    right=_ref("expression"),
                ),
                "expression": {"anyOf": [_ref("column"), _ref("literal"), _ref("binary")]},
                "select": _node(
                    "select",
                    columns={"type": "array", "items": _ref("expression"), "minItems": 1},
                    source={"anyOf": [_IDENTIFIER, _ref("select")]},
                    where={"anyOf": [_ref("expression"), {"type": "null"}]},
                    limit={"type": ["integer", "null"], "minimum": 0},
                ),
            },
            "$ref": "#/$defs/select",
        },
        [
            {
                "kind": "select",
                "columns": [{"kind": "column", "name": "id", "table": None}],
                "source": "users",
                "where": {
                    "kind": "binary",
                    "op": "=",
                    "left": {"kind": "column", "name": "age", "table": "users"},
                    "right": {"kind": "literal", "value": 5},
                },
                "limit": 10,
            }
        ],
        [
            {"kind": "select", "columns": [], "source": "users", "where": None, "limit": None},
            {"kind": "select", "columns": [{"kind": "star"}], "source": "users", "where": None, "limit": None},
        ],
    ),
    case(
        "user interface",
        "realistic tree recursion",
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["div", "button", "header", "section", "field", "form"]},
                "label": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#"}},
                "attributes": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
                        "required": ["name", "value"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["type", "label", "children", "attributes"],
            "additionalProperties": False,
        },
        [
            {
                "type": "form",
                "label": "",
                "children": [
                    {"type": "field", "label": "Name", "children": [], "attributes": [{"name": "id", "value": "n"}]}
                ],
                "attributes": [],
            }
        ],
        [{"type": "table", "label": "", "children": [], "attributes": []}, {"type": "div", "label": ""}],
    ),
    case(
        "filter of a search",
        "realistic tree recursion anyOf",
        {
            "$defs": {
                "filter": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {
                                "and": {"type": "array", "items": _ref("filter"), "minItems": 1, "maxItems": 3}
                            },
                            "required": ["and"],
                            "additionalProperties": False,
                        },
                        {
                            "type": "object",
                            "properties": {"field": _IDENTIFIER, "eq": {"type": ["string", "number"]}},
                            "required": ["field", "eq"],
                            "additionalProperties": False,
                        },
                        {
                            "type": "object",
                            "properties": {"field": _IDENTIFIER, "in": {"type": "array", "items": {"type": "string"}}},
                            "required": ["field", "in"],
                            "additionalProperties": False,
                        },
                    ]
                }
            },
            "$ref": "#/$defs/filter",
        },
        [{"field": "a", "eq": 1}, {"and": [{"field": "a", "in": []}, {"and": [{"field": "b", "eq": "x"}]}]}],
        [{"and": []}, {"field": "A", "eq": 1}, {"field": "a", "eq": 1, "in": []}],
    ),
    case(
        "small language",
        "realistic ast recursion mutual",
        {
            "$defs": {
                "statement": {
                    "anyOf": [
                        _node("let", name=_IDENTIFIER, value=_ref("term")),
                        _node("print", value=_ref("term")),
                        _node("while", test=_ref("term"), body={"type": "array", "items": _ref("statement")}),
                    ]
                },
                "term": {"anyOf": [{"type": "integer"}, _IDENTIFIER, _node("sum", of=_ref("terms"))]},
                "terms": {"type": "array", "items": _ref("term"), "minItems": 2, "maxItems": 2},
            },
            "type": "array",
            "items": _ref("statement"),
        },
        [[], [{"kind": "let", "name": "x", "value": {"kind": "sum", "of": [1, "y"]}}, {"kind": "print", "value": "x"}]],
        [[{"kind": "let", "name": "X", "value": 1}], [{"kind": "print", "value": {"kind": "sum", "of": [1]}}]],
    ),
    case(
        "state machine",
        "realistic map nested",
        {
            "type": "object",
            "properties": {
                "initial": _IDENTIFIER,
                "states": {
                    "type": "object",
                    "additionalProperties": {
                        "type": "object",
                        "properties": {
                            "on": {"type": "object", "additionalProperties": _IDENTIFIER},
                            "final": {"type": "boolean"},
                        },
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["initial", "states"],
            "additionalProperties": False,
        },
        [{"initial": "idle", "states": {"idle": {"on": {"START": "busy"}}, "busy": {"final": True}}}],
        [{"initial": "Idle", "states": {}}, {"initial": "idle", "states": {"idle": {"on": {"GO": 1}}}}],
    ),
    case(
        "plan of an agent",
        "realistic strict array $ref",
        {
            "$defs": {
                "task": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "integer", "minimum": 1, "maximum": 99},
                        "goal": {"type": "string", "minLength": 1, "maxLength": 100},
                        "after": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}},
                        "tool": {"anyOf": [{"enum": ["browse", "code", "ask"]}, {"type": "null"}]},
                    },
                    "required": ["id", "goal", "after", "tool"],
                    "additionalProperties": False,
                }
            },
            "type": "object",
            "properties": {"tasks": {"type": "array", "items": _ref("task"), "minItems": 1, "maxItems": 6}},
            "required": ["tasks"],
            "additionalProperties": False,
        },
        [{"tasks": [{"id": 1, "goal": "look", "after": [], "tool": "browse"}]}],
        [{"tasks": []}, {"tasks": [{"id": 100, "goal": "look", "after": [], "tool": None}]}],
    ),
    case(
        "chart",
        "realistic anyOf const",
        {
            "type": "object",
            "properties": {
                "mark": {"enum": ["bar", "line", "point"]},
                "encoding": {
                    "type": "object",
                    "properties": {
                        axis: {
                            "type": "object",
                            "properties": {
                                "field": {"type": "string"},
                                "type": {"enum": ["nominal", "ordinal", "quantitative", "temporal"]},
                                "aggregate": {"enum": ["sum", "mean", "count"]},
                            },
                            "required": ["field", "type"],
                            "additionalProperties": False,
                        }
                        for axis in ("x", "y", "color")
                    },
                    "required": ["x", "y"],
                    "additionalProperties": False,
                },
                "width": {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "container"}]},
            },
            "required": ["mark", "encoding"],
            "additionalProperties": False,
        },
        [
            {
                "mark": "bar",
                "encoding": {
                    "x": {"field": "year", "type": "temporal"},
                    "y": {"field": "n", "type": "quantitative", "aggregate": "sum"},
                },
                "width": "container",
            }
        ],
        [{"mark": "pie", "encoding": {}}, {"mark": "bar", "encoding": {"x": {"field": "a", "type": "nominal"}}}],
    ),
    case(
        "regular language of a parser",
        "realistic recursion tuple",
        {
            "$defs": {
                "regex": {
                    "anyOf": [
                        {"type": "string", "maxLength": 1},
                        {
                            "type": "array",
                            "prefixItems": [{"enum": ["star", "plus", "maybe"]}, _ref("regex")],
                            "items": False,
                            "minItems": 2,
                        },
                        {
                            "type": "array",
                            "prefixItems": [{"enum": ["or", "then"]}, _ref("regex"), _ref("regex")],
                            "items": False,
                            "minItems": 3,
                        },
                    ]
                }
            },
            "$ref": "#/$defs/regex",
        },
        ["a", ["star", "b"], ["or", "a", ["then", "b", ["maybe", "c"]]]],
        ["ab", ["star"], ["or", "a"], ["star", "a", "b"]],
    ),
)
