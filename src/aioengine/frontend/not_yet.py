"""Methods of vLLM's that this engine has not: each raises a clear error in place of an AttributeError."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from aioengine.errors import InvalidRequest


def not_yet(
    name: str, why: str = "this engine generates text, and has no embeddings, scores or classes yet"
) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        """Not there yet."""
        raise InvalidRequest(f"{name} is not there yet: {why}")

    return refuse


class NotYet:
    """A base of `Engine`, and of `LLM` and `LLMEngine`."""

    embed, encode, score, classify, reward = map(not_yet, ("embed", "encode", "score", "classify", "reward"))
    beam_search = not_yet("beam_search", "n gives several choices, each drawn, with its cumulative_logprob")
