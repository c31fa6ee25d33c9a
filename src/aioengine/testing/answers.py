"""The texts and errors that a `FakeExecutor` answers with, in place of hashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aioengine.errors import ConfigError
from aioengine.scheduler.plan import RowAdded
from aioengine.text.tokenizer import Tokenizer

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

    def next_token(self, added: RowAdded, output: list[int]) -> int:
        """Return the token after ``output``; EOS after the whole answer.

        Raises:
            the answer's error, where that comes next.
        """
        prompt_ids = added.token_ids[: added.num_prompt_tokens]
        key = added.sampling.seed, prompt_ids.tobytes()
        answers = self._begun.setdefault(key, [])
        if not output and (not answers or key in self._gone_on):
            self._gone_on.discard(key)
            answers.append(self._begin(prompt_ids.tolist()))
        fitting = (each for each in reversed(answers) if each[1][: len(output)] == output[: len(each[1])])
        text, token_ids, error = next(fitting, answers[-1])
        if output != token_ids[: len(output)]:  # a grammar has forced other tokens of the same text
            written = self._tokenizer.decode(output)
            rest = text[len(written) :] if text.startswith(written) else ""
            token_ids = [*output, *self._tokenizer.encode(rest, add_special_tokens=False)]
        if output or not token_ids:
            self._gone_on.add(key)
        if len(output) < len(token_ids):
            return token_ids[len(output)]
        if error is not None:
            raise error
        return self._eos_token_id

    def _begin(self, prompt_ids: list[int]) -> tuple[str, list[int], Exception | None]:
        if callable(self._given):
            answer = self._given(self._tokenizer.decode(prompt_ids))
        else:
            answer = self._given[min(self._num_begun, len(self._given) - 1)]
        if not _is_answer(answer):
            raise ConfigError(f"answers gave {answer!r}: a text, an error, or a text and an error is needed")
        self._num_begun += 1
        pair = answer if isinstance(answer, tuple) else (answer, None) if isinstance(answer, str) else ("", answer)
        text, error = pair
        return text, self._tokenizer.encode(text, add_special_tokens=False), error


def _is_answer(given: object) -> bool:
    if isinstance(given, tuple):
        return len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], Exception)
    return isinstance(given, str | Exception)
