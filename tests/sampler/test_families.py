"""The first tokens of several choices, drawn from one row of logits."""

import numpy as np
import pytest
from sampler.batch import (
    asking,
    changed_logits,
    chi_square_is_plausible,
    expected_probabilities,
    random_logits,
    sample_for,
    tokens_of,
)

FILTERS = ({}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02})


@pytest.mark.parametrize("vocab", [7, 128, 1000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_each_choice_gets_the_token_that_it_would_get_alone(
    filters: dict[str, float], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(4, vocab, seed=vocab)
    family = asking([3], temperature=1.2, seed=5, choice=2, num_choices=20, repetition_penalty=1.5, **filters)
    others = [asking(temperature=1.0, seed=1), asking(num_choices=3), asking([1], [2], temperature=1.0, num_choices=9)]
    requests = [others[0], family, *others[1:]]
    sampled = sample_for(requests, logits)
    assert sampled.counts.tolist() == [1, 20, 3, 1]
    assert sampled.token_ids.dtype == sampled.next_ids.dtype == np.int32
    alone = [
        asking([3], temperature=1.2, seed=5, choice=choice, repetition_penalty=1.5, **filters)
        for choice in range(2, 22)
    ]
    tokens = tokens_of(sampled)
    assert tokens[1] == sample_for(alone, logits[1].expand(20, -1)).token_ids.tolist()
    assert len(set(tokens[1])) > 1
    assert tokens[0] == tokens_of(sample_for(others[:1], logits[:1]))[0]
    assert tokens[2] == [int(logits[2].argmax())] * 3, "a greedy family repeats one token"
    assert tokens[3] == tokens_of(sample_for(others[2:], logits[3:]))[0]
    assert sampled.next_ids.tolist() == [of_row[0] for of_row in tokens]
    for elements in (1, 7 * vocab):
        monkeypatch.setattr("aioengine.kernels.torch.draws.CHUNK_ELEMENTS", elements)
        assert tokens_of(sample_for(requests, logits)) == tokens


def test_a_row_that_has_output_goes_on_alone() -> None:
    logits = random_logits(1, 50, seed=1)
    one = asking([1], [2], temperature=1.0, choice=3)
    several = asking([1], [2], temperature=1.0, choice=3, num_choices=5)
    assert tokens_of(sample_for([several], logits)) == tokens_of(sample_for([one], logits))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_choices_are_drawn_from_the_distribution_and_independently(filters: dict[str, float]) -> None:
    vocab, num_families, num_choices = 12, 1500, 8
    logits = random_logits(vocab, seed=3, spread=1.0)
    requests = [
        asking([1], temperature=1.1, seed=seed, num_choices=num_choices, logit_bias=((4, 1.0),), **filters)
        for seed in range(num_families)
    ]
    sampled = sample_for(requests, logits.expand(num_families, -1))
    tokens = sampled.token_ids.reshape(num_families, num_choices)
    probabilities = expected_probabilities(changed_logits(logits.numpy(), requests[0]), 1.1, **filters)  # type: ignore[arg-type]
    for choice in range(num_choices):
        assert chi_square_is_plausible(np.bincount(tokens[:, choice], minlength=vocab), probabilities), choice
    pairs = np.outer(probabilities, probabilities).ravel()
    for one, other in ((0, 1), (0, 7), (3, 4), (6, 7)):
        counts = np.bincount(tokens[:, one] * vocab + tokens[:, other], minlength=vocab * vocab)
        assert chi_square_is_plausible(counts, pairs), (one, other)
    of_neighbours = np.bincount(tokens[:-1, 0] * vocab + tokens[1:, 1], minlength=vocab * vocab)
    assert chi_square_is_plausible(of_neighbours, pairs), "seeds next to each other"
