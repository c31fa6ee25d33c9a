"""Schemas and patterns that are made to be slow, large or fatal to a grammar library, and what they did to it.

`HOSTILE` was measured with llguidance 1.9.1 on a shared core, the library's default limits, and the bundled tokenizer:
the time to compile, the time of the slowest of the first 60 masks, what memory rose by, and what ended it. Less than
0.05 s, 0.02 s and 20 MB are left out. Other threads of Python ran on all the while: the library lets go of the GIL, but
for reading the text (0.1 s for 10 MB). What kills the process does not on a thread with a stack of 512 MB.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Hostile:
    """A text that is sent for a grammar.

    Attributes:
        text: makes the text; some are of megabytes.
        happened: what the library did with its default limits.
    """

    name: str
    kind: Literal["json", "regex", "lark"]
    text: Callable[[], str]
    happened: str


def _nested(opening: str, inner: str, closing: str, depth: int) -> str:
    return opening * depth + inner + closing * depth


def _dumped(schema: object) -> Callable[[], str]:
    return lambda: json.dumps(schema)


HOSTILE: tuple[Hostile, ...] = (
    Hostile(
        "arrays 120 deep",
        "json",
        lambda: _nested('{"type":"array","items":', "{}", "}", 120),
        "nothing: fast and small",
    ),
    Hostile(
        "arrays 1,000 deep",
        "json",
        lambda: _nested('{"type":"array","items":', "{}", "}", 1_000),
        "refused: the text is nested more than 128 deep",
    ),
    Hostile(
        "arrays 10,000 deep",
        "json",
        lambda: _nested('{"type":"array","items":', "{}", "}", 10_000),
        "refused: the text is nested more than 128 deep",
    ),
    Hostile("allOf 60 deep", "json", lambda: _nested('{"allOf":[', "{}", "]}", 60), "nothing: fast and small"),
    Hostile(
        "anyOf 10,000 deep",
        "json",
        lambda: _nested('{"anyOf":[', "{}", "]}", 10_000),
        "refused: the text is nested more than 128 deep",
    ),
    Hostile(
        "lists 100,000 deep in a constant",
        "json",
        lambda: '{"const":' + _nested("[", "", "]", 100_000) + "}",
        "refused: the text is nested more than 128 deep",
    ),
    Hostile(
        "5,000 branches",
        "json",
        lambda: json.dumps(
            {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {f"k{index}": {"type": "integer"}},
                        "required": [f"k{index}"],
                        "additionalProperties": False,
                    }
                    for index in range(5_000)
                ]
            }
        ),
        "0.6 s to compile, 27 MB, the first masks fail: more items in a row than max_items_in_row",
    ),
    Hostile(
        "2,000 branches that begin alike",
        "json",
        lambda: json.dumps(
            {
                "anyOf": [
                    {"type": "object", "properties": {"a": {"type": "string"}, f"k{index}": {}}, "required": ["a"]}
                    for index in range(2_000)
                ]
            }
        ),
        "0.6 s to compile, 0.54 s for a mask, 45 MB, the first masks fail: more items in a row than max_items_in_row",
    ),
    Hostile(
        "5,000 one-of branches of objects",
        "json",
        lambda: json.dumps(
            {
                "oneOf": [
                    {"type": "object", "properties": {"k": {"const": str(index)}}, "required": ["k"]}
                    for index in range(5_000)
                ]
            }
        ),
        "3.0 s to compile, 73 MB, the first masks fail: more items in a row than max_items_in_row",
    ),
    Hostile(
        "ten anyOf of ten in an allOf",
        "json",
        lambda: json.dumps(
            {"allOf": [{"anyOf": [{"minimum": level * 10 + index} for index in range(10)]} for level in range(10)]}
        ),
        "refused: schema too large",
    ),
    Hostile(
        "definitions that double, 25 times",
        "json",
        lambda: json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    **{
                        f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}, {"$ref": f"#/$defs/d{level + 1}"}]}
                        for level in range(25)
                    },
                    "d25": {"type": "object", "properties": {"a": {"type": "string"}}},
                },
            }
        ),
        "nothing: fast and small",
    ),
    Hostile("a reference to itself", "json", _dumped({"$ref": "#"}), "the first mask is empty, and an error"),
    Hostile(
        "two references to each other",
        "json",
        _dumped({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        "the first mask is empty, and an error",
    ),
    Hostile(
        "an allOf of itself",
        "json",
        _dumped({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}),
        "the first mask is empty, and an error",
    ),
    Hostile(
        "a tree that never ends",
        "json",
        _dumped(
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
        ),
        "nothing: fast and small",
    ),
    Hostile(
        "5,000 references in a row",
        "json",
        lambda: json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(5_000)} | {"d5000": {}},
            }
        ),
        "kills the process: the stack overflows",
    ),
    Hostile(
        "2,000 objects, each in a definition of its own",
        "json",
        lambda: json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    f"d{index}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{index + 1}"}}}
                    for index in range(2_000)
                }
                | {"d2000": {}},
            }
        ),
        "kills the process: the stack overflows, of 8 MB at 1,000 and of 2 MB at 500",
    ),
    Hostile(
        "maxItems of 10**4",
        "json",
        _dumped({"type": "array", "items": {"type": "integer"}, "maxItems": 10**4}),
        "nothing: fast and small",
    ),
    Hostile(
        "maxItems of 10**6",
        "json",
        _dumped({"type": "array", "items": {"type": "integer"}, "maxItems": 10**6}),
        "nothing: fast and small",
    ),
    Hostile(
        "maxItems of 10**9",
        "json",
        _dumped({"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
        "nothing: fast and small",
    ),
    Hostile("minItems of 10**9", "json", _dumped({"type": "array", "minItems": 10**9}), "nothing: fast and small"),
    Hostile("maxLength of 10**5", "json", _dumped({"type": "string", "maxLength": 10**5}), "nothing: fast and small"),
    Hostile("maxLength of 10**9", "json", _dumped({"type": "string", "maxLength": 10**9}), "nothing: fast and small"),
    Hostile(
        "maxLength of 2**40",
        "json",
        _dumped({"type": "string", "maxLength": 2**40}),
        "refused: decimal literal invalid",
    ),
    Hostile("minLength of 10**9", "json", _dumped({"type": "string", "minLength": 10**9}), "nothing: fast and small"),
    Hostile(
        "maxLength of 10**5 and a pattern",
        "json",
        _dumped({"type": "string", "maxLength": 10**5, "pattern": "(a|b)*c(a|b){10}"}),
        "nothing: fast and small",
    ),
    Hostile(
        "maxProperties of 10**9", "json", _dumped({"type": "object", "maxProperties": 10**9}), "nothing: fast and small"
    ),
    Hostile(
        "minProperties of 10**9", "json", _dumped({"type": "object", "minProperties": 10**9}), "nothing: fast and small"
    ),
    Hostile(
        "enum of 10,000",
        "json",
        lambda: json.dumps({"enum": [f"value {index}" for index in range(10_000)]}),
        "0.1 s to compile",
    ),
    Hostile(
        "enum of 100,000",
        "json",
        lambda: json.dumps({"enum": [f"value {index}" for index in range(100_000)]}),
        "0.4 s to compile, 56 MB, refused: more than initial_lexer_fuel",
    ),
    Hostile(
        "enum of 40,000 structures",
        "json",
        lambda: json.dumps({"enum": [{"a": [index]} for index in range(40_000)]}),
        "20.2 s to compile, 237 MB, panics, which is an error of the matcher: more than 65,525 symbols",
    ),
    Hostile(
        "10,000 optional properties",
        "json",
        lambda: json.dumps(
            {
                "type": "object",
                "properties": {f"property {index}": {"type": "integer"} for index in range(10_000)},
                "additionalProperties": False,
            }
        ),
        "9 s and more to compile, quadratic; then more items in a row than max_items_in_row",
    ),
    Hostile(
        "3,000 optional properties, and others",
        "json",
        lambda: json.dumps({"type": "object", "properties": {f"property {index}": {} for index in range(3_000)}}),
        "0.8 s to compile, 0.09 s for a mask, 32 MB, the first masks fail: more items in a row than max_items_in_row",
    ),
    Hostile(
        "40 required ones after 40 in an anyOf",
        "json",
        lambda: json.dumps(
            {
                "type": "object",
                "properties": {f"p{index}": {"type": "string"} for index in range(40)},
                "anyOf": [{"required": [f"p{index}"]} for index in range(40)],
                "minProperties": 1,
            }
        ),
        "0.1 s to compile, the first masks fail: more items in a row than max_items_in_row",
    ),
    Hostile(
        "a description of 10 MB", "json", lambda: json.dumps({"type": "integer", "description": "x" * 10**7}), "20 MB"
    ),
    Hostile(
        "a constant of 10 MB",
        "json",
        lambda: json.dumps({"const": "x" * 10**7}),
        "0.7 s to compile, 2.75 s for a mask, 382 MB, masks fail: too many expressions (initial_lexer_fuel)",
    ),
    Hostile(
        "a pattern of 1 MB",
        "json",
        lambda: json.dumps({"type": "string", "pattern": "x" * 10**6}),
        "0.9 s to compile, 96 MB",
    ),
    Hostile(
        "10 MB of properties",
        "json",
        lambda: json.dumps({"type": "object", "properties": {f"{index:090}": {} for index in range(100_000)}}),
        "0.3 s to compile, 55 MB, refused: schema too large",
    ),
    Hostile("a look-ahead", "json", _dumped({"type": "string", "pattern": "^(?=a)a$"}), "refused: look-around"),
    Hostile("a back-reference", "json", _dumped({"type": "string", "pattern": "^(a)\\1$"}), "refused: back-references"),
    Hostile(
        "multipleOf of 1e-300", "json", _dumped({"type": "number", "multipleOf": 1e-300}), "refused: too many digits"
    ),
    Hostile("multipleOf of 1e-9", "json", _dumped({"type": "number", "multipleOf": 1e-9}), "nothing: fast and small"),
    Hostile(
        "multipleOf of 4294967291",
        "json",
        _dumped({"type": "integer", "multipleOf": 4294967291}),
        "nothing: fast and small",
    ),
    Hostile(
        "multipleOf of 99991", "json", _dumped({"type": "integer", "multipleOf": 99991}), "0.9 s to compile, 51 MB"
    ),
    Hostile(
        "multipleOf of 10**400",
        "json",
        lambda: '{"type": "integer", "multipleOf": 1' + "0" * 400 + "}",
        "refused: number out of range",
    ),
    Hostile(
        "multipleOf of zero", "json", _dumped({"type": "integer", "multipleOf": 0}), "refused: invalid multiple of"
    ),
    Hostile(
        "two multiples whose product is beyond 32 bits",
        "json",
        _dumped({"allOf": [{"type": "integer", "multipleOf": 4000000000}, {"multipleOf": 4000000000}]}),
        "refused: invalid multiple of",
    ),
    Hostile(
        "a minimum of 400 digits",
        "json",
        lambda: '{"type": "integer", "minimum": 1' + "0" * 400 + "}",
        "refused: number out of range",
    ),
    Hostile(
        "a minimum of 30 digits",
        "json",
        lambda: '{"type": "integer", "minimum": 1' + "0" * 30 + "}",
        "refused: no range of integers",
    ),
    Hostile(
        "a minimum that is text",
        "json",
        _dumped({"minimum": "é" * 200}),
        "0.1 s to compile, 50 MB, panics, which is an error of the matcher: its message cuts a letter in two",
    ),
    Hostile(
        "a pattern that is a list",
        "json",
        lambda: json.dumps({"pattern": ["é" * 200]}, ensure_ascii=False),
        "refused: expected string",
    ),
    Hostile("no JSON", "json", lambda: "{", "refused: no JSON"),
    Hostile("a lone surrogate", "json", lambda: '{"const": "\\ud800"}', "refused: no JSON"),
    Hostile("a byte of zero", "json", lambda: '{"const": "\\u0000"}', "nothing: fast and small"),
    Hostile(
        "a hundred counts within counts",
        "regex",
        lambda: "(((a{1,100}){1,100}){1,100})",
        "masks fail: too many expressions in the lexer (step_lexer_fuel)",
    ),
    Hostile(
        "counts of anything within counts",
        "regex",
        lambda: "(((.{1,100}){1,100}){1,100})x",
        "masks fail: too many expressions in the lexer (step_lexer_fuel)",
    ),
    Hostile(
        "counts five deep",
        "regex",
        lambda: "(((((a{1,50}b?){1,50}c?){1,50}d?){1,50}e?){1,50})",
        "nothing: fast and small",
    ),
    Hostile(
        "a count of 10**9",
        "regex",
        lambda: "a{1000000000}",
        "0.85 s for a mask, 125 MB, masks fail: too many expressions in the lexer (initial_lexer_fuel)",
    ),
    Hostile("a count of 10**5", "regex", lambda: "(ab|cd){100000}", "nothing: fast and small"),
    Hostile("states that double", "regex", lambda: "(a|b)*a(a|b){25}", "nothing: fast and small"),
    Hostile(
        "states that double, within any letters", "regex", lambda: "(.*[aeiou].{18}){3}", "nothing: fast and small"
    ),
    Hostile(
        "10,000 alternatives",
        "regex",
        lambda: "|".join(f"word{index * 7919}" for index in range(10_000)),
        "0.1 s to compile",
    ),
    Hostile(
        "200,000 alternatives",
        "regex",
        lambda: "|".join(f"word{index * 7919}" for index in range(200_000)),
        "2.4 s to compile, 305 MB, refused: more than initial_lexer_fuel",
    ),
    Hostile("groups 1,000 deep", "regex", lambda: _nested("(", "a", ")?", 1_000), "refused: nested too deep"),
    Hostile(
        "groups 100,000 deep",
        "regex",
        lambda: _nested("(", "a", ")?", 100_000),
        "0.2 s to compile, 62 MB, refused: nested too deep",
    ),
    Hostile("stars of stars", "regex", lambda: _nested("(", "a", "*)*", 100) + "b", "refused: nested too deep"),
    Hostile(
        "all letters of all scripts",
        "regex",
        lambda: "(\\p{L}{1,200}\\p{N}?){1,200}",
        "masks fail: too many expressions in the lexer (step_lexer_fuel)",
    ),
    Hostile("a word boundary", "regex", lambda: "\\bfoo\\b", "refused: look-around"),
    Hostile("no regex", "regex", lambda: "(", "refused: unclosed group"),
    Hostile("an empty class", "regex", lambda: "[^\\x00-\\x{10FFFF}]", "the first mask is empty, and an error"),
    Hostile("left recursion", "lark", lambda: 'start: start "a" | "a"', "nothing: fast and small"),
    Hostile(
        "ambiguity", "lark", lambda: 'start: start start | start start start | "a" | ""', "nothing: fast and small"
    ),
    Hostile(
        "a rule that never ends",
        "lark",
        lambda: 'start: "a" start',
        "0.06 s for a mask, masks fail: more than step_max_items",
    ),
    Hostile("a rule of itself", "lark", lambda: "start: start", "the first mask is empty, and an error"),
    Hostile(
        "a count of 10**9 of a rule",
        "lark",
        lambda: 'start: a{1000000000}\na: "a"',
        "0.05 s for a mask, masks fail: more than step_max_items",
    ),
    Hostile(
        "counts of rules within counts",
        "lark",
        lambda: 'start: a{1,1000}\na: b{1,1000}\nb: "x"{1,1000} "y"?',
        "0.04 s for a mask",
    ),
    Hostile(
        "50,000 rules",
        "lark",
        lambda: "start: r0\n" + "\n".join(f'r{index}: "a" r{index + 1}' for index in range(50_000)) + '\nr50000: "b"',
        "kills the process: the stack overflows",
    ),
    Hostile(
        "parentheses 10,000 deep",
        "lark",
        lambda: "start: " + _nested("(", '"a"', ")", 10_000),
        "refused: too deeply nested",
    ),
    Hostile(
        "a grammar within",
        "lark",
        lambda: "start: %json " + _nested('{"items":', "{}", "}", 5_000),
        "refused: the text is nested more than 128 deep",
    ),
    Hostile(
        "a file that it imports",
        "lark",
        lambda: 'start: x\n%import .secret (x)\n%import "/etc/passwd"',
        "refused: a syntax error",
    ),
    Hostile("no grammar", "lark", lambda: "start: (", "refused: a syntax error"),
    Hostile("nothing", "lark", lambda: "", "refused: empty"),
)
