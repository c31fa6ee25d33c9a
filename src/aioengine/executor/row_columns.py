"""What the host keeps of an executor's rows, whatever the device: how each is sampled, and what is asked about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioengine.kernels.sampling.sample_rows import PARAM_WORDS, SAMPLE_WORDS, SampleRow
from aioengine.sampling_params import PENALTIES, ROW_PARAMS, is_any_on
from aioengine.scheduler.plan import Int32, RowAdded, RowSampling, StepPlan

Int64 = NDArray[np.int64]

NO_IDS = np.zeros(0, np.int64)


def spans(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> Int64:
    """int64 [sum of counts]: ``starts[i]``, ``starts[i] + 1``, … ``counts[i]`` of them, one span after the other."""
    ends = np.cumsum(counts)
    positions: Int64 = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts - starts, counts)
    return positions


def has_rules(sampling: RowSampling) -> bool:
    """Whether the row's logits are changed at every step; ``stop_ids`` are masked at the first ones only."""
    return bool(
        sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.logit_bias
        or sampling.logits_processors
        or is_any_on(sampling, PENALTIES)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """Prompt tokens of a step whose log-probabilities are asked for.

    Attributes:
        index: int32 [m], which of the plan's rows each belongs to, ascending.
        positions: int32 [m], its logits_row in the prompt.
        token_ids: int64 [m], what it is.
        predicted_at: int64 [m], where in the step's tokens the one before it is.
        num_top: likeliest tokens to report for each.
    """

    index: Int32
    positions: Int32
    token_ids: Int64
    predicted_at: Int64
    num_top: int


class RowColumns:
    """Up to ``max_num_seqs`` rows.

    Attributes:
        num_prompt_tokens: int32 [rows].
        words: int32 [rows, SAMPLE_WORDS], as the sampling kernels take a sample's; the rest are their business.
        params: of each of `RowParams` float32 or int32 [rows]; views of ``words``, as seed and choice are.
        seed: int64 [rows].
        choice, logprobs, min_tokens, prompt_logprobs: int32 [rows], as in `RowSampling`.
        has_rules: bool [rows], whether the logits are changed at each step.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.words = np.zeros((max_num_seqs, SAMPLE_WORDS), np.int32)
        self.params: dict[str, NDArray[Any]] = {
            name: self.words.view(np.float32 if ROW_PARAMS[name] is float else np.int32)[:, word]
            for name, word in PARAM_WORDS.items()
        }
        self.seed: Int64 = self.words[:, SampleRow.SEED_LOW : SampleRow.SEED_HIGH + 1].view(np.int64)[:, 0]
        self.choice = self.words[:, SampleRow.CHOICE]
        self.logprobs, self.min_tokens, self.prompt_logprobs = np.zeros((3, max_num_seqs), np.int32)
        self.has_rules = np.zeros(max_num_seqs, np.bool_)
        self._num_choices: dict[int, int] = {}
        self._logprob_token_ids: dict[int, Int64] = {}

    def remove(self, rows: Int32) -> None:
        for row in rows.tolist():
            self._num_choices.pop(row, None)
            self._logprob_token_ids.pop(row, None)

    def add(self, added: RowAdded) -> None:
        row, sampling = added.row, added.sampling
        self.num_prompt_tokens[row] = added.num_prompt_tokens
        for name, column in self.params.items():
            column[row] = getattr(sampling, name)
        self.seed[row], self.choice[row] = sampling.seed, sampling.choice
        self.logprobs[row], self.prompt_logprobs[row] = sampling.logprobs, sampling.prompt_logprobs
        self.min_tokens[row] = sampling.min_tokens if sampling.stop_ids else 0  # else nothing to mask until then
        self.has_rules[row] = has_rules(sampling)
        if sampling.num_choices > 1:
            self._num_choices[row] = sampling.num_choices
        if sampling.logprob_token_ids:
            self._logprob_token_ids[row] = np.array(sampling.logprob_token_ids, np.int64)

    def num_choices(self, rows: Int32, positions: Int32) -> Int32 | None:
        """How many tokens each row brings at these output positions; None where it is one.

        A row brings several at position 0 alone, and is not asked again from then on.
        """
        if not self._num_choices:
            return None
        counts = [self._num_choices.get(row, 1) for row in rows.tolist()]
        num_choices = np.where(positions == 0, counts, 1).astype(np.int32)
        for row in rows[positions > 0].tolist():
            self._num_choices.pop(row, None)
        return num_choices if (num_choices > 1).any() else None

    def logprob_token_ids(self, rows: Int32) -> list[Int64] | None:
        """What to report always, of each row; None where no row has any."""
        if not self._logprob_token_ids:
            return None
        return [self._logprob_token_ids.get(row, NO_IDS) for row in rows.tolist()]

    def prompt_tokens(
        self, plan: StepPlan, offsets: Int32, token_ids: Callable[[Int32, Int64], Int64]
    ) -> PromptTokens | None:
        """Of the rows that ask: each prompt token that follows one which the plan computes.

        Args:
            offsets: int32 [b + 1], where each row's tokens begin in the step.
            token_ids: of rows at positions, int64 [m] from [m] each.
        """
        num_top = self.prompt_logprobs[plan.rows]
        asking = (num_top >= 0).nonzero()[0]
        if not len(asking):
            return None
        rows, starts = plan.rows[asking], plan.starts[asking]
        # The prompt's last token predicts an output token.
        counts = np.minimum(plan.num_tokens[asking], self.num_prompt_tokens[rows] - 1 - starts).clip(min=0)
        if not counts.any():
            return None
        positions = spans(starts + 1, counts)
        return PromptTokens(
            index=np.repeat(asking, counts).astype(np.int32),
            positions=positions.astype(np.int32),
            token_ids=token_ids(np.repeat(rows, counts), positions),
            predicted_at=spans(offsets[asking], counts),
            num_top=int(num_top[asking].max()),
        )
