"""The texts and errors that a `FakeExecutor` answers with, in place of hashes."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence

from aioengine.errors import ConfigError
from aioengine.scheduler.plan import RowAdded
from aioengine.structured.grammar import CompiledGrammar
from aioengine.text.tokenizer import Tokenizer

MAX_TOKEN_CHARS = 32
"""The longest token that is looked for where a constraint does not admit the answer's own."""

Answer = str | Exception | tuple[str, Exception]
"""A text, with tool calls and reasoning as the model writes them; an error; or a text that an error cuts."""


class Answers:
    """Give each request its answer, token by token.

    A request is known by its prompt and its seed, so that one that is preempted goes on with its answer.

    Args:
        given: one for each request, in the order in which they begin, the last one for all further ones; or a function
            from the prompt's text to the request's.
    """

    def __init__(self, given: Sequence[Answer] | Callable[[str], Answer]) -> None:
        if not callable(given) and not (isinstance(given, list | tuple) and given and all(map(_is_answer, given))):
            raise ConfigError("answers: a list of texts or errors is needed, or a function from a prompt to one")
        self._given = given
        self._num_begun = 0
        self._begun: dict[tuple[int, bytes], list[tuple[str, list[int], Exception | None]]] = {}
        self._gone_on: set[tuple[int, bytes]] = set()
        """Keys whose last answer has come past its first token, or is empty."""
        self._tokenizer: Tokenizer
        self._eos_token_id = 0

    def use(self, tokenizer: Tokenizer | None, eos_token_id: int | None) -> None:
        if tokenizer is None or eos_token_id is None:
            raise ConfigError("answers need a model with a tokenizer and an EOS")
        self._tokenizer, self._eos_token_id = tokenizer, eos_token_id

    def next_token(
        self, added: RowAdded, grammar: CompiledGrammar | None, output: list[int], allowed: Container[int] | None
    ) -> int:
        """Return the token after ``output``; EOS after the whole answer.

        Args:
            grammar: the row's; None: it has none.
            allowed: the tokens that the request's constraint admits next; None: it has none.
        Raises:
            the answer's error, where that comes next.
            ValueError: the constraint admits no token of the answer, nor its end.
        """
        prompt_ids = added.token_ids[: added.num_prompt_tokens]
        key = added.sampling.seed, prompt_ids.tobytes()
        answers = self._begun.setdefault(key, [])
        if not output and (not answers or key in self._gone_on):
            self._gone_on.discard(key)
            answers.append(self._begin(prompt_ids.tolist(), grammar))
        fitting = (each for each in reversed(answers) if each[1][: len(output)] == output[: len(each[1])])
        text, token_ids, error = next(fitting, answers[-1])
        if output != token_ids[: len(output)]:  # a grammar has forced other tokens of the same text
            token_ids = [*output, *self._encode(self._rest(text, output))]
        if output or not token_ids:
            self._gone_on.add(key)
        if error is not None and len(output) >= len(token_ids):
            raise error
        token_id = (*token_ids, self._eos_token_id)[len(output)]
        return token_id if allowed is None else self._allowed(token_id, text, output, allowed)

    def _allowed(self, token_id: int, text: str, output: list[int], allowed: Container[int]) -> int:
        """Return a token of the answer's rest, the longest that is allowed; or EOS, where the constraint may end."""
        rest = self._rest(text, output)
        shorter = (self._encode(rest[:end])[0] for end in range(min(len(rest), MAX_TOKEN_CHARS), 0, -1))
        for one in (token_id, *shorter, self._eos_token_id):
            if one in allowed:
                return one
        written = self._tokenizer.decode(output)
        raise ValueError(f"answers: the request's constraint does not admit {text!r}, by what follows {written!r}")

    def _rest(self, text: str, output: list[int]) -> str:
        written = self._tokenizer.decode(output)
        return text[len(written) :] if text.startswith(written) else ""

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _begin(self, prompt_ids: list[int], grammar: CompiledGrammar | None) -> tuple[str, list[int], Exception | None]:
        if callable(self._given):
            answer = self._given(self._tokenizer.decode(prompt_ids))
        else:
            answer = self._given[min(self._num_begun, len(self._given) - 1)]
        if not _is_answer(answer):
            raise ConfigError(f"answers gave {answer!r}: a text, an error, or a text and an error is needed")
        self._num_begun += 1
        pair = answer if isinstance(answer, tuple) else (answer, None) if isinstance(answer, str) else ("", answer)
        text, error = pair
        if grammar is not None:
            text = self._respelt(text, grammar)
        return text, self._encode(text), error

    def _respelt(self, text: str, grammar: CompiledGrammar) -> str:
        """JSON that a constraint does not admit for its spaces alone, as the constraint spells them."""
        matcher = grammar.matcher()
        matcher.consume(self._encode(text))
        try:
            return json.dumps(json.loads(text), ensure_ascii=False) if matcher.problem else text
        except ValueError:
            return text


def _is_answer(given: object) -> bool:
    if isinstance(given, tuple):
        return len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], Exception)
    return isinstance(given, str | Exception)
