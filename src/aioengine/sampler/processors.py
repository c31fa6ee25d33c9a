"""Calling the functions over logits that requests brought along, so that none can harm another's request."""

from __future__ import annotations

import contextlib
import traceback

import numpy as np
import torch
from torch import Tensor

from aioengine.errors import TRACEBACK, describe, linked
from aioengine.sampler.blocks import put_rows
from aioengine.sampler.rows import Int64, RuledRows
from aioengine.scheduler.plan import LogitsProcessor, LogitsRow


def run_processors(logits: Tensor, ruled: RuledRows) -> dict[int, Exception]:
    """Let the rows' processors change their logits: each row's first, then each one's second, and so on.

    Rows whose first (second, …) processor is the same object are given to it together.

    Returns:
        What went wrong, by row of logits; such a row's further processors are not called.
    """
    failures: dict[int, Exception] = {}
    for nth in range(max(len(rules.logits_processors) for rules in ruled.rules)):
        sharing: dict[int, tuple[LogitsProcessor, list[int]]] = {}
        for i, rules in enumerate(ruled.rules):
            if nth < len(rules.logits_processors) and int(ruled.logits_rows[i]) not in failures:
                processor = rules.logits_processors[nth]
                sharing.setdefault(id(processor), (processor, []))[1].append(i)
        for processor, members in sharing.values():
            error = run(processor, logits, ruled, np.array(members))
            if error is not None:
                failures.update(dict.fromkeys(ruled.logits_rows[members].tolist(), error))
    return failures


def run(processor: LogitsProcessor, logits: Tensor, ruled: RuledRows, members: Int64) -> Exception | None:
    """Give a processor the logits of the rows ``members`` of ``ruled``; returns what went wrong."""
    logits_rows = ruled.logits_rows[members]
    # A copy, whatever the rows are: a processor may keep it, or break it.
    given = logits.index_select(0, torch.from_numpy(logits_rows).to(logits.device))
    shape = given.shape
    try:
        returned = processor(given, [logits_row(ruled, i) for i in members.tolist()])
        changed = given if returned is None else returned
        check(changed, shape, logits)
        put_rows(logits, logits_rows.tolist(), changed.detach())
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


def logits_row(ruled: RuledRows, i: int) -> LogitsRow:
    """What the processor is told of a row; copies, since it may keep them when the row is another's."""
    tokens = ruled.history[ruled.history_rows[i], : ruled.num_tokens[i]].copy()
    tokens.flags.writeable = False
    num_prompt = int(ruled.num_prompt_tokens[i])
    return LogitsRow(
        prompt_token_ids=tokens[:num_prompt], output_token_ids=tokens[num_prompt:], choice=int(ruled.choice[i])
    )
