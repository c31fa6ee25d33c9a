"""When a token ends its sequence."""

from __future__ import annotations

from aioengine.outputs import FinishReason
from aioengine.scheduler.sequence import Sequence


def finish_reason(
    sequence: Sequence, token_id: int, eos_token_ids: frozenset[int]
) -> tuple[FinishReason | None, int | None]:
    """Why ``sequence`` ends with ``token_id``, its newest token, if it does: (finish reason, stop reason).

    The order is vLLM's: nothing before ``min_tokens`` but the length; then EOS, then the request's stop tokens (the
    stop reason is the id), then the length. The sampler masks stop tokens until then, unless a row has no other.
    """
    params = sequence.request.params
    if len(sequence.output_ids) >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token_id in sequence.stop_token_ids:
            return "stop", token_id
    if sequence.num_tokens >= sequence.limit:
        return "length", None
    return None, None
