"""Plain torch for `Operations` on rules and log-probabilities: the oracle of kernels, and what runs without them."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.sampling.sample_rows import SampleFlag, SampleRow, param_of
from aioengine.kernels.torch.sampling import chunks, rows_of


def edit_logits(logits: Tensor, samples: Tensor, sample_of_row: Tensor, edits: Tensor) -> None:
    edit_rows, edit_tokens, _, edit_until = edits
    edit_values = edits[2].view(torch.float32)
    sample = _samples_of_rows(samples, sample_of_row, edit_rows)
    is_known = (sample >= 0) & (edit_tokens >= 0) & (edit_tokens < logits.shape[1])
    words = samples[sample[is_known]]
    is_now = words[:, SampleRow.OUTPUT_POSITION] < edit_until[is_known]
    logits_rows = words[is_now, SampleRow.LOGITS_ROW].long()
    tokens, values = edit_tokens[is_known][is_now].long(), edit_values[is_known][is_now]
    is_mask = values == -torch.inf
    logits.index_put_((logits_rows[~is_mask], tokens[~is_mask]), values[~is_mask], accumulate=True)
    logits[logits_rows[is_mask], tokens[is_mask]] = -torch.inf


def _samples_of_rows(samples: Tensor, sample_of_row: Tensor, rows: Tensor) -> Tensor:
    """int64 [any]: the first sample of each of ``rows``; -1 for padding, and where the row does not sample."""
    if not len(samples) or not len(sample_of_row):
        return torch.full_like(rows, -1, dtype=torch.int64)
    sample = torch.where(rows >= 0, sample_of_row[rows.clamp(min=0).long()], -1).long()
    words = samples[sample.clamp(min=0)]
    is_wanted = (
        (sample >= 0) & (words[:, SampleRow.LOGITS_ROW] >= 0) & (words[:, SampleRow.FLAGS] & SampleFlag.FIRST != 0)
    )
    return torch.where(is_wanted, sample, -1)


def ends_of_bad_words(
    samples: Tensor,
    sample_of_row: Tensor,
    history: Tensor,
    word_rows: Tensor,
    word_offsets: Tensor,
    word_ids: Tensor,
    edit_values: Tensor,
) -> None:
    sample = _samples_of_rows(samples, sample_of_row, word_rows)
    if not len(samples):
        edit_values.zero_()
        return
    lengths = word_offsets.diff()
    word = torch.arange(len(word_rows), device=lengths.device).repeat_interleave(lengths)
    ids = torch.arange(len(word), device=lengths.device)
    of_sample = samples[sample.clamp(min=0)[word]]
    before_end = word_offsets[1:][word] - ids
    is_output = (before_end <= of_sample[:, SampleRow.OUTPUT_POSITION]) & (sample[word] >= 0)
    at = torch.where(is_output, of_sample[:, SampleRow.END] - before_end, 0)
    row = torch.where(is_output, of_sample[:, SampleRow.ROW], 0)
    is_other = ~is_output | (history[row, at] != word_ids[: len(word)])
    num_others = torch.zeros_like(sample).index_add_(0, word, is_other.long())
    edit_values.copy_(torch.where((sample >= 0) & (num_others == 0), -torch.inf, 0.0))


def penalise(logits: Tensor, samples: Tensor, history: Tensor, counters: Tensor) -> None:
    """See `Operations.penalise`. Counts by sorting a row's tokens; the counters are left alone."""
    penalties = torch.stack([param_of(samples, f"{name}_penalty") for name in ("repetition", "frequency", "presence")])
    is_first = (samples[:, SampleRow.LOGITS_ROW] >= 0) & (samples[:, SampleRow.FLAGS] & SampleFlag.FIRST != 0)
    is_penalised = is_first & (penalties != penalties.new_tensor([[1.0], [0.0], [0.0]])).any(dim=0)
    for sample in is_penalised.nonzero()[:, 0].tolist():
        repetition, frequency, presence = penalties[:, sample]
        words = samples[sample].tolist()
        of_row, of_logits_row = history[words[SampleRow.ROW]], logits[words[SampleRow.LOGITS_ROW]]
        end = words[SampleRow.END]
        if repetition != 1:
            known = _known(of_row[:end], logits.shape[1])
            before = of_logits_row[known]
            of_logits_row[known] = torch.where(before > 0, before / repetition, before * repetition)
        if frequency != 0 or presence != 0:
            output = _known(of_row[end - words[SampleRow.OUTPUT_POSITION] : end], logits.shape[1])
            output, counts = output.unique(return_counts=True)
            of_logits_row[output] = of_logits_row[output] - frequency * counts - presence


def _known(tokens: Tensor, vocab: int) -> Tensor:
    """int64 [any]: the tokens that the model has."""
    return tokens[(tokens >= 0) & (tokens < vocab)].long()


def top_logprobs(logits: Tensor, samples: Tensor, log_mass: Tensor, ids: Tensor, logprobs: Tensor) -> None:
    """See `Operations.top_logprobs`. NaN counts as the highest."""
    is_wanted = (samples[:, SampleRow.LOGITS_ROW] >= 0) & (samples[:, SampleRow.FLAGS] & SampleFlag.LOGPROBS != 0)
    wanted, k = is_wanted.nonzero()[:, 0], ids.shape[1]
    for chunk in chunks(len(wanted), logits.shape[1]):
        of_samples = rows_of(logits, samples[wanted[chunk], SampleRow.LOGITS_ROW])
        mass = torch.logsumexp(of_samples, dim=-1)
        log_mass[wanted[chunk]] = mass
        for sample, x, lowest in zip(wanted[chunk], of_samples, of_samples.topk(k).values if k else (), strict=False):
            near = (~(x < lowest[-1])).nonzero()[:, 0]
            order = x[near].argsort(descending=True, stable=True)[:k]  # stable: of equal ones the lowest id first
            ids[sample] = near[order].int()
            logprobs[sample] = x[near[order]] - log_mass[sample]


def look_up(
    logits: Tensor, logits_rows: Tensor, token_ids: Tensor, log_mass: Tensor, logprobs: Tensor, ranks: Tensor
) -> None:
    wanted = (logits_rows >= 0).nonzero()[:, 0]
    for chunk in chunks(len(wanted), logits.shape[1]):
        pairs = wanted[chunk]
        of_pairs = rows_of(logits, logits_rows[pairs])
        values = of_pairs.gather(1, token_ids[pairs, None].long())
        logprobs[pairs] = values[:, 0] - log_mass[pairs]
        ranks[pairs] = 1 + (of_pairs > values).sum(dim=-1, dtype=torch.int32)
