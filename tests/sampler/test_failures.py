"""Rows of which no token can be sampled: they fail, say why, and harm no other."""

from typing import Any

import numpy as np
import pytest
import torch
from sampler.batch import Sampled, asking, random_logits, sample_for

FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
)


def sample(logits: torch.Tensor, **sampling: Any) -> Sampled:
    """Of as many requests as there are rows of logits, at temperature 1."""
    return sample_for([asking(**{"temperature": 1.0, **sampling})] * len(logits), logits)


@pytest.mark.parametrize("vocab", [1, 70, 128])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_hopeless_row_fails_and_harms_no_other(bad: float, filters: dict[str, Any], vocab: int) -> None:
    logits = random_logits(3, vocab, seed=6)
    good = sample(logits, logprobs=0, **filters)
    assert good.failures == ()
    logits[1] = bad
    sampled = sample(logits, logprobs=0, **filters)
    (failure,) = sampled.failures
    assert failure.index == 1
    assert ("not numbers" if bad != bad else "all -inf") in str(failure.error)
    assert sampled.counts.tolist() == [1, 0, 1]
    assert sampled.token_ids.tolist() == good.token_ids[[0, 2]].tolist()
    assert sampled.next_ids.tolist() == [good.token_ids[0], 0, good.token_ids[2]]
    assert sampled.logprobs is not None
    assert good.logprobs is not None
    assert sampled.logprobs.index.tolist() == [0, 1]
    np.testing.assert_array_equal(sampled.logprobs.logprobs, good.logprobs.logprobs[[0, 2]])


@pytest.mark.parametrize("place", [0, 63, 64, 69])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_one_nan_is_enough(place: int, filters: dict[str, Any]) -> None:
    logits = random_logits(2, 70, seed=6)
    logits[0, place] = torch.nan
    sampled = sample(logits, **filters)
    assert [failure.index for failure in sampled.failures] == [0]
    assert len(sampled.token_ids) == 1


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_an_infinite_logit_is_chosen_for_certain(filters: dict[str, Any]) -> None:
    logits = random_logits(2, 70, seed=6)
    logits[0, 33] = torch.inf
    sampled = sample(logits, **filters)
    assert sampled.failures == ()
    assert sampled.token_ids[0] == 33


MASKING: dict[str, dict[str, Any]] = {
    "stop ids": {"min_tokens": 1, "stop_ids": tuple(range(70))},
    "bad words": {"bad_words": tuple((token,) for token in range(70))},
    "allowed ids that the model does not have": {"allowed_token_ids": (70, 500)},
    "an allowed id that is a bad word": {"allowed_token_ids": (7,), "bad_words": ((7,),), "logit_bias": ((7, 100.0),)},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("masking", MASKING.values(), ids=MASKING)
def test_a_row_that_is_left_no_token_says_what_may_have_taken_them(masking: dict[str, Any], temperature: float) -> None:
    logits = random_logits(2, 70, seed=6)
    sampled = sample_for([asking(temperature=temperature, **masking), asking(temperature=temperature)], logits)
    (failure,) = sampled.failures
    assert failure.index == 0
    for name in ("allowed_token_ids", "bad_words", "min_tokens", "processor"):
        assert name in str(failure.error)
    assert sampled.counts.tolist() == [0, 1]


def test_all_rows_may_fail() -> None:
    sampled = sample(torch.full((3, 70), torch.nan), logprobs=2)
    assert [failure.index for failure in sampled.failures] == [0, 1, 2]
    assert sampled.token_ids.tolist() == []
    assert sampled.next_ids.tolist() == [0, 0, 0]
    assert sampled.logprobs is None


def test_what_a_mask_covers_need_not_be_a_number() -> None:
    logits = random_logits(1, 70, seed=6)
    logits[0, 40:] = torch.nan
    sampled = sample_for([asking(allowed_token_ids=tuple(range(40)))], logits)
    assert sampled.failures == ()
    assert sampled.token_ids[0] == int(logits[0, :40].argmax())
