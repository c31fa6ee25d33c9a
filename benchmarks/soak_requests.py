"""The requests of a soak's clients, of every kind that there is, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

VOCAB_SIZE = 2048
FIRST_WORD_ID = 10
"""Special tokens come before."""
MAX_MODEL_LEN = 512

Way = Literal["generate", "stream", "unread", "finish", "stalled", "left", "broken"]
WAYS: tuple[Way, ...] = (
    "generate",  # the whole result
    "stream",  # delta by delta
    "unread",  # nothing is read for a while, then everything
    "finish",  # some deltas, then the whole result
    "stalled",  # with max_unread_tokens: read, stop reading, go on
    "left",  # the block is left by `return`
    "broken",  # the block is left by an exception
)

WORDS = (
    "Once upon a time", " there was", " a fox", " an owl", " and", " the old tree", " lived happily", ". ", " What is",
    " three plus four", "?", " Tell me", " about", " the moon", "\n", " 日本", " é", " 🙂",
)  # fmt: skip

Draw = Callable[[random.Random], Any]


def favour_even_ids(logits: Any, rows: Any) -> None:
    """A logits processor."""
    logits[:, ::2] += 2.0


def break_down(logits: Any, rows: Any) -> None:
    """A logits processor with a bug: its request fails alone."""
    raise ArithmeticError("a processor's own bug")


def some_ids(count: int) -> Draw:
    return lambda rng: [rng.randrange(FIRST_WORD_ID, VOCAB_SIZE) for _ in range(count)]


KNOBS: dict[str, tuple[float, Draw]] = {
    "temperature": (0.7, lambda rng: rng.choice([0.0, 0.0, 0.3, 1.0, 1.7])),
    "top_p": (0.2, lambda rng: rng.uniform(0.1, 1.0)),
    "top_k": (0.2, lambda rng: rng.choice([-1, 1, 5, 50, VOCAB_SIZE])),
    "min_p": (0.1, lambda rng: rng.uniform(0.0, 0.3)),
    "min_tokens": (0.1, lambda rng: rng.randrange(6)),
    "ignore_eos": (0.2, lambda rng: True),
    "stop": (0.15, lambda rng: rng.sample([".", " a", "he", "zq", "\n", " the"], k=rng.randint(1, 3))),
    "stop_token_ids": (0.1, some_ids(60)),
    "n": (0.12, lambda rng: rng.randint(2, 4)),
    "presence_penalty": (0.08, lambda rng: rng.uniform(-2.0, 2.0)),
    "frequency_penalty": (0.08, lambda rng: rng.uniform(-2.0, 2.0)),
    "repetition_penalty": (0.08, lambda rng: rng.uniform(0.8, 1.5)),
    "logit_bias": (0.08, lambda rng: dict.fromkeys(some_ids(5)(rng), rng.uniform(-20.0, 20.0))),
    "allowed_token_ids": (0.06, some_ids(80)),
    "bad_words": (0.06, lambda rng: rng.sample(["fox", "the", "lived happily", "tree"], k=2)),
    "logits_processors": (0.03, lambda rng: [favour_even_ids]),
    "logprobs": (0.1, lambda rng: rng.randrange(6)),
    "logprob_token_ids": (0.05, some_ids(3)),
    "prompt_logprobs": (0.05, lambda rng: rng.randrange(4)),
    "detokenize": (0.05, lambda rng: False),
    "skip_special_tokens": (0.1, lambda rng: False),
    "include_stop_str_in_output": (0.1, lambda rng: True),
}
"""Field of `SamplingParams` → how often a request sets it, and to what."""

MAX_TOKENS = (1, 2, 4, 6, 8, 8, 12, 12, 16, 24, 40, 60)

BAD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": [5] * MAX_MODEL_LEN}),
    ("prompt", {"prompt": "moon " * 5 * MAX_MODEL_LEN}),
    ("prompt", {"prompt": [VOCAB_SIZE]}),
    ("prompt", {"prompt": [-1]}),
    ("top_p", {"top_p": 7.0}),
    ("temperature", {"temperature": float("nan")}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("max_tokens", {"max_tokens": 0}),
    ("logprobs", {"logprobs": 21}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
    ("priority", {"priority": 0.5}),
    ("on_full", {"on_full": "hope"}),
    ("cache_salt", {"cache_salt": ""}),
)
"""(field that the refusal names, what is wrong)."""


def draw_sampling(rng: random.Random) -> dict[str, Any]:
    """Keywords of `generate` that decide, with the prompt, which tokens come."""
    sampling: dict[str, Any] = {"max_tokens": rng.choice(MAX_TOKENS), "seed": rng.randrange(2**31)}
    sampling |= {name: draw(rng) for name, (share, draw) in KNOBS.items() if rng.random() < share}
    sampling["min_tokens"] = min(sampling.get("min_tokens", 0), sampling["max_tokens"])
    if not sampling.get("detokenize", True):
        sampling.pop("stop", None)
    return sampling


def draw_prompt(rng: random.Random, heads: list[list[int]]) -> Any:
    """A prompt of 1 to about 400 tokens; many of ids begin like others."""
    kind = rng.choice(["ids", "ids", "shared", "shared", "shared", "text", "chat", "long"])
    if kind == "text":
        return "".join(rng.choices(WORDS, k=rng.randint(1, 20)))
    if kind == "chat":
        return [{"role": "user", "content": "".join(rng.choices(WORDS, k=rng.randint(1, 8)))}]
    if kind == "long":
        if rng.random() < 0.5:
            return "".join(rng.choices(WORDS[:10], k=rng.randint(60, 120)))
        return some_ids(rng.randint(100, 400))(rng)
    if kind == "shared":
        head = rng.choice(heads)
        return head[: rng.randint(1, len(head))] + some_ids(rng.randint(0, 12))(rng)
    return some_ids(rng.choice([1, 2, 15, 16, 17, 40, 70]))(rng)


class Wish:
    """One request: what is asked, how it is read, and what befalls it.

    Attributes:
        arguments: of `Engine.generate`.
        way: how it is read.
        patience: deltas that are read before the reader does what its way says.
        rest: moments for which it then does nothing.
        streaming: what `Engine.stream` takes besides.
        strike: what befalls it, at a random moment.
        strike_moments: after how many of them.
        refused_for: the field for which it must be refused; None for a good one.
        repeats: the number of the reference request that it repeats.
    """

    def __init__(self, rng: random.Random, heads: list[list[int]], references: list[dict[str, Any]]) -> None:
        self.refused_for: str | None = None
        self.repeats: int | None = None
        if references and rng.random() < 0.25:
            self.repeats = rng.randrange(len(references))
            self.arguments = dict(references[self.repeats])
        else:
            self.arguments = draw_reference(rng, heads)
        self.arguments["request_id"] = f"request {rng.randrange(400)}"  # some live at once under one name
        self.arguments["priority"] = rng.choice([0, 0, 0, -1, 1, 5])
        self.arguments["cache_salt"] = rng.choice([None, None, None, "blue", "red"])
        self.arguments["on_full"] = "raise" if rng.random() < 0.1 else "wait"
        self.way: Way = rng.choice(WAYS) if rng.random() < 0.7 else "stream"
        self.patience = rng.randrange(5)
        self.rest = rng.choice([1, 5, 30, 100])
        self.streaming: dict[str, Any] = {"stream_interval": rng.choice([None, 1, 1, 3])}
        if self.way == "stalled" or rng.random() < 0.1:
            self.streaming["max_unread_tokens"] = rng.choice([1, 2, 5])
        self.strike: Literal["", "cancel", "abort"] = rng.choice(["", "", "", "", "", "", "cancel", "abort"])
        self.strike_moments = rng.choice([0, 0, 1, 3, 10, 40])
        if rng.random() < 0.02:
            self.refused_for, wrong = rng.choice(BAD)
            self.arguments |= wrong
            self.repeats = None
        elif self.repeats is None and rng.random() < 0.01:
            self.arguments["logits_processors"] = [break_down]

    @property
    def num_choices(self) -> int:
        count: int = self.arguments.get("n", 1)
        return count

    @property
    def may_fail(self) -> bool:
        return self.arguments.get("logits_processors") == [break_down]


def draw_reference(rng: random.Random, heads: list[list[int]]) -> dict[str, Any]:
    """Arguments of a request whose tokens are always the same ones."""
    return {"prompt": draw_prompt(rng, heads), **draw_sampling(rng)}


def draw_heads(rng: random.Random) -> list[list[int]]:
    """Beginnings that many prompts have."""
    return [some_ids(count)(rng) for count in (20, 48, 64, 150)]
