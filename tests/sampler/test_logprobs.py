"""Log-probabilities against log_softmax in float64: of sampled tokens, of tokens asked for, and of prompts."""

import numpy as np
import pytest
import torch
from sampler.batch import asking, random_logits, sample_for

from aioengine.kernels.operations import plain_torch as operations
from aioengine.sampler.outputs import DeviceOutputs, OutputSizes
from aioengine.sampler.sampler import Sampler


def test_logprobs_may_ask_for_no_token_but_the_sampled_one_or_for_all() -> None:
    logits = random_logits(30, seed=1)[None]
    for wanted, width in ((0, 0), (30, 30), (99, 30)):
        logprobs = sample_for([asking(logprobs=wanted)], logits).logprobs
        assert logprobs is not None
        assert logprobs.top_ids.shape == (1, width)


@pytest.mark.parametrize("vocab", [1, 7, 123, 5003])
def test_ranks_are_exact_whatever_the_chunks(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(5, vocab, seed=vocab).round(decimals=1)  # so that there are many equal ones
    requests = [
        asking(temperature=2.0, seed=row, logprobs=row, logprob_token_ids=tuple(range(0, vocab, 1 + vocab // 40)))
        for row in range(5)
    ]
    for elements in (2**20, 1, 3 * vocab):
        monkeypatch.setattr("aioengine.kernels.torch.draws.CHUNK_ELEMENTS", elements)
        sampled = sample_for(requests, logits)
        lines = sampled.logprobs
        assert lines is not None
        for row, token in enumerate(sampled.token_ids.tolist()):
            assert lines.ranks[row] == 1 + int((logits[row] > logits[row, token]).sum())
            span = slice(*lines.extra_offsets[row : row + 2].tolist())
            assert lines.extra_ids[span].tolist() == list(range(0, vocab, 1 + vocab // 40))
            of_extra = logits[row, torch.from_numpy(lines.extra_ids[span].astype(np.int64))]
            assert lines.extra_ranks[span].tolist() == [1 + int((logits[row] > value).sum()) for value in of_extra]
            expected = (of_extra - torch.logsumexp(logits[row], dim=-1)).numpy()
            np.testing.assert_allclose(lines.extra_logprobs[span], expected, atol=1e-5)


def test_tokens_asked_for_come_in_their_order_for_rows_that_want_logprobs() -> None:
    logits = random_logits(4, 90, seed=1)
    requests = [
        asking(logprobs=0, logprob_token_ids=(80, 3, 3)),
        asking(logprob_token_ids=(1,)),
        asking(logprobs=2),
        asking(logprobs=1, logprob_token_ids=(90, 5, 2**31 - 1)),
    ]
    lines = sample_for(requests, logits).logprobs
    assert lines is not None
    assert lines.index.tolist() == [0, 2, 3]
    assert lines.extra_offsets.tolist() == [0, 3, 3, 4]
    assert lines.extra_ids.tolist() == [80, 3, 3, 5]
    assert lines.extra_offsets.dtype == lines.extra_ids.dtype == lines.extra_ranks.dtype == np.int32
    assert lines.extra_logprobs.dtype == np.float32


def test_likeliest_tokens_are_of_the_vocabulary_though_most_of_it_is_impossible() -> None:
    logits = torch.full((1, 70), -torch.inf)
    logits[0, 5] = 1.0
    lines = sample_for([asking(logprobs=70)], logits).logprobs
    assert lines is not None
    assert lines.top_ids[0, 0] == 5
    assert (lines.top_ids < 70).all()
    assert lines.top_logprobs[0].tolist() == [0.0] + [-np.inf] * 69


@pytest.mark.parametrize("num_top", [0, 1, 5, 2000])
@pytest.mark.parametrize("vocab", [1, 7, 123, 1000])
def test_prompt_logprobs_are_the_log_softmax_of_the_prompts_logits(
    vocab: int, num_top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(vocab)
    hidden = random_logits(60, 16, seed=1)
    head = random_logits(16, vocab, seed=2, spread=0.5)
    predicted_at = np.sort(random.choice(60, 41, replace=False))
    token_ids, width = random.integers(0, vocab, 41), min(num_top, vocab)
    wanted = torch.from_numpy(np.stack((predicted_at, token_ids)).astype(np.int32))
    sampler = Sampler(operations, torch.zeros(1, 1, dtype=torch.int32), vocab)
    expected = torch.log_softmax((hidden @ head)[torch.from_numpy(predicted_at)].double(), dim=-1).numpy()
    most: list[int] = []

    def logits_of(tokens: torch.Tensor) -> torch.Tensor:
        most.append(len(tokens))
        return hidden[tokens.long()] @ head

    for elements, tokens_a_chunk in ((2**22, 41), (1, 1), (7 * vocab, 7)):
        monkeypatch.setattr("aioengine.sampler.sampler.PROMPT_CHUNK_ELEMENTS", elements)
        most.clear()
        sizes = OutputSizes(0, num_prompt=41, num_prompt_top=width)
        result = DeviceOutputs(torch.zeros(sizes.num_words, dtype=torch.int32), sizes).prompt
        sampler.score_prompt(logits_of, wanted, result)
        assert max(most) == tokens_a_chunk
        of_tokens = expected[np.arange(41), token_ids]
        np.testing.assert_allclose(result.logprobs, of_tokens, atol=1e-5)
        assert result.ranks.tolist() == (1 + (expected > of_tokens[:, None]).sum(axis=1)).tolist()
        ranking = np.argsort(-expected, axis=1)[:, :width]
        assert result.top_ids.tolist() == ranking.tolist()
        np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(expected, ranking, axis=1), atol=1e-5)
