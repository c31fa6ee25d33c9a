"""What a step brings back from a GPU: one array of 32-bit words, for one copy. The same sections on both sides."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", NDArray[Any], Tensor)


class Scored(NamedTuple, Generic[Words]):
    """Log-probabilities of m tokens, and of the k likeliest in their places.

    Attributes:
        logprobs, log_mass: float32 [m]. ranks: int32 [m].
        top_ids: int32 [m, k]. top_logprobs: float32 [m, k].
    """

    logprobs: Words
    log_mass: Words
    ranks: Words
    top_ids: Words
    top_logprobs: Words


class OutputSizes(NamedTuple):
    """How much of each a step brings.

    Attributes:
        num_slots: tokens sampled.
        num_top: likeliest tokens beside each; -1: no log-probabilities.
        num_extra: tokens that are reported always.
        num_prompt, num_prompt_top: prompt tokens that are scored, and likeliest ones beside each.
    """

    num_slots: int
    num_top: int = -1
    num_extra: int = 0
    num_prompt: int = 0
    num_prompt_top: int = 0

    @property
    def scored(self) -> tuple[tuple[int, int], ...]:
        """(m, k) of each `Scored`, in order: of slots, of extra tokens, of the prompt's."""
        has_logprobs = self.num_top >= 0
        return (
            (self.num_slots if has_logprobs else 0, max(self.num_top, 0)),
            (self.num_extra, 0),
            (self.num_prompt, self.num_prompt_top),
        )

    @property
    def num_words(self) -> int:
        return 2 * self.num_slots + sum(m * (3 + 2 * k) for m, k in self.scored)


class Outputs(NamedTuple, Generic[Words]):
    """Views of the words.

    Attributes:
        token_ids, status: int32 [slots]; the second as in `aioengine.kernels.slots.Status`.
        sampled, extra, prompt: empty where nobody asked.
    """

    token_ids: Words
    status: Words
    sampled: Scored[Words]
    extra: Scored[Words]
    prompt: Scored[Words]

    @classmethod
    def of(cls, words: Words, sizes: OutputSizes) -> Outputs[Words]:
        num_slots = sizes.num_slots
        token_ids, status = words[:num_slots], words[num_slots : 2 * num_slots]
        first = 2 * num_slots
        parts = []
        for m, k in sizes.scored:
            end = first + m * (3 + 2 * k)
            parts.append(_scored(words[first:end], m, k))
            first = end
        return cls(token_ids, status, *parts)


def _scored(words: Words, m: int, k: int) -> Scored[Words]:
    floats = words.view(torch.float32) if isinstance(words, Tensor) else words.view(np.float32)
    ids_end = 3 * m + m * k
    return Scored(
        logprobs=floats[:m],
        log_mass=floats[m : 2 * m],
        ranks=words[2 * m : 3 * m],
        top_ids=words[3 * m : ids_end].reshape(m, k),
        top_logprobs=floats[ids_end:].reshape(m, k),
    )
