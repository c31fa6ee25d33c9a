"""Plans as bytes, for executors in other processes.

A plan is one msgpack message, in which an array is an extension of its own: its bytes as they are, which the decoded
plan shares with the message. Handles travel as the plain data that they are.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from aioengine.errors import WireError
from aioengine.scheduler.plan import Purpose, StepPlan

MAX_PLAN_BYTES = 256 * 2**20
"""Bytes of a plan: every row of an engine added at once, each with a long prompt."""

DTYPES = (np.dtype("<i4"), np.dtype("i1"))
"""By the code of the extension."""


def encode_plan(plan: StepPlan) -> bytes:
    """Raises WireError: the plan is larger than `MAX_PLAN_BYTES`."""
    message = _encoder.encode(plan)
    if len(message) > MAX_PLAN_BYTES:
        raise WireError(f"a plan of {len(message):,} bytes; {MAX_PLAN_BYTES:,} are allowed")
    return message


def decode_plan(message: bytes) -> StepPlan:
    """The plan of `encode_plan`; its arrays are read-only views of ``message``.

    Raises:
        WireError: the message is malformed, truncated or too large, or a value in it fits no plan.
    """
    if len(message) > MAX_PLAN_BYTES:
        raise WireError(f"a plan of {len(message):,} bytes; {MAX_PLAN_BYTES:,} are allowed")
    try:
        plan = _decoder.decode(message)
        _check(plan)
    except Exception as error:  # msgspec's own, and what a constraint's __post_init__ finds wrong with its values
        raise WireError(f"a malformed plan: {error}") from None
    return plan


def _check(plan: StepPlan) -> None:
    tables = (
        (plan.rows, plan.epochs, plan.starts, plan.num_tokens, plan.purposes),
        (plan.grown_rows, plan.grown_groups, plan.grown_blocks),
        (plan.copied_from, plan.copied_to),
    )
    if any(len({len(column) for column in columns}) > 1 for columns in tables):
        raise ValueError("columns of one table differ in length")
    if len(plan.rows) and (plan.starts.min() < 0 or plan.num_tokens.min() < 1):
        raise ValueError("a row computes no tokens")
    if not np.isin(plan.purposes, list(Purpose)).all():
        raise ValueError("a purpose is unknown")
    if any(not 0 < row.num_prompt_tokens <= len(row.token_ids) for row in plan.added):
        raise ValueError("a row has no prompt")


def _encode_array(value: Any) -> Ext:
    if isinstance(value, np.ndarray) and value.dtype in DTYPES:
        return Ext(DTYPES.index(value.dtype), np.ascontiguousarray(value).data)
    raise TypeError(f"a {type(value).__name__} is no plain data")


def _decode_array(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, DTYPES[code])


def _check_array(kind: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype != get_args(get_args(kind)[1])[0]:
        raise TypeError(f"an array of {kind} is needed")
    return value


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(StepPlan, ext_hook=_decode_array, dec_hook=_check_array)
