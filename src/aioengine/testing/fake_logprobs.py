"""The log-probabilities that a `FakeExecutor` makes up: the likeliest token has -0.5, and each next id 1 less."""

from __future__ import annotations

import msgspec
import numpy as np

from aioengine.scheduler.plan import Float32, Int32, RowSampling, StepLogprobs, int32


def logprobs_of(distances: Int32) -> Float32:
    """Of tokens whose ids are so far behind the likeliest one's; their ranks are one more."""
    return np.float32(-0.5) - distances.astype(np.float32)


def likeliest(first: Int32, width: int, vocab_size: int) -> tuple[Int32, Float32]:
    """[len(first), width] token ids and log-probabilities, or as many as there are."""
    distances = np.arange(min(width, vocab_size), dtype=np.int32)
    ids: Int32 = (first[:, None] + distances) % vocab_size
    return ids, np.tile(logprobs_of(distances), (len(first), 1))


def step_logprobs(lines: list[tuple[RowSampling, int]], vocab_size: int) -> StepLogprobs | None:
    """Of tokens, each with the sampling of its row; each is the likeliest one of its place."""
    index = [i for i, (sampling, _) in enumerate(lines) if sampling.logprobs >= 0]
    if not index:
        return None
    asking = [lines[i][0] for i in index]
    chosen = int32([lines[i][1] for i in index])
    top_ids, top_logprobs = likeliest(chosen, max(sampling.logprobs for sampling in asking), vocab_size)
    logprobs = StepLogprobs(
        index=int32(index),
        logprobs=logprobs_of(np.zeros_like(chosen)),
        ranks=np.ones_like(chosen),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
    return _with_extra(logprobs, chosen, [sampling.logprob_token_ids for sampling in asking], vocab_size)


def _with_extra(logprobs: StepLogprobs, chosen: Int32, asked: list[tuple[int, ...]], vocab_size: int) -> StepLogprobs:
    """With those of the tokens that each line's row has named."""
    counts = [len(ids) for ids in asked]
    if not any(counts):
        return logprobs
    ids = int32([token for ids in asked for token in ids])
    distances: Int32 = (ids - np.repeat(chosen, counts)) % vocab_size
    return msgspec.structs.replace(
        logprobs,
        extra_offsets=int32(np.cumsum([0, *counts])),
        extra_ids=ids,
        extra_logprobs=logprobs_of(distances),
        extra_ranks=distances + np.int32(1),
    )
