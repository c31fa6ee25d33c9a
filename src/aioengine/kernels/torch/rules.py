"""Plain torch oracles of the operations on rules and log-probabilities, as in `aioengine.kernels.operations`."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.sampling.sample_rows import SampleFlag, SampleRow, param_of


def edit_logits(
    logits: Tensor,
    samples: Tensor,
    sample_of_row: Tensor,
    edit_rows: Tensor,
    edit_tokens: Tensor,
    edit_values: Tensor,
    edit_until: Tensor,
) -> None:
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
    edit_values.zero_()
    offsets = word_offsets.tolist()
    for word, sample in enumerate(_samples_of_rows(samples, sample_of_row, word_rows).tolist()):
        if sample < 0:
            continue
        begin = word_ids[offsets[word] : offsets[word + 1]]
        row, end, num_outputs = samples[sample, [SampleRow.ROW, SampleRow.END, SampleRow.OUTPUT_POSITION]].tolist()
        output = history[row, end - num_outputs : end]
        if len(begin) <= num_outputs and torch.equal(output[num_outputs - len(begin) :], begin):
            edit_values[word] = -torch.inf


def penalise(logits: Tensor, samples: Tensor, history: Tensor, counters: Tensor) -> None:
    vocab = logits.shape[1]
    penalties = [param_of(samples, f"{name}_penalty") for name in ("repetition", "frequency", "presence")]
    is_first = (samples[:, SampleRow.LOGITS_ROW] >= 0) & (samples[:, SampleRow.FLAGS] & SampleFlag.FIRST != 0)
    is_penalised = is_first & ((penalties[0] != 1) | (penalties[1] != 0) | (penalties[2] != 0))
    for sample in is_penalised.nonzero()[:, 0].tolist():
        repetition, frequency, presence = (column[sample] for column in penalties)
        end, num_outputs = samples[sample, [SampleRow.END, SampleRow.OUTPUT_POSITION]].tolist()
        first = 0 if repetition != 1 else end - num_outputs
        tokens = history[samples[sample, SampleRow.ROW], first:end].long()
        of_logits_row = logits[samples[sample, SampleRow.LOGITS_ROW]]
        known = tokens[(tokens >= 0) & (tokens < vocab)]
        output = tokens[len(tokens) - num_outputs :]
        counts = torch.bincount(output[(output >= 0) & (output < vocab)], minlength=vocab)
        before = of_logits_row[known]
        of_logits_row[known] = torch.where(before > 0, before / repetition, before * repetition)
        lowered = of_logits_row - frequency * counts - presence
        of_logits_row.copy_(torch.where(counts > 0, lowered, of_logits_row))


def top_logprobs(logits: Tensor, samples: Tensor, log_mass: Tensor, ids: Tensor, logprobs: Tensor) -> None:
    is_wanted = (samples[:, SampleRow.LOGITS_ROW] >= 0) & (samples[:, SampleRow.FLAGS] & SampleFlag.LOGPROBS != 0)
    of_samples = logits[samples[is_wanted, SampleRow.LOGITS_ROW].long()]
    mass = torch.logsumexp(of_samples, dim=-1)
    values, tokens = of_samples.sort(dim=-1, descending=True, stable=True)  # stable: of equal ones the lowest id first
    k = ids.shape[1]
    log_mass[is_wanted] = mass
    ids[is_wanted] = tokens[:, :k].int()
    logprobs[is_wanted] = values[:, :k] - mass[:, None]


def look_up(
    logits: Tensor, logits_rows: Tensor, token_ids: Tensor, log_mass: Tensor, logprobs: Tensor, ranks: Tensor
) -> None:
    is_wanted = logits_rows >= 0
    of_pairs = logits[logits_rows[is_wanted].long()]
    values = of_pairs.gather(1, token_ids[is_wanted, None].long())
    logprobs[is_wanted] = values[:, 0] - log_mass[is_wanted]
    ranks[is_wanted] = 1 + (of_pairs > values).sum(dim=-1, dtype=torch.int32)
