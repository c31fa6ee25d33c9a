"""What the fake device is to bring, worked out by hand, and who is told of it."""

from __future__ import annotations

from typing import Any

from aioengine import CompletionDelta
from aioengine.outputs.metrics import RequestMetrics, StepRecord
from aioengine.scheduler.plan import RowSampling
from aioengine.testing import sample_hash

NUM_SPECIAL_TOKENS = 3
VOCAB_SIZE = 2048


def continuation(prompt: list[int], count: int, *, seed: int, choice: int = 0) -> list[int]:
    """The first ``count`` tokens that a device of `make_executor` samples behind a prompt, however it gets there."""
    ids, sampling = list(prompt), RowSampling(seed=seed, choice=choice)
    for _ in range(count):
        token = sample_hash(ids, sampling, vocab_size=VOCAB_SIZE - NUM_SPECIAL_TOKENS)
        ids.append(NUM_SPECIAL_TOKENS + token)
    return ids[len(prompt) :]


class Witness:
    """An observer that keeps all that it is told."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.metrics: list[RequestMetrics] = []
        self.reasons: list[tuple[str, ...]] = []

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        self.metrics.append(metrics)
        self.reasons.append(finish_reasons)


def tokens_of(output: Any) -> list[list[int]]:
    """A request's tokens, choice by choice."""
    return [completion.token_ids for completion in output.outputs]


def as_ids(deltas: list[CompletionDelta]) -> list[int]:
    """All tokens of a stream's deltas."""
    return [token_id for delta in deltas for token_id in delta.token_ids]
