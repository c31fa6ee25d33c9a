"""Loggers of statistics written against vLLM's `StatLoggerBase`, fed by an observer of the engine.

A logger has ``record(scheduler_stats, iteration_stats)``, called at each step and at each request's end, and may
have ``log()`` and ``log_engine_initialized()``. Of vLLM's numbers it gets those that an engine of one device has, by
the same names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.outputs.metrics import RequestMetrics, StepRecord
from aioengine.validation import shorten

StatLoggerFactory = Callable[[EngineConfig, int], Any]
"""Makes a logger, of the engine's config and its number, 0."""


@dataclass
class PrefixCacheStats:
    """Tokens looked up in the prefix cache since the last step, and tokens found."""

    queries: int
    hits: int


@dataclass
class LoadStats:
    """The load after the last step; vLLM's ``SchedulerStats``."""

    num_running_reqs: int
    """Sequences, as in vLLM: each choice counts."""
    num_waiting_reqs: int
    kv_cache_usage: float
    """Share of the blocks that are held, 0 to 1."""
    prefix_cache_stats: PrefixCacheStats


@dataclass
class FinishedRequestStats:
    """A request that has ended; times are in seconds, 0.0 where it has not come that far."""

    finish_reason: str
    e2e_latency: float
    num_prompt_tokens: int
    num_generation_tokens: int
    queued_time: float
    prefill_time: float
    inference_time: float
    decode_time: float
    mean_time_per_output_token: float
    num_cached_tokens: int


@dataclass
class IterationStats:
    """The results of a step, or of the end of a request alone."""

    iteration_timestamp: float
    """Unix seconds."""
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preempted_reqs: int = 0
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)


class StatLoggers:
    """An `Observer` that calls loggers, on the engine's loop: they have to be quick.

    Raises:
        ConfigError: ``factories`` holds what cannot be called, or makes what has no ``record``.
    """

    def __init__(self, factories: Iterable[StatLoggerFactory], config: EngineConfig) -> None:
        self.loggers: list[Any] = []
        for make in factories:
            logger = make(config, 0) if callable(make) else None
            if not callable(getattr(logger, "record", None)):
                raise ConfigError(
                    f"stat_loggers holds {shorten(make)}: give functions or classes that return an object with record()"
                )
            self.loggers.append(logger)
        self._load = LoadStats(0, 0, 0.0, PrefixCacheStats(0, 0))
        self._before = (0, 0, 0)
        """Preemptions, and the prefix cache's queries and hits, up to the last step."""

    def call(self, name: str) -> None:
        """Call this method of the loggers that have it."""
        for logger in self.loggers:
            getattr(logger, name, lambda: None)()

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        finished = FinishedRequestStats(
            finish_reason=finish_reasons[0],
            e2e_latency=metrics.e2e_latency_s or 0.0,
            num_prompt_tokens=metrics.num_prompt_tokens,
            num_generation_tokens=metrics.num_generation_tokens,
            queued_time=metrics.queue_time_s or 0.0,
            prefill_time=metrics.prefill_time_s or 0.0,
            inference_time=metrics.inference_time_s or 0.0,
            decode_time=metrics.decode_time_s or 0.0,
            mean_time_per_output_token=metrics.mean_inter_token_latency_s or 0.0,
            num_cached_tokens=metrics.num_cached_tokens,
        )
        self._record(IterationStats(time.time(), finished_requests=[finished]))

    def on_step(self, record: StepRecord) -> None:
        totals = record.preemptions, record.prefix_cache_queries, record.prefix_cache_hits
        preemptions, queries, hits = (now - before for now, before in zip(totals, self._before, strict=True))
        self._before = totals
        self._load = LoadStats(
            num_running_reqs=record.running,
            num_waiting_reqs=record.waiting,
            kv_cache_usage=1 - record.free_blocks / record.num_blocks,
            prefix_cache_stats=PrefixCacheStats(queries, hits),
        )
        self._record(
            IterationStats(
                iteration_timestamp=time.time(),
                num_generation_tokens=record.num_sampled,
                num_prompt_tokens=record.num_prompt_tokens,
                num_preempted_reqs=preemptions,
                time_to_first_tokens_iter=list(record.times_to_first_token_s),
                inter_token_latencies_iter=record.inter_token_latencies_s.tolist(),
            )
        )

    def _record(self, iteration_stats: IterationStats) -> None:
        for logger in self.loggers:
            logger.record(self._load, iteration_stats)
