"""Drawing tokens: the Gumbel-max trick over the tokens that have a chance.

The token is the one whose logit plus Gumbel noise is the highest, which samples exactly from the softmax. The filters'
threshold and the noise's span drop blocks of tokens that no noise could make win.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.sampler.blocks import BLOCK, CHUNK_ELEMENTS, BlockedLogits, Scratch, distinct, row_index
from aioengine.sampler.filters import filter_threshold
from aioengine.sampler.noise import NOISE_SPAN, gumbel, noise_keys
from aioengine.sampler.rows import Int64, SamplingRows
from aioengine.scheduler.plan import Int32


def draw_tokens(
    logits: BlockedLogits, top: Tensor, rows: SamplingRows, drawn: Int64, choice: Int32, scratch: Scratch
) -> Tensor:
    """Draw tokens, a bounded number at once.

    Args:
        logits: of all rows.
        top: float32 [n], their highest logits.
        drawn: int64 [d], the row of each draw, ascending; a row may stand there several times.
        choice: int32 [d], of each draw.
    Returns:
        int64 [d] token ids.
    """
    draws_a_chunk = max(1, CHUNK_ELEMENTS // (logits.values.shape[1] * BLOCK))
    if len(drawn) <= draws_a_chunk:
        return draw(logits, top, rows, drawn, choice, scratch)
    chunks = [slice(start, start + draws_a_chunk) for start in range(0, len(drawn), draws_a_chunk)]
    return torch.cat([draw(logits, top, rows, drawn[chunk], choice[chunk], scratch) for chunk in chunks])


def draw(
    logits: BlockedLogits, top: Tensor, rows: SamplingRows, drawn: Int64, choice: Int32, scratch: Scratch
) -> Tensor:
    """As `draw_tokens`, at once."""
    members, member = distinct(drawn)  # a row of which several tokens are drawn is looked at once
    index = row_index(members)
    logits = logits.rows(index)
    temperature = torch.from_numpy(rows.params["temperature"][members])
    # Clamped so that a +inf leads to no NaN.
    top = top[index].clamp(torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)
    threshold = filter_threshold(logits, rows, members, temperature, top)
    # A token this far below the likeliest one loses to it, whatever the noise of the two.
    floor = top - temperature * NOISE_SPAN
    if threshold is not None:
        floor = torch.maximum(floor, threshold)
    has_chance = logits.maxima >= floor[:, None]
    of_draw, in_block = (has_chance if member is None else has_chance[member]).nonzero(as_tuple=True)
    of_row = of_draw if member is None else member[of_draw]
    scores = scratch.blocks("scores", len(of_draw), torch.float32)
    torch.index_select(logits.values.flatten(0, 1), 0, of_row * has_chance.shape[1] + in_block, out=scores)
    is_dropped = scores < threshold[of_row, None] if threshold is not None else None
    keys = noise_keys(rows.seed[drawn], choice, rows.positions[drawn])
    noise = gumbel(keys.rows(of_draw), in_block, scratch)
    scores.sub_(top[of_row, None]).div_(temperature[of_row, None]).add_(noise)
    if is_dropped is not None:
        scores.masked_fill_(is_dropped, -torch.inf)
    entry, lane = highest(scores, of_draw, len(drawn))
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
