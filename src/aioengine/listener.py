"""Who follows a sequence, and what a step's numbers look like to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from aioengine.core.plan import PromptLogprobs
from aioengine.core.sequence import Sequence
from aioengine.core.step_output import StepOutput
from aioengine.errors import AioEngineError

PROMPT_SLICE = 32
"""Prompt tokens whose log-probabilities are handed out between the loop's turns: with 20 each, below a millisecond."""


class SampledLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Raw log-probabilities about one token.

    Attributes:
        logprob, rank: the token's own.
        others: (token id, log-probability, rank): the likeliest tokens, as many as the request asked for, and those
            that it named.
    """

    logprob: float
    rank: int
    others: list[tuple[int, float, int]]


class Listener(Protocol):
    """Follows one sequence. It hears of each token once, in order, and then of the end, or of an error, once.

    It is called on the loop, between device steps, and must return soon.
    """

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        """A token was sampled; if it is the last one, the sequence's ``finish_reason`` is set."""
        ...

    def on_prompt_logprobs(self, position: int, lines: list[SampledLogprobs]) -> None:
        """About the prompt's tokens from ``position`` on; after a preemption some may come again, and alike."""
        ...

    def on_end(self) -> None:
        """The sequence has ended: see its ``finish_reason`` and ``stop_reason``."""
        ...

    def on_error(self, error: AioEngineError) -> None:
        """The sequence has ended by an error, which is this listener's alone."""
        ...


def token_lines(output: StepOutput) -> dict[int, SampledLogprobs]:
    """Log-probabilities by the index of their token in the output, each as wide as its row asked for."""
    logprobs = output.logprobs
    if logprobs is None:
        return {}
    token_at = {place: index for index, place in enumerate(output.places.tolist())}
    columns = (logprobs.logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs)
    extra_ends = logprobs.extra_offsets.tolist() or [0] * (len(logprobs.index) + 1)
    lines = {}
    for line, (place, logprob, rank, ids, values) in enumerate(
        zip(logprobs.index.tolist(), *(column.tolist() for column in columns), strict=True)
    ):
        index = token_at.get(place)
        if index is not None:  # its sequence lives
            width = output.sequences[index].sampling.logprobs
            extra = slice(extra_ends[line], extra_ends[line + 1])
            named = (c[extra].tolist() for c in (logprobs.extra_ids, logprobs.extra_logprobs, logprobs.extra_ranks))
            likeliest = zip(ids[:width], values[:width], range(1, width + 1), strict=False)
            lines[index] = SampledLogprobs(logprob, rank, [*likeliest, *zip(*named, strict=True)])
    return lines


def prompt_lines(
    pieces: list[tuple[Sequence, PromptLogprobs]],
) -> Iterator[tuple[Sequence, int, list[SampledLogprobs]]]:
    """The lines about prompts in slices of `PROMPT_SLICE`: (sequence, the first one's position, lines)."""
    for sequence, piece in pieces:
        width = sequence.sampling.prompt_logprobs
        for start in range(0, len(piece.positions), PROMPT_SLICE):
            part = slice(start, start + PROMPT_SLICE)
            columns = (piece.logprobs, piece.ranks, piece.top_ids, piece.top_logprobs)
            lines = [
                SampledLogprobs(
                    logprob, rank, list(zip(ids[:width], values[:width], range(1, width + 1), strict=False))
                )
                for logprob, rank, ids, values in zip(*(column[part].tolist() for column in columns), strict=True)
            ]
            yield sequence, int(piece.positions[start]), lines
