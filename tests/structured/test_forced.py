"""Text that follows without a choice: it is looked for where it is known to be short, and nowhere else."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import numpy as np
import pytest
from nightly import few, seeds
from structured.conftest import NUM_TOKENS, vocabulary
from structured.schema_sample import SAMPLE
from structured.schema_sample.case import SchemaCase

from aioengine import Choice, Grammar, InvalidRequest, Json, Regex, StructuralTags, Tag
from aioengine.structured.constraints import Constraint, Either, unforced
from aioengine.structured.forced import MAX_FORCED_BYTES, longest_forced, longest_match, longest_text
from aioengine.structured.guidance import GuidanceMatcher
from aioengine.tool_calls.calls import ToolChoice, read_tools
from aioengine.tool_calls.formats import find_tool_format, known_names

FIVE = {"type": "number", "minimum": 5, "maximum": 5}
SELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
FOREVER: dict[str, Constraint] = {
    "a terminal that takes what the next one needs": Grammar('start: /a+/ "a"'),
    "such a one behind a choice": Grammar('start: /[b-d]{3}/ /a+/ "a"'),
    "in GBNF": Grammar('root ::= [ab] [a]+ "a"'),
    "by names of terminals": Grammar('start: A B\nA: "x"+\nB: "x"'),
    "by a lexeme that is not lazy": Grammar('start: a "y"\na[capture]: /[xy]/ /y*/'),
    "a number that takes its end": Grammar('start: %json {"type": "number", "minimum": 5, "maximum": 5} "0"'),
    "a rule that never ends": Grammar('start: "a" start'),
    "rules that never end, behind a choice": Grammar('start: /[ab]/ x\nx: "a" x | "a" y\ny: "a" x'),
    "options that say that they force": Grammar('%llguidance {"no_forcing": false}\nstart: /a+/ "a"'),
    "a tag whose end continues its pattern": StructuralTags((Tag("<f>", "x<|im_end|>", pattern="x+"),), ("<f>",)),
    "a tag whose end continues its number": StructuralTags((Tag("<f>", "0", schema=FIVE),), ("<f>",)),
    "one of several": Either((Choice(["b"]), Grammar('start: /a+/ "a"'))),
    "a schema that requires itself": Json(SELF),
    "a million of one letter": Regex("[xy](a{1000}){1000}b"),
    "a pattern as long as a least length": Json({
        "type": "string",
        "allOf": [{"pattern": "^a*$"}, {"minLength": 10**6}],
    }),
    "a million items": Json({"type": "array", "items": {"const": 1}, "minItems": 10**6}),
    "items that double": Json({
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{n}": {"prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2, "minItems": 2} for n in range(24)},
            "d24": {"const": "x"},
        },
    }),
}  # fmt: skip


def walk(matcher: GuidanceMatcher, rng: random.Random, *, num_tokens: int, is_forcing: bool) -> int:
    """Go through the beginning of an answer; returns the most bytes that were forced at once."""
    mask, longest = np.zeros(NUM_TOKENS // 32, np.int32), 0
    for _ in range(num_tokens):
        matcher.fill(mask)
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if matcher.problem or not len(ids) or matcher.raw.is_stopped():
            break
        if is_forcing:
            longest = max(longest, len(matcher.raw.compute_ff_bytes()))
        else:
            assert matcher.forced() == []
        matcher.consume([int(rng.choice(ids))])
    return longest


@pytest.mark.parametrize("name", FOREVER)
def test_text_that_is_forced_for_ever_is_sampled_token_by_token(name: str) -> None:
    assert longest_forced(FOREVER[name]) > MAX_FORCED_BYTES  # else the library would not come back
    began = time.thread_time()
    grammar = vocabulary().compile(FOREVER[name])
    walk(grammar.matcher(), random.Random(name), num_tokens=40, is_forcing=False)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("case", few(SAMPLE[::12], of=SAMPLE), ids=str)
def test_no_more_is_forced_than_was_reckoned(case: SchemaCase, seed: int) -> None:
    reckoned = longest_text(case.schema)
    try:
        grammar = vocabulary().compile(Json(case.schema))
    except InvalidRequest:
        return
    assert grammar.is_forcing == (reckoned <= MAX_FORCED_BYTES)
    if grammar.is_forcing:
        forced = walk(grammar.matcher(), random.Random(f"{seed} {case}"), num_tokens=100, is_forcing=True)
        assert forced <= reckoned, f"seed {seed}"


@pytest.mark.parametrize(
    ("pattern", "least"),
    [("abc", 3), ("a{20}", 20), ("(ab{3}){4,}", 16), ("((a{9}){9}){9}", 729), ("(?x)a{ 30 , }", 30), ("a{5}{6}", 30)],
)
def test_the_shortest_match_is_not_longer_than_was_reckoned(pattern: str, least: int) -> None:
    assert least <= longest_match(pattern) <= 100 * least


@pytest.mark.parametrize(
    "given",
    [
        Regex("[0-9]{3}-[0-9]{4}"),
        Regex("[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}"),
        Choice(["a red fox", "nothing"]),
        StructuralTags((Tag("<f>", "</f>", schema={"type": "integer"}),), ("<f>",)),
        Grammar('start: "abc"', is_forcing=True),
    ],
)
def test_what_is_commonly_asked_for_is_forced(given: Constraint) -> None:
    assert longest_forced(given) <= MAX_FORCED_BYTES


def test_the_text_of_a_deep_or_odd_schema_is_reckoned_without_an_error() -> None:
    chain: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(6000)}
    for schema in (
        True,
        {"$ref": "#/$defs/d0", "$defs": chain},
        {"properties": [1], "required": 3, "items": [2], "anyOf": {}},
    ):
        longest_text(schema)
    began = time.thread_time()
    longest_match("{1," * 80_000)
    longest_match("\\" * 250_000)
    longest_text({"anyOf": [{"$ref": "#/x"}] * 20_000, "x": {"enum": list(range(20_000))}})
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("name", known_names().split(", "))
def test_no_tool_format_goes_on_with_what_a_number_takes(name: str) -> None:
    """A number takes up digits that stand behind it: for ever, where they are forced."""
    schema = {"type": "object", "properties": {"x": FIVE, "y": {"anyOf": [FIVE, {"type": "null"}]}}, "required": ["x"]}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    for mode in ("required", "auto"):
        text = find_tool_format(name).grammar(tools, ToolChoice(mode), parallel=True)
        for rule in re.findall(r"^(r\d+): %json", text, re.M):
            for behind in re.findall(rf"\b{rule} (.*)", text):
                assert not behind or behind[:1] not in '"/' or behind[1] not in "0123456789+-.eE", behind[:20]


def test_a_sender_who_is_not_trusted_forces_nothing() -> None:
    forcing = Grammar('start: "a"', is_forcing=True)
    assert unforced(Either((forcing, Regex("a")))) == Either((Grammar('start: "a"'), Regex("a")))
    assert unforced(forcing) == Grammar('start: "a"')
