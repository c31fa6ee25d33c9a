"""Grammars of schemas over the bundled tokenizer, and random walks through their masks.

`compile_as_is` is the library alone, and `compile_schema` what the engine makes of it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, localcontext
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from structured.conftest import vocabulary

from aioengine.errors import InvalidRequest
from aioengine.structured.constraints import Json

_MAX_DIGITS = 5000


class Refused(Exception):
    """The schema cannot be held to: the message has the keyword."""


class Matcher:
    """The state of one answer in a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def consume(self, token_ids: list[int]) -> bool:
        """Takes the tokens, in order; False where one does not fit."""
        # The library's consume_tokens takes no end once it has stopped by itself; consume_token does.
        return all(self._matcher.consume_token(token_id) for token_id in token_ids)

    def allowed(self) -> NDArray[np.int32]:
        """A bit for each token that may come next: [vocabulary / 32]."""
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)

    @property
    def error(self) -> str:
        """Why the matcher is of no more use, by a limit of the library for one; empty if it is."""
        return self._matcher.get_error() if self._matcher.is_error() else ""

    @property
    def is_stopped(self) -> bool:
        """Whether nothing but the end of the text can come."""
        return self._matcher.is_stopped()


class Grammar:
    """What a schema admits."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""
        return Matcher(self._matcher.deep_copy())


def compile_schema(schema: Any, *, whitespace: bool = True) -> Grammar:
    """The grammar of JSON texts that the schema admits, by the engine.

    Raises:
        Refused: it cannot be held to.
    """
    try:
        compiled = vocabulary().compile(Json(schema, whitespace=whitespace))
    except InvalidRequest as error:
        raise Refused(str(error)) from None
    return Grammar(compiled.matcher().raw)


def compile_as_is(schema: dict[str, Any], overrides: dict[str, Any] | None = None) -> Grammar:
    """The library's own idea of the schema.

    Raises:
        Refused: it has none.
    """
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
    matcher = LLMatcher(_tokenizer(), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise Refused(matcher.get_error().strip())
    return Grammar(matcher)


def allowed_ids(matcher: Matcher) -> NDArray[np.int64]:
    """The ids of the tokens that may come next, ascending."""
    return np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))


def is_admitted(grammar: Grammar, text: str) -> bool:
    """Whether the text, token by token, stays within the masks, and may end where it ends."""
    matcher = grammar.matcher()
    for token_id in _tokenizer().tokenize_str(text):
        if token_id not in allowed_ids(matcher) or not matcher.consume([token_id]):
            return False
    return eos_ids() <= set(allowed_ids(matcher).tolist())


@dataclass(frozen=True)
class Walk:
    """The bytes that a walk has written, and whether it came to an end."""

    text: bytes
    has_ended: bool


def walk(grammar: Grammar, rng: random.Random, *, num_free_tokens: int, max_tokens: int) -> Walk:
    """A random text of the grammar: the first tokens are drawn freely, the others so that it ends soon.

    A walk draws either among the allowed tokens or first among their first bytes: the one writes words, the other
    escapes, signs and odd letters. Some draws are among the signs of JSON alone, or they would be rare.
    """
    matcher = grammar.matcher()
    is_by_byte = rng.random() < 0.5
    is_in_string = False
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        allowed = allowed_ids(matcher)
        assert not matcher.error, matcher.error
        assert allowed.size, f"nothing may follow, nor may it end: {decode(token_ids)!r}"
        is_end = np.isin(allowed, sorted(eos_ids()))
        assert is_end.sum() in (0, len(eos_ids())), f"one end is allowed, another is not: {decode(token_ids)!r}"
        choices = allowed[~is_end]
        is_free = len(token_ids) < num_free_tokens
        if is_end.any() and (not choices.size or not is_free or rng.random() < 0.2):
            assert matcher.consume([rng.choice(sorted(eos_ids()))]), f"the end is refused: {decode(token_ids)!r}"
            return Walk(decode(token_ids), has_ended=True)
        token_id = _drawn(choices, rng, is_by_byte) if is_free else _closing(choices, rng, is_in_string)
        assert matcher.consume([token_id]), f"an allowed token is refused: {decode(token_ids)!r}, {token_id}"
        token_ids.append(token_id)
        is_in_string = decode(token_ids).replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') % 2 == 1
    return Walk(decode(token_ids), has_ended=False)


def _drawn(choices: NDArray[np.int64], rng: random.Random, is_by_byte: bool) -> int:
    first_bytes = _first_bytes()[choices]
    if rng.random() < 0.15:
        is_sign = np.isin(first_bytes, list(b'"{}[],:'))
        if is_sign.any():
            choices, first_bytes = choices[is_sign], first_bytes[is_sign]
    return _of_one_first_byte(choices, rng) if is_by_byte else int(rng.choice(choices.tolist()))


def _closing(choices: NDArray[np.int64], rng: random.Random, is_in_string: bool) -> int:
    """A token that leads to the end: a quote in a string, a bracket outside, else no space and nothing that opens."""
    distances = _distances_to_end(is_in_string)[choices]
    return _of_one_first_byte(choices[distances == distances.min()], rng)


def _of_one_first_byte(choices: NDArray[np.int64], rng: random.Random) -> int:
    first_bytes = _first_bytes()[choices]
    first_byte = rng.choice(np.unique(first_bytes).tolist())
    return int(rng.choice(choices[first_bytes == first_byte].tolist()))


@cache
def _first_bytes() -> NDArray[np.uint8]:
    return np.array([token[0] if token else 0 for token in _token_bytes()], dtype=np.uint8)


@cache
def _distances_to_end(is_in_string: bool) -> NDArray[np.uint8]:
    return np.array([_distance_to_end(token, is_in_string) for token in _token_bytes()], dtype=np.uint8)


def _distance_to_end(token: bytes, is_in_string: bool) -> int:
    if is_in_string:
        return 0 if token == b'"' else 1
    if any(byte in b" \t\n\r" for byte in token):
        return 5
    if any(byte in b"{[" for byte in token):
        return 4
    return {b"}": 0, b"]": 0, b",": 1, b":": 1, b'"': 2}.get(token, 3)


def decode(token_ids: list[int]) -> bytes:
    """The bytes of the tokens."""
    return b"".join(_token_bytes()[token_id] for token_id in token_ids)


class ExactValidator:
    """Validates texts by ``jsonschema``, with formats, and with numbers as they are written, not as doubles."""

    def __init__(self, schema: Any) -> None:
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        kind = validator_for(exact, jsonschema.Draft202012Validator)
        self._validator = kind(exact, format_checker=kind.FORMAT_CHECKER)

    def faults(self, text: str | bytes) -> list[str]:
        """What is wrong with the JSON text; empty if it fits the schema."""
        instance = json.loads(text, parse_float=_exact_number)
        with localcontext(prec=_MAX_DIGITS):
            return [error.message for error in self._validator.iter_errors(instance)]


def _exact_number(digits: str) -> Decimal | float:
    try:
        return Decimal(digits)
    except InvalidOperation:  # an exponent that is too large
        return float(digits)


@cache
def _tokenizer() -> LLTokenizer:
    demo = files("aioengine.models") / "demo"
    return LLTokenizer((demo / "tokenizer.json").read_text(), eos_token=sorted(eos_ids()))


@cache
def eos_ids() -> frozenset[int]:
    """The tokens that end an answer of the bundled model."""
    demo = files("aioengine.models") / "demo"
    return frozenset(json.loads((demo / "generation_config.json").read_text())["eos_token_id"])


@cache
def _token_bytes() -> list[bytes]:
    tokenizer = _tokenizer()
    return [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
