"""What native kernels of sampling promise beyond their operations: threads, company and recording change nothing."""

from __future__ import annotations

import pytest
import torch
from kernels.harness import POISON
from kernels.test_draw import mixed_rows, samples_of
from sampler.batch import random_logits
from torch import Tensor

from aioengine.kernels.native.operations import NativeOperations
from aioengine.kernels.native.team import Team


def drawn(ops: NativeOperations, logits: Tensor, samples: Tensor) -> list[int]:
    token_ids, status = torch.full((2, len(samples)), POISON, dtype=torch.int32)
    ops.draw(logits, samples, None, token_ids, status, has_filters=True, is_greedy=False)
    assert not status.any()
    return token_ids.tolist()


@pytest.mark.parametrize("vocab", [7, 257, 40_000])
def test_a_sample_is_the_same_alone_in_company_and_with_more_threads(teams: list[Team], vocab: int) -> None:
    logits, samples = random_logits(23, vocab, seed=vocab, spread=1.0), samples_of(mixed_rows(23, seed=vocab))
    one, two = (NativeOperations(team) for team in teams)
    together = drawn(one, logits, samples)
    assert drawn(two, logits, samples) == together
    assert [drawn(one, logits, samples[[nth]])[0] for nth in range(23)] == together
