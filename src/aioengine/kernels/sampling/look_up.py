"""The log-probability of given tokens, logit - logsumexp, and their ranks: 1 plus the number of higher logits.

Stays if, at 64 rows of 128,256 logits, it beats torch's `gather`, comparison and sum by 1.2; not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.launch_checks import check_logits, check_tensor

PAIRS = 128
"""(logits_row, token) pairs of a program of the first launch."""

TILE = 4096
"""Tokens that a program of the second one compares: 16 KB, as in `top_logprobs`."""

NUM_WARPS = 4

# Not specialised: these change from step to step, and are views into larger buffers.
_VIEWS = ["logits_rows", "token_ids", "log_mass", "logprobs", "ranks"]


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=_VIEWS)
def _look_up_kernel(logits, logits_rows, token_ids, log_mass, logprobs, ranks, num_pairs, vocab, PAIRS: tl.constexpr):
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    logits_row = tl.load(logits_rows + pairs, mask=pairs < num_pairs, other=-1)
    is_wanted = logits_row >= 0
    token = tl.load(token_ids + pairs, mask=is_wanted, other=0)
    value = tl.load(logits + logits_row.to(tl.int64) * vocab + token, mask=is_wanted)
    tl.store(logprobs + pairs, value - tl.load(log_mass + pairs, mask=is_wanted), mask=is_wanted)
    tl.store(ranks + pairs, tl.full([PAIRS], 1, tl.int32), mask=is_wanted)  # what the next launch adds to


@triton.jit(do_not_specialize_on_alignment=_VIEWS)
def _rank_kernel(logits, logits_rows, token_ids, ranks, vocab, TILE: tl.constexpr):
    pair, tile = tl.program_id(0), tl.program_id(1)
    logits_row = tl.load(logits_rows + pair)
    if logits_row >= 0:
        of_logits_row = logits + logits_row.to(tl.int64) * vocab
        value = tl.load(of_logits_row + tl.load(token_ids + pair))
        tokens = tile * TILE + tl.arange(0, TILE)
        others = tl.load(of_logits_row + tokens, mask=tokens < vocab, other=float("-inf"))
        num_higher = tl.sum((others > value).to(tl.int32), axis=0)
        # Integers: the sum does not depend on their order. A likely token has nothing above it in most tiles.
        tl.atomic_add(ranks + pair, num_higher, mask=num_higher > 0, sem="relaxed")


def look_up(
    logits: Tensor, logits_rows: Tensor, token_ids: Tensor, log_mass: Tensor, logprobs: Tensor, ranks: Tensor
) -> None:
    """See `Operations.look_up`. Outputs of pairs that are passed over stay as they are. NaN is higher than nothing, and
    nothing is higher than NaN.

    Two launches, the first of a few µs. The second reads a row of logits once a pair: 155 MB for 256 rows of 151,936,
    32 µs at 4.8 TB/s. Pairs of one row next to each other read it from the L2 cache but once, as their programs run
    together.
    """
    device = check_logits(logits)
    num_pairs, vocab = len(logits_rows), logits.shape[1]
    check_tensor("logits_rows", logits_rows, (None,), torch.int32, device)
    check_tensor("token_ids", token_ids, (num_pairs,), torch.int32, device)
    check_tensor("log_mass", log_mass, (num_pairs,), torch.float32, device)
    check_tensor("logprobs", logprobs, (num_pairs,), torch.float32, device)
    check_tensor("ranks", ranks, (num_pairs,), torch.int32, device)
    if not num_pairs or not len(logits):
        return
    _look_up_kernel[(triton.cdiv(num_pairs, PAIRS),)](
        logits, logits_rows, token_ids, log_mass, logprobs, ranks,
        num_pairs, vocab, PAIRS,
        num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    _rank_kernel[(num_pairs, triton.cdiv(vocab, TILE))](
        logits, logits_rows, token_ids, ranks, vocab, TILE, num_warps=NUM_WARPS, enable_fp_fusion=True
    )
