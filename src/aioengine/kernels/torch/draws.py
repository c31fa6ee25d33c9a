"""The definition of draws, in plain torch.

The token of a sample is the one whose (logit - top) / temperature plus Gumbel noise is the highest, which samples
exactly from the softmax. The noise is a hash of (seed, choice, output position, token id), and no generator's state
(counter-based, as in Salmon et al., SC 2011): a draw does not depend on the batch, the row, preemption or the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from aioengine.kernels.sample_rows import SampleRow, param_of

NOISE_SPAN = 19.5
"""The highest noise that `gumbel` makes, -log(-log(1 - 2⁻²⁴)) = 16.64, less the lowest, -log(-log(2⁻²⁴)) = -2.81."""

BLOCK = 64
"""Logits that are looked at together if the highest of them has a chance."""

FEW = 128
"""Likeliest tokens whose mass is summed first, for top-p."""

CHUNK_ELEMENTS = 2**20
"""Logits of the rows that are worked on together: bounds the temporaries to a few MB each."""

GPU_CHUNK_ELEMENTS = 2**24
"""There launches are what costs."""

NOISE_ELEMENTS = 2**15
"""So many random numbers are made together: their ten temporaries stay in the cache."""

MAX_FLOAT = torch.finfo(torch.float32).max


def chunks(
    num_rows: int, width: int, max_elements: int | None = None, *, device: torch.device | None = None
) -> Iterator[slice]:
    """Parts of ``num_rows`` rows of ``width`` elements, with so many elements at most.

    Args:
        max_elements: absent: `CHUNK_ELEMENTS`, or on a GPU `GPU_CHUNK_ELEMENTS`.
        device: absent: the host.
    """
    on_gpu = device is not None and device.type == "cuda"
    max_elements = max_elements or (GPU_CHUNK_ELEMENTS if on_gpu else CHUNK_ELEMENTS)
    size = max(1, max_elements // max(width, 1))
    return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))


def rows_of(logits: Tensor, rows: Tensor) -> Tensor:
    """``logits[rows]``; where these are next to each other nothing is copied."""
    first = rows[:1].sum()
    if torch.equal(rows, torch.arange(len(rows), dtype=rows.dtype, device=rows.device) + first):
        return logits[int(first) : int(first) + len(rows)]
    return logits.index_select(0, rows)


def is_allowed(masks: Tensor, vocab: int) -> Tensor:
    """Bool [m, V] of masks' bits."""
    lanes = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (masks[:, :, None] >> lanes & 1).bool().flatten(1)[:, :vocab]


def draw_tokens(x: Tensor, top: Tensor, samples: Tensor, *, has_filters: bool) -> Tensor:
    """int64 [s]: tokens at temperatures above 0; anything where the highest logit is no number or -inf.

    Args:
        x: float32 [s, V]. top: float32 [s], the highest of each row.
        samples: int32 [s, SAMPLE_WORDS].
    """
    temperature, num_rows = param_of(samples, "temperature"), len(x)
    top = top.clamp(-MAX_FLOAT, MAX_FLOAT)  # finite, so that a +inf leads to no NaN
    # A token this far below the likeliest one loses to it, whatever the noise of the two.
    floor = top - temperature * NOISE_SPAN
    if has_filters:
        floor = floor.maximum(threshold(x, floor, top, temperature, samples))
    blocks = F.pad(x, (0, -x.shape[1] % BLOCK), value=-torch.inf).unflatten(1, (-1, BLOCK))
    row, block = (blocks.amax(dim=-1) >= floor[:, None]).nonzero(as_tuple=True)
    x = blocks[row, block]
    scores = (x - top[row, None]).div_(temperature[row, None])
    tokens = block[:, None] * BLOCK + torch.arange(BLOCK, device=x.device)
    keys = noise_keys(samples)[row, None]
    for part in chunks(len(row), BLOCK, NOISE_ELEMENTS):
        scores[part] += gumbel(keys[part], tokens[part])
    if has_filters:
        scores.masked_fill_(x < floor[row, None], -torch.inf)
    of_block = scores.amax(dim=1)
    of_row = top.new_zeros(num_rows).scatter_reduce_(0, row, of_block, "amax", include_self=False)
    best = (of_block == of_row[row]).nonzero()[:, 0]
    drawn: Tensor = tokens[best].gather(1, scores[best].argmax(dim=1, keepdim=True))[:, 0]  # of several the first
    return drawn.new_zeros(num_rows).scatter_reduce_(0, row[best], drawn, "amin", include_self=False)


def threshold(x: Tensor, floor: Tensor, top: Tensor, temperature: Tensor, samples: Tensor) -> Tensor:
    """float32 [s]: the lowest logit kept by min-p, then top-k, then top-p on what is left, renormalised.

    Tokens of equal logits are kept or dropped together.

    Args:
        x: float32 [s, V].
        floor: float32 [s]; a result that is not above it need not be exact. -inf: it always is.
        top, temperature: float32 [s].
        samples: int32 [s, SAMPLE_WORDS].
    """
    top_k, top_p, min_p = (param_of(samples, name) for name in ("top_k", "top_p", "min_p"))
    lowest = top + temperature * min_p.log()
    limited = ((top_k > 0) & (top_k < x.shape[1])).nonzero()[:, 0]
    if len(limited):
        k = top_k[limited, None].long()
        kth = x[limited].topk(int(k.max())).values.gather(1, k - 1)[:, 0]
        lowest[limited] = lowest[limited].maximum(kth)
    nucleus = (top_p < 1).nonzero()[:, 0]
    if len(nucleus):
        x, kept, top, temperature = x[nucleus], lowest[nucleus, None], top[nucleus, None], temperature[nucleus, None]
        wanted = kept_mass(x, kept, top, temperature).sum(dim=1, keepdim=True) * top_p[nucleus, None]
        reach, depth = kept.maximum(floor[nucleus, None]), FEW
        while True:  # until the likeliest ones hold that much
            values = x.topk(min(depth, x.shape[1])).values
            mass = kept_mass(values, kept, top, temperature)
            is_within = mass.cumsum(dim=1) - mass < wanted
            if depth >= x.shape[1] or not (is_within & (values >= reach))[:, -1].any():
                break
            depth *= 16
        last_kept = values.gather(1, is_within.sum(dim=1, keepdim=True).clamp(min=1) - 1)
        lowest[nucleus] = kept.maximum(last_kept)[:, 0]
    return lowest


def kept_mass(x: Tensor, lowest: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities of logits, 0 below the lowest kept: [s, m] from [s, m] and three times [s, 1]."""
    return (x - top).div_(temperature).exp_().masked_fill_(x < lowest, 0.0)


def noise_keys(samples: Tensor) -> Tensor:
    """int64 [s]: what a sample's noise depends on beside the token, mixed."""
    low, high = samples[:, SampleRow.SEED_LOW].long() & 0xFFFFFFFF, samples[:, SampleRow.SEED_HIGH].long() << 32
    key = mix64(high | low)
    key = mix64(key ^ samples[:, SampleRow.CHOICE])
    return mix64(key ^ samples[:, SampleRow.OUTPUT_POSITION])


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of the standard Gumbel distribution: float32 of the shape of ``keys`` and ``token_ids``, int64.

    A uniform number of 23 bits plus a half lies strictly between 0 and 1, which float32 holds exactly, so that both
    logarithms are finite. Tokens less likely than 2⁻²⁴ of the likeliest are drawn more rarely than they should be.
    """
    uniform = shift_right(hash_tokens(keys, token_ids), 9).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def hash_tokens(keys: Tensor, token_ids: Tensor) -> Tensor:
    """32 hashed bits as int32: "triple32" of Wellons' hash-prospector, with the key's halves mixed in."""
    low, high = keys[..., None].view(torch.int32).unbind(-1)
    x = token_ids.int() + low  # int32 sums and products wrap around as uint32 ones do
    x.bitwise_xor_(shift_right(x, 17)).mul_(0xED5AD4BB - 2**32)
    x.bitwise_xor_(shift_right(x, 11)).mul_(0xAC4C1B51 - 2**32).add_(high)
    x.bitwise_xor_(shift_right(x, 15)).mul_(0x31848BAB)
    return x.bitwise_xor_(shift_right(x, 14))


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's step (Steele, Lea & Flood, OOPSLA 2014) on int64, which wraps around as uint64 does."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int32 or int64, where torch's copies the sign."""
    return (x >> bits).bitwise_and_((1 << 8 * x.itemsize - bits) - 1)
