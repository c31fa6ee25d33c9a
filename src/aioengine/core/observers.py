"""Observers of steps and requests, the log, and the user's own code that an engine calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import operator
from collections.abc import Callable, Iterator

import msgspec

from aioengine.config import EngineConfig
from aioengine.outputs.metrics import EngineMetrics, Observer, RequestMetrics, StepRecord
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import StepPlan, StepResult
from aioengine.scheduler.scheduler import Scheduler
from aioengine.scheduler.sequence import Request
from aioengine.scheduler.steps import StepOutput

logger = logging.getLogger("aioengine")


class Observers:
    """An engine's own metrics, the user's observers, and the log line about the load.

    Args:
        log_interval_s: seconds between two log lines; 0: none.
        now_s: when the first interval begins, by the core's clock.
    """

    def __init__(self, user_code: UserCode, *, log_interval_s: float, now_s: float) -> None:
        self.metrics = EngineMetrics()
        self._user_code = user_code
        self._observers: dict[object, Observer] = {}
        self.num_at_door: Callable[[], int] = lambda: 0
        """Sequences that wait for admission at the caller's side, of which a core knows nothing."""
        self.stop_metrics = self.add(self.metrics)
        """To be called where nothing reads them: they cost 20 µs a step."""
        self._stats_log = StatsLog(self.metrics, interval_s=log_interval_s or math.inf, now_s=now_s)

    def add(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` at each step and request's end from now on; the returned function stops that, once."""
        addition = object()
        self._observers[addition] = observer

        def stop() -> None:
            self._observers.pop(addition, None)

        return stop

    def on_step(self, record: StepRecord, now_s: float) -> None:
        """A step's result has been applied."""
        if num_at_door := self.num_at_door():
            record = msgspec.structs.replace(record, waiting=record.waiting + num_at_door)
        for observer in tuple(self._observers.values()):  # one may add or remove another
            with self._user_code.called("an observer failed"):
                observer.on_step(record)
        line = self._stats_log.poll(now_s)
        if line is not None:
            logger.info("%s", line)

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        """A request has ended."""
        for observer in tuple(self._observers.values()):
            with self._user_code.called("an observer failed"):
                observer.on_request(metrics, finish_reasons)


class StatsLog:
    """One line about an engine, ``interval_s`` (more than 0) after the last one at the earliest: `poll` gives it."""

    def __init__(self, metrics: EngineMetrics, *, interval_s: float, now_s: float) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._counters = (
            metrics.prompt_tokens,
            metrics.generation_tokens,
            metrics.prefix_cache_queries,
            metrics.prefix_cache_hits,
            metrics.num_preemptions,
        )
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._begun_s = now_s
        self._totals = [counter.value for counter in self._counters]

    def poll(self, now_s: float) -> str | None:
        """The line about the time since the last one, if it is due."""
        seconds = now_s - self._begun_s
        if seconds < self._interval_s:
            return None
        before, m = self._totals, self._metrics
        self._begin(now_s)
        prompt_tokens, generation_tokens, queries, hits, preemptions = map(operator.sub, self._totals, before)
        hit_rate = f"{100 * hits / queries:.1f} %" if queries else "-"
        return (
            f"in {seconds:.1f} s: prompt {prompt_tokens / seconds:,.1f} tokens/s, "
            f"generation {generation_tokens / seconds:,.1f} tokens/s; "
            f"running {m.num_requests_running.value:.0f}, waiting {m.num_requests_waiting.value:.0f}, "
            f"KV cache {100 * m.kv_cache_usage_perc.value:.1f} %, prefix cache hits {hit_rate}, "
            f"preemptions {preemptions}"
        )


def make_record(
    scheduler: Scheduler, plan: StepPlan, result: StepResult, output: StepOutput, *, launched_at: float, now: float
) -> StepRecord:
    """Make the record of a step that has just been applied."""
    kv, pool = scheduler.kv, scheduler.kv.tightest_pool
    return StepRecord(
        step=plan.step,
        num_tokens=int(plan.num_tokens.sum()),
        num_sampled=len(output.token_ids) + sum(map(len, output.forced.values())),
        num_prompt_tokens=sum(len(sequence.prompt) for sequence in output.first),
        device_time_s=result.device_time_s,
        step_time_s=now - launched_at,
        loop_lag_s=max(now - result.ended_at_s, 0.0) if result.ended_at_s else None,
        inter_token_latencies_s=output.gaps_s,
        times_to_first_token_s=[now - sequence.arrived_at for sequence in output.first],
        running=scheduler.num_running,
        waiting=scheduler.num_without_row,
        free_blocks=pool.num_free,
        num_blocks=pool.num_blocks,
        preemptions=scheduler.preemption.num_preemptions,
        prefix_cache_queries=kv.num_queried_tokens,
        prefix_cache_hits=kv.num_hit_tokens,
        blocked=len(scheduler.blocked),
        cached_blocks=pool.num_cached,
        touched_blocks=pool.num_touched,
    )


# The request log: off by default, and without prompts


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
            if isinstance(value, msgspec.Struct):
                value = type(value).__name__
            is_long = name in ("stop", "bad_words") or isinstance(value, tuple | dict)
            shown.append(f"{name}: {len(value)}" if is_long else f"{name}={value}")
    return ", ".join(shown) or "default parameters"


class UserCode:
    """Code of the user's that an engine calls, and that awaits nothing.

    What it raises is logged, and the engine goes on. KeyboardInterrupt and SystemExit go on, too, as from any callback
    of asyncio's: out of the loop, at its next turn. While the engine ends they are kept until it has closed everything.
    """

    def __init__(self) -> None:
        self._is_keeping = False
        self._kept: BaseException | None = None

    @contextlib.contextmanager
    def called(self, failure: str) -> Iterator[None]:
        """Call it in this block; ``failure`` is logged of what it raises."""
        try:
            yield
        except BaseException as error:
            self.raised(error, failure)

    def raised(self, error: BaseException, failure: str) -> None:
        """It has raised; to be called in the handler. For calls that each token makes: `called` costs 0.7 µs."""
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            logger.error("%s", failure, exc_info=error)  # a CancelledError, too: nothing is awaited in such code
        elif self._is_keeping:
            self._kept = self._kept or error
        else:
            asyncio.get_running_loop().call_soon(_raise, error)

    def keep(self) -> None:
        """The engine ends: keep from now on what would end the loop."""
        self._is_keeping = True

    def let_go(self) -> None:
        """Everything is closed: raise what was kept, if anything."""
        self._is_keeping = False
        kept, self._kept = self._kept, None
        if kept is not None:
            raise kept


def _raise(error: BaseException) -> None:
    raise error
