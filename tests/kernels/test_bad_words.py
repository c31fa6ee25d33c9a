"""Bad words of several tokens against loops, and all masks and biases of requests together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kernels.harness import SMALL, assert_close
from kernels.rule_batch import FOREVER, PADDING, edits_of, make_samples, places_of, run
from sampler.batch import Asking, asking, changed_logits, random_logits
from torch import Tensor

from aioengine.kernels.sample_rows import SampleFlag, SampleRow


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def flat(words: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Offsets and ids."""
    return ints(*np.cumsum([0, *map(len, words)]).tolist()), ints(*(token for word in words for token in word))


def random_requests(seed: int, vocab: int) -> list[Asking]:
    """Outputs of few tokens, so that words begin; words of one token too, and some longer than the output."""
    random = np.random.default_rng(seed)
    requests = []
    for _ in range(5):
        prompt, output = (random.integers(0, 3, int(random.integers(1, 12))).tolist() for _ in range(2))
        output = output[: int(random.integers(0, 12))]
        words = [tuple(random.integers(0, 3, int(random.integers(1, 5))).tolist()) for _ in range(15)]
        tails = [(*output[len(output) - n :], vocab - 1) for n in range(1, len(output) + 1)]
        over = [(*(prompt + output)[-n:], 4) for n in (len(output) + 1,)]  # begun in the prompt: not the output
        biases = {int(token): float(random.normal()) for token in random.integers(0, vocab + 2, 6)}
        requests.append(
            asking(
                prompt,
                output,
                bad_words=(*words, *tails, *over, (vocab + 1,), (0, vocab + 5)),
                min_tokens=int(random.integers(0, 20)),
                stop_ids=(5 % vocab, vocab + 9),
                logit_bias=tuple(biases.items()),
            )
        )
    return requests


@SMALL
@pytest.mark.parametrize(("vocab", "seed"), [(7, 0), (123, 1), (123, 2)])
def test_masks_and_biases_are_those_of_loops(ops: Any, vocab: int, seed: int) -> None:
    requests = random_requests(seed, vocab)
    places = places_of(requests, vocab, seed)
    rows = places.samples[:, SampleRow.ROW].tolist()
    begun = [(row, word) for row, r in zip(rows, requests, strict=True) for word in r.sampling.bad_words if word[1:]]
    begun.append((-1, (0, 0)))
    row_without_sample = int((places.sample_of_row < 0).nonzero()[0, 0])
    begun.append((row_without_sample, (0, 0)))
    word_values = torch.full((len(begun),), torch.nan)
    word_rows = ints(*(row for row, _ in begun))
    run(
        ops.ends_of_bad_words,
        places.samples,
        places.sample_of_row,
        places.history,
        word_rows,
        *flat([w[:-1] for _, w in begun]),
        word_values,
    )
    assert word_values[-2:].tolist() == [0, 0]
    assert {0.0, -math.inf} == set(word_values.tolist())
    listed = [(row, word[-1], value, FOREVER) for (row, word), value in zip(begun, word_values.tolist(), strict=True)]
    for row, request in zip(rows, requests, strict=True):
        sampling = request.sampling
        listed += [(row, word[0], -math.inf, FOREVER) for word in sampling.bad_words if len(word) == 1]
        listed += [(row, token, -math.inf, sampling.min_tokens) for token in sampling.stop_ids]
        listed += [(row, token, bias, FOREVER) for token, bias in sampling.logit_bias]
    edit_rows, tokens, values, until = zip(*listed, strict=True)
    raw = random_logits(len(requests), vocab, seed=seed)
    made = raw.clone()
    edits = edits_of(ints(*edit_rows), ints(*tokens), torch.tensor(values), ints(*until))
    run(ops.edit_logits, made, places.samples, places.sample_of_row, edits)
    expected = np.stack([changed_logits(of_row.numpy(), r) for of_row, r in zip(raw, requests, strict=True)])
    assert_close(made, torch.from_numpy(expected).float())


@SMALL
def test_long_words_and_many_words_are_compared_to_their_beginnings(ops: Any) -> None:
    history = torch.arange(90, dtype=torch.int32).view(2, 45)
    samples = make_samples(
        {SampleRow.LOGITS_ROW: 0, SampleRow.ROW: 1, SampleRow.END: 40, SampleRow.OUTPUT_POSITION: 38}
    )
    output = list(range(47, 85))
    same_but_first = [1, *output[1:]]
    begins = [tuple(output), tuple(same_but_first), (46, *output), tuple(output[-1:]), (84, 85), *[(84,)] * 70]
    values = torch.full((len(begins),), torch.nan)
    rows = torch.ones(len(begins), dtype=torch.int32)
    run(ops.ends_of_bad_words, samples, ints(-1, 0), history, rows, *flat(begins), values)
    assert (values == -torch.inf).tolist() == [True, False, False, True, False, *[True] * 70]
    assert values[[1, 2, 4]].tolist() == [0, 0, 0]


@SMALL
def test_only_first_samples_of_lines_count(ops: Any) -> None:
    same = {SampleRow.END: 3, SampleRow.OUTPUT_POSITION: 3}
    samples = make_samples(
        {SampleRow.LOGITS_ROW: 0, SampleRow.FLAGS: SampleFlag.LOGPROBS, **same},
        PADDING | same,
        {SampleRow.LOGITS_ROW: 1, **same},
    )
    history = torch.zeros(3, 4, dtype=torch.int32)
    values = torch.full((3,), torch.nan)
    run(ops.ends_of_bad_words, samples, ints(0, 1, 2), history, ints(0, 1, 2), *flat([(0,)] * 3), values)
    assert values.tolist() == [0, 0, -math.inf]
