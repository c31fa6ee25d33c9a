"""The request log: a line where a request begins and one where it ends. Off by default, and without prompts."""

from __future__ import annotations

import logging

from aioengine.config import EngineConfig
from aioengine.metrics import RequestMetrics
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.sequence import Request

logger = logging.getLogger("aioengine")


class RequestLog:
    """Logs requests, as an engine's config says.

    Args:
        config: its ``log_requests`` and ``log_prompts`` count.
        whose: put before each line.
    """

    def __init__(self, config: EngineConfig, whose: str = "") -> None:
        self._is_on = config.log_requests
        self._has_prompts = config.log_prompts
        self._whose = whose

    def begun(self, request: Request, prompt: str | None = None) -> None:
        """A request has been accepted.

        Args:
            prompt: its text, where it has one.
        """
        if not self._is_on:
            return
        ids = request.prompt_token_ids
        of_prompt = f", prompt {ids.tolist() if prompt is None else prompt!r}" if self._has_prompts else ""
        logger.info(
            "%srequest %r: %d prompt tokens, priority %d, %s%s",
            self._whose,
            request.request_id,
            len(ids),
            request.priority,
            _describe(request.params),
            of_prompt,
        )

    def ended(self, request_id: str, finish_reasons: tuple[str, ...], metrics: RequestMetrics) -> None:
        """All its choices have ended."""
        if self._is_on:
            logger.info(
                "%srequest %r ended by %s: %d tokens in %.3f s",
                self._whose,
                request_id,
                ", ".join(finish_reasons),
                metrics.num_generation_tokens,
                metrics.e2e_latency_s or 0.0,
            )


_WITH_TEXTS = ("stop", "bad_words")


def _describe(params: SamplingParams) -> str:
    """The parameters that are not as by default; of texts how many, since they may be as private as a prompt."""
    default = SamplingParams()
    shown = []
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if value != getattr(default, name):
            is_long = name in _WITH_TEXTS or isinstance(value, tuple | dict)
            shown.append(f"{name}: {len(value)}" if is_long else f"{name}={value}")
    return ", ".join(shown) or "default parameters"
