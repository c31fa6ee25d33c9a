"""What the sampler has to know of each row: a few columns for all, more for those that have rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioengine.sampling_params import PENALTIES, is_any_on
from aioengine.scheduler.plan import Float32, Int32, LogitsProcessor, RowSampling

Int64 = NDArray[np.int64]


def int64(values: Sequence[int]) -> Int64:
    return np.array(values, np.int64)


def spans(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> Int64:
    """int64 [sum of counts]: ``starts[i]``, ``starts[i] + 1``, … ``counts[i]`` of them, one span after the other."""
    ends = np.cumsum(counts)
    positions: Int64 = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts - starts, counts)
    return positions


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSequences:
    """Bad words of several tokens, flat: their last tokens, and the tokens that stand before those.

    Attributes:
        last_ids: int64 [w].
        starts: int64 [w], where each word's tokens begin in the following.
        ids: int32 [p], all but the last token of each word.
        distances: int32 [p], how far each of them is from the word's last token.
    """

    last_ids: Int64
    starts: Int64
    ids: Int32
    distances: Int32

    @classmethod
    def of(cls, words: Sequence[tuple[int, ...]]) -> BadSequences:
        lengths = np.array([len(word) - 1 for word in words])
        starts = np.cumsum(lengths) - lengths
        return cls(
            last_ids=int64([word[-1] for word in words]),
            starts=starts,
            ids=np.concatenate([word[:-1] for word in words]).astype(np.int32),
            distances=(np.repeat(lengths, lengths) - spans(np.zeros_like(starts), lengths)).astype(np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """A row's rules that are lists, as arrays; made once, when the row is added. The fields are as in `RowSampling`.

    Attributes:
        allowed_ids: int64 [a]; None: all.
        bad_ids: int64 [b], bad words of one token.
        bad_sequences: those of several.
        stop_ids: int64 [s].
        bias_ids, biases: int64 and float32 [l].
    """

    allowed_ids: Int64 | None
    bad_ids: Int64
    bad_sequences: BadSequences | None
    stop_ids: Int64
    bias_ids: Int64
    biases: Float32
    logits_processors: tuple[LogitsProcessor, ...]

    @classmethod
    def of(cls, sampling: RowSampling) -> RowRules:
        sequences = [word for word in sampling.bad_words if len(word) > 1]
        return cls(
            allowed_ids=int64(sampling.allowed_token_ids) if sampling.allowed_token_ids else None,
            bad_ids=int64([word[0] for word in sampling.bad_words if len(word) == 1]),
            bad_sequences=BadSequences.of(sequences) if sequences else None,
            stop_ids=int64(sampling.stop_ids),
            bias_ids=int64([token_id for token_id, _ in sampling.logit_bias]),
            biases=np.array([bias for _, bias in sampling.logit_bias], np.float32),
            logits_processors=sampling.logits_processors,
        )


NO_RULES = RowRules.of(RowSampling())


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
class RuledRows:
    """The rows of a step whose logits have to be changed before a token is drawn.

    Attributes:
        logits_rows: int64 [m], the rows of the step's logits, ascending.
        history: int32 [any, tokens], of which ``history[history_rows[i]]`` begins with the row's ``num_tokens[i]``
            tokens, ``num_prompt_tokens[i]`` of them the prompt.
        history_rows, num_tokens, num_prompt_tokens: int32 [m].
        choice: int32 [m].
        is_before_min: bool [m], ``stop_ids`` are to be masked.
        params: of each of `PENALTIES` float32 [m].
        rules: m of them.
    """

    logits_rows: Int64
    history: Int32
    history_rows: Int32
    num_tokens: Int32
    num_prompt_tokens: Int32
    choice: Int32
    is_before_min: NDArray[np.bool_]
    params: Mapping[str, NDArray[Any]]
    rules: Sequence[RowRules]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """What the sampler must know of each row, as columns; the fields are those of `RowSampling`.

    Attributes:
        params: of each of `RowParams` float32 or int32 [n].
        choice, logprobs: int32 [n].
        seed: int64 [n].
        positions: int32 [n], output position of the token to sample; the first one's is 0.
        num_choices: int32 [n], how many tokens to sample at this position; None where it is one for each row.
        ruled: None where no row has a rule to apply.
        logprob_token_ids: int64 [any], one array a row; None where all are empty.
    """

    params: Mapping[str, NDArray[Any]]
    seed: Int64
    choice: Int32
    logprobs: Int32
    positions: Int32
    num_choices: Int32 | None = None
    ruled: RuledRows | None = None
    logprob_token_ids: Sequence[Int64] | None = None


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


def why_hopeless(*, is_nan: bool, is_ruled: bool, has_processors: bool) -> Exception:
    """Why no token can be sampled from logits of which the highest is NaN, else -inf."""
    if is_nan:
        after = "the logits are not numbers after the request's processors"
        return ArithmeticError(after if has_processors else "the model's logits are not numbers")
    if is_ruled:
        return ValueError(
            "no token is left to sample: allowed_token_ids, bad_words, min_tokens or a logits processor mask all"
        )
    return ArithmeticError("the model's logits are all -inf")
