"""Constraints compiled by llguidance: grammars as Earley parsers over lexers of derivatives (Koppel et al.; github.com/
guidance-ai/llguidance), whose masks take microseconds."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import llguidance
import msgspec
import numpy as np

from aioengine.errors import LENIENT, AioEngineError, InvalidRequest
from aioengine.processes.threads import start_with_stack
from aioengine.structured.constraints import Choice, Constraint, Either, Grammar, Json, Regex, StructuralTags
from aioengine.structured.forced import MAX_FORCED_BYTES, longest_forced
from aioengine.structured.grammar import STACK_BYTES, TOO_LARGE, Mask
from aioengine.structured.json_schema import ends_in_backslash, unsound_keywords
from aioengine.structured.normalize import normalized
from aioengine.structured.trials import is_to_be_tried, try_compiling

WHITESPACE = r"(\x20|\x0A\x20{0,64})"
"""Whitespace between tokens of JSON, at most once: a model that may write any number of line breaks may never stop."""

LIMITS: dict[str, Any] = {
    "max_items_in_row": 5_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Limits of compiling (tens of ms) and of one mask (some ms). A lexer with all its states takes up to 20 MB. A row of
5,000 items, as for 1,250 optional properties, takes 10 ms; the library holds the GIL while it consumes a token."""

SIZE_PROBLEMS = re.compile(r"lexer error|[Tt]oo many|max is")
"""Matches the library's message for any of these limits."""

_CHAR = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHAR}{{1,{length}}}" for length in (2, 4, 6, 8, 12, 16, 24)), f"{_CHAR}+"]
"""Sets of tokens that the library admits at once where any such text may come. With its own slices, of 10 and 30
characters, a mask within a text that has a ``maxLength`` takes 180 µs in place of 30, with 129,000 tokens."""

ESCAPES = 'nrbtf\\"'
"""Escapes in JSON strings, without ``\\u``: a key written with that would pass for another one."""

NUM_SMALL = 16
"""Masks of up to so many rows are computed one after the other: handing them to threads takes as long."""

MIN_FORCED_BYTES = 8
"""Fewer forced bytes are sampled: finding the tokens of any number takes 10 µs under the GIL, as long as some masks."""

NOT_FORCING = '%llguidance {"no_forcing": true}\n'
"""The head of a grammar that may force long or endless text, which the library else searches for in each mask."""

ROWS_OF_LEXER = 32
"""Rows of a lexer, from which on the grammar is compiled again for the next: one thread at a time can use a lexer."""

MAX_LEXERS = min(os.cpu_count() or 1, 8)

MAX_AGAIN_S = 0.005
"""A grammar that took longer to compile has one lexer: more would be compiled in the rows' thread, which waits."""

MAX_RENEWAL_S = 0.1
"""A grammar that took longer gets no new lexer when its own is full, for the same reason; its rows fail."""

MAX_AT_ONCE_S = 0.02
"""A grammar that took longer is freed in a thread: freeing takes a fifth of the time, and up to 3 ms for its states."""

TOKENS_OF_FUEL = 128
"""The library limits the cost of a mask and the tokens after it; a mask is made between more tokens than this."""

NO_TOKEN = 2**32 - 1

MAX_SHOWN_CHARS = 500

NAMES_OF_LARK = re.compile(r'//.*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/|<[^<>\s\[]+>')
"""Comments, literals, regular expressions, and names of tokens."""

PASSED_OVER = re.compile(r"nimplemented|Unknown format|coerce_one_of")
"""Matches the library's messages about keywords that ``lenient`` ignores."""

GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.M)

MAX_RULES = 500
"""Most rules of a GBNF grammar: the converter takes half a second for these, and quadratic time for more."""

ESCAPE_OF_GBNF = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|.)")

LISTING = re.compile(r"^\s*\d+ \| .*", re.M | re.S)
"""The grammar's lines at the end of the library's message: most callers have not written them."""

POSITION = re.compile(r"^(at )?\d+\(\d+\): ")


class Vocabulary:
    """A tokenizer in llguidance's form, for which grammars are compiled.

    Args:
        tokenizer_json: as `tokenizers.Tokenizer.to_str` returns it.
        num_tokens: size of the model's vocabulary; its masks have a bit for each.
        ending_ids: tokens that end the output.
        try_first: called with each grammar that may take long to compile, as `try_compiling`.
    Raises:
        InvalidRequest: llguidance cannot read the tokenizer, or there is no ending token.
    """

    def __init__(
        self,
        tokenizer_json: str,
        num_tokens: int,
        ending_ids: Sequence[int],
        try_first: Callable[[str, int, dict[str, Any]], None] = try_compiling,
    ) -> None:
        self._try_first = try_first
        known = msgspec.json.decode(tokenizer_json)
        added = known.get("added_tokens") or []
        self.control_ids = {token["content"]: int(token["id"]) for token in added if _is_control(token)}
        num_known = max((int(token["id"]) + 1 for token in added), default=0)
        num_known = max(num_known, len(known.get("model", {}).get("vocab") or ()))
        endings = [token_id for token_id in ending_ids if token_id < max(num_tokens, num_known)]
        if not endings:
            raise InvalidRequest("structured: this model has no token that ends an output", param="structured")
        self.ending_ids = endings
        self.is_ending = frozenset(endings)
        self.text_id = next(token_id for token_id in itertools.count() if token_id not in endings)
        """Id of a token that does not end an output."""
        self.num_tokens = max(num_tokens, num_known)
        self.num_words = -(-self.num_tokens // 32)
        """Words of a mask; the model's masks are shorter if the tokenizer has more tokens."""
        try:
            self.tokenizer = llguidance.LLTokenizer(
                _with_hidden_names(known, self.control_ids), n_vocab=self.num_tokens, eos_token=endings, slices=SLICES
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
        began = time.thread_time()
        try:
            is_forcing = longest_forced(constraint) <= MAX_FORCED_BYTES
            is_one = is_forcing and not isinstance(constraint, Either)
            text = self._grammar_of(constraint) if is_one else self._one_of(constraint, is_forcing=is_forcing)
            if is_to_be_tried(constraint):
                self._try_first(text, self.num_tokens, LIMITS)
                began = time.thread_time()
            limits = llguidance.LLParserLimits(**LIMITS)
            begin = functools.partial(llguidance.LLMatcher, self.tokenizer, text, log_level=0, limits=limits)
            matcher = begin()
            problem = matcher.get_error()
        except AioEngineError:
            raise
        except BaseException as error:
            is_said = type(error).__name__ in ("Exception", "GbnfToLarkError")
            problem = str(error) if is_said else f"{type(error).__name__}: {error}"
        if problem:
            problem = LISTING.sub("", problem)
            if not isinstance(constraint, Grammar) or GBNF.search(constraint.text):
                problem = POSITION.sub("", problem)
            raise _refused(_shown(problem)).with_hint(LENIENT if PASSED_OVER.search(problem) else "")
        compile_s = time.thread_time() - began
        grammar = GuidanceGrammar(self, matcher, begin, compile_s, is_forcing=is_forcing)
        self._try(grammar)
        return grammar

    def _try(self, grammar: GuidanceGrammar) -> None:
        """Make the first two masks, which reveal grammars that no text fits and most of those beyond `LIMITS`.

        Raises:
            InvalidRequest: it is one of these.
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
        """The grammar in llguidance's form: Lark, or JSON around it."""
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
                _check_end(pattern)
                return llguidance.LLMatcher.grammar_from_regex(pattern)
            case Choice(options):
                return "start: " + " | ".join(map(_quoted, options))
            case Grammar(text) if GBNF.search(text):
                if text.count("::=") > MAX_RULES:
                    raise _refused(f"it has more than {MAX_RULES} rules")
                from llguidance.gbnf_to_lark import any_to_lark

                return any_to_lark(ESCAPE_OF_GBNF.sub(_unescaped, text))
            case Grammar(text):
                return NAMES_OF_LARK.sub(self._control_token, text)
            case StructuralTags():
                return self._tags(constraint)
        raise TypeError(f"{constraint!r} has no grammar of its own")

    def _one_of(self, constraint: Constraint, *, is_forcing: bool) -> str:
        """A grammar of alternatives, one for each option of the constraint."""
        options = constraint.options if isinstance(constraint, Either) else (constraint,)
        names = [f"option_{number}" for number in range(len(options))]
        rules = ("" if is_forcing else NOT_FORCING) + "start: " + " | ".join(f"@{name}" for name in names)
        inner = [self._named(name, option) for name, option in zip(names, options, strict=True)]
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": rules}, *inner]})

    def _control_token(self, found: re.Match[str]) -> str:
        """The id of a control token in the grammar's syntax; any other text unchanged."""
        token_id = self.control_ids.get(found[0])
        return found[0] if token_id is None else f"<[{token_id}]>"

    def _with_control_tokens(self, text: str) -> str:
        """A text in the grammar's syntax, with the control tokens in it by their ids."""
        names = "|".join(map(re.escape, sorted(self.control_ids, key=len, reverse=True)))
        pieces = re.split(f"({names})", text) if names else [text]
        ids = self.control_ids
        return " ".join(f"<[{ids[piece]}]>" if piece in ids else _quoted(piece) for piece in pieces if piece)

    def _named(self, name: str, constraint: Constraint) -> dict[str, Any]:
        """The constraint as one of several grammars."""
        text = self._grammar_of(constraint)
        if text.lstrip().startswith("{"):
            (grammar,) = json.loads(text)["grammars"]
            return {**grammar, "name": name}
        return {"name": name, "lark_grammar": text}

    def _tags(self, constraint: StructuralTags) -> str:
        names = [f"tag_{number}" for number in range(len(constraint.tags))]
        rules = ["%llguidance {}", f"start: ({' | '.join(names)})* TEXT", r"TEXT: /(.|\n)*/"]
        for name, tag in zip(names, constraint.tags, strict=True):
            trigger = min((one for one in constraint.triggers if tag.begin.startswith(one)), key=len)
            if trigger in self.control_ids:
                head = f"TEXT <[{self.control_ids[trigger]}]>"
            else:
                rules.append(f"{name}_head[lazy]: TEXT {_quoted(trigger)}")
                head = f"{name}_head"
            end = self._with_control_tokens(tag.end)
            if tag.pattern is None:
                body = f"{_inline_json(tag.schema)} {end}"
            else:
                _check_end(tag.pattern)
                rules.append(f"{name.upper()}: /{_slashed(tag.pattern)}/")
                body = f"{name.upper()} {end}"
                if end == _quoted(tag.end) != "":  # the first end is the end, though the pattern may go on with it
                    rules.append(f"{name}_body[lazy]: {body}")
                    body = f"{name}_body"
            parts = (head, self._with_control_tokens(tag.begin[len(trigger) :]), body)
            rules.append(f"{name}: {' '.join(filter(None, parts))}")
        return "\n".join(rules) + "\n"


def _is_control(token: dict[str, Any]) -> bool:
    """Whether the library keeps an added token out of texts: by its flag, or by the form of its name."""
    name = token["content"]
    return bool(token.get("special")) or (name.startswith("<") and name.endswith(">"))


def _with_hidden_names(known: dict[str, Any], control_ids: Mapping[str, int]) -> str:
    """A tokenizer.json whose control tokens have names that no text contains.

    The library tokenizes forced text, and would return a control token where the text contains its name.
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


class Lexer:
    """The lexer that some matchers of a grammar share. Masks of all of them add states to it.

    It accepts no token of any matcher once it has as many states as `LIMITS` admits, or once a mask reached a limit.

    Args:
        begun: llguidance's matcher at the beginning of the text, whose copies share the lexer.
        is_large: freeing it takes long.

    Attributes:
        matchers: the matchers that use it now.
    """

    def __init__(self, begun: Any, *, is_large: bool) -> None:
        self.begun = begun
        self._is_large = is_large
        self.matchers = weakref.WeakSet[GuidanceMatcher]()

    def __del__(self) -> None:
        # At the interpreter's exit no thread is waited for, and one inside the library would be a segmentation fault.
        if self._is_large and not sys.is_finalizing() and threading.main_thread().is_alive():
            with contextlib.suppress(RuntimeError):  # no thread can be started: then it is freed here
                name = "aioengine-grammar-end"
                threading.Thread(target=_free, args=(self.begun,), name=name, daemon=False).start()

    def limit(self, token_id: int) -> str:
        """Why it accepts no token any more; empty if it does.

        Args:
            token_id: any token that does not end the output, since those do not reach the lexer.
        """
        copy = self.begun.deep_copy()
        copy.consume_token(token_id)
        problem: str = copy.get_error()
        return problem if problem.startswith("lexer error") else ""


class GuidanceGrammar:
    """A `CompiledGrammar`.

    Args:
        begun: llguidance's matcher.
        begin: makes another matcher, with a lexer of its own, in about ``compile_s``.
        is_forcing: search for forced text; the constraint bounds its length.

    Attributes:
        is_spent: one of its lexers is full, and making another one takes too long.
    """

    def __init__(
        self, vocabulary: Vocabulary, begun: Any, begin: Callable[[], Any], compile_s: float, *, is_forcing: bool
    ) -> None:
        self.vocabulary = vocabulary
        self.is_forcing = is_forcing
        self.is_spent = False
        self._begin = begin
        self._compile_s = compile_s
        self._is_large = compile_s > MAX_AT_ONCE_S
        self._lexers = [Lexer(begun, is_large=self._is_large)]

    @property
    def num_lexers(self) -> int:
        return len(self._lexers)

    def matcher(self) -> GuidanceMatcher:
        self._lexers = [lexer for lexer in self._lexers if lexer.matchers] or self._lexers[:1]
        lexer = self._least_used()
        if len(lexer.matchers) >= ROWS_OF_LEXER and len(self._lexers) < MAX_LEXERS and self._compile_s < MAX_AGAIN_S:
            self._lexers.append(lexer := Lexer(self._begin(), is_large=False))
        return GuidanceMatcher(self, lexer)

    def replace(self, full: Lexer) -> tuple[Lexer, bool] | None:
        """A lexer in place of a full one, and whether it is unused so far; None if making one takes too long."""
        if full not in self._lexers:  # another matcher has had it replaced
            return self._least_used(), False
        if self._compile_s > MAX_RENEWAL_S:
            self.is_spent = True
            return None
        begun = self._begin() if self._compile_s < MAX_AGAIN_S else _with_deep_stack(self._begin)
        fresh = Lexer(begun, is_large=self._is_large)
        self._lexers[self._lexers.index(full)] = fresh
        return fresh, True

    def _least_used(self) -> Lexer:
        return min(self._lexers, key=lambda lexer: len(lexer.matchers))


class GuidanceMatcher:
    """A `Matcher`.

    Attributes:
        raw: llguidance's matcher.
        lexer: the lexer that ``raw`` uses.
    """

    def __init__(self, grammar: GuidanceGrammar, lexer: Lexer) -> None:
        self.raw = lexer.begun.deep_copy()
        self.lexer = lexer
        self.ending_ids = grammar.vocabulary.ending_ids
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._token_ids: list[int] = []
        """All tokens that it has consumed, except those that end the output."""
        self._is_over = False
        self._num_unmasked = 0
        """Tokens since the last mask."""
        self._num_at_fresh = -1
        """Token count when it got an unused lexer; -1 if its last new lexer was a used one, or it got none."""
        self._limit = ""
        """Why it cannot go on with any lexer; empty if it can."""
        lexer.matchers.add(self)

    @property
    def problem(self) -> str:
        if not (self._limit or self.raw.is_error()):
            return ""
        problem = _shown(self._limit or self.raw.get_error())
        return f"{TOO_LARGE}: {problem}" if SIZE_PROBLEMS.search(problem) else problem

    def consume(self, token_ids: Sequence[int]) -> None:
        if self._vocabulary.is_ending.isdisjoint(token_ids) and not self._is_over:
            self._consume(token_ids)
        else:
            for token_id in token_ids:
                if not self._is_end(token_id):
                    self._consume((token_id,))
        if self.raw.is_error():
            self.renew()

    def _consume(self, token_ids: Sequence[int]) -> None:
        for first in range(0, len(token_ids), TOKENS_OF_FUEL):
            piece = list(token_ids[first : first + TOKENS_OF_FUEL])
            self._take(piece)
            self.raw.consume_tokens(piece)

    def consume_all(self, matchers: Sequence[GuidanceMatcher], token_ids: Sequence[int]) -> None:
        if len(matchers) <= NUM_SMALL:
            for matcher, token_id in zip(matchers, token_ids, strict=True):
                matcher.consume((token_id,))
            return
        pairs = zip(matchers, token_ids, strict=True)
        taking = [(matcher, token_id) for matcher, token_id in pairs if not matcher._is_end(token_id)]
        taking.sort(key=lambda pair: id(pair[0].lexer))  # threads take neighbours, out of each other's locks
        for matcher, token_id in taking:
            matcher._take((token_id,))
        if taking:
            taken = _threads().consume_token_par([(matcher.raw, token_id) for matcher, token_id in taking])
            for (matcher, _), is_taken in zip(taking, taken, strict=True):
                if not is_taken:
                    matcher.renew()

    def _take(self, token_ids: Sequence[int]) -> None:
        """Record tokens, at most `TOKENS_OF_FUEL`, before llguidance's matcher consumes them; make a due mask."""
        self._num_unmasked += len(token_ids)
        if self._num_unmasked > TOKENS_OF_FUEL:
            self._fill(np.empty(self._vocabulary.num_words, np.int32))
            self._num_unmasked = len(token_ids)
        self._token_ids += token_ids

    def _is_end(self, token_id: int) -> bool:
        """Whether the output ends with this token, or has ended; llguidance must get no token then."""
        if token_id in self._vocabulary.is_ending and self.raw.is_accepting():
            self._is_over = True
        return self._is_over

    def renew(self) -> bool:
        while self.raw.is_error() and (limit := self.lexer.limit(self._vocabulary.text_id)):
            if self._num_at_fresh == len(self._token_ids) or (replaced := self._grammar.replace(self.lexer)) is None:
                self._limit = limit
                return False
            self.lexer.matchers.discard(self)
            self.lexer, is_fresh = replaced
            self.lexer.matchers.add(self)
            self._num_at_fresh = len(self._token_ids) if is_fresh else -1
            self.raw = self.lexer.begun.deep_copy()
            token_ids, self._token_ids, self._num_unmasked = self._token_ids, [], 0
            self._consume(token_ids)
            if not self.raw.is_error():
                return True
        return False

    @property
    def _is_stuck(self) -> bool:
        return bool(self._limit) or self.raw.is_error()

    def forced(self) -> list[int]:
        if self._is_over or self._is_stuck:
            return []
        if self.raw.is_stopped():
            return [self.ending_ids[0]]
        if not self._grammar.is_forcing or len(self.raw.compute_ff_bytes()) < MIN_FORCED_BYTES:
            return []
        forced: list[int] = self.raw.compute_ff_tokens()
        return forced

    def fill(self, mask: Mask) -> None:
        words = np.empty(self._vocabulary.num_words, np.int32) if self._vocabulary.num_words > len(mask) else mask
        self._fill(words)
        if words is not mask:
            mask[:] = words[: len(mask)]

    def _fill(self, words: Mask) -> None:
        if self._is_stuck:
            words.fill(0)
        else:
            self.raw.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._num_unmasked = 0

    def fill_all(self, matchers: Sequence[GuidanceMatcher], indices: Sequence[int], masks: Mask) -> None:
        if len(indices) <= NUM_SMALL or self._vocabulary.num_words > masks.shape[1]:
            for matcher, index in zip(matchers, indices, strict=True):
                matcher.fill(masks[index])
        else:
            pairs = sorted(zip(matchers, indices, strict=True), key=lambda pair: id(pair[0].lexer))
            rows: list[tuple[Any, int]] = []
            for matcher, index in pairs:
                matcher._num_unmasked = 0
                if matcher._is_stuck:
                    masks[index] = 0
                else:
                    rows.append((matcher.raw, index))
            if rows:
                _threads().unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks))


@functools.cache
def _threads() -> Any:
    return llguidance.LLExecutor(os.cpu_count())


def _free(begun: Any) -> None:
    """Free the state that a matcher and its copies share without the GIL, since a large grammar takes 0.1 s.

    A token that does not exist ends a matcher, and the library ends two of them without the GIL.
    """
    llguidance.LLExecutor(1).consume_token_par([(begun, NO_TOKEN), (begun.deep_copy(), NO_TOKEN)])


def _with_deep_stack(function: Callable[[], Any]) -> Any:
    """Call a function in a thread with a stack of `STACK_BYTES`, and return its result."""
    outcome: Future[Any] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # a panic of the library's is no Exception
            outcome.set_exception(error)

    start_with_stack(threading.Thread(target=call, name="aioengine-grammar"), STACK_BYTES)
    return outcome.result()


def _inline_json(schema: Any) -> str:
    """A rule for the JSON of a schema inside a Lark grammar."""
    schema = normalized(schema)
    if unsound := unsound_keywords(schema):
        raise _refused("; ".join(unsound))
    options = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"structured: it cannot be enforced: {why}", param="structured")


def _check_end(pattern: str) -> None:
    if ends_in_backslash(pattern):
        raise _refused("the expression ends in a backslash")


def _unescaped(found: re.Match[str]) -> str:
    """An escape of GBNF in a form that the library's converter reads right; it reads ``\\u`` wrong."""
    digits = found[1] or found[2]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000:
        raise _refused(f"{found[0]} is half of a surrogate pair")
    return f"\\x{code:02x}" if code < 128 else chr(code)  # an ASCII character may be a sign where it stands


def _quoted(text: str) -> str:
    """A text as a Lark literal; empty for no text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def _slashed(pattern: str) -> str:
    """The pattern with a backslash before each slash that has none."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.S)


def _shown(problem: str) -> str:
    """The library's message on one line, without its parser's state."""
    text = " ".join(problem.split("<state>")[0].replace("<non-verbose/>", "").split())
    text = "no text fits it" if text.startswith("NoExtension") else text
    text = "oneOf: its options cannot be told apart; anyOf admits them" if "coerce_one_of" in text else text
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
