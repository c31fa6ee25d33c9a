"""Rules against loops over tokens: each one, all together, their order, and what they leave alone."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import few
from sampler.batch import (
    Asking,
    Rows,
    asking,
    changed_logits,
    chi_square_is_plausible,
    expected_probabilities,
    random_logits,
    sample_for,
)

from aioengine.scheduler.plan import RowSampling

VOCABS = (1, 7, 123, 1000, 5003)


def after_rules(logits: torch.Tensor, requests: list[Asking]) -> torch.Tensor:
    sampled = sample_for(requests, logits, seed=len(requests))
    assert all(isinstance(failure.error, ValueError) for failure in sampled.failures), "nothing left"
    return sampled.logits


def assert_rules_hold(logits: torch.Tensor, requests: list[Asking]) -> None:
    changed = after_rules(logits, requests)
    for raw, made, request in zip(logits, changed, requests, strict=True):
        expected = changed_logits(raw.numpy(), request)
        np.testing.assert_allclose(made.numpy(), expected, rtol=2e-6, atol=2e-5, err_msg=str(request.sampling))


@st.composite
def random_requests(draw: st.DrawFn, vocab: int) -> list[Asking]:
    """Requests with some rules, their words made of their own tokens so that they come up; some ids are unknown."""
    ids = st.integers(0, min(vocab - 1, 12)) | st.integers(0, vocab - 1)
    strange_ids = ids | st.integers(vocab, vocab + 70) | st.just(2**31 - 1)
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        prompt, output = draw(st.lists(ids, min_size=1, max_size=20)), draw(st.lists(ids, max_size=30))
        tail = [tuple(output[len(output) - n :]) for n in range(1, min(4, len(output)) + 1)]
        word = st.lists(ids, min_size=1, max_size=4).map(tuple)
        if tail:
            word |= st.builds(lambda begin, last: (*begin, last), st.sampled_from(tail), strange_ids)
        penalty = st.just(0.0) | st.floats(-2, 2, width=32)
        sampling = RowSampling(
            temperature=0.0,
            allowed_token_ids=draw(st.just(()) | st.lists(strange_ids, max_size=20).map(tuple)),
            bad_words=draw(st.just(()) | st.lists(word, max_size=6).map(tuple)),
            min_tokens=draw(st.integers(0, 40)),
            stop_ids=draw(st.lists(strange_ids, max_size=3).map(tuple)),
            logit_bias=draw(
                st.just(()) | st.dictionaries(strange_ids, st.floats(-100, 100, width=32), max_size=9).map(as_pairs)
            ),
            repetition_penalty=draw(st.just(1.0) | st.floats(0.125, 4, width=32)),
            frequency_penalty=draw(penalty),
            presence_penalty=draw(penalty),
        )
        requests.append(Asking(sampling, prompt, output))
    return requests


def as_pairs(biases: dict[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(biases.items())


@pytest.mark.parametrize("vocab", few([123], of=VOCABS))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_rules_of_any_rows_do_what_loops_over_their_tokens_do(vocab: int, data: st.DataObject) -> None:
    requests = data.draw(random_requests(vocab))
    logits = random_logits(len(requests), vocab, seed=data.draw(st.integers(0, 999)), spread=5)
    assert_rules_hold(logits, requests)


RULES: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": (3, 5, 6)},
    "a bad word": {"bad_words": ((4,),)},
    "a begun sequence": {"bad_words": ((1, 2, 3),)},
    "stop ids": {"min_tokens": 5, "stop_ids": (2, 3)},
    "logit_bias": {"logit_bias": ((2, 7.5), (6, -100.0))},
    "repetition_penalty": {"repetition_penalty": 4.0},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "presence_penalty": {"presence_penalty": -1.5},
    "a processor": {"logits_processors": (lambda logits, rows: logits.flip(-1),)},
}


def test_many_rows_with_long_histories_are_penalised() -> None:
    random = np.random.default_rng(5)
    requests = [
        asking(
            random.integers(0, 900, 300).tolist(),
            random.integers(0, 900, length).tolist(),
            repetition_penalty=repetition,
            frequency_penalty=frequency,
        )
        for length, repetition, frequency in ((0, 1.2, 0.5), (900, 1.0, 0.3), (1, 1.5, 0.0), (57, 1.3, -1.0), (5, 1, 0))
    ]
    logits = random_logits(len(requests), 1000, seed=1)
    assert_rules_hold(logits, requests)


def test_counts_are_not_kept_from_one_step_to_the_next() -> None:
    logits = random_logits(2, 50, seed=1)
    rows = Rows([asking([1], [3] * 9, frequency_penalty=1.0), asking([1], [4, 4, 5], frequency_penalty=-1.0)], 50)
    first = rows.sample(logits.clone()).logits
    assert not torch.equal(first, logits)
    for _ in range(2):
        assert torch.equal(rows.sample(logits.clone()).logits, first)


# The order


def test_rules_are_applied_in_the_order_that_they_are_listed_in() -> None:
    seen: list[torch.Tensor] = []

    def look(logits: torch.Tensor, _: object) -> None:
        seen.append(logits.clone())
        logits[:, 1] = 4.0
        logits[:, 6] = 3.0

    request = asking(
        [1],
        [2, 6],
        allowed_token_ids=(1, 2, 3, 4, 6),
        bad_words=((3,),),
        min_tokens=9,
        stop_ids=(4,),
        logit_bias=((2, -9.0), (3, 5.0), (5, 50.0)),
        logits_processors=(look,),
        repetition_penalty=2.0,
        frequency_penalty=1.0,
    )
    changed = after_rules(torch.ones(1, 8), [request])[0].tolist()
    never = -math.inf
    assert seen[0][0].tolist() == [never, 1, -8, never, never, never, 1, never], "masks and biases, no penalties"
    assert changed == [never, 2, -17, never, never, never, 0.5, never], "a mask is not undone by a bias"


# Draws


@pytest.mark.parametrize("name", few(["a begun sequence", "repetition_penalty"], of=RULES))
def test_tokens_are_drawn_from_the_distribution_after_the_rule(name: str) -> None:
    num_draws = 8000
    rule = RULES[name]
    logits = random_logits(40, seed=11, spread=1.5)
    requests = [asking([4, 5], [6, 1, 1, 2], temperature=1.3, seed=seed, **rule) for seed in range(num_draws)]
    changed = changed_logits(logits.numpy(), requests[0])
    counts = np.bincount(sample_for(requests, logits.expand(num_draws, -1)).token_ids, minlength=40)
    assert chi_square_is_plausible(counts, expected_probabilities(changed, 1.3))
    assert not chi_square_is_plausible(counts, expected_probabilities(logits.double().numpy(), 1.3))


# What they leave alone


@pytest.mark.parametrize("vocab", [128, 1000])
def test_rows_without_rules_bring_the_same_bits_beside_rows_with_them(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    plain = [
        asking(
            random.integers(0, vocab, 5).tolist(),
            random.integers(0, vocab, 9).tolist(),
            temperature=float(random.choice([0.0, 1.0, 1.7])),
            top_k=int(random.choice([0, 9])),
            top_p=float(random.choice([1.0, 0.9])),
            seed=seed,
            logprobs=int(random.choice([-1, 0, 3])),
        )
        for seed in range(20)
    ]
    ruled = [
        asking([4, 5], [6, 1, 1, 2], temperature=1.0, logprobs=5, logprob_token_ids=(9, 1), **rule)
        for rule in RULES.values()
    ] + [asking(temperature=1.0, num_choices=3, logprobs=2)]
    logits = random_logits(len(plain) + len(ruled), vocab, seed=3)
    alone = sample_for(plain, logits[: len(plain)])
    order = random.permutation(len(plain) + len(ruled))
    mixed = sample_for([(plain + ruled)[i] for i in order], logits[torch.from_numpy(order)])
    place_of = np.argsort(order)
    assert mixed.failures == ()
    assert mixed.logprobs is not None
    assert alone.logprobs is not None
    first_of_row = np.cumsum(mixed.counts) - mixed.counts
    lines = {index: line for line, index in enumerate(mixed.logprobs.index.tolist())}
    own_lines = {index: line for line, index in enumerate(alone.logprobs.index.tolist())}
    for row in range(len(plain)):
        index = int(first_of_row[place_of[row]])
        assert mixed.token_ids[index] == mixed.next_ids[place_of[row]] == alone.token_ids[row]
        assert (row in own_lines) == (index in lines)
        if row in own_lines:
            line, own = lines[index], own_lines[row]
            assert mixed.logprobs.logprobs[line] == alone.logprobs.logprobs[own]
            assert mixed.logprobs.ranks[line] == alone.logprobs.ranks[own]
            np.testing.assert_array_equal(mixed.logprobs.top_logprobs[line][:3], alone.logprobs.top_logprobs[own][:3])
