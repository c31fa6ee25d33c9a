"""What the scheduler tells the device, and what the device answers: plain, immutable, numbered.

A `StepPlan` is a delta over stable rows. A row is a place in the executor's persistent buffers; a running sequence
keeps its row until it leaves. The executor owns the token history and the block tables, so that a steady decode step
carries a few small arrays and no token ids: sampled tokens are already on the device when the next step reads them.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]


class Want(enum.IntEnum):
    """What a row's last token of a step is computed for."""

    NOTHING = 0
    """A prefill chunk that ends before the last known token: only its KV is wanted."""
    LOGITS = 1
    """Sample the next token."""


class RowSampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the sampler has to know about a row; already validated.

    A draw depends on (``seed``, ``choice``, output position) only, where the first output token has position 0.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    min_tokens: int = 0
    """``stop_ids`` cannot be sampled at output positions below this."""
    stop_ids: tuple[int, ...] = ()
    logprobs: int = -1
    """How many likeliest tokens to report beside the sampled one; -1: no log-probabilities at all."""


class RowAdded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sequence that takes a row: all that the executor must know of it.

    Attributes:
        row: the row, free until now (``StepPlan.removed`` comes first).
        token_ids: int32 [known tokens], the prompt and what was generated before a preemption.
        num_prompt_tokens: how many of them are the prompt; output position = index - num_prompt_tokens.
        block_ids: int32 [blocks], the sequence's block table so far; enough for all of ``token_ids``.
    """

    row: int
    token_ids: Int32
    num_prompt_tokens: int
    block_ids: Int32
    sampling: RowSampling


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One device step, as a delta to the step before.

    An executor applies, in this order: ``removed``, ``added``, ``grown``; then computes ``rows``. All arrays are
    read-only and owned by the plan. ``rows[i]`` computes the tokens at positions ``starts[i]`` up to
    ``starts[i] + num_tokens[i]`` of its history, writing their KV, and samples the token after them if
    ``wants[i]`` is `Want.LOGITS`. That token is appended to the row's history on the device.

    Attributes:
        step: counts up by one.
        removed: int32 [r], rows that became free.
        added: rows taken.
        grown_rows, grown_blocks: int32 [g] each, row ``grown_rows[i]`` gets block ``grown_blocks[i]`` appended.
        rows: int32 [b], rows with tokens in this step; no row twice.
        epochs: int32 [b], the epoch of each row's tenant; a result is matched by (row, epoch).
        starts: int32 [b], first position to compute: an upper bound where the device knows the true one.
        num_tokens: int32 [b], at least 1 each.
        wants: int8 [b], a `Want` each.
    """

    step: int
    removed: Int32
    added: tuple[RowAdded, ...]
    grown_rows: Int32
    grown_blocks: Int32
    rows: Int32
    epochs: Int32
    starts: Int32
    num_tokens: Int32
    wants: Int8

    def describe(self) -> dict[str, Any]:
        """The plan as plain data for a person to read: no token ids, so no prompt text."""
        return {
            "step": self.step,
            "removed": self.removed.tolist(),
            "added": [
                {"row": a.row, "num_tokens": len(a.token_ids), "num_prompt_tokens": a.num_prompt_tokens,
                 "num_blocks": len(a.block_ids), "sampling": msgspec.structs.asdict(a.sampling)}
                for a in self.added
            ],
            "grown": np.stack([self.grown_rows, self.grown_blocks], axis=1).tolist(),
            "rows": [
                {"row": row, "epoch": epoch, "start": start, "num_tokens": num_tokens, "want": Want(want).name}
                for row, epoch, start, num_tokens, want in zip(
                    self.rows.tolist(), self.epochs.tolist(), self.starts.tolist(),
                    self.num_tokens.tolist(), self.wants.tolist(), strict=True,
                )
            ],
        }  # fmt: skip


class StepLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Raw log-probabilities (before temperature and filters) of the tokens whose rows asked for them.

    Attributes:
        index: int32 [m], which of ``StepResult.token_ids`` each line is about, ascending.
        logprobs: float32 [m], of the sampled token.
        ranks: int32 [m], 1 for the likeliest token.
        top_ids: int32 [m, k], the likeliest first; k is the most that any row asked for, a row reads its own first few.
        top_logprobs: float32 [m, k].
    """

    index: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32


class StepResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a step brought, flat: ``token_ids[offsets[i]:offsets[i + 1]]`` belong to ``plan.rows[i]``.

    A row may bring none (`Want.NOTHING`), one, or several tokens.

    Attributes:
        step: the plan's.
        offsets: int32 [b + 1].
        token_ids: int32 [tokens sampled].
        logprobs: None where no row asked.
        device_time_s: how long the step held the device.
    """

    step: int
    offsets: Int32
    token_ids: Int32
    logprobs: StepLogprobs | None = None
    device_time_s: float = 0.0


def int32(values: Any) -> Int32:
    """An immutable int32 array, owning its data."""
    array = np.array(values, dtype=np.int32)
    array.flags.writeable = False
    return array


EMPTY = int32([])
