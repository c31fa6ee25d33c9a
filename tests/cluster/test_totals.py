"""The records of several engines as those of one."""

from __future__ import annotations

import numpy as np

from aioengine.cluster.cluster_core import StepTotals
from aioengine.outputs.metrics import StepRecord


def record(step: int, *, running: int, preemptions: int, free_blocks: int = 5) -> StepRecord:
    return StepRecord(
        step=step,
        num_tokens=1,
        num_sampled=1,
        num_prompt_tokens=0,
        device_time_s=0.0,
        step_time_s=0.0,
        loop_lag_s=None,
        inter_token_latencies_s=np.empty(0),
        times_to_first_token_s=[],
        running=running,
        waiting=1,
        free_blocks=free_blocks,
        num_blocks=10,
        preemptions=preemptions,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
    )


def test_loads_are_those_of_all_replicas() -> None:
    totals = StepTotals()
    totals.take(0, record(0, running=3, preemptions=0))
    told = totals.take(1, record(0, running=4, preemptions=0, free_blocks=2))
    assert (told.running, told.waiting, told.free_blocks, told.num_blocks) == (7, 2, 7, 20)
    told = totals.take(0, record(1, running=1, preemptions=0))
    assert told.running == 5


def test_the_loads_of_an_engine_that_has_ended_are_gone_and_its_counters_stay() -> None:
    totals = StepTotals()
    totals.take(0, record(0, running=3, preemptions=7))
    totals.take(1, record(0, running=2, preemptions=1))
    totals.forget(0)
    totals.forget(0)
    told = totals.take(1, record(1, running=2, preemptions=1))
    assert (told.running, told.num_blocks, told.preemptions) == (2, 10, 8)
    told = totals.take(0, record(0, running=1, preemptions=2))  # started again, it counts from nothing
    assert (told.running, told.preemptions) == (3, 10)
    assert totals.counters["preemptions"] == 10
