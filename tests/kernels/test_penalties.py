"""Penalties against a loop over tokens, to the last bit: duplicates across programs, and unknown ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernels.harness import ALL, assert_same
from kernels.rule_batch import PADDING, make_samples, places_of, random_places, run, strange_logits
from nightly import nightly
from sampler.batch import Asking, asking
from torch import Tensor

from aioengine.kernels.operations import plain_torch
from aioengine.kernels.sample_rows import SampleFlag, SampleRow, param_of
from aioengine.kernels.triton import penalise as penalties
from aioengine.sampling_params import PENALTIES


@pytest.fixture(autouse=True)
def _many_small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short histories are shared by programs too, some of which take several turns."""
    monkeypatch.setattr(penalties, "BLOCK", 16)
    monkeypatch.setattr(penalties, "MANY_PROGRAMS", 9)
    monkeypatch.setattr(penalties, "FEW_PARTS", 3)


def random_requests(seed: int, vocab: int, longest: int) -> list[Asking]:
    """Of few tokens, so that each is there several times; some prompts and outputs alone; unknown ids."""
    random = np.random.default_rng(seed)
    requests = []
    for repetition, frequency, presence in (
        (1.3, 0.0, 0.0),
        (1.0, 0.7, 0.0),
        (1.0, 0.0, -1.1),
        (0.6, -0.3, 0.9),
        (1.2, 0.9, 0.4),
        (2.0, 0.1, 0.1),
    ):
        prompt = random.integers(0, min(vocab, 20) + 2, int(random.integers(1, longest))).tolist()
        output = random.integers(0, min(vocab, 20) + 2, int(random.integers(0, longest))).tolist()
        requests.append(
            asking(
                prompt,
                output[: len(output) * (len(requests) != 3)],
                repetition_penalty=repetition,
                frequency_penalty=frequency,
                presence_penalty=presence,
            )
        )
    return requests


def penalised(logits: Tensor, request: Asking) -> Tensor:
    """A row's logits, token by token, each operation rounded to float32."""
    sampling, made = request.sampling, logits.clone()
    repetition, frequency, presence = (
        np.float32(getattr(sampling, f"{name}_penalty")) for name in ("repetition", "frequency", "presence")
    )
    for token in {*request.prompt, *request.output} & set(range(len(logits))):
        value = np.float32(logits[token])
        value = value / repetition if value > 0 else value * repetition
        count = request.output.count(token)
        if count:
            value = value - frequency * np.float32(count) - presence
        made[token] = float(value)
    return made


@ALL
@pytest.mark.parametrize(("vocab", "longest", "seed"), [(7, 123, 1), (1000, 20, 3), *nightly((1, 7, 0), (123, 60, 2))])
def test_penalties_are_those_of_a_loop(ops: Any, vocab: int, longest: int, seed: int) -> None:
    requests = random_requests(seed, vocab, longest)
    places = places_of(requests, vocab, seed)
    raw = strange_logits(len(requests), vocab, seed=seed) * 1.1
    expected = torch.stack([penalised(of_row, request) for of_row, request in zip(raw, requests, strict=True)])
    counters = torch.zeros(len(requests) + 1, vocab, dtype=torch.int32)
    made = raw.clone()
    run(ops.penalise, made, places.samples, places.history, counters)
    assert_same(made, expected)
    assert not counters.any()
    assert not torch.equal(torch.nan_to_num(made), torch.nan_to_num(raw))


@ALL
@pytest.mark.parametrize("seed", range(3))
def test_any_samples_in_any_order_with_padding(ops: Any, seed: int) -> None:
    places = random_places(seed, vocab=50)
    random = np.random.default_rng(seed)
    for sample in places.samples[:-1]:
        for name in PENALTIES:
            param_of(sample, name).fill_(random.choice([0.0, 1.0, 0.5]) + 0.5 * (name == "repetition_penalty"))
    raw = strange_logits(4, 50, seed=seed)
    made, expected = raw.clone(), raw.clone()
    counters = torch.zeros(len(places.samples), 50, dtype=torch.int32)
    run(ops.penalise, made, places.samples, places.history, counters)
    run(plain_torch.penalise, expected, places.samples, places.history, counters)
    assert_same(made, expected)
    assert not counters.any()


@ALL
def test_samples_without_penalties_and_padding_read_and_write_nothing(ops: Any) -> None:
    """Their rows and rows of logits are not there at all."""
    nowhere = {SampleRow.LOGITS_ROW: 2**30, SampleRow.ROW: 2**30, SampleRow.END: 9, SampleRow.OUTPUT_POSITION: 5}
    samples = make_samples(
        nowhere,
        PADDING
        | {SampleRow.END: 9, SampleRow.OUTPUT_POSITION: 12, "repetition_penalty": 1.0, "frequency_penalty": 0.5},
        nowhere | {SampleRow.FLAGS: SampleFlag.LOGPROBS, "repetition_penalty": 2.0},
    )
    logits, history = torch.full((1, 5), torch.nan), torch.zeros(1, 20, dtype=torch.int32)
    counters = torch.zeros(3, 5, dtype=torch.int32)
    run(ops.penalise, logits, samples, history, counters)
    assert logits.isnan().all()
    assert not counters.any()


def test_programs_share_a_history_by_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert penalties.parts_a_sample(1, 131_072) == 256
    assert penalties.parts_a_sample(256, 131_072) == 8
    assert penalties.parts_a_sample(256, 700) == 2
    assert penalties.parts_a_sample(1, 0) == 1
