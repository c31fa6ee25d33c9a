"""Rows for the sampler: as columns, or as requests with their tokens; and what plain definitions make of those."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from aioengine.executor.input_batch import InputBatch
from aioengine.sampler.blocks import Scratch
from aioengine.sampler.rows import SamplingRows
from aioengine.sampler.sampling import Sampled, sample
from aioengine.sampling_params import ROW_PARAMS, RowParams
from aioengine.scheduler.plan import EMPTY, LogitsRow, RowAdded, RowSampling, StepPlan, Want, int32

DEFAULTS = {"seed": 0, "choice": 0, "logprobs": -1, "positions": 0}


def make_rows(n: int, **columns: Any) -> SamplingRows:
    """Columns of n rows without rules; a scalar holds for all of them."""

    def column(name: str, value: float, dtype: type[np.generic]) -> Any:
        return np.broadcast_to(np.asarray(columns.pop(name, value)), n).astype(dtype)

    params = {
        name: column(name, getattr(RowParams(), name), np.float32 if kind is float else np.int32)
        for name, kind in ROW_PARAMS.items()
    }
    others = {name: column(name, value, np.int64 if name == "seed" else np.int32) for name, value in DEFAULTS.items()}
    assert not columns, f"no such columns: {columns}"
    return SamplingRows(params=params, **others)


def row_of(rows: SamplingRows, index: int) -> SamplingRows:
    params = {name: column[index : index + 1] for name, column in rows.params.items()}
    return SamplingRows(params=params, **{name: getattr(rows, name)[index : index + 1] for name in DEFAULTS})


@dataclass
class Asking:
    """A request's row: how it is sampled, and its tokens so far."""

    sampling: RowSampling
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)


def asking(prompt: Sequence[int] = (0,), output: Sequence[int] = (), **sampling: Any) -> Asking:
    """Greedy, unless told otherwise."""
    return Asking(RowSampling(**{"temperature": 0.0, **sampling}), list(prompt), list(output))


def rows_of(requests: Sequence[Asking], seed: int = 0) -> SamplingRows:
    """A step that samples the next token of each request; ``seed`` decides which rows of the executor they have."""
    longest = max(len(request.prompt) + len(request.output) for request in requests)
    batch = InputBatch(max_num_seqs=len(requests) + 3, max_model_len=longest + 1, block_size=16)
    places = random.Random(seed).sample(range(len(requests) + 3), len(requests))
    tokens = [request.prompt + request.output for request in requests]
    plan = StepPlan(
        step=1,
        removed=EMPTY,
        added=tuple(
            RowAdded(
                row=place,
                token_ids=int32(of_row),
                num_prompt_tokens=len(request.prompt),
                block_ids=int32([0] * -(-len(of_row) // 16)),
                sampling=request.sampling,
            )
            for place, request, of_row in zip(places, requests, tokens, strict=True)
        ),
        grown_rows=EMPTY,
        grown_blocks=EMPTY,
        rows=int32(places),
        epochs=int32([0] * len(places)),
        starts=int32([len(of_row) - 1 for of_row in tokens]),
        num_tokens=int32([1] * len(places)),
        wants=np.full(len(places), Want.LOGITS, np.int8),
    )
    batch.apply(plan)
    return batch.inputs(plan).sampling


def sample_for(requests: Sequence[Asking], logits: torch.Tensor, scratch: Scratch | None = None) -> Sampled:
    """A step of these requests; ``logits`` stay as they are."""
    return sample(logits.clone(), rows_of(requests), scratch)


def tokens_of(sampled: Sampled) -> list[list[int]]:
    """Each row's."""
    ends = np.cumsum(sampled.counts)
    return [part.tolist() for part in np.split(sampled.token_ids, ends[:-1])]


def random_logits(*shape: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def changed_logits(raw: np.ndarray, request: Asking) -> np.ndarray:
    """A row's logits after its rules, token by token, in float64."""
    s, logits = request.sampling, [float(value) for value in raw]
    vocab, masked = len(logits), set()
    if s.allowed_token_ids:
        masked |= set(range(vocab)) - set(s.allowed_token_ids)
    for word in s.bad_words:
        others = list(word[:-1])
        if not others or request.output[-len(others) :] == others:
            masked.add(word[-1])
    if len(request.output) < s.min_tokens:
        masked |= set(s.stop_ids)
    for token in masked:
        if token < vocab:
            logits[token] = -math.inf
    for token, bias in s.logit_bias:
        if token < vocab:
            logits[token] += bias
    for processor in s.logits_processors:
        row = LogitsRow(int32(request.prompt), int32(request.output), s.choice)
        given = torch.tensor([logits], dtype=torch.float32)
        returned = processor(given, [row])
        logits = (given if returned is None else returned)[0].double().tolist()
    for token in range(vocab):
        if token in request.prompt or token in request.output:
            repetition = s.repetition_penalty
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        count = request.output.count(token)
        logits[token] -= s.frequency_penalty * count
        logits[token] -= s.presence_penalty if count else 0.0
    return np.array(logits)


def expected_probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution by its definition, in float64, one token after the other."""
    probabilities = np.exp((logits - logits.max()) / temperature)
    probabilities /= probabilities.sum()
    kept = probabilities >= min_p * probabilities.max()
    if top_k > 0:
        kept &= probabilities >= np.sort(probabilities)[::-1][min(top_k, len(logits)) - 1]
    probabilities = np.where(kept, probabilities, 0)
    probabilities /= probabilities.sum()
    mass, last_kept = 0.0, 1.0
    for probability in np.sort(probabilities)[::-1]:
        if mass >= top_p:
            break
        mass += probability
        last_kept = probability
    probabilities = np.where(probabilities >= last_kept, probabilities, 0)
    return probabilities / probabilities.sum()


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether counts could be drawn from probabilities: false for 1 in 30,000 fair ones.

    What has no probability is never drawn: one count there is too many.
    """
    if counts[probabilities == 0].any():
        return False
    total = counts.sum()
    common = probabilities * total >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probabilities[common], probabilities[~common].sum()) * total
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) == 1:
        return True
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(observed) - 1
    # Wilson and Hilferty: the cube root of a chi-square variable is nearly normal.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return bool(deviation < 4)
