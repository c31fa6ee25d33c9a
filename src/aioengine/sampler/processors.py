"""Calling the functions over logits that requests brought along, so that none can harm another's request."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.errors import TRACEBACK, describe, linked
from aioengine.scheduler.plan import LogitsProcessor, LogitsRow


class ProcessedRow(NamedTuple):
    """A row of logits that has processors.

    Attributes:
        allowed_ids: int64 [any], the only tokens that its processors are to find above -inf; None: all.
        row: given to the processors; the arrays are not to change later, since a processor may keep them.
    """

    logits_row: int
    processors: tuple[LogitsProcessor, ...]
    allowed_ids: Tensor | None
    row: LogitsRow


def run_processors(logits: Tensor, rows: Sequence[ProcessedRow]) -> dict[int, Exception]:
    """Let the rows' processors change their logits: each row's first, then each one's second, and so on.

    Rows whose first (second, …) processor is the same object are given to it together.

    Returns:
        What went wrong, by row of logits; such a row's further processors are not called.
    """
    for logits_row, _, allowed_ids, _ in rows:
        if allowed_ids is not None:
            index = allowed_ids[allowed_ids < logits.shape[1]].to(logits.device)
            kept = logits[logits_row, index]
            logits[logits_row].fill_(-torch.inf)[index] = kept
    failures: dict[int, Exception] = {}
    for nth in range(max(len(row.processors) for row in rows)):
        sharing: dict[int, list[ProcessedRow]] = {}
        for row in rows:
            if nth < len(row.processors) and row.logits_row not in failures:
                sharing.setdefault(id(row.processors[nth]), []).append(row)
        for members in sharing.values():
            error = run(members[0].processors[nth], logits, members)
            if error is not None:
                failures.update(dict.fromkeys((row.logits_row for row in members), error))
    return failures


def run(processor: LogitsProcessor, logits: Tensor, members: Sequence[ProcessedRow]) -> Exception | None:
    """Give a processor the logits of some rows; returns what went wrong."""
    logits_rows = [row.logits_row for row in members]
    # A copy, whatever the rows are: a processor may keep it, or break it.
    given = logits.index_select(0, torch.tensor(logits_rows, dtype=torch.long, device=logits.device))
    shape = given.shape
    try:
        returned = processor(given, [row.row for row in members])
        changed = given if returned is None else returned
        check(changed, shape, logits)
        for logits_row, of_row in zip(logits_rows, changed.detach(), strict=True):
            logits[logits_row].copy_(of_row)
    except BaseException as error:  # SystemExit too: one request's code must not end the others' step
        return forget_frames(error)
    return None


def forget_frames(error: BaseException) -> Exception:
    """The error with its traceback as text: frames would keep the step's logits alive as long as someone keeps it."""
    frames = TRACEBACK.__get__(error)
    if frames is not None and frames.tb_next is not None:
        stack = "".join(traceback.format_tb(frames.tb_next))
        with contextlib.suppress(Exception):  # its notes are of its own making
            BaseException.add_note(error, f"Raised by a logits processor:\n{stack}")
    for link in linked(error):
        TRACEBACK.__set__(link, None)
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a logits processor raised {describe(error)}")
    failure.__cause__ = error
    return failure


def check(changed: object, shape: torch.Size, logits: Tensor) -> None:
    wanted = f"float32 {list(shape)}, or None after changing its logits in place"
    if not isinstance(changed, Tensor):
        raise TypeError(f"a logits processor returned a {type(changed).__name__}; it must return {wanted}")
    if changed.shape != shape or changed.dtype != logits.dtype or changed.device != logits.device:
        made = f"{str(changed.dtype).removeprefix('torch.')} {list(changed.shape)} on {changed.device}"
        raise ValueError(f"a logits processor made {made}; it must return {wanted}, on {logits.device}")
