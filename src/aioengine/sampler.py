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

NOISE_SPAN = 19.5
"""The highest noise that `gumbel` makes, -log(-log(1 - 2⁻²⁴)) = 16.64, less the lowest, -log(-log(2⁻²⁴)) = -2.81."""

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


class Scratch:
    """Memory for the temporaries of a draw, reused: fresh pages cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def blocks(self, name: str, num_blocks: int, dtype: torch.dtype) -> Tensor:
        """[num_blocks, BLOCK] of anything, valid until the next call with that name."""
        tensor = self._tensors.get(name)
        if tensor is None or len(tensor) < num_blocks:
            tensor = torch.empty(1 << (num_blocks - 1).bit_length(), BLOCK, dtype=dtype)
            self._tensors[name] = tensor
        return tensor[:num_blocks]


def sample(logits: Tensor, rows: SamplingRows, scratch: Scratch | None = None) -> tuple[Tensor, StepLogprobs | None]:
    """Choose a token for each row.

    Log-probabilities are of the logits as given: before ``stop_ids`` are masked, temperature and filters.

    Args:
        logits: float32 [n, vocab]; is not changed.
        scratch: one to use again and again; absent: a new one.
    Returns:
        int64 [n] token ids, and the log-probabilities of the rows that asked (None where none did). A row whose logits
        are not numbers, or are all masked, brings an arbitrary token id.
    """
    scratch = scratch or Scratch()
    raw = block(logits)
    masked = mask_stop_ids(logits, rows)
    blocked = raw if masked is logits else block(masked)
    tokens = likeliest(blocked)
    drawn = np.flatnonzero(rows.temperature > 0)
    rows_a_chunk = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(drawn), rows_a_chunk):
        chunk = drawn[start : start + rows_a_chunk]
        index = row_index(chunk)
        tokens[index] = draw(blocked.rows(index), rows, chunk, tokens[index], scratch)
    return tokens, step_logprobs(logits, raw, tokens, rows.logprobs)


def row_index(rows: NDArray[np.int64]) -> Tensor | slice:
    """Ascending ``rows`` as an index; a slice if none is left out between them, since that copies nothing."""
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else torch.from_numpy(rows)


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
    if 4 * k > num_blocks:  # most blocks would have to be looked into
        flat = logits.values.view(num_rows, -1)
        if 8 * k > flat.shape[1]:
            values, ids = flat.sort(descending=True)  # faster than topk for so many
            return values[:, :k], ids[:, :k]
        return flat.topk(k)
    blocks = logits.maxima.topk(k).indices
    candidates = logits.values.gather(1, blocks[:, :, None].expand(-1, -1, BLOCK)).view(num_rows, -1)
    values, places = candidates.topk(k)
    return values, blocks.gather(1, places // BLOCK) * BLOCK + places % BLOCK


def draw(
    logits: BlockedLogits, rows: SamplingRows, chunk: NDArray[np.int64], best_tokens: Tensor, scratch: Scratch
) -> Tensor:
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
    threshold = filter_threshold(logits, rows, chunk, temperature, top)
    keys = noise_keys(rows.seed[chunk], rows.choice[chunk], rows.positions[chunk])
    # A token this far below the likeliest one loses to it, whatever the noise of the two.
    floor = top - temperature * NOISE_SPAN
    if threshold is not None:
        floor = torch.maximum(floor, threshold)
    has_chance = logits.maxima >= floor[:, None]
    has_chance[torch.arange(len(chunk)), best_tokens // BLOCK] = True  # at least one, though all be NaN
    row, in_block = has_chance.nonzero(as_tuple=True)
    scores = scratch.blocks("scores", len(row), torch.float32)
    torch.index_select(logits.values.flatten(0, 1), 0, row * has_chance.shape[1] + in_block, out=scores)
    is_dropped = scores < threshold[row, None] if threshold is not None else None
    scores.sub_(top[row, None]).div_(temperature[row, None]).add_(gumbel(keys.rows(row), in_block, scratch))
    if is_dropped is not None:
        scores.masked_fill_(is_dropped, -torch.inf)
    entry, lane = highest(scores, row, len(chunk))
    return in_block[entry] * BLOCK + lane


def highest(scores: Tensor, row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Where each row's highest score is, the first of several.

    Args:
        scores: float32 [m, BLOCK], of blocks that belong to the rows ``row``: int64 [m], ascending, each row in it.
    Returns:
        int64 [num_rows] each: the index into the m blocks, and the one within the block.
    """
    of_block = scores.amax(dim=-1)
    of_row = torch.full((num_rows,), -torch.inf).scatter_reduce_(0, row, of_block, "amax")
    num_blocks = len(row)
    entry = torch.where(of_block == of_row[row], torch.arange(num_blocks), num_blocks - 1)
    first = torch.full((num_rows,), num_blocks - 1).scatter_reduce_(0, row, entry, "amin")
    return first, scores[first].argmax(dim=-1)


def filter_threshold(
    logits: BlockedLogits, rows: SamplingRows, chunk: NDArray[np.int64], temperature: Tensor, top: Tensor
) -> Tensor | None:
    """float32 [n]: the lowest logit that each row's filters keep; None where no row has one."""
    min_p, top_k, top_p = rows.min_p[chunk], rows.top_k[chunk], rows.top_p[chunk]
    if not ((min_p > 0) | (top_k > 0) | (top_p < 1)).any():
        return None
    threshold = top + temperature * torch.from_numpy(min_p).log()
    threshold = apply_top_k(logits, top_k, threshold)
    return apply_top_p(logits, top_p, temperature, top, threshold)


def apply_top_k(logits: BlockedLogits, top_k: Int32, threshold: Tensor) -> Tensor:
    """Raise the threshold to the ``top_k``-th highest logit of each row that has one."""
    vocab = logits.values.shape[1] * BLOCK
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab))
    if not len(limited):
        return threshold
    index = row_index(limited)
    values, _ = largest(logits.rows(index), int(top_k[limited].max()))
    kth = values.gather(1, torch.from_numpy(top_k[limited].astype(np.int64) - 1)[:, None])[:, 0]
    raised = threshold.clone()
    raised[index] = torch.maximum(threshold[index], kth)
    return raised


def apply_top_p(
    logits: BlockedLogits, top_p: NDArray[np.float32], temperature: Tensor, top: Tensor, threshold: Tensor
) -> Tensor:
    """Raise the threshold to the logit at which the likeliest tokens hold ``top_p`` of what the threshold keeps."""
    threshold = threshold.clone()
    vocab = logits.values.shape[1] * BLOCK
    open_rows = np.flatnonzero(top_p < 1)
    for k in (*(tier for tier in TOP_P_TIERS if tier < vocab), vocab):
        if not len(open_rows):
            break
        index = row_index(open_rows)
        of_rows, lowest = logits.rows(index), threshold[index, None]
        values, _ = largest(of_rows, k)
        mass = kept_mass(values, lowest, top[index, None], temperature[index, None])
        # Where the last of these is dropped already, they hold all that is kept; else the whole row must be summed.
        has_more = values[:, -1:] >= lowest
        total = mass.sum(dim=-1, keepdim=True)
        if k < vocab and has_more.any():
            whole_mass = kept_mass(of_rows.values.flatten(1), lowest, top[index, None], temperature[index, None])
            total = torch.where(has_more, whole_mass.sum(dim=-1, keepdim=True), total)
        mass_before = mass.cumsum(dim=-1) - mass
        num_kept = (mass_before < total * torch.from_numpy(top_p[open_rows])[:, None]).sum(dim=-1, keepdim=True)
        is_found = (num_kept < k) | (k == vocab) | ~has_more
        last_kept = values.gather(1, num_kept.clamp(min=1) - 1)
        threshold[index] = torch.where(is_found, torch.maximum(lowest, last_kept), lowest)[:, 0]
        open_rows = open_rows[~is_found[:, 0].numpy()]
    return threshold


def kept_mass(values: Tensor, threshold: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities of logits, 0 below the threshold: [n, m] from [n, m] and three times [n, 1]."""
    mass = (values - top).div_(temperature).exp_()
    return mass.masked_fill_(values < threshold, 0.0)


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


def gumbel(keys: NoiseKeys, in_block: Tensor, scratch: Scratch) -> Tensor:
    """Noise of the standard Gumbel distribution for blocks of token ids, a function of key and token id.

    A uniform number of 23 bits plus a half lies strictly between 0 and 1, which float32 holds exactly, so that both
    logarithms are finite. Tokens less likely than 2⁻²⁴ of the likeliest are drawn more rarely than they should be.

    Args:
        keys: [m].
        in_block: int64 [m], which block of the vocabulary.
    Returns:
        float32 [m, BLOCK], in ``scratch``.
    """
    bits = scratch.blocks("bits", len(in_block), torch.int32)
    shifted = scratch.blocks("shifted", len(in_block), torch.int32)
    torch.add((in_block * BLOCK).int()[:, None], torch.arange(BLOCK, dtype=torch.int32), out=bits)
    hash_tokens_(bits, keys, shifted)
    noise = scratch.blocks("noise", len(in_block), torch.float32)
    noise.copy_(shift_right(bits, 9, shifted)).add_(0.5).mul_(2.0**-23)
    return noise.log_().neg_().log_().neg_()


def hash_tokens_(tokens: Tensor, keys: NoiseKeys, shifted: Tensor) -> None:
    """Token ids to 32 hashed bits, in place: "triple32" of Wellons' hash-prospector, with the key's words mixed in.

    int32 products wrap around as uint32 ones do.

    Args:
        tokens: int32 [m, n].
        keys: [m].
        shifted: like ``tokens``, is overwritten.
    """
    x = tokens.add_(keys.low[:, None])
    x.bitwise_xor_(shift_right(x, 17, shifted)).mul_(0xED5AD4BB - 2**32)
    x.bitwise_xor_(shift_right(x, 11, shifted)).mul_(0xAC4C1B51 - 2**32)
    x.add_(keys.high[:, None])
    x.bitwise_xor_(shift_right(x, 15, shifted)).mul_(0x31848BAB)
    x.bitwise_xor_(shift_right(x, 14, shifted))


def shift_right(x: Tensor, bits: int, out: Tensor) -> Tensor:
    """Logical shift of int32, where torch's copies the sign."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (32 - bits)) - 1)


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
    index = row_index(asked)
    row_logits = logits[index]
    log_mass = torch.logsumexp(row_logits, dim=-1, keepdim=True)
    of_tokens = row_logits.gather(1, tokens[index][:, None])
    ranks = (row_logits > of_tokens).sum(dim=-1, dtype=torch.int32) + 1
    top_logits, top_ids = largest(blocked.rows(index), min(int(num_logprobs.max()), logits.shape[1]))
    return StepLogprobs(
        index=asked.astype(np.int32),
        logprobs=(of_tokens - log_mass)[:, 0].numpy(),
        ranks=ranks.numpy(),
        top_ids=top_ids.int().numpy(),
        top_logprobs=(top_logits - log_mass).numpy(),
    )
