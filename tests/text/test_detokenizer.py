"""Ids become text piece by piece, and stop strings end it where a search of the whole text would."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.conftest import texts_of

from aioengine.text.detokenizer import Detokenizer, PieceDetokenizer, WindowDetokenizer, make_detokenizer
from aioengine.text.stop_strings import StopSearch
from aioengine.text.token_table import TokenTable, WindowTable

# A byte-level table: two words, each byte of 😀 and é, a special token that is skipped, and their ids.
A, B, F0, X9F, X98, X80, C3, XA9, SKIPPED, BEYOND = range(10)
BYTES = TokenTable(pieces=["a", " b", b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xc3", b"\xa9", None])
RUNS = TokenTable(pieces=BYTES.pieces, byte_runs=True)
SPACED = TokenTable(pieces=[" a", " ", None, b" ", ""], byte_runs=True, lead_strip=2)
FIRST = TokenTable(pieces=[" a", "b", None], first_pieces={0: "a"})


def fed(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join(map(detokenizer.feed_one, ids))


def fed_until_stop(detokenizer: Detokenizer, ids: Sequence[int]) -> tuple[str, int]:
    """The text, and the index of the id that completed the stop string."""
    text = ""
    for index, token_id in enumerate(ids):
        text += detokenizer.feed_one(token_id)
        if detokenizer.stop_string is not None:
            return text, index
    raise AssertionError(f"no stop string in {text!r}")


@pytest.mark.parametrize(
    ("table", "ids", "expected"),
    [
        (BYTES, [A, B, A], ["a", " b", "a", ""]),
        (BYTES, [F0, X9F, X98, X80, A], ["", "", "", "😀", "a", ""]),
        (BYTES, [F0, SKIPPED, X9F, BEYOND, X98, X80], ["", "", "", "", "", "😀", ""]),
        (BYTES, [F0, X9F, A], ["", "", "\ufffda", ""]),
        (BYTES, [C3, C3, XA9], ["", "\ufffd", "é", ""]),
        (BYTES, [X80, A, C3], ["\ufffd", "a", "", "\ufffd"]),
        (RUNS, [F0, X9F, X98, X80, A], ["", "", "", "", "😀a", ""]),
        (RUNS, [C3, XA9, SKIPPED, C3, BEYOND, XA9], ["", "", "", "", "", "", "éé"]),
        (RUNS, [C3, XA9, X80, A, A], ["", "", "", "\ufffd\ufffd\ufffda", "a", ""]),
        (RUNS, [A, C3], ["a", "", "\ufffd"]),
        (SPACED, [2, 1, 4, 0, 0], ["", "", "", "a", " a", ""]),
        (SPACED, [1, 1, 1, 0], ["", "", " ", " a", ""]),
        (SPACED, [3, 3, 3, 0], ["", "", "", "  a", ""]),
        (SPACED, [3], ["", ""]),
        (FIRST, [2, 0, 0, 1], ["", "a", " a", "b", ""]),
        (FIRST, [1, 0], ["b", " a", ""]),
        (BYTES, [], [""]),
    ],
)
def test_a_token_shows_what_it_settles(table: TokenTable, ids: list[int], expected: list[str]) -> None:
    assert texts_of(make_detokenizer(table), ids) == expected


def test_sequences_do_not_share_state() -> None:
    first, second = make_detokenizer(FIRST), make_detokenizer(FIRST)
    assert first.feed_one(0) == "a"
    assert second.feed_one(0) == "a"


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_without_a_stop_string_in_the_text_nothing_ends_it(stop: tuple[str, ...]) -> None:
    detokenizer = make_detokenizer(BYTES, stop=stop)
    assert texts_of(detokenizer, [A, F0, X9F, X98, X80, B]) == ["a", "", "", "", "😀", " b", ""]
    assert detokenizer.stop_string is None


# The window: a decoder known only as a function. Words join with spaces, so each text depends on being first.
NUM_WORDS = 50
WORD_KINDS = bytes([WindowTable.SETTLES]) * NUM_WORDS + bytes([WindowTable.DROPPED])


def join_words(ids: list[int]) -> str:
    assert len(ids) <= 2 * WindowDetokenizer.NUM_CONTEXT_TOKENS, "a token's cost grows with the text"
    return " ".join(f"w{i}" for i in ids)


def test_a_window_gives_the_text_of_the_whole_decode_at_a_bounded_cost() -> None:
    table = WindowTable(decode=join_words, kinds=WORD_KINDS)
    rng = random.Random(0)
    ids = [*(rng.randrange(NUM_WORDS + 3) for _ in range(2000)), *[NUM_WORDS] * 500, 2]
    kept = [i for i in ids if i < NUM_WORDS]
    assert "".join(texts_of(make_detokenizer(table), ids)) == " ".join(f"w{i}" for i in kept)


def test_a_window_keeps_a_token_with_text_before_many_without() -> None:
    table = WindowTable(decode=lambda ids: " ".join(f"w{i}" for i in ids if i), kinds=WORD_KINDS)
    assert "".join(texts_of(make_detokenizer(table), [1, *[0] * 100, 2])) == "w1 w2"


@pytest.mark.parametrize("num_bytes_lost", [0, 1, 2, 3])
def test_a_window_shows_no_half_character(num_bytes_lost: int) -> None:
    kinds = bytes([WindowTable.SETTLES]) * 256
    table = WindowTable(decode=lambda ids: bytes(ids).decode("utf-8", "replace"), kinds=kinds)
    data = ("a😀" * 40).encode()[: -num_bytes_lost or None]
    shown = texts_of(make_detokenizer(table), list(data))
    assert "".join(shown) == data.decode("utf-8", "replace")
    assert not any("\ufffd" in text for text in shown[:-1])


def test_a_window_waits_where_a_tokens_text_is_open() -> None:
    kinds = bytes([WindowTable.SETTLES, WindowTable.HOLDS])
    table = WindowTable(decode=lambda ids: "".join("ab"[i] for i in ids), kinds=kinds)
    assert texts_of(make_detokenizer(table), [0, 1, 1, 0, 1]) == ["a", "", "", "bba", "", "b"]


# Special tokens without spaces between them. "w" is a word; S and T are special.
W, S, T, HALF, GONE = range(5)
CONTENTS = {S: "<s>", T: "<t>"}
WORDS = TokenTable(pieces=[" w", " <s>", " <t>", b"\xc3", None], first_pieces={W: "w", S: "<s>", T: "<t>"})


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([S, T, S, W, S], ["<s>", "<t>", "<s>", " w", " <s>", ""]),
        ([W, S, S, T], ["w", " <s>", "<s>", "<t>", ""]),
        ([S, W, T, T], ["<s>", " w", " <t>", "<t>", ""]),
        ([S, GONE, S, 99, S], ["<s>", "", " <s>", "", " <s>", ""]),  # not one directly after the other
        ([W, HALF, S, T, HALF], ["w", "", "\ufffd <s>", "<t>", "", "\ufffd"]),
        ([], [""]),
    ],
)
def test_a_special_token_directly_after_another_shows_its_content(ids: list[int], expected: list[str]) -> None:
    assert texts_of(make_detokenizer(WORDS, joined=CONTENTS), ids) == expected


def test_without_anything_to_join_or_to_stop_at_nothing_looks_for_it() -> None:
    assert type(make_detokenizer(WORDS, joined={})) is PieceDetokenizer
    assert texts_of(make_detokenizer(WORDS), [S, T, W]) == ["<s>", " <t>", " w", ""]


def test_bytes_before_joined_tokens_stay_before_them() -> None:
    table = TokenTable(pieces=["w", b"\xc3", b"\xc3"])
    assert texts_of(make_detokenizer(table, joined={1: "<s>", 2: "<t>"}), [1, 2, 0]) == ["", "\ufffd<t>", "w", ""]


def test_a_window_joins_special_tokens_as_a_table_does() -> None:
    words = ["w", "<s>", "<t>", "\ufffd"]
    table = WindowTable(decode=lambda ids: " ".join(words[i] for i in ids), kinds=bytes([WindowTable.SETTLES]) * 4)
    ids = [S, T, W, 3, S, S, T, W, *[S] * 100, W]
    shown = texts_of(make_detokenizer(table, joined=CONTENTS), ids)
    assert "".join(shown) == "<s><t> w \ufffd <s><s><t> w <s>" + "<s>" * 99 + " w"
    assert shown[:2] == ["<s>", "<t>"]


# Stop strings, on a table whose ids are the letters, some of their pairs and one long piece.
PIECES: list[str | bytes | None] = ["a", "b", "c", "aa", "ab", "bc", "abcab", "", None]
LETTERS = TokenTable(pieces=PIECES)
PIECE_IDS = {piece: i for i, piece in enumerate(PIECES)}
STOP_STRINGS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)
LETTER_IDS = st.lists(st.integers(0, len(PIECES)), max_size=30)


def search(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """The oracle: the end of the match that ends first and its string, the longest one that ends there."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            return end, max(found, key=len)
    return None


@settings(max_examples=500, deadline=None)
@given(ids=LETTER_IDS, stop=STOP_STRINGS, include_stop=st.booleans(), min_tokens=st.integers(0, 5))
def test_a_stop_string_is_found_where_a_search_of_the_whole_text_finds_it(
    ids: list[int], stop: list[str], include_stop: bool, min_tokens: int
) -> None:
    texts = [str(PIECES[i] or "") if i < len(PIECES) else "" for i in ids]
    spared = "".join(texts[:min_tokens])
    text = "".join(texts[min_tokens:])
    match = search(text, stop)
    detokenizer = make_detokenizer(LETTERS, stop=stop, include_stop=include_stop, min_tokens=min_tokens)
    if match is None:
        assert "".join(texts_of(detokenizer, ids)) == spared + text
        assert detokenizer.stop_string is None
        return
    end, stop_string = match
    shown, completed_by = fed_until_stop(detokenizer, ids)
    assert fed(detokenizer, ids) == "", "nothing is consumed any more"
    assert shown == spared + text[: end if include_stop else end - len(stop_string)]
    assert detokenizer.flush() == ""
    assert detokenizer.stop_string == stop_string
    assert completed_by == next(i for i in range(len(ids)) if len("".join(texts[min_tokens : i + 1])) >= end)


@settings(max_examples=200, deadline=None)
@given(ids=LETTER_IDS, stop=STOP_STRINGS)
def test_only_what_may_begin_a_stop_string_is_held_back(ids: list[int], stop: list[str]) -> None:
    detokenizer = make_detokenizer(LETTERS, stop=stop)
    text = shown = ""
    for token_id in ids:
        text += str(PIECES[token_id] or "") if token_id < len(PIECES) else ""
        shown += detokenizer.feed_one(token_id)
        if detokenizer.stop_string is not None:
            return
        beginnings = (string[:length] for string in stop for length in range(len(string)))
        held = max((len(start) for start in beginnings if text.endswith(start)), default=0)
        assert shown == text[: len(text) - held]


@pytest.mark.parametrize(
    ("stop", "pieces", "expected", "stop_string"),
    [
        (("abc",), ("a", "b", "a", "bc"), ["", "", "ab", ""], "abc"),
        (("abcab", "bc"), ("abcab",), ["a"], "bc"),  # the one that ends first
        (("c", "bc", "abc"), ("a", "bc"), ["", ""], "abc"),  # of those that end there, the longest
        (("bc", "c"), ("abcab",), ["a"], "bc"),
        (("aab",), ("aa", "aa", "ab"), ["", "aa", "a"], "aab"),
        (("b",), ("a", "abcab", "c", "b", "a"), ["a", "a", "", "", ""], "b"),  # then nothing is consumed
    ],
)
def test_the_stop_string_that_ends_first_ends_the_text(
    stop: tuple[str, ...], pieces: tuple[str, ...], expected: list[str], stop_string: str
) -> None:
    detokenizer = make_detokenizer(LETTERS, stop=stop)
    assert texts_of(detokenizer, [PIECE_IDS[piece] for piece in pieces]) == [*expected, ""]
    assert detokenizer.stop_string == stop_string


@pytest.mark.parametrize(
    ("table", "options", "ids", "shown"),
    [
        (WORDS, {"stop": ("><t",), "joined": CONTENTS}, [W, S, T], "w <s"),
        (BYTES, {"stop": ("é😀",)}, [A, C3, XA9, F0, X9F, X98, X80], "a"),
        (RUNS, {"stop": ("é",)}, [A, C3, XA9], "a"),  # which only the end settles
    ],
)
def test_stop_strings_are_found_across_tokens(
    table: TokenTable, options: dict[str, Any], ids: list[int], shown: str
) -> None:
    detokenizer = make_detokenizer(table, **options)
    assert "".join(texts_of(detokenizer, ids)) == shown
    assert (detokenizer.stop_string,) == options["stop"]


def test_what_the_first_tokens_hold_back_is_no_part_of_a_match() -> None:
    detokenizer = make_detokenizer(RUNS, stop=("é",), min_tokens=2)
    assert "".join(texts_of(detokenizer, [C3, XA9])) == "é"
    assert detokenizer.stop_string is None


def test_many_long_stop_strings_cost_a_constant_a_character() -> None:
    """Sixty-four that share a kilobyte, on a text that keeps coming back to it: steps are counted, not timed."""
    stop = ["a" * 1000 + chr(0x100 + i) for i in range(64)]
    search = StopSearch(stop)
    pieces = ["aa"] * 499 + ["b", "a"] * 3 + ["aa"] * 600 + ["c"]
    assert "".join([*map(search.feed, pieces), search.flush()]) == "".join(pieces)
    assert search.found is None
    assert len(search._states) <= 1001
    assert sum(len(state.following) for state in search._states) <= 2 * sum(map(len, pieces))
