"""Logits to tokens: masks, filters, and draws that depend on nothing but the request.

A draw is a function of (seed, choice, output position) and the row's logits. The random number of each token id comes
from a hash of those (counter-based: Salmon et al., SC 2011), and the token is the one whose logit plus Gumbel noise is
the highest (the Gumbel-max trick), which samples exactly from the softmax. So a draw depends on no generator's state:
not on the batch, the row, preemption or the device.

A filter keeps the tokens whose logit is at or above a threshold of its row; tokens of equal logits are kept or dropped
together. Min-p is applied first, then top-k, then top-p on what is left, renormalised; the last threshold drops tokens
that no noise could make win. Logits are seen in blocks with their maxima, so that nearly all of them are only read
once: a greedy row costs one pass, where ``argmax`` takes six times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from aioengine.core.plan import Int32, StepLogprobs

BLOCK = 64
"""Logits that share a maximum."""

CHUNK_ELEMENTS = 2**20
"""Logits of the rows that are drawn together: bounds the temporaries to a few MB."""

MAX_GUMBEL = 16.64
"""The highest noise that `gumbel` makes, -log(-log(1 - 2⁻²⁴)) = 16.6355, rounded up."""

TOP_P_TIERS = (128, 2048)
"""How many likeliest tokens are looked at for the mass of top-p, until the whole row is sorted: 13 ms for 150,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """What the sampler must know of each row, as columns; the fields are those of `RowSampling`.

    Attributes:
        temperature, top_p, min_p: float32 [n].
        top_k, choice, min_tokens, logprobs: int32 [n].
        seed: int64 [n].
        positions: int32 [n], output position of the token to sample; the first one's is 0.
        stop_ids: one tuple a row.
    """

    temperature: NDArray[np.float32]
    top_k: Int32
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    choice: Int32
    min_tokens: Int32
    logprobs: Int32
    positions: Int32
    stop_ids: Sequence[tuple[int, ...]]


class BlockedLogits(NamedTuple):
    """Logits, and the maximum of each block of them.

    Attributes:
        values: float32 [n, blocks, BLOCK], padded with -inf.
        maxima: float32 [n, blocks].
    """

    values: Tensor
    maxima: Tensor

    def rows(self, index: Tensor | slice) -> BlockedLogits:
        return BlockedLogits(self.values[index], self.maxima[index])


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, StepLogprobs | None]:
    """Choose a token for each row.

    Log-probabilities are of the logits as given: before ``stop_ids`` are masked, temperature and filters.

    Args:
        logits: float32 [n, vocab]; is not changed.
    Returns:
        int64 [n] token ids, and the log-probabilities of the rows that asked (None where none did). A row whose logits
        are not numbers, or are all masked, brings an arbitrary token id.
    """
    raw = block(logits)
    masked = mask_stop_ids(logits, rows)
    blocked = raw if masked is logits else block(masked)
    tokens = likeliest(blocked)
    drawn = np.flatnonzero(rows.temperature > 0)
    rows_a_chunk = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(drawn), rows_a_chunk):
        chunk = drawn[start : start + rows_a_chunk]
        index = torch.from_numpy(chunk)
        of_rows = blocked.rows(slice(int(chunk[0]), int(chunk[-1]) + 1) if is_run(chunk) else index)
        tokens[index] = draw(of_rows, rows, chunk, tokens[index])
    return tokens, step_logprobs(logits, raw, tokens, rows.logprobs)


def is_run(indices: NDArray[np.int64]) -> bool:
    """Whether ascending ``indices`` leave none out, so that a slice can stand for them without a copy."""
    return int(indices[-1] - indices[0]) == len(indices) - 1


def block(logits: Tensor) -> BlockedLogits:
    vocab = logits.shape[1]
    if vocab % BLOCK:
        logits = F.pad(logits, (0, -vocab % BLOCK), value=-torch.inf)
    values = logits.view(len(logits), -1, BLOCK)
    return BlockedLogits(values, values.amax(dim=-1))


def mask_stop_ids(logits: Tensor, rows: SamplingRows) -> Tensor:
    """``logits``, or a copy with ``stop_ids`` at -inf in the rows that have not ``min_tokens`` yet.

    Ids that the model does not have are passed over.
    """
    early = [row for row in np.flatnonzero(rows.positions < rows.min_tokens).tolist() if rows.stop_ids[row]]
    if not early:
        return logits
    masked = logits.clone()
    for row in early:
        masked[row, [token for token in rows.stop_ids[row] if token < logits.shape[1]]] = -torch.inf
    return masked


def likeliest(logits: BlockedLogits) -> Tensor:
    """int64 [n]: the token id of each row's highest logit, the lowest id of several."""
    each = torch.arange(len(logits.maxima))
    best_block = logits.maxima.argmax(dim=-1)
    return best_block * BLOCK + logits.values[each, best_block].argmax(dim=-1)


def largest(logits: BlockedLogits, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` highest logits of each row, in descending order, and their token ids: [n, k] each, k at most vocab.

    They lie in the ``k`` blocks with the highest maxima: any other block's logits are all at most its maximum, below
    those ``k`` maxima.
    """
    num_rows, num_blocks, _ = logits.values.shape
    if k >= num_blocks:
        return logits.values.view(num_rows, -1).topk(k)
    blocks = logits.maxima.topk(k).indices
    candidates = logits.values.gather(1, blocks[:, :, None].expand(-1, -1, BLOCK)).view(num_rows, -1)
    values, places = candidates.topk(k)
    return values, blocks.gather(1, places // BLOCK) * BLOCK + places % BLOCK


def draw(logits: BlockedLogits, rows: SamplingRows, chunk: NDArray[np.int64], best_tokens: Tensor) -> Tensor:
    """Sample each row of ``chunk``.

    Args:
        logits: of the chunk's rows.
        chunk: int64 [n], their places in ``rows``.
        best_tokens: int64 [n], their likeliest tokens.
    Returns:
        int64 [n] token ids.
    """
    temperature = torch.from_numpy(rows.temperature[chunk])
    # Clamped so that a row of -inf alone, or with a +inf, leads to no NaN.
    top = logits.maxima.amax(dim=-1).clamp_(torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)
    threshold = top + temperature * torch.from_numpy(rows.min_p[chunk]).log()
    threshold = apply_top_k(logits, rows.top_k[chunk], threshold)
    threshold = apply_top_p(logits, rows.top_p[chunk], temperature, top, threshold)

    keys = noise_keys(rows.seed[chunk], rows.choice[chunk], rows.positions[chunk])
    # The likeliest token has a score of its noise alone. A token this far below it loses whatever its own noise is.
    lead = gumbel(keys, best_tokens[:, None])[:, 0] - MAX_GUMBEL
    threshold = torch.maximum(threshold, top + temperature * lead)
    return highest_score(logits, keys, threshold, top, temperature, best_tokens)


def apply_top_k(logits: BlockedLogits, top_k: Int32, threshold: Tensor) -> Tensor:
    """Raise the threshold to the ``top_k``-th highest logit of each row that has one."""
    vocab = logits.values.shape[1] * BLOCK
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab))
    if not len(limited):
        return threshold
    index = torch.from_numpy(limited)
    values, _ = largest(logits.rows(index), int(top_k[limited].max()))
    kth = values.gather(1, torch.from_numpy(top_k[limited].astype(np.int64) - 1)[:, None])[:, 0]
    return threshold.index_copy(0, index, torch.maximum(threshold[index], kth))


def apply_top_p(
    logits: BlockedLogits, top_p: NDArray[np.float32], temperature: Tensor, top: Tensor, threshold: Tensor
) -> Tensor:
    """Raise the threshold to the logit at which the likeliest tokens hold ``top_p`` of what the threshold keeps."""
    open_rows = np.flatnonzero(top_p < 1)
    vocab = logits.values.shape[1] * BLOCK
    for k in (*(tier for tier in TOP_P_TIERS if tier < vocab), vocab):
        if not len(open_rows):
            break
        index = torch.from_numpy(open_rows)
        of_rows, scale = logits.rows(index), temperature[index, None]
        values, _ = largest(of_rows, k)
        mass = kept_mass(values, threshold[index, None], top[index, None], scale)
        # Where the last of these is dropped already, they hold all that is kept; else the whole row must be summed.
        total = mass.sum(dim=-1)
        has_more = values[:, -1] >= threshold[index]
        if k < vocab and has_more.any():
            more = of_rows.rows(has_more).values.flatten(1)
            of_more = index[has_more]
            total[has_more] = kept_mass(
                more, threshold[of_more, None], top[of_more, None], temperature[of_more, None]
            ).sum(dim=-1)
        needed = total * torch.from_numpy(top_p[open_rows])
        mass_before = mass.cumsum(dim=-1) - mass
        num_kept = (mass_before < needed[:, None]).sum(dim=-1).clamp_(min=1)
        is_found = (num_kept < k) | (k == vocab) | ~has_more
        last_kept = values.gather(1, num_kept[:, None] - 1)[:, 0]
        raised = torch.maximum(threshold[index], last_kept)
        threshold = threshold.index_copy(0, index, torch.where(is_found, raised, threshold[index]))
        open_rows = open_rows[~is_found.numpy()]
    return threshold


def kept_mass(values: Tensor, threshold: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities of logits, 0 below the threshold: [n, m] from [n, m] and three times [n, 1]."""
    mass = (values - top).div_(temperature).exp_()
    return mass.masked_fill_(values < threshold, 0.0)


def highest_score(
    logits: BlockedLogits, keys: NoiseKeys, threshold: Tensor, top: Tensor, temperature: Tensor, best_tokens: Tensor
) -> Tensor:
    """The token of each row with the highest (logit - top) / temperature + noise, of those at or above the threshold.

    Only blocks that hold such a token are looked into.

    Args:
        threshold, top, temperature: float32 [n].
        best_tokens: int64 [n], the rows' likeliest tokens.
    Returns:
        int64 [n], the lowest id of several.
    """
    is_candidate = logits.maxima >= threshold[:, None]
    is_candidate[torch.arange(len(best_tokens)), best_tokens // BLOCK] = True  # at least one, though all be NaN
    row, in_block = is_candidate.nonzero(as_tuple=True)
    values = logits.values[row, in_block]
    tokens = in_block[:, None] * BLOCK + torch.arange(BLOCK)
    scores = (values - top[row, None]).div_(temperature[row, None])
    scores += gumbel(keys.rows(row), tokens)
    scores.masked_fill_(~(values >= threshold[row, None]), -torch.inf)

    block_scores, lanes = scores.max(dim=-1)
    best = torch.full_like(top, -torch.inf).scatter_reduce_(0, row, block_scores, "amax")
    entries = torch.where(block_scores == best[row], torch.arange(len(row)), len(row))
    winner = torch.full_like(best_tokens, len(row)).scatter_reduce_(0, row, entries, "amin")
    return tokens[winner, lanes[winner]]


class NoiseKeys(NamedTuple):
    """64 bits a row: two int32 [n]."""

    low: Tensor
    high: Tensor

    def rows(self, index: Tensor) -> NoiseKeys:
        return NoiseKeys(self.low[index], self.high[index])


def noise_keys(seed: NDArray[np.int64], choice: Int32, positions: Int32) -> NoiseKeys:
    """What a row's noise depends on, mixed: [n] each."""
    key = mix64(seed.astype(np.int64).view(np.uint64))
    key = mix64(key ^ choice.astype(np.uint64))
    key = mix64(key ^ positions.astype(np.uint64))
    words = torch.from_numpy(key.view(np.int32).reshape(-1, 2))
    return NoiseKeys(words[:, 0], words[:, 1])


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's step, uint64 [n] (Steele, Lea & Flood, OOPSLA 2014): a bijection that mixes all bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel(keys: NoiseKeys, tokens: Tensor) -> Tensor:
    """Noise of the standard Gumbel distribution, a function of key and token id.

    A uniform number of 23 bits plus a half lies strictly between 0 and 1, which float32 holds exactly, so that both
    logarithms are finite. Tokens less likely than 2⁻²⁴ of the likeliest are drawn more rarely than they should be.

    Args:
        keys: [n].
        tokens: int64 [n, m].
    Returns:
        float32 [n, m].
    """
    bits = shift_right(hash_tokens(keys, tokens), 9)
    uniform = bits.float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def hash_tokens(keys: NoiseKeys, tokens: Tensor) -> Tensor:
    """32 hashed bits as int32 [n, m]: "triple32" of Wellons' hash-prospector, with the key's words mixed in.

    int32 products wrap around as uint32 ones do; its right shifts must be told not to copy the sign.
    """
    x = tokens.int().add_(keys.low[:, None])
    x ^= shift_right(x, 17)
    x *= 0xED5AD4BB - 2**32
    x ^= shift_right(x, 11)
    x *= 0xAC4C1B51 - 2**32
    x += keys.high[:, None]
    x ^= shift_right(x, 15)
    x *= 0x31848BAB
    x ^= shift_right(x, 14)
    return x


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def step_logprobs(logits: Tensor, blocked: BlockedLogits, tokens: Tensor, num_logprobs: Int32) -> StepLogprobs | None:
    """Log-probabilities of the sampled tokens and of the likeliest ones.

    A rank is 1 plus the number of tokens with a higher logit.

    Args:
        logits: float32 [n, vocab], unmasked.
        blocked: the same.
        tokens: int64 [n], sampled.
        num_logprobs: int32 [n], likeliest tokens to report; below 0: the row asks for nothing.
    """
    asked = np.flatnonzero(num_logprobs >= 0)
    if not len(asked):
        return None
    index = torch.from_numpy(asked)
    row_logits = logits[index]
    log_mass = torch.logsumexp(row_logits, dim=-1, keepdim=True)
    of_tokens = row_logits.gather(1, tokens[index, None])
    ranks = (row_logits > of_tokens).sum(dim=-1, dtype=torch.int32) + 1
    top_logits, top_ids = largest(blocked.rows(index), min(int(num_logprobs.max()), logits.shape[1]))
    return StepLogprobs(
        index=asked.astype(np.int32),
        logprobs=(of_tokens - log_mass)[:, 0].numpy(),
        ranks=ranks.numpy(),
        top_ids=top_ids.int().numpy(),
        top_logprobs=(top_logits - log_mass).numpy(),
    )
