"""The log-probabilities that a `FakeExecutor` makes up: the likeliest token has -0.5, and each next id 1 less."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np

from aioengine.scheduler.plan import Float32, Int32, PromptLogprobs, RowSampling, StepLogprobs, int32


def logprobs_of(distances: Int32) -> Float32:
    """Of tokens whose ids are so far behind the likeliest one's; their ranks are one more."""
    return np.float32(-0.5) - distances.astype(np.float32)


def likeliest(first: Int32, width: int, vocab_size: int) -> tuple[Int32, Float32]:
    """[len(first), width] token ids and log-probabilities, or as many as there are."""
    distances = np.arange(min(width, vocab_size), dtype=np.int32)
    ids: Int32 = (first[:, None] + distances) % vocab_size
    return ids, np.tile(logprobs_of(distances), (len(first), 1))


def step_logprobs(sampled: list[tuple[RowSampling, int]], vocab_size: int) -> StepLogprobs | None:
    """Of tokens, each with the sampling of its row; each is its position's likeliest one."""
    index = [i for i, (sampling, _) in enumerate(sampled) if sampling.logprobs >= 0]
    if not index:
        return None
    asking = [sampled[i][0] for i in index]
    chosen = int32([sampled[i][1] for i in index])
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
    """With those of the tokens that each row has named."""
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


NUM_PROMPT_RANKS = 4
"""The unlikeliest rank that a prompt token has."""


def prompt_logprobs(asked: list[tuple[int, list[int], int, int]], vocab_size: int) -> PromptLogprobs:
    """Of prompt tokens; how far an id is behind the likeliest one's is decided by all tokens before it.

    Args:
        asked: index in the plan, tokens, the first position to tell of, and the width, of each row that asks.
    """
    rows = []
    for index, tokens, first, _ in asked:
        checksum = zlib.crc32(np.array(tokens[: first - 1], np.int32).tobytes())
        for position in range(first, len(tokens)):
            checksum = zlib.crc32(np.int32(tokens[position - 1]).tobytes(), checksum)
            rows.append((index, position, tokens[position], checksum % NUM_PROMPT_RANKS))
    indices, positions, token_ids, distances = (int32(column) for column in zip(*rows, strict=True))
    top_ids, top_logprobs = likeliest(
        (token_ids - distances) % vocab_size, max(width for *_, width in asked), vocab_size
    )
    return PromptLogprobs(
        index=indices,
        positions=positions,
        logprobs=logprobs_of(distances),
        ranks=distances + np.int32(1),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
