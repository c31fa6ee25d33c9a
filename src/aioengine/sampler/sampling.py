"""A step's logits to its tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioengine.sampler.blocks import BlockedLogits, Scratch, block, likeliest, put_rows, row_index
from aioengine.sampler.draws import draw_tokens
from aioengine.sampler.logprobs import step_logprobs
from aioengine.sampler.rows import Int64, RuledRows, SamplingRows, spans, why_hopeless
from aioengine.sampler.rules import apply_rules
from aioengine.scheduler.plan import Float32, Int32, RowFailure, StepLogprobs


class Sampled(NamedTuple):
    """What `sample` brings.

    Attributes:
        token_ids: int32 [t], the rows' one after the other.
        counts: int32 [n], how many each row has: none if it failed, one, or at output position 0 its ``num_choices``.
        next_ids: int32 [n], what a row goes on with: its first token; 0 if it failed.
        logprobs: None where no row asked.
        failures: ``index`` is the row.
    """

    token_ids: Int32
    counts: Int32
    next_ids: Int32
    logprobs: StepLogprobs | None
    failures: tuple[RowFailure, ...]


class SampleRows(NamedTuple):
    """The tokens that are to be sampled.

    Attributes:
        rows: int64 [t], ascending.
        choice, temperature: int32 and float32 [t].
        counts: int32 [n], of each row.
    """

    rows: Int64
    choice: Int32
    temperature: Float32
    counts: Int32


def sample(logits: Tensor, rows: SamplingRows, scratch: Scratch | None = None) -> Sampled:
    """Choose a token for each row, or several.

    Log-probabilities are of the logits as given: before any rule, temperature and filters. A row whose highest logit,
    after its rules, is NaN or -inf fails; +inf is a token that is chosen for certain.

    Args:
        logits: float32 [n, vocab]; those of rows that have rules are changed.
        scratch: one to use again and again; absent: a new one.
    """
    scratch = scratch or Scratch()
    vocab = logits.shape[1]
    failures: dict[int, Exception] = {}
    raw = None
    if rows.ruled is not None:
        logits = logits.contiguous()
        raw = RawLogits.copy(logits, rows, rows.ruled)
        failures = apply_rules(logits, rows.ruled, scratch)
    blocked = block(logits)
    best, top = likeliest(blocked)
    if not float(top.min()) > -np.inf:  # a NaN is not, either
        failures = {**hopeless_rows(top, rows.ruled), **failures}
    is_one_each = rows.num_choices is None and not failures
    samples = one_sample_each(rows) if is_one_each else make_samples(rows, list(failures))
    token_ids = best if is_one_each else best[torch.from_numpy(samples.rows)]
    drawn = (samples.temperature > 0).nonzero()[0]
    if len(drawn):
        token_ids[row_index(drawn)] = draw_tokens(
            blocked, top, rows, samples.rows[drawn], samples.choice[drawn], scratch
        )
    if raw is not None:
        raw.put_back(blocked)
    sampled = token_ids.int().numpy()
    return Sampled(
        token_ids=sampled,
        counts=samples.counts,
        next_ids=sampled if is_one_each else first_tokens(sampled, samples),
        logprobs=step_logprobs(blocked, vocab, rows, samples.rows, token_ids),
        failures=tuple(RowFailure(row, failures[row]) for row in sorted(failures)),
    )


class RawLogits(NamedTuple):
    """The logits of rows that have rules and want log-probabilities, as the model gave them."""

    rows: Int64
    values: Tensor

    @classmethod
    def copy(cls, logits: Tensor, rows: SamplingRows, ruled: RuledRows) -> RawLogits | None:
        logits_rows = ruled.logits_rows[rows.logprobs[ruled.logits_rows] >= 0]
        return cls(logits_rows, logits.index_select(0, torch.from_numpy(logits_rows))) if len(logits_rows) else None

    def put_back(self, blocked: BlockedLogits) -> None:
        put_rows(blocked.values.flatten(1)[:, : self.values.shape[1]], self.rows.tolist(), self.values)
        blocked.maxima[torch.from_numpy(self.rows)] = block(self.values).maxima


def hopeless_rows(top: Tensor, ruled: RuledRows | None) -> dict[int, Exception]:
    """Why no token can be sampled, for the rows whose highest logit, of ``top``, is NaN or -inf."""
    rules = {} if ruled is None else dict(zip(ruled.logits_rows.tolist(), ruled.rules, strict=True))
    return {
        row: why_hopeless(
            is_nan=bool(torch.isnan(top[row])),
            is_ruled=row in rules,
            has_processors=row in rules and bool(rules[row].logits_processors),
        )
        for row in np.flatnonzero(~(top.numpy() > -np.inf)).tolist()
    }


def one_sample_each(rows: SamplingRows) -> SampleRows:
    num_rows = len(rows.choice)
    return SampleRows(np.arange(num_rows), rows.choice, rows.params["temperature"], np.ones(num_rows, np.int32))


def make_samples(rows: SamplingRows, failed: list[int]) -> SampleRows:
    """None for the rows ``failed``, and for the others as many as they have choices."""
    num_rows = len(rows.choice)
    counts = np.ones(num_rows, np.int32) if rows.num_choices is None else rows.num_choices.copy()
    counts[failed] = 0
    row_of_sample = np.repeat(np.arange(num_rows), counts)
    nth_of_row = spans(np.zeros_like(counts), counts)
    choice = (rows.choice[row_of_sample] + nth_of_row).astype(np.int32)
    return SampleRows(row_of_sample, choice, rows.params["temperature"][row_of_sample], counts)


def first_tokens(token_ids: Int32, samples: SampleRows) -> Int32:
    """int32 [n]: the first of each row's tokens; 0 for a row that has none."""
    firsts = np.zeros(len(samples.counts), np.int32)
    firsts[samples.rows[::-1]] = token_ids[::-1]
    return firsts
