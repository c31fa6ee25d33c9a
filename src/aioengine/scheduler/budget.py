"""How a step's tokens are shared out among the rows."""

from __future__ import annotations

import msgspec
import numpy as np

from aioengine.scheduler.plan import Int32
from aioengine.scheduler.row_table import Rows, RowTable


class Budget(msgspec.Struct, frozen=True, gc=False):
    """Most tokens of a step.

    Attributes:
        max_tokens: of all its rows; at least one a row.
        max_mixed_prefill_tokens: of prompts, in a step in which rows decode, so that these wait no longer for it than
            such a chunk takes (Agrawal et al., Sarathi-Serve, OSDI 2024).
    """

    max_tokens: int
    max_mixed_prefill_tokens: int

    def beside(self, num_decodes: int) -> int:
        """Tokens of a step in which so many rows decode."""
        return min(self.max_tokens, num_decodes + self.max_mixed_prefill_tokens) if num_decodes else self.max_tokens


class Work(msgspec.Struct, frozen=True, gc=False):
    """What a step computes: ``num_tokens[i]`` tokens of ``rows[i]``, from ``starts[i]`` up to ``ends[i]``.

    ``num_left`` more could be in it.
    """

    rows: Rows
    starts: Int32
    num_tokens: Int32
    ends: Int32
    num_left: int


class Claim(msgspec.Struct, frozen=True, gc=False):
    """What a sequence without a row is going to take of a step, behind all decodes and the prefills before its own."""

    num_tokens: int
    num_before: int
    """How many of the running sequences come before it."""


def share_budget(table: RowTable, budget: Budget, claim: Claim | None = None) -> Work:
    """Rows with tokens to compute, and how many each: decodes first, then prefills in order as far as it goes."""
    rows = table.running_rows
    starts = table.scheduled[rows]
    num_tokens = np.minimum(table.expected[rows], table.last[rows]) - starts
    num_wanted = int(num_tokens.sum())
    max_tokens = budget.beside(int(np.count_nonzero(num_tokens == 1)))
    if num_wanted + (claim.num_tokens if claim else 0) > max_tokens:
        num_tokens = _ration(num_tokens, max_tokens, claim)
        num_wanted = int(num_tokens.sum())
    if np.count_nonzero(num_tokens) < len(rows):
        has_some = num_tokens > 0
        rows, starts, num_tokens = rows[has_some], starts[has_some], num_tokens[has_some]
    return Work(rows, starts, num_tokens, starts + num_tokens, max_tokens - num_wanted)


def join(table: RowTable, work: Work, new_rows: Rows) -> Work:
    """Append the first chunks of newly assigned rows; the last one may have to share its prompt out."""
    rows = np.concatenate([work.rows, new_rows])
    starts = table.scheduled[rows]
    new_tokens = table.expected[new_rows] - table.scheduled[new_rows]
    num_left = work.num_left - int(new_tokens.sum())
    new_tokens[-1] += min(num_left, 0)
    num_tokens = np.concatenate([work.num_tokens, new_tokens])
    return Work(rows, starts, num_tokens, starts + num_tokens, max(num_left, 0))


def out_of_blocks(table: RowTable, work: Work) -> list[Rows]:
    """By group of layers the rows that need a block, each as often as it needs one.

    Once where a row decodes; a prompt has all of its own, but for groups with windows.
    """
    growing = []
    for capacity in table.capacity:
        num_lacking = work.ends - capacity[work.rows]
        lacking = (num_lacking > 0).nonzero()[0]
        rows = work.rows[lacking]
        if len(rows) and max(num_lacking[lacking].tolist()) > table.block_size:
            # A prompt's blocks, or those of tokens that a grammar forced.
            rows = np.repeat(rows, -(-num_lacking[lacking] // table.block_size))
        growing.append(rows)
    return growing


def _ration(num_tokens: Int32, max_tokens: int, claim: Claim | None) -> Int32:
    """Cut down what rows want to one step's budget, which is at least one token for each of them."""
    is_decode = num_tokens == 1
    prefills = np.where(is_decode, 0, num_tokens)
    left = max_tokens - np.count_nonzero(is_decode)
    before = np.cumsum(prefills) - prefills
    if claim is not None:
        before[claim.num_before :] += claim.num_tokens
    shares = np.clip(left - before, 0, prefills)
    return np.where(is_decode, 1, shares).astype(np.int32)
