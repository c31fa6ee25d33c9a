"""A step as words of 32 bits: fixed sections at the same place in every step, for graphs, and what else it brings.

The host writes them into page-locked memory, and one copy brings the fixed ones to the device; what changes rows
(prompts, block tables, rules) comes in a second one.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aioengine.kernels.sample_rows import SAMPLE_WORDS
from aioengine.sampler.outputs import ALIGNMENT, aligned
from aioengine.scheduler.plan import Int32

Words = TypeVar("Words", NDArray[Any], Tensor)


class Sections(NamedTuple):
    """Words of each section, a row of the executor; of the last two a row of a group's block tables."""

    rows: int = 4
    """As `Operations.gather_tokens` takes them."""
    decodes: int = 3
    """As `Operations.attend_decode` takes them."""
    samples: int = SAMPLE_WORDS
    sample_of_row: int = 1
    scored_rows: int = 1
    kept: int = 1
    processed_samples: int = 1
    """These four as in `aioengine.sampler.sampler.SampleTensors`."""
    grown: int = 4
    """Spans, for `Operations.put_spans`: a block more for a row."""
    grown_blocks: int = 1


SECTIONS = Sections()
PADDING = np.zeros(ALIGNMENT, np.int32)
NUM_GROWN_SECTIONS = 2
"""The last ones, which each group of layers has: a row may get a block more in all of its tables."""


def num_fixed_words(num_rows: int, num_groups: int = 1) -> int:
    """Number of words of all sections."""
    of_rows, of_tables = SECTIONS[:-NUM_GROWN_SECTIONS], SECTIONS[-NUM_GROWN_SECTIONS:]
    return num_rows * (sum(of_rows) + num_groups * sum(of_tables))


class FixedWords(NamedTuple, Generic[Words]):
    """The fixed sections, numpy's on the host or torch's on the device: views of one array, int32 [rows, words], those
    of one word a row [rows]. ``grown`` and ``grown_blocks`` have groups · rows in place of these rows."""

    rows: Words
    decodes: Words
    samples: Words
    sample_of_row: Words
    scored_rows: Words
    kept: Words
    processed_samples: Words
    grown: Words
    grown_blocks: Words

    @classmethod
    def of(cls, words: Words, num_rows: int, num_groups: int = 1) -> FixedWords[Words]:
        """Sections of ``words``, int32 [num_fixed_words]."""
        views, first = [], 0
        for number, width in enumerate(SECTIONS):
            of_tables = number >= len(SECTIONS) - NUM_GROWN_SECTIONS
            count = num_rows * (num_groups if of_tables else 1)
            end = first + count * width
            views.append(words[first:end] if width == 1 else words[first:end].reshape(count, width))
            first = end
        return cls(*views)


class Span(NamedTuple):
    """Words from ``first`` up to ``end`` of those that come beside the fixed ones."""

    first: int
    end: int

    def of(self, words: Words) -> Words:
        return words[self.first : self.end]


class ExtraWords:
    """Words that a step brings beside the fixed sections, collected."""

    def __init__(self) -> None:
        self._parts: list[Int32] = []
        self.num_words = 0

    def add(self, words: NDArray[np.int32]) -> Span:
        """Append int32 words of any shape, at a multiple of 16 bytes; they are read when the step is written."""
        part = words.reshape(-1)
        span = Span(self.num_words, self.num_words + len(part))
        self._parts += [part, PADDING[: aligned(len(part)) - len(part)]]
        self.num_words = aligned(span.end)
        return span

    def write(self, target: NDArray[np.int32]) -> None:
        np.concatenate(self._parts, out=target[: self.num_words])


class TableSpans:
    """Spans of words to be put into a table, collected: for `Operations.put_spans`."""

    def __init__(self, extra: ExtraWords) -> None:
        self._extra = extra
        self._spans: list[NDArray[np.integer]] = []

    def add(self, row: int, column: int, words: NDArray[np.int32]) -> None:
        if len(words):
            first, _ = self._extra.add(words)
            self._spans.append(np.array([[row, column, first, len(words)]]))

    def add_each(self, rows: NDArray[np.int32], columns: NDArray[np.integer], words: NDArray[np.int32]) -> None:
        """Add one word a span."""
        first, end = self._extra.add(words)
        self._spans.append(np.stack((rows, columns, np.arange(first, end), np.ones_like(rows)), axis=1))

    def end(self) -> Span | None:
        """Put the spans themselves behind the words; None if there are none."""
        return self._extra.add(np.concatenate(self._spans).astype(np.int32)) if self._spans else None
