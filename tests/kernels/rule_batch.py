"""Samples for the kernels of rules and log-probabilities: of words, at random, or of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from kernels.harness import DEVICE
from sampler.batch import Asking, Rows
from torch import Tensor

from aioengine.kernels.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow, param_of
from aioengine.sampling_params import FILTERS, PENALTIES

FOREVER = 2**31 - 1
NEUTRAL = {**FILTERS, **PENALTIES, SampleRow.MASK: -1, SampleRow.FLAGS: SampleFlag.FIRST}
PADDING = {SampleRow.LOGITS_ROW: -1, SampleRow.ROW: -1, "repetition_penalty": 2.0, SampleRow.FLAGS: 3}


def run(operation: Callable[..., None], *arguments: Tensor | None) -> None:
    """Call an operation where kernels run, with tensors of the CPU, and bring back what it has made of them."""
    moved = [None if given is None else given.to(DEVICE) for given in arguments]
    operation(*moved)
    for given, made in zip(arguments, moved, strict=True):
        if given is not None and made is not None and given is not made:
            given.copy_(made)


def edits_of(rows: Tensor, tokens: Tensor, values: Tensor, until: Tensor) -> Tensor:
    """int32 [4, e], as `Operations.edit_logits` takes them."""
    return torch.stack((rows, tokens, values.float().view(torch.int32), until))


def make_samples(*samples: dict[Any, float]) -> Tensor:
    """int32 [s, SAMPLE_WORDS], by `SampleRow` or the name of a parameter; words that are not given change nothing."""
    made = torch.zeros(len(samples), SAMPLE_WORDS, dtype=torch.int32)
    for sample, words in zip(made, samples, strict=True):
        for word, value in (NEUTRAL | words).items():
            if isinstance(word, str):
                param_of(sample, word).fill_(value)
            else:
                sample[word] = value
    return made


class Places(NamedTuple):
    """Rows of the executor, those that sample with a sample each, in no particular order."""

    samples: Tensor
    sample_of_row: Tensor
    history: Tensor


def random_places(seed: int, num_rows: int = 6, num_logits_rows: int = 4, longest: int = 40, vocab: int = 50) -> Places:
    """Rows in any order; one sample is padding, one not the first of its logits; ids up to 3 above the vocabulary."""
    random = np.random.default_rng(seed)
    rows, logits_rows = random.permutation(num_rows)[:num_logits_rows], random.permutation(num_logits_rows)
    sample_of_row = torch.full((num_rows,), -1, dtype=torch.int32)
    samples: list[dict[Any, float]] = []
    for row, logits_row in zip(rows.tolist(), logits_rows.tolist(), strict=True):
        sample_of_row[row] = len(samples)
        end = int(random.integers(1, longest + 1))
        words = {
            SampleRow.LOGITS_ROW: logits_row,
            SampleRow.ROW: row,
            SampleRow.END: end,
            SampleRow.OUTPUT_POSITION: int(random.integers(0, end + 1)),
        }
        samples.append(words)
        if random.random() < 0.3:
            samples.append(words | {SampleRow.FLAGS: SampleFlag.LOGPROBS, "repetition_penalty": 3.0})
    samples.append(PADDING)
    history = torch.from_numpy(random.integers(0, vocab + 3, (num_rows, longest + 1)).astype(np.int32))
    return Places(make_samples(*samples), sample_of_row, history)


def places_of(requests: Sequence[Asking], vocab: int, seed: int = 0) -> Places:
    """One row of logits a request, in order."""
    rows = Rows(requests, vocab, seed)
    return Places(rows.samples.samples, rows.sample_of_row, rows.history)


def strange_logits(*shape: int, seed: int) -> Tensor:
    """With NaN, infinities and many equal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(*shape, generator=generator)).round(decimals=1)
    kind = torch.randint(0, 40, shape, generator=generator)
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 0.0)):
        logits[kind == number] = value
    return logits
