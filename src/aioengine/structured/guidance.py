"""Constraints compiled by llguidance: grammars as Earley parsers over lexers of derivatives (Koppel et al.; github.com/
guidance-ai/llguidance), whose masks take microseconds."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance
import msgspec
import numpy as np

from aioengine.errors import InvalidRequest
from aioengine.structured.constraints import Choice, Constraint, Either, Grammar, Json, Regex, StructuralTags
from aioengine.structured.grammar import Mask
from aioengine.structured.json_schema import MAX_PATTERNS, unsound_keywords
from aioengine.structured.normalize import normalized

WHITESPACE = r"(\x20|\x0A\x20{0,64})"
"""Between tokens of JSON, at most once: a model that may write any number of line breaks may never stop."""

LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Of compiling (tens of ms) and of one mask (some ms); a lexer's state takes 1 to 2 kB."""

ESCAPES = 'nrbtf\\"'
"""Of texts of JSON, without ``\\u``: a key that is written otherwise would pass for another one."""

NUM_SMALL = 16
"""Masks of so many rows are computed one after the other: handing them to threads takes as long."""

MIN_FORCED_BYTES = 8
"""Fewer are sampled: finding the tokens of any number of bytes takes 10 µs under the GIL, as long as some masks."""

MAX_FORCING_BYTES = 32 * 1024
"""Of a longer constraint nothing is forced: looking for it may take as long as a mask, some ms, and under the GIL."""

ROWS_OF_LEXER = 32
"""A grammar that so many rows have begun is compiled once more: a lexer's lock lets one thread at a time use it."""

MAX_LEXERS = min(os.cpu_count() or 1, 8)

MAX_AGAIN_S = 0.005
"""A grammar that took longer is not compiled again: it is done where the rows are, not beside them."""

MAX_SHOWN_CHARS = 500

TEXTS_OF_LARK = re.compile(r'//.*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/')
"""Comments, literals and regular expressions."""

NAMES_OF_LARK = re.compile(TEXTS_OF_LARK.pattern + r"|<[^<>\s\[]+>")
"""These, and names of tokens."""

LENIENT = 'Json(schema, lenient=True), or over HTTP a response_format with "strict": false, passes it over'
LENIENTLY = re.compile(r"nimplemented|Unknown format|coerce_one_of")
"""In what the library says of what it may pass over."""

GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.M)


class Vocabulary:
    """A tokenizer as llguidance knows it: what grammars are compiled for.

    Args:
        tokenizer_json: as `tokenizers.Tokenizer.to_str` gives it.
        num_tokens: the model's; its masks have a bit for each.
        ending_ids: tokens that end the output.
    Raises:
        InvalidRequest: llguidance cannot read the tokenizer, or there is no ending token.
    """

    def __init__(self, tokenizer_json: str, num_tokens: int, ending_ids: Sequence[int]) -> None:
        known = msgspec.json.decode(tokenizer_json)
        added = known.get("added_tokens") or []
        self.control_ids = {token["content"]: int(token["id"]) for token in added if _is_control(token)}
        num_known = max((int(token["id"]) + 1 for token in added), default=0)
        num_known = max(num_known, len(known.get("model", {}).get("vocab") or ()))
        endings = [token_id for token_id in ending_ids if token_id < max(num_tokens, num_known)]
        if not endings:
            raise InvalidRequest("structured: this model has no token that ends an output", param="structured")
        self.ending_ids = endings
        self.num_words = -(-max(num_tokens, num_known) // 32)
        """Of a mask; the model's are cut where the tokenizer has more tokens."""
        try:
            self.tokenizer = llguidance.LLTokenizer(
                _unspoken(known, self.control_ids), n_vocab=max(num_tokens, num_known), eos_token=endings
            )
        except BaseException as error:  # a panic of the library's is no Exception
            raise InvalidRequest(
                f"structured: this model's tokenizer cannot be used for it: {str(error)[:MAX_SHOWN_CHARS]}",
                param="structured",
            ) from None

    def compile(self, constraint: Constraint) -> GuidanceGrammar:
        """Compile a constraint; not on the loop. Most of it runs without the GIL.

        Raises:
            InvalidRequest: it cannot be enforced, or takes more than `LIMITS` to do so.
        """
        began = time.perf_counter()
        try:
            text = self._grammar_of(constraint)
            limits = llguidance.LLParserLimits(**LIMITS)
            begin = functools.partial(llguidance.LLMatcher, self.tokenizer, text, log_level=0, limits=limits)
            matcher = begin()
            problem = matcher.get_error()
        except InvalidRequest:
            raise
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise _refused(_shown(problem) + ("; " + LENIENT if LENIENTLY.search(problem) else ""))
        is_quick = time.perf_counter() - began < MAX_AGAIN_S
        is_forcing = len(constraint.content) <= MAX_FORCING_BYTES
        grammar = GuidanceGrammar(self, matcher, begin if is_quick else None, is_forcing=is_forcing)
        self._try(grammar)
        return grammar

    def _try(self, grammar: GuidanceGrammar) -> None:
        """Make the first masks: what no text fits, and most of what takes more than `LIMITS`, shows there.

        Raises:
            InvalidRequest: it does.
        """
        matcher = grammar.matcher()
        mask = np.zeros(self.num_words, np.int32)
        for _ in range(2):
            matcher.fill(mask)
            if matcher.problem:
                raise _refused(matcher.problem)
            if not mask.any():
                raise _refused("no text fits it")
            first = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
            matcher.consume([first])

    def _grammar_of(self, constraint: Constraint) -> str:
        """What llguidance takes: Lark, or JSON around it."""
        match constraint:
            case Json(schema, has_whitespace, is_lenient):
                spacing = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
                if not has_whitespace:
                    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
                schema = normalized(schema)
                if not is_lenient and (unsound := unsound_keywords(schema)):
                    raise _refused("; ".join(unsound))
                options: Any = {**spacing, "lenient": is_lenient, "json_allowed_escapes": ESCAPES}
                return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
            case Regex(pattern):
                return llguidance.LLMatcher.grammar_from_regex(pattern)
            case Choice(options):
                return "start: " + " | ".join(map(_quoted, options))
            case Grammar(text) if len(re.findall("[&~]", TEXTS_OF_LARK.sub("", text))) > MAX_PATTERNS:
                raise _refused(f"more than {MAX_PATTERNS} of & and ~: through all they have in common is looked")
            case Grammar(text) if GBNF.search(text):
                from llguidance.gbnf_to_lark import any_to_lark

                return any_to_lark(text)
            case Grammar(text):
                return NAMES_OF_LARK.sub(self._by_id, text)
            case StructuralTags():
                return self._tags(constraint)
            case Either(options):
                names = [f"option_{number}" for number in range(len(options))]
                rules = "start: " + " | ".join(f"@{name}" for name in names)
                inner = [self._named(name, option) for name, option in zip(names, options, strict=True)]
                return json.dumps({"grammars": [{"name": "either", "lark_grammar": rules}, *inner]})

    def _by_id(self, found: re.Match[str]) -> str:
        """A control token of a grammar by its id; anything else as it is."""
        token_id = self.control_ids.get(found[0])
        return found[0] if token_id is None else f"<[{token_id}]>"

    def _spelled(self, text: str) -> str:
        """A text as the model writes it: control tokens in it by their ids."""
        names = "|".join(map(re.escape, sorted(self.control_ids, key=len, reverse=True)))
        pieces = re.split(f"({names})", text) if names else [text]
        ids = self.control_ids
        return " ".join(f"<[{ids[piece]}]>" if piece in ids else _quoted(piece) for piece in pieces if piece)

    def _named(self, name: str, constraint: Constraint) -> dict[str, Any]:
        """As one of several grammars."""
        text = self._grammar_of(constraint)
        if text.lstrip().startswith("{"):
            (grammar,) = json.loads(text)["grammars"]
            return {**grammar, "name": name}
        return {"name": name, "lark_grammar": text}

    def _tags(self, constraint: StructuralTags) -> str:
        names = [f"tag_{number}" for number in range(len(constraint.tags))]
        rules = ["%llguidance {}", f"start: ({' | '.join(names)})* TEXT", r"TEXT: /(.|\n)*/"]
        for name, tag in zip(names, constraint.tags, strict=True):
            trigger = max((one for one in constraint.triggers if tag.begin.startswith(one)), key=len)
            if trigger in self.control_ids:
                head = f"TEXT <[{self.control_ids[trigger]}]>"
            else:
                rules.append(f"{name}_head[lazy]: TEXT {_quoted(trigger)}")
                head = f"{name}_head"
            body = f"/{_slashed(tag.pattern)}/" if tag.pattern is not None else _inline_json(tag.schema)
            parts = (head, self._spelled(tag.begin[len(trigger) :]), body, self._spelled(tag.end))
            rules.append(f"{name}: {' '.join(filter(None, parts))}")
        return "\n".join(rules) + "\n"


def _is_control(token: dict[str, Any]) -> bool:
    """Whether the library keeps an added token out of texts: by its flag, or by the form of its name."""
    name = token["content"]
    return bool(token.get("special")) or (name.startswith("<") and name.endswith(">"))


def _unspoken(known: dict[str, Any], control_ids: Mapping[str, int]) -> str:
    """A tokenizer.json whose control tokens have names that no text has.

    The library makes tokens of forced text, and would take a control token where the text has its name.
    """
    mark = secrets.token_hex(8)
    names = {name: f"<{mark} {token_id}>" for name, token_id in control_ids.items()}

    def renamed(name: Any) -> Any:
        return names.get(name, name)

    model = known.get("model") or {}
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {renamed(name): token_id for name, token_id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[renamed(name), score] for name, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = renamed(model["unk_token"])
    for token in known.get("added_tokens") or []:
        token["content"] = renamed(token["content"])
    return msgspec.json.encode(known).decode()


class GuidanceGrammar:
    """A `CompiledGrammar`; its matchers are copies of a few, each of which share a lexer and what it has found out.

    Args:
        begun: llguidance's matcher.
        begin: makes another one, with a lexer of its own; None: it takes too long.
        is_forcing: what follows without a choice is looked for.
    """

    def __init__(
        self, vocabulary: Vocabulary, begun: Any, begin: Callable[[], Any] | None, *, is_forcing: bool
    ) -> None:
        self.vocabulary = vocabulary
        self.is_forcing = is_forcing
        self._begun = [begun]
        self._begin = begin
        self._num_matchers = 0

    def matcher(self) -> GuidanceMatcher:
        number, self._num_matchers = self._num_matchers, self._num_matchers + 1
        if number >= ROWS_OF_LEXER * len(self._begun) and len(self._begun) < MAX_LEXERS and self._begin is not None:
            self._begun.append(self._begin())
        lexer = number % len(self._begun)
        return GuidanceMatcher(self, self._begun[lexer].deep_copy(), lexer)


class GuidanceMatcher:
    """A `Matcher`.

    Attributes:
        raw: llguidance's.
        lexer: which one of its grammar's it uses.
    """

    def __init__(self, grammar: GuidanceGrammar, raw: Any, lexer: int) -> None:
        self.raw = raw
        self.lexer = lexer
        self.ending_ids = grammar.vocabulary.ending_ids
        self._vocabulary = grammar.vocabulary
        self._is_forcing = grammar.is_forcing
        self._is_over = False

    @property
    def problem(self) -> str:
        return _shown(self.raw.get_error()) if self.raw.is_error() else ""

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self._is_end(token_id):
                self.raw.consume_token(token_id)

    def consume_all(self, matchers: Sequence[GuidanceMatcher], token_ids: Sequence[int]) -> None:
        pairs = zip(matchers, token_ids, strict=True)
        raw = [(matcher.lexer, matcher.raw, token_id) for matcher, token_id in pairs if not matcher._is_end(token_id)]
        if len(raw) <= NUM_SMALL:
            for _, matcher, token_id in raw:
                matcher.consume_token(token_id)
        else:
            raw.sort(key=_by_lexer)
            _threads().consume_token_par([one[1:] for one in raw])

    def _is_end(self, token_id: int) -> bool:
        """Whether the output ends with this token, or has ended; llguidance takes no token then."""
        if token_id in self.ending_ids and self.raw.is_accepting():
            self._is_over = True
        return self._is_over

    def forced(self) -> list[int]:
        if self._is_over or self.raw.is_error():
            return []
        if self.raw.is_stopped():
            return [self.ending_ids[0]]
        forced: list[int] = []
        if self._is_forcing and len(self.raw.compute_ff_bytes()) >= MIN_FORCED_BYTES:
            forced = self.raw.compute_ff_tokens()
        return forced

    def fill(self, mask: Mask) -> None:
        words = np.empty(self._vocabulary.num_words, np.int32) if self._vocabulary.num_words > len(mask) else mask
        self.raw.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if words is not mask:
            mask[:] = words[: len(mask)]

    def fill_all(self, matchers: Sequence[GuidanceMatcher], indices: Sequence[int], masks: Mask) -> None:
        if len(indices) <= NUM_SMALL or self._vocabulary.num_words > masks.shape[1]:
            for matcher, index in zip(matchers, indices, strict=True):
                matcher.fill(masks[index])
        else:
            pairs = zip(matchers, indices, strict=True)
            raw = sorted(((matcher.lexer, matcher.raw, index) for matcher, index in pairs), key=_by_lexer)
            rows = [one[1:] for one in raw]
            _threads().unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks))


_by_lexer = operator.itemgetter(0)
"""Threads take neighbours, and so keep out of each other's locks."""


@functools.cache
def _threads() -> Any:
    return llguidance.LLExecutor(os.cpu_count())


def _inline_json(schema: Any) -> str:
    """JSON of a schema inside a grammar of Lark's."""
    schema = normalized(schema)
    if unsound := unsound_keywords(schema):
        raise _refused("; ".join(unsound))
    options = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"structured: it cannot be enforced: {why}", param="structured")


def _quoted(text: str) -> str:
    """As a literal of Lark's; empty for no text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def _slashed(pattern: str) -> str:
    return pattern.replace("/", r"\/")


def _shown(problem: str) -> str:
    """The library's message on one line, without its parser's state."""
    text = " ".join(problem.split("<state>")[0].replace("<non-verbose/>", "").split())
    text = "no text fits it" if text.startswith("NoExtension") else text
    text = "oneOf: its options cannot be told apart; anyOf admits them" if "coerce_one_of" in text else text
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
