"""What a step has brought, once the scheduler has taken its result in."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.scheduler.plan import Int32, PromptLogprobs, StepLogprobs
from aioengine.scheduler.sequence import Sequence

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What applying a result brought: ``token_ids[i]`` is the newest token of ``sequences[i]``.

    A sequence that ended with its token has its ``finish_reason`` set.

    Attributes:
        places: int32, where ``token_ids`` stood in the result; ``logprobs.index`` speaks of those.
        logprobs: as in the result.
        gaps_s: float64 [m], seconds since the token before, of the tokens that followed one.
        first: the sequences whose first token it brought, but for children.
        prompt_logprobs: about the prompts of these sequences, which have not ended.
        failed: sequences that ended because their own row failed, and why.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    places: Int32
    logprobs: StepLogprobs | None
    gaps_s: Float64
    first: list[Sequence]
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]]
    failed: list[tuple[Sequence, Exception]]


def score_prompts(
    logprobs: PromptLogprobs | None, sequences: list[Sequence], is_alive: Bool
) -> list[tuple[Sequence, PromptLogprobs]]:
    """The lines about the prompt of each of ``sequences`` that lives, which count as handed out from now on."""
    if logprobs is None:
        return []
    indices, starts = np.unique(logprobs.index, return_index=True)
    pieces = []
    for index, start, end in zip(
        indices.tolist(), starts.tolist(), [*starts[1:].tolist(), len(logprobs.index)], strict=True
    ):
        if is_alive[index]:
            columns = (getattr(logprobs, name)[start:end] for name in logprobs.__struct_fields__)
            piece = PromptLogprobs(**dict(zip(logprobs.__struct_fields__, columns, strict=True)))
            sequences[index].num_scored_tokens = max(sequences[index].num_scored_tokens, int(piece.positions[-1]))
            pieces.append((sequences[index], piece))
    return pieces
