"""The log-probabilities that a `FakeExecutor` makes up: the likeliest token has -0.5, and each next id 1 less."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np

from aioengine.scheduler.plan import Float32, Int32, PromptLogprobs, RowSampling, StepLogprobs, int32

NUM_PROMPT_RANKS = 4
"""The unlikeliest rank that a prompt token has."""


def step_logprobs(sampled: list[tuple[RowSampling, int]], vocab_size: int) -> StepLogprobs | None:
    """Of tokens, each with the sampling of its row; each is its position's likeliest one."""
    asking = [(index, sampling, token) for index, (sampling, token) in enumerate(sampled) if sampling.logprobs >= 0]
    if not asking:
        return None
    indices, samplings, tokens = zip(*asking, strict=True)
    chosen = int32(tokens)
    top_ids, top_logprobs = _likeliest(chosen, max(sampling.logprobs for sampling in samplings), vocab_size)
    logprobs = StepLogprobs(
        index=int32(indices),
        logprobs=_logprobs_of(np.zeros_like(chosen)),
        ranks=np.ones_like(chosen),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
    counts = [len(sampling.logprob_token_ids) for sampling in samplings]
    if not any(counts):
        return logprobs
    extra_ids = int32([token for sampling in samplings for token in sampling.logprob_token_ids])
    distances: Int32 = (extra_ids - np.repeat(chosen, counts)) % vocab_size
    return msgspec.structs.replace(
        logprobs,
        extra_offsets=int32(np.cumsum([0, *counts])),
        extra_ids=extra_ids,
        extra_logprobs=_logprobs_of(distances),
        extra_ranks=distances + np.int32(1),
    )


def prompt_logprobs(asked: list[tuple[int, list[int], int, int]], vocab_size: int) -> PromptLogprobs:
    """Of prompt tokens; all tokens before it decide the rank of one.

    Args:
        asked: index in the plan, tokens, the first position to tell of, and the width, of each row that asks.
    """
    rows = [
        (index, position, tokens[position], zlib.crc32(int32(tokens[:position]).tobytes()) % NUM_PROMPT_RANKS)
        for index, tokens, first, _ in asked
        for position in range(first, len(tokens))
    ]
    indices, positions, token_ids, distances = (int32(column) for column in zip(*rows, strict=True))
    width = max(width for *_, width in asked)
    top_ids, top_logprobs = _likeliest((token_ids - distances) % vocab_size, width, vocab_size)
    return PromptLogprobs(
        index=indices,
        positions=positions,
        logprobs=_logprobs_of(distances),
        ranks=distances + np.int32(1),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _logprobs_of(distances: Int32) -> Float32:
    """Of tokens whose ids are so far behind the likeliest one's; their ranks are one more."""
    return np.float32(-0.5) - distances.astype(np.float32)


def _likeliest(first: Int32, width: int, vocab_size: int) -> tuple[Int32, Float32]:
    """[len(first), width] token ids and log-probabilities, or as many as there are."""
    distances = np.arange(min(width, vocab_size), dtype=np.int32)
    ids: Int32 = (first[:, None] + distances) % vocab_size
    return ids, np.tile(_logprobs_of(distances), (len(first), 1))
