"""Plain torch for `Operations.draw`, as `aioengine.sampler` has it for CPUs: the oracle, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.sampling.sample_rows import SampleRow, Status, param_of

MAX_FLOAT = torch.finfo(torch.float32).max


def draw(
    logits: Tensor,
    samples: Tensor,
    masks: Tensor | None,
    token_ids: Tensor,
    status: Tensor,
    *,
    has_filters: bool,
    is_greedy: bool,
) -> None:
    """See `Operations.draw`. Sorts; and has a sample's logits several times in memory."""
    is_padding = samples[:, SampleRow.LOGITS_ROW] < 0
    x = logits[samples[:, SampleRow.LOGITS_ROW].clamp(min=0).long()]
    if masks is not None:
        mask = samples[:, SampleRow.MASK, None]
        x = x.masked_fill((mask >= 0) & ~is_allowed(masks, x.shape[1])[mask[:, 0].clamp(min=0).long()], -torch.inf)
    top = x.amax(dim=1)
    if is_greedy:
        scores = x
    else:
        temperature = param_of(samples, "temperature")
        # Finite, so that a +inf leads to no NaN.
        finite_top = top.clamp(-MAX_FLOAT, MAX_FLOAT)
        divisor = torch.where(temperature > 0, temperature, 1.0)
        scores = ((x - finite_top[:, None]) / divisor[:, None]).add_(gumbel(samples, x.shape[1]))
        if has_filters:
            scores.masked_fill_(x < threshold(x, finite_top, divisor, samples), -torch.inf)
        scores = torch.where((temperature > 0)[:, None], scores, x)
    token_ids.copy_(scores.argmax(dim=1))  # the first of several
    status.fill_(Status.SAMPLED)
    status.masked_fill_(top == -torch.inf, Status.NOTHING_LEFT)
    status.masked_fill_(top.isnan(), Status.NOT_A_NUMBER)
    status.masked_fill_(is_padding, Status.SAMPLED)
    token_ids.masked_fill_(is_padding | (status != Status.SAMPLED), 0)


def is_allowed(masks: Tensor, vocab: int) -> Tensor:
    """Bool [m, V] of masks' bits."""
    lanes = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (masks[:, :, None] >> lanes & 1).bool().flatten(1)[:, :vocab]


def threshold(x: Tensor, top: Tensor, temperature: Tensor, samples: Tensor) -> Tensor:
    """Float32 [s, 1], the lowest logit kept by min-p, then top-k, then top-p on what is left, renormalised.

    Args:
        x: float32 [s, V].
        top, temperature: float32 [s].
        samples: int32 [s, SAMPLE_WORDS].
    """
    top_k, top_p, min_p = (param_of(samples, name) for name in ("top_k", "top_p", "min_p"))
    values = x.sort(dim=1, descending=True).values
    lowest = (top + temperature * min_p.log())[:, None]
    last = x.shape[1] - 1
    kth = values.gather(1, (top_k[:, None].long() - 1).clamp(0, last))
    lowest = torch.where((top_k > 0)[:, None], lowest.maximum(kth), lowest)
    mass = ((values - top[:, None]) / temperature[:, None]).exp_().masked_fill_(values < lowest, 0.0)
    mass_before = mass.cumsum(dim=1) - mass
    num_kept = (mass_before < mass.sum(dim=1, keepdim=True) * top_p[:, None]).sum(dim=1, keepdim=True)
    last_kept = values.gather(1, num_kept.clamp(min=1) - 1)
    return torch.where((top_p < 1)[:, None], lowest.maximum(last_kept), lowest)


def gumbel(samples: Tensor, vocab: int) -> Tensor:
    """Noise of (seed, choice, output position, token id): float32 [s, vocab]; see `aioengine.sampler.noise`."""
    low, high = samples[:, SampleRow.SEED_LOW].long() & 0xFFFFFFFF, samples[:, SampleRow.SEED_HIGH].long() << 32
    key = mix64(high | low)
    key = mix64(key ^ samples[:, SampleRow.CHOICE])
    key = mix64(key ^ samples[:, SampleRow.OUTPUT_POSITION])
    # In int64, of which the lower 32 bits are those of uint32: products wrap around.
    x = torch.arange(vocab, device=samples.device) + key[:, None] & 0xFFFFFFFF
    x = (x ^ x >> 17) * 0xED5AD4BB & 0xFFFFFFFF
    x = (x ^ x >> 11) * 0xAC4C1B51 & 0xFFFFFFFF
    x = x + shift_right(key, 32)[:, None] & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x31848BAB & 0xFFFFFFFF
    x = x ^ x >> 14
    return ((x >> 9).float() + 0.5).mul_(2.0**-23).log_().neg_().log_().neg_()


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's step (Steele, Lea & Flood, OOPSLA 2014) on int64, which wraps around as uint64 does."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, where torch's copies the sign."""
    return x >> bits & (1 << 64 - bits) - 1
