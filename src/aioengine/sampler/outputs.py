"""What a step brings back from a GPU: one array of 32-bit words, for one copy. The same sections on both sides."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", NDArray[Any], Tensor)

ALIGNMENT = 4


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
        num_samples: tokens sampled.
        num_top: likeliest tokens beside each; -1: no log-probabilities.
        num_extra: tokens that are reported always.
        num_prompt, num_prompt_top: prompt tokens that are scored, and likeliest ones beside each.
    """

    num_samples: int
    num_top: int = -1
    num_extra: int = 0
    num_prompt: int = 0
    num_prompt_top: int = 0

    @property
    def scored(self) -> tuple[tuple[int, int], ...]:
        """(m, k) of each `Scored`, in order: of samples, of extra tokens, of the prompt's."""
        has_logprobs = self.num_top >= 0
        return (
            (self.num_samples if has_logprobs else 0, max(self.num_top, 0)),
            (self.num_extra, 0),
            (self.num_prompt, self.num_prompt_top),
        )

    @property
    def sections(self) -> list[int]:
        """How many words each section has: the samples' two, then five of each `Scored`."""
        return [self.num_samples] * 2 + [words for m, k in self.scored for words in (m, m, m, m * k, m * k)]

    @property
    def num_words(self) -> int:
        return sum(map(aligned, self.sections))


class DeviceOutputs(NamedTuple, Generic[Words]):
    """Views of the words.

    Attributes:
        token_ids, status: int32 [samples]; the second as in `aioengine.kernels.sampling.sample_rows.Status`.
        sampled, extra, prompt: empty where no row asked.
    """

    token_ids: Words
    status: Words
    sampled: Scored[Words]
    extra: Scored[Words]
    prompt: Scored[Words]

    @classmethod
    def of(cls, words: Words, sizes: OutputSizes) -> DeviceOutputs[Words]:
        views: list[Words] = []
        first = 0
        for length in sizes.sections:
            views.append(words[first : first + length])
            first += aligned(length)
        token_ids, status, *rest = views
        of_samples, of_extra, of_prompt = (k for _, k in sizes.scored)
        scored = _scored(rest[:5], of_samples), _scored(rest[5:10], of_extra), _scored(rest[10:], of_prompt)
        return cls(token_ids, status, *scored)


def aligned(num_words: int) -> int:
    """Rounded up to 16 bytes, so that kernels are compiled for one alignment of their arguments."""
    return -(-num_words // ALIGNMENT) * ALIGNMENT


def _scored(sections: list[Any], k: int) -> Scored[Any]:
    logprobs, log_mass, ranks, top_ids, top_logprobs = sections
    m = len(ranks)
    return Scored(
        logprobs=_floats(logprobs),
        log_mass=_floats(log_mass),
        ranks=ranks,
        top_ids=top_ids.reshape(m, k),
        top_logprobs=_floats(top_logprobs).reshape(m, k),
    )


def _floats(words: Any) -> Any:
    return words.view(torch.float32) if isinstance(words, Tensor) else words.view(np.float32)
