"""A sequence's tokens, its sampling, and its states."""

from __future__ import annotations

from typing import Any

import pytest

from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import int32
from aioengine.scheduler.sequence import Request, Sequence, make_choices


def make_sequence(prompt: list[int], *, eos_token_ids: tuple[int, ...] = (), **params: Any) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=int32(prompt),
        params=SamplingParams(**params),
        seed=3,
        max_total_tokens=100,
    )
    return make_choices(request, eos_token_ids=eos_token_ids)


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("length", range(4))
def test_a_slice_may_lie_across_the_end_of_the_prompt(start: int, length: int) -> None:
    sequence = make_sequence([10, 11, 12, 13])
    sequence.output_ids += [14, 15, 16, 17]
    assert sequence.slice_ids(start, start + length) == list(range(10, 18))[start : start + length]


def test_stop_tokens_are_masked_until_min_tokens_and_eos_only_for_those_who_mind_it() -> None:
    assert make_sequence([1], eos_token_ids=(7,), stop_token_ids=(9,)).sampling.stop_ids == ()
    assert make_sequence([1], eos_token_ids=(7,), stop_token_ids=(9,), min_tokens=2).sampling.stop_ids == (7, 9)
    ignoring = make_sequence([1], eos_token_ids=(7,), stop_token_ids=(9,), min_tokens=2, ignore_eos=True)
    assert ignoring.sampling.stop_ids == (9,)


def test_the_sampler_is_told_what_was_asked_for() -> None:
    sampling = make_sequence([1], temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, logprobs=2).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 0, 0.9, 0.1)
    assert (sampling.seed, sampling.logprobs) == (3, 2)
    assert make_sequence([1]).sampling.logprobs == -1
