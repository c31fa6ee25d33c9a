"""The likeliest tokens and the ranks of given ones, against log_softmax in float64 and loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernels.harness import ALL, assert_same
from kernels.rule_batch import PADDING, make_samples, run, strange_logits
from nightly import nightly
from sampler.batch import random_logits
from torch import Tensor

from aioengine.kernels.sample_rows import SampleFlag, SampleRow

# numpy says so of each NaN and infinity, where the interpreter computes with it.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

POISON = 12345
ASKING = SampleFlag.FIRST | SampleFlag.LOGPROBS


def likeliest(ops: Any, logits: Tensor, samples: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    log_mass = torch.full((len(samples),), float(POISON))
    ids = torch.full((len(samples), k), POISON, dtype=torch.int32)
    logprobs = torch.full((len(samples), k), float(POISON))
    run(ops.top_logprobs, logits, samples, log_mass, ids, logprobs)
    return log_mass, ids, logprobs


def one_sample_a_line(num_logits_rows: int) -> Tensor:
    return make_samples(
        *(
            {SampleRow.LOGITS_ROW: logits_row, SampleRow.FLAGS: SampleFlag.LOGPROBS}
            for logits_row in range(num_logits_rows)
        )
    )


@ALL
@pytest.mark.parametrize(
    ("vocab", "k"),
    [
        (1, 0),
        (7, 5),
        (129, 9),
        (4097, 20),
        *nightly((1, 1), (123, 1), (37, 37), (128, 8), (1000, 20), (9001, 40), (9001, 0)),
    ],
)
def test_the_likeliest_tokens_are_those_of_a_sorted_log_softmax(ops: Any, vocab: int, k: int) -> None:
    logits = random_logits(3, vocab, seed=vocab + k, spread=5)
    logits[1] += 300
    logits[2] = logits[2].round()  # so that there are many equal ones
    log_mass, ids, logprobs = likeliest(ops, logits, one_sample_a_line(3), k)
    expected = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(log_mass, torch.logsumexp(logits.double(), dim=-1).float(), rtol=2e-7, atol=3e-6)
    ranking = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert_same(ids, ranking.int())
    torch.testing.assert_close(logprobs, expected.gather(1, ranking).float(), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(logprobs[[0, 2]], expected.gather(1, ranking).float()[[0, 2]], rtol=1e-6, atol=1e-5)


@ALL
@pytest.mark.parametrize(("vocab", "k", "seed"), [(40, 40, 2), *nightly((300, 5, 0), (300, 20, 1), (4200, 33, 3))])
def test_nan_is_the_highest_and_infinities_make_what_torch_makes(ops: Any, vocab: int, k: int, seed: int) -> None:
    logits = strange_logits(7, vocab, seed=seed)
    logits[0].nan_to_num_(nan=0.0)
    logits[1].nan_to_num_(nan=0.0, posinf=1.0, neginf=-torch.inf)
    logits[2] = -torch.inf
    logits[3] = -300.0
    logits[3, : vocab // 2] = -torch.inf
    logits[4] = torch.where(torch.arange(vocab) % 2 == 0, 0.0, -0.0)
    logits[5, -1] = -torch.tensor(torch.nan)
    log_mass, ids, logprobs = likeliest(ops, logits, one_sample_a_line(7), k)
    values, ranking = logits.sort(dim=-1, descending=True, stable=True)
    mass = torch.logsumexp(logits, dim=-1)
    torch.testing.assert_close(log_mass, mass, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert_same(ids, ranking[:, :k].int())
    torch.testing.assert_close(logprobs, (values - mass[:, None])[:, :k], rtol=1e-6, atol=2e-5, equal_nan=True)


@ALL
def test_samples_choose_their_lines_and_others_keep_what_they_have(ops: Any) -> None:
    logits = random_logits(3, 200, seed=4)
    samples = make_samples(
        {SampleRow.LOGITS_ROW: 2, SampleRow.FLAGS: ASKING},
        {SampleRow.LOGITS_ROW: 0, SampleRow.FLAGS: SampleFlag.FIRST},
        PADDING,
        {SampleRow.LOGITS_ROW: 2, SampleRow.FLAGS: SampleFlag.LOGPROBS},
        {SampleRow.LOGITS_ROW: 1, SampleRow.FLAGS: ASKING},
    )
    results = likeliest(ops, logits, samples, 4)
    expected = likeliest(ops, logits, one_sample_a_line(3), 4)
    for made, of_lines in zip(results, expected, strict=True):
        assert_same(made[[0, 3, 4]], of_lines[[2, 2, 1]])
        assert (made[[1, 2]] == POISON).all()


@ALL
@pytest.mark.parametrize(("vocab", "num_pairs"), [(1, 1), (7, 123), (123, 7), (9001, 5), (300, 200)])
def test_logprobs_and_ranks_are_those_of_comparisons(ops: Any, vocab: int, num_pairs: int) -> None:
    random = np.random.default_rng(vocab)
    logits = (
        strange_logits(4, vocab, seed=vocab) if vocab != 9001 else random_logits(4, vocab, seed=1).round(decimals=2)
    )
    logits_rows = torch.from_numpy(random.integers(-1, 4, num_pairs).astype(np.int32))
    logits_rows[0] = 3
    token_ids = torch.from_numpy(random.integers(0, vocab, num_pairs).astype(np.int32))
    is_wanted = logits_rows >= 0
    log_mass = torch.logsumexp(logits, dim=-1)[logits_rows.long()]
    logprobs, ranks = torch.full((num_pairs,), float(POISON)), torch.full((num_pairs,), POISON, dtype=torch.int32)
    run(ops.look_up, logits, logits_rows, token_ids, log_mass, logprobs, ranks)
    of_pairs = logits[logits_rows[is_wanted].long()]
    values = of_pairs.gather(1, token_ids[is_wanted, None].long())
    assert_same(ranks[is_wanted], 1 + (of_pairs > values).sum(dim=1).int())
    assert_same(logprobs[is_wanted], values[:, 0] - log_mass[is_wanted])
    assert (logprobs[~is_wanted] == POISON).all()
    assert (ranks[~is_wanted] == POISON).all()
    sorted_lines = logits.sort(dim=-1).values
    for logits_row, token, rank in zip(logits_rows.tolist(), token_ids.tolist(), ranks.tolist(), strict=True):
        if logits_row >= 0 and not logits[logits_row].isnan().any():
            above = torch.searchsorted(sorted_lines[logits_row], logits[logits_row, token], right=True)
            assert rank == 1 + vocab - int(above)
