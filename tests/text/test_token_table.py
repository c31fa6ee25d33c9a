"""A detokenizer with a tokenizer's table says, in pieces, exactly what the tokenizer's decode says at once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.conftest import SEEDS, texts_of
from tokenizers import Tokenizer, decoders, models

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.text.detokenizer import make_detokenizer
from aioengine.text.token_table import TokenTable, WindowTable, build_token_tables

CHARS = "abc .'\n🙂👩‍👧日本é▁\x00\ufffd"


def assert_same_text(backend: Tokenizer, table: TokenTable | WindowTable, ids: list[int], skip: bool) -> None:
    expected = backend.decode(ids, skip_special_tokens=skip)
    assert_shows(expected, texts_of(make_detokenizer(table), ids), ids)
    if isinstance(table, TokenTable):
        parts = table.to_bytes(ids, is_start=True)
        assert len(parts) == len(ids)
        text = b"".join(parts).decode(errors="replace")
        # A run of bytes that is no text shows one U+FFFD a byte, whatever could be read of it.
        assert text == expected or (table.byte_runs and text.count("\ufffd") < expected.count("\ufffd")), ids


def assert_shows(expected: str, texts: list[str], ids: list[int]) -> None:
    shown = ""
    for text in texts:
        shown += text
        assert expected.startswith(shown), (ids, shown, expected)  # so no U+FFFD is shown that does not stay
    assert shown == expected, ids


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_ids_decode_as_the_backend_decodes_them(backend: Tokenizer, skip: bool, seed: int) -> None:
    rng = random.Random(seed)
    table = build_token_tables(backend)[not skip]
    num_ids = backend.get_vocab_size()
    rare = [*range(min(300, num_ids)), *range(num_ids - 8, num_ids + 5)]
    for _ in range(150):
        of = rng.choice([range(num_ids), range(num_ids + 5), rare, rng.choices(rare, k=3)])
        assert_same_text(backend, table, rng.choices(of, k=rng.choice([1, 2, 3, 8, 90])), skip)


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet=st.sampled_from(CHARS) | st.characters(exclude_categories=["Cs"]), max_size=60))
def test_encoded_text_comes_back_as_the_backend_brings_it_back(backend: Tokenizer, text: str) -> None:
    ids = backend.encode(text).ids
    for skip in (True, False):
        assert_same_text(backend, build_token_tables(backend)[not skip], ids, skip)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_bytes_in_any_order_become_characters_where_they_are_some(data: st.DataObject) -> None:
    backend = byte_runs()
    byte = st.sampled_from([0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xF5, 0xFF])
    ids = data.draw(st.lists(byte | st.sampled_from([256, 257]), max_size=12))
    for decoder in (decoders.ByteLevel(), decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])):
        backend.decoder = decoder
        assert_same_text(backend, build_token_tables(backend)[0], ids, True)


def byte_runs() -> Tokenizer:
    """Byte tokens as ``ByteFallback`` has them, a token that is none, and a special one; ids 0–255 are the bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens(["<s>"])
    return backend


def joined(backend: Tokenizer, contents: dict[int, str], ids: list[int]) -> str:
    """The oracle: the decode of the whole, in it each special token after another one replaced by its content."""
    text, num_decoded = "", 0
    for index in range(1, len(ids)):
        if ids[index] in contents and ids[index - 1] in contents:
            before = backend.decode(ids[:index], skip_special_tokens=False)
            text += before[num_decoded:] + contents[ids[index]]
            num_decoded = len(backend.decode(ids[: index + 1], skip_special_tokens=False))
    return text + backend.decode(ids, skip_special_tokens=False)[num_decoded:]


@pytest.mark.parametrize("seed", SEEDS)
def test_special_tokens_are_joined_and_nothing_else_changes(backend: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    table = build_token_tables(backend).with_special
    contents = {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
    assert contents
    num_ids = backend.get_vocab_size()
    for _ in range(150):
        others = rng.choice([range(num_ids), range(num_ids + 5), range(min(300, num_ids))])
        size = rng.choice([1, 2, 3, 8, 90])
        ids = [rng.choice([*contents]) if rng.random() < 0.5 else rng.choice(others) for _ in range(size)]
        assert_shows(joined(backend, contents, ids), texts_of(make_detokenizer(table, joined=contents), ids), ids)


def test_common_tokenizers_need_no_window() -> None:
    replaced = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    for steps in (
        [decoders.ByteLevel()],
        replaced,
        [*replaced, decoders.Strip(" ", 1, 0)],
        [decoders.Metaspace()],
        [decoders.WordPiece()],
    ):
        backend = byte_runs()
        backend.decoder = decoders.Sequence(steps)
        assert isinstance(build_token_tables(backend).without_special, TokenTable), steps


def test_a_decoder_in_python_goes_through_the_window_and_may_fail() -> None:
    class Shout:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            if "<0x00>" in tokens:
                raise ValueError("no zeros")
            return [token.upper() for token in tokens]

    backend = byte_runs()
    backend.decoder = decoders.Decoder.custom(Shout())
    table = build_token_tables(backend).without_special
    assert isinstance(table, WindowTable)
    assert "".join(texts_of(make_detokenizer(table), [256, 257, 256])) == "AA"
    with pytest.raises(InvalidRequest, match="cannot decode these tokens: ValueError: no zeros"):
        texts_of(make_detokenizer(table), [0, 256])


def test_a_decoder_that_the_library_panics_on_is_refused() -> None:
    backend = byte_runs()
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(ModelLoadError, match="Strip with stop"):
        build_token_tables(backend)


def test_an_empty_vocabulary_decodes_to_nothing() -> None:
    backend = Tokenizer(models.BPE())
    assert "".join(texts_of(make_detokenizer(build_token_tables(backend).without_special), [0, 5])) == ""
