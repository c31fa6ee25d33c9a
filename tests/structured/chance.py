"""Expressions, schemas, grammars and tools of chance: made to be odd, large in the library, or endless."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from structured.schema_sample import SAMPLE

_LEAVES = ("a", "b", ".", "[a-z]", r"\d", r"\w", "(?s:.)", "é", "[^a]", r"\p{L}", r"\s", "x", "aaaa")
_TIMES = ("*", "+", "?", "{2}", "{3,}", "{5,50}", "{100}", "{1000}", "{100000}", "{0,1000}")
_NUMBERS = (0, 1, 2, 3, 7, 99_991, 1000, 10**6, 10**9, 0.1, 1e-9, 1.5, 123456.789, 2**53 - 1, -5, 2**63)
_TYPES = ("object", "array", "string", "number", "integer", ["object", "string"], ["number", "null"])
_FORMATS = ("date", "uri", "email", "hostname", "ipv6", "duration", "uuid4", "iri")
MAX_CHARS = 15_000


def expression(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth > 4 or kind < 0.25:
        return rng.choice(_LEAVES)
    inner = expression(rng, depth + 1)
    if kind < 0.6:
        return f"({inner}|{expression(rng, depth + 1)})"
    if kind < 0.8:
        return f"({inner}){rng.choice(_TIMES)}"
    return inner + expression(rng, depth + 1) + expression(rng, depth + 1)


def schema(rng: random.Random) -> dict[str, Any]:
    """One of the sample, of which parts are in each other."""
    root = copy.deepcopy(rng.choice([case.schema for case in SAMPLE if isinstance(case.schema, dict)]))
    for _ in range(rng.randrange(1, 8)):
        nodes = list(_nodes(root))
        node, part = rng.choice(nodes), copy.deepcopy(rng.choice(nodes))
        number = rng.choice(_NUMBERS)
        made: dict[str, Any] = {
            **{name: [part, rng.choice(nodes)] * rng.randrange(1, 4) for name in ("allOf", "anyOf", "oneOf")},
            **dict.fromkeys(("items", "additionalProperties", "not", "propertyNames", "contains"), part),
            **{name: abs(number) for name in ("minLength", "maxLength", "minItems", "maxItems", "multipleOf")},
            "properties": {f"{rng.choice('abc')}{n}": part for n in range(rng.randrange(1, 30))},
            "patternProperties": {expression(rng): part for _ in range(rng.randrange(1, 4))},
            "pattern": expression(rng),
            "minimum": number,
            "maximum": number,
            "$ref": rng.choice(("#", "#/$defs/A", "#/properties/a0")),
            "required": ["a0", "a1", "b2"],
            "enum": [number, "x", None],
            "prefixItems": [part] * rng.randrange(1, 20),
            "format": rng.choice(_FORMATS),
            "type": rng.choice(_TYPES),
        }
        keyword = rng.choice(list(made))
        before = dict(node)
        node[keyword] = copy.deepcopy(made[keyword])
        if len(json.dumps(root)) > MAX_CHARS:
            node.clear()
            node.update(before)
            break
    return root


def _nodes(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(inner)


def grammar(rng: random.Random) -> str:
    """In Lark's syntax; some of them force text for ever."""
    rules, terminals = [f"r{n}" for n in range(rng.randrange(1, 6))], [f"T{n}" for n in range(rng.randrange(1, 5))]

    def atom(depth: int) -> str:
        match rng.randrange(8):
            case 0 | 1:
                return rng.choice(rules)
            case 2 | 3:
                return rng.choice(terminals)
            case 4:
                return json.dumps(rng.choice(("a", "b", "ab", "aaaa", " ", "x" * 50, "0")))
            case 5:
                return f"/{rng.choice(('a+', '[ab]*', expression(rng)))}/"
            case 6 if depth < 3:
                return f"({body(depth + 1)}){rng.choice(('*', '+', '?', '{3}', '{2,9}', '{1000}'))}"
        return f'%json {{"type": "{rng.choice(("string", "number", "object"))}"}}'

    def body(depth: int = 0) -> str:
        return " | ".join(" ".join(atom(depth) for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4)))

    lines = [f"start: {body()}"]
    lines += [f"{name}{rng.choice(('', '', '[lazy]', '[max_tokens=5]'))}: {body()}" for name in rules]
    lines += [f"{name}: /{expression(rng)}/{rng.choice(('', ' & ~/a*/', ' & /.*b/'))}" for name in terminals]
    return "\n".join(lines)


def tool(rng: random.Random) -> dict[str, Any]:
    parameters = {**schema(rng), "type": "object"}
    return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": rng.random() < 0.3}}


def bodies(rng: random.Random) -> dict[str, Any]:
    """A request's fields."""
    match rng.randrange(5):
        case 0:
            return {"guided_regex": expression(rng) + expression(rng)}
        case 1:
            return {"guided_grammar": grammar(rng)}
        case 2:
            return {"tools": [tool(rng) for _ in range(rng.randrange(1, 3))], "tool_choice": "required"}
    shape = {"name": "x", "schema": schema(rng), "strict": rng.random() < 0.7}
    return {"response_format": {"type": "json_schema", "json_schema": shape}}
