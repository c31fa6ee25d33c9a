"""Log-probabilities of a step, as its listeners get them: each made when it is handed out."""

from __future__ import annotations

from collections.abc import Iterator

from aioengine.core.listener import SampledLogprobs
from aioengine.scheduler.plan import PromptLogprobs
from aioengine.scheduler.sequence import Sequence
from aioengine.scheduler.steps import StepOutput

PROMPT_SLICE = 32
"""Prompt tokens whose log-probabilities are handed out between the loop's turns: with 20 each, below a millisecond."""


class OutputLogprobs:
    """The log-probabilities of a step's tokens, each made when it is asked for: all at once would hold the loop."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        self._row_of: dict[int, int] = {}
        """By the index of a token in the output, its row in the arrays of ``output.logprobs``."""
        if output.logprobs is not None:
            index_of = {result_index: index for index, result_index in enumerate(output.result_indices.tolist())}
            for row, result_index in enumerate(output.logprobs.index.tolist()):
                index = index_of.get(result_index)
                if index is not None:  # its sequence lives
                    self._row_of[index] = row

    def get(self, index: int) -> SampledLogprobs | None:
        """About token ``index`` of the output, as wide as its request asked for; None if it did not ask."""
        row = self._row_of.get(index)
        logprobs = self._output.logprobs
        if row is None or logprobs is None:
            return None
        width = self._output.sequences[index].sampling.logprobs
        others = _likeliest(logprobs.top_ids[row].tolist(), logprobs.top_logprobs[row].tolist(), width)
        if len(logprobs.extra_offsets):
            extra = slice(*logprobs.extra_offsets[row : row + 2].tolist())
            named = (c[extra].tolist() for c in (logprobs.extra_ids, logprobs.extra_logprobs, logprobs.extra_ranks))
            others += zip(*named, strict=True)
        return SampledLogprobs(float(logprobs.logprobs[row]), int(logprobs.ranks[row]), others)


def slice_prompt_logprobs(
    pieces: list[tuple[Sequence, PromptLogprobs]],
) -> Iterator[tuple[Sequence, int, list[SampledLogprobs]]]:
    """Yield a step's log-probabilities of prompts, `PROMPT_SLICE` tokens at once.

    Yields:
        the sequence, the position of the first token in its prompt, and the log-probabilities of each token.
    """
    for sequence, piece in pieces:
        width = sequence.sampling.prompt_logprobs
        columns = (piece.logprobs, piece.ranks, piece.top_ids, piece.top_logprobs)
        for start in range(0, len(piece.positions), PROMPT_SLICE):
            of_slice = (column[start : start + PROMPT_SLICE].tolist() for column in columns)
            yield (
                sequence,
                int(piece.positions[start]),
                [
                    SampledLogprobs(logprob, rank, _likeliest(ids, values, width))
                    for logprob, rank, ids, values in zip(*of_slice, strict=True)
                ],
            )


def _likeliest(ids: list[int], logprobs: list[float], width: int) -> list[tuple[int, float, int]]:
    """The first ``width`` of the likeliest tokens with their ranks, from 1 on."""
    return list(zip(ids[:width], logprobs[:width], range(1, width + 1), strict=False))
