"""One JSON value in a text that arrives in pieces."""

from __future__ import annotations

import re
from typing import Final

MAX_DEPTH = 256
"""Of arrays and objects inside each other; what is deeper is no JSON here. Python's own reader has a limit, too."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}

# What may come next.
_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _COLON, _COMMA = range(6)

# A number: state -> the next one by a character's class. Those of _NUMBER_ENDS are whole numbers.
_NUMBER: Final = {
    "-": {"0": "0", "1": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1": "1", ".": ".", "e": "e"},
    ".": {"0": ".0", "1": ".0"},
    ".0": {"0": ".0", "1": ".0", "e": "e"},
    "e": {"0": "e0", "1": "e0", "+": "e+", "-": "e+"},
    "e+": {"0": "e0", "1": "e0"},
    "e0": {"0": "e0", "1": "e0"},
}
_NUMBER_ENDS = frozenset(("0", "1", ".0", "e0"))
_CLASS_OF = {"0": "0", **dict.fromkeys("123456789", "1"), ".": ".", "e": "e", "E": "e", "+": "+", "-": "-"}


class JsonScanner:
    """Finds where a JSON value ends, by the grammar of RFC 8259, each character looked at once.

    Attributes:
        is_done: the value has ended.
        is_wrong: the character at the place where the last scan ended makes it no JSON.
    """

    __slots__ = ("_closers", "_escape", "_is_in_string", "_is_key", "_next", "_number", "_word", "is_done", "is_wrong")

    def __init__(self) -> None:
        self.is_done = self.is_wrong = False
        self._closers: list[str] = []
        self._next = _VALUE
        self._is_in_string = self._is_key = False
        self._escape = 0  # -1: after a backslash; above 0: so many hex digits are to come
        self._number = ""
        self._word = ""

    def scan(self, text: str, at: int = 0) -> int:
        """Take ``text`` from ``at`` on; returns how far it belongs to the value.

        A number has ended when a character comes that is not its own, so that one at the end of a text never is.
        """
        while at < len(text) and not (self.is_done or self.is_wrong):
            at = self._scan_string(text, at) if self._is_in_string else at + self._take(text[at])
        return at

    def _scan_string(self, text: str, at: int) -> int:
        if not self._escape:
            found = _PLAIN.match(text, at)
            at = found.end() if found else at
            if at == len(text):
                return at
        char = text[at]
        if self._escape < 0:
            self._escape = 4 if char == "u" else 0
            self.is_wrong = char not in 'u"\\/bfnrt'
        elif self._escape > 0:
            self._escape -= 1
            self.is_wrong = char not in _HEX
        elif char == "\\":
            self._escape = -1
        elif char == '"':
            self._is_in_string = False
            self._end(_COLON if self._is_key else _COMMA)
        else:
            self.is_wrong = True
        return at + (not self.is_wrong)

    def _take(self, char: str) -> bool:
        """Whether the character, which is in no string, belongs to the value."""
        if self._number:
            state = _NUMBER[self._number].get(_CLASS_OF.get(char, ""))
            if state is not None:
                self._number = state
                return True
            if self._number not in _NUMBER_ENDS:
                self.is_wrong = True
                return False
            self._number = ""
            self._end(_COMMA)
            return not self.is_done and self._take(char)
        if self._word:
            self.is_wrong = char != self._word[0]
            self._word = self._word[1:]
            if not self._word and not self.is_wrong:
                self._end(_COMMA)
            return not self.is_wrong
        return char in " \t\n\r" or self._take_structure(char)

    def _take_structure(self, char: str) -> bool:
        wants_value = self._next in (_VALUE, _FIRST_VALUE)
        if char == '"' and self._next not in (_COLON, _COMMA):
            self._is_in_string, self._is_key = True, not wants_value
        elif wants_value and char in "{[" and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._next = _FIRST_KEY if char == "{" else _FIRST_VALUE
        elif self._closers and char == self._closers[-1] and self._next in (_FIRST_VALUE, _FIRST_KEY, _COMMA):
            self._closers.pop()
            self._end(_COMMA)
        elif self._closers and char == "," and self._next == _COMMA:
            self._next = _KEY if self._closers[-1] == "}" else _VALUE
        elif char == ":" and self._next == _COLON:
            self._next = _VALUE
        elif wants_value and char in _WORDS:
            self._word = _WORDS[char]
        elif wants_value and (number := _CLASS_OF.get(char)) in ("0", "1", "-"):
            self._number = str(number)
        else:
            self.is_wrong = True
        return not self.is_wrong

    def _end(self, following: int) -> None:
        """A string, number, word, array or object has ended."""
        self._next = following
        self.is_done = not self._closers


def is_json(text: str) -> bool:
    """Whether a whole text is one JSON value, white space around it aside."""
    scanner = JsonScanner()
    end = scanner.scan(text + " ")
    return scanner.is_done and not text[end:].strip(" \t\n\r")
