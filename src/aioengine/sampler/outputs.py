"""Words that come back from a step: one array of 32-bit words, for one copy, with the same sections on both sides."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
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
        num_vectors, vector_size: hidden states, and the numbers of each.
    """

    num_samples: int
    num_top: int = -1
    num_extra: int = 0
    num_prompt: int = 0
    num_prompt_top: int = 0
    num_vectors: int = 0
    vector_size: int = 0

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
    def num_words(self) -> int:
        return _layout(self)[-1][1]


class DeviceOutputs(Generic[Words]):
    """Views of the words.

    Attributes:
        token_ids, status: int32 [samples]; the second as in `aioengine.kernels.sample_rows.Status`.
    """

    def __init__(self, words: Words, sizes: OutputSizes) -> None:
        self._words: Words = words
        self._sizes: OutputSizes = sizes
        (first, end), (first_status, end_status) = _layout(sizes)[:2]
        self.token_ids: Words = words[first:end]
        self.status: Words = words[first_status:end_status]

    @property
    def sampled(self) -> Scored[Words]:
        """Log-probabilities of the samples; empty where no row asked, as the other two."""
        return self._scored(0)

    @property
    def extra(self) -> Scored[Words]:
        """Log-probabilities of the tokens that are reported always."""
        return self._scored(1)

    @property
    def prompt(self) -> Scored[Words]:
        """Log-probabilities of the prompt tokens."""
        return self._scored(2)

    @property
    def vectors(self) -> Words:
        """float32 [num_vectors, vector_size]."""
        first, end = _layout(self._sizes)[-2]
        floats: Words = _floats(self._words[first:end]).reshape(self._sizes.num_vectors, self._sizes.vector_size)
        return floats

    def _scored(self, nth: int) -> Scored[Words]:
        m, k = self._sizes.scored[nth]
        spans = _layout(self._sizes)[2 + 5 * nth : 7 + 5 * nth]
        logprobs, log_mass, ranks, top_ids, top_logprobs = (self._words[first:end] for first, end in spans)
        return Scored(
            logprobs=_floats(logprobs),
            log_mass=_floats(log_mass),
            ranks=ranks,
            top_ids=top_ids.reshape(m, k),
            top_logprobs=_floats(top_logprobs).reshape(m, k),
        )


@lru_cache(maxsize=32)
def _layout(sizes: OutputSizes) -> list[tuple[int, int]]:
    """First word and end of each section: two of samples, five of each `Scored`, the vectors; last, the end of all."""
    lengths = [sizes.num_samples] * 2 + [words for m, k in sizes.scored for words in (m, m, m, m * k, m * k)]
    lengths.append(sizes.num_vectors * sizes.vector_size)
    firsts = [0, *accumulate(map(aligned, lengths))]
    return [(first, first + length) for first, length in zip(firsts, [*lengths, 0], strict=True)]


def aligned(num_words: int) -> int:
    """Rounded up to 16 bytes, so that kernels are compiled for one alignment of their arguments."""
    return -(-num_words // ALIGNMENT) * ALIGNMENT


def _floats(words: Any) -> Any:
    return words.view(torch.float32) if isinstance(words, Tensor) else words.view(np.float32)
