"""The request log: a line where a request begins and one where it ends. Off by default, and without prompts."""

from __future__ import annotations

import logging

from aioengine.config import EngineConfig
from aioengine.metrics import RequestMetrics
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.sequence import Request

logger = logging.getLogger("aioengine")


def log_begin(config: EngineConfig, request: Request, prompt: str | None = None, *, whose: str = "") -> None:
    """A request has been accepted; ``prompt`` is its text, where it has one."""
    if not config.log_requests:
        return
    ids = request.prompt_token_ids
    of_prompt = f", prompt {ids.tolist() if prompt is None else prompt!r}" if config.log_prompts else ""
    logger.info(
        "%srequest %r: %d prompt tokens, priority %d, %s%s",
        whose,
        request.request_id,
        len(ids),
        request.priority,
        _describe(request.params),
        of_prompt,
    )


def log_end(config: EngineConfig, request_id: str, finish_reasons: tuple[str, ...], metrics: RequestMetrics) -> None:
    """All its choices have ended."""
    if config.log_requests:
        reasons, num_tokens, time_s = ", ".join(finish_reasons), metrics.num_generation_tokens, metrics.e2e_latency_s
        logger.info("request %r ended by %s: %d tokens in %.3f s", request_id, reasons, num_tokens, time_s or 0.0)


def _describe(params: SamplingParams) -> str:
    """The parameters that are not as by default; of texts how many, since they may be as private as a prompt."""
    default = SamplingParams()
    shown = []
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if value != getattr(default, name):
            is_long = name in ("stop", "bad_words") or isinstance(value, tuple | dict)
            shown.append(f"{name}: {len(value)}" if is_long else f"{name}={value}")
    return ", ".join(shown) or "default parameters"
