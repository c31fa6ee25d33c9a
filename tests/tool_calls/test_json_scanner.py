"""The scanner against Python's own reader."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.tool_calls.json_scanner import MAX_DEPTH, JsonScanner, is_json

BITS = (
    "{", "}", "[", "]", ",", ":", '"', '"a"', "\\", "\\n", "\\u00", "e9", "0", "1", "-", ".", "e", "E+", "true", "fals",
    "null", " ", "\n", "\t", "\x00", "é", "\ud800", "1.5e3", '{"a": ', "[1, ", "01", "\u00a0",
)  # fmt: skip

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def by_python(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


some_bits = given(bits=st.lists(st.sampled_from(BITS), max_size=8))
some_values = given(
    value=values, indent=st.sampled_from([None, 1]), rest=st.sampled_from(["", "x", " ,", "}"]), at=st.integers(0, 50)
)


@settings(max_examples=200, deadline=None)
@some_bits
def test_what_is_json_is_what_python_reads(bits: list[str]) -> None:
    check_bits(bits)


@pytest.mark.nightly
@settings(max_examples=1500, deadline=None)
@some_bits
def test_what_is_json_is_what_python_reads_of_much(bits: list[str]) -> None:
    check_bits(bits)


def check_bits(bits: list[str]) -> None:
    text = "".join(bits)
    assert is_json(text) == by_python(text)


@settings(max_examples=40, deadline=None)
@some_values
def test_a_value_ends_where_it_ends_in_two_pieces(value: object, indent: int | None, rest: str, at: int) -> None:
    check_two_pieces(value, indent, rest, at)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None)
@some_values
def test_many_values_end_where_they_end_in_two_pieces(value: object, indent: int | None, rest: str, at: int) -> None:
    check_two_pieces(value, indent, rest, at)


def check_two_pieces(value: object, indent: int | None, rest: str, at: int) -> None:
    text = json.dumps([value], indent=indent)
    at %= len(text)
    scanner = JsonScanner()
    assert scanner.scan(text[:at]) == at
    assert not scanner.is_done
    assert scanner.scan(text[at:] + rest) == len(text) - at
    assert scanner.is_done
    assert not scanner.is_wrong


@pytest.mark.parametrize(
    ("text", "wrong_at"),
    [("[1 2]", 3), ("[01]", 2), ('{"a" 1}', 5), ('["\\x"]', 3), ('["\n"]', 2), ("[1,]", 3), ("{a}", 1), ("[tru]", 4),
     ("[1.]", 3), ("}", 0), ('{"a": 1]', 7), ("[-]", 2)],
)  # fmt: skip
def test_the_first_wrong_character_is_found(text: str, wrong_at: int) -> None:
    scanner = JsonScanner()
    assert scanner.scan(text) == wrong_at
    assert scanner.is_wrong
    assert not scanner.is_done


def test_depth_has_a_limit() -> None:
    assert is_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not is_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
