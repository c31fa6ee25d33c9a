"""What a cluster costs its front end, by the number of replicas; and how far one front end reaches by that.

    python -m benchmarks.cluster [--json FILE]

No replica and no socket is there: requests go into `RemoteCore`s whose links lead nowhere, and messages as engines
write them are read back from memory. So what is measured is the front end's own CPU time, in this thread:

- **a request**: its prompt of 256 tokens hashed, a replica chosen, its message written, its sequence followed;
- **a message** of a step, by the rows in it, to listeners that count: what one costs, and a token in it.

From these two and the cost of a reader (`benchmarks/transport.py`: 0.2 µs a token for an answer that is read whole, 4.1
for one that a task reads token by token) the last table says how many front ends N replicas need, at 60 % of a core
each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from aioengine.cluster.cluster_core import ClusterCore
from aioengine.cluster.replica import MakeBackend, Replica, ReplicaState
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.health import Beat
from aioengine.core.listener import UNLIMITED
from aioengine.core.protocol import CoreHooks
from aioengine.outputs.metrics import StepRecord
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import int32
from aioengine.scheduler.scheduler import SchedulerStats
from aioengine.scheduler.sequence import Request, Sequence
from aioengine.transport import wire
from aioengine.transport.client import RemoteCore
from aioengine.transport.link import Link

NUM_REPLICAS = (1, 2, 8, 64, 512)
ROWS = (1, 8, 32, 128, 256)
PROMPT_TOKENS = 256
REQUESTS = 2_000
MESSAGES = 400
REPEATS = 5
NUM_BLOCKS = 100_000
READERS_US = {"whole answers": 0.2, "a task a stream": 4.1}
SHARE_OF_CORE = 0.6
"""What a front end may use of its core: beyond that queues grow long."""
STEPS_PER_S, ROWS_PER_REPLICA = 40, 128
"""Of a replica in the plan: 25 ms a step of 128 rows, as a GPU decodes a model of 8 billion parameters or more."""


class Counting:
    """A listener that counts."""

    num_allowed = UNLIMITED
    num_tokens = 0

    def on_started(self) -> None: ...

    def on_token(self, token_id: int, logprobs: object) -> None:
        self.num_tokens += 1

    def on_prompt_logprobs(self, position: int, logprobs: object) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: Exception) -> None: ...


def make_cluster(num_replicas: int) -> ClusterCore:
    """A cluster of replicas that serve, and whose links lead nowhere."""
    config = EngineConfig(log_stats_interval_s=0.0, max_waiting=1_000_000)
    options = ReplicaOptions(replicas=num_replicas)
    hooks = CoreHooks(cast(Any, None), cast(Any, None), lambda: None)
    cluster = ClusterCore(config, options, hooks, time.perf_counter)
    for rank in range(num_replicas):
        replica = Replica(rank, cast(MakeBackend, None), cluster, hooks)
        replica.core = make_core(config, replica._hooks)
        replica.state = ReplicaState.SERVING
        cluster.add_replica(replica)
    return cluster


def make_core(config: EngineConfig, hooks: CoreHooks) -> RemoteCore:
    attached = wire.Attached(
        version=wire.PROTOCOL_VERSION,
        config={},
        info=ExecutorInfo(num_blocks=NUM_BLOCKS, block_size=16, max_model_len=8192, vocab_size=100_000),
        eos_token_ids=(2,),
        model_path="",
        first_beat=Beat(),
        stats=SchedulerStats(
            **{"running": 0, "waiting": 0, "blocked": 0, "free_blocks": NUM_BLOCKS, "num_blocks": NUM_BLOCKS},
            **{"preemptions": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0, "steps": 0},
        ),
    )
    writer = wire.Writer()
    link = SimpleNamespace(send=lambda body: writer.write(body), reader=wire.Reader(wire.FromEngine))
    return RemoteCore(
        cast(Link, link),
        attached,
        config=config,
        hooks=hooks,
        is_far=False,
        describe_cut=cast(Any, None),
        logs_stats=False,
    )


def request(number: int) -> Request:
    prompt = np.random.default_rng(number).integers(100, 100_000, PROMPT_TOKENS)
    return Request(
        request_id=str(number),
        prompt_token_ids=int32(prompt),
        params=SamplingParams(max_tokens=1000),
        seed=number,
        max_total_tokens=PROMPT_TOKENS + 1000,
    )


def add(cluster: ClusterCore, asked: Request) -> Sequence:
    sequence = cluster.make_sequence(asked)
    cluster.add(sequence, [Counting()])
    return sequence


def request_us(num_replicas: int) -> float:
    """CPU µs that a request costs before its first token."""
    cluster, asked = make_cluster(num_replicas), [request(number) for number in range(REQUESTS)]
    begun = time.thread_time()
    for each in asked:
        add(cluster, each)
    return (time.thread_time() - begun) / REQUESTS * 1e6


def record(rows: int) -> StepRecord:
    return StepRecord(
        **{"step": 1, "num_tokens": rows, "num_sampled": rows, "num_prompt_tokens": 0, "device_time_s": 0.02},
        **{"step_time_s": 0.02, "loop_lag_s": 0.0, "inter_token_latencies_s": np.full(rows, 0.02)},
        **{"times_to_first_token_s": [], "running": rows, "waiting": 0, "free_blocks": 1, "num_blocks": 2},
        **{"preemptions": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0},
    )


async def message_us(rows: int) -> float:
    """CPU µs that the message of a step with so many rows costs, its record included."""
    cluster = make_cluster(8)
    core = cluster.replicas[0].core
    assert isinstance(core, RemoteCore)
    sequences = [core.make_sequence(request(number)) for number in range(rows)]
    for sequence in sequences:
        core.add(sequence, [Counting()])
    writer = wire.Writer()
    numbers = [sequence.order for sequence in sequences]
    step = wire.StepOutputsMessage(numbers=numbers, token_ids=[7] * rows, record=record(rows))
    frames = [[writer.write(step)] for _ in range(MESSAGES)]
    begun = time.thread_time()
    for each in frames:
        await core._take(each)
    return (time.thread_time() - begun) / MESSAGES * 1e6


def fit(costs: dict[int, float]) -> tuple[float, float]:
    """Least squares: (µs a message, µs a token in it)."""
    token_us, message = np.polyfit(list(costs), list(costs.values()), 1)
    return float(message), float(token_us)


def front_ends(num_replicas: int, message: float, token_us: float, reader_us: float) -> float:
    """Cores of front ends that so many replicas keep busy; each replica sends a message to each front end a step."""
    steps = num_replicas * STEPS_PER_S
    tokens_us = steps * ROWS_PER_REPLICA * (token_us + reader_us)
    budget_us = SHARE_OF_CORE * 1e6 - steps * message  # a front end's, beside what all messages cost it
    return math.inf if budget_us <= 0 else tokens_us / budget_us


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    requests = {n: statistics.median(request_us(n) for _ in range(REPEATS)) for n in NUM_REPLICAS}
    messages = {rows: statistics.median([await message_us(rows) for _ in range(REPEATS)]) for rows in ROWS}
    message, token_us = fit(messages)
    print("| replicas | µs a request |\n|---|---|")
    for n, cost in requests.items():
        print(f"| {n} | {cost:.1f} |")
    print("\n| rows in a message | µs | µs a token |\n|---|---|---|")
    for rows, cost in messages.items():
        print(f"| {rows} | {cost:.1f} | {cost / rows:.2f} |")
    print(f"\nfitted: {message:.1f} µs a message, {token_us:.2f} µs a token in it\n")
    print(f"| replicas of {ROWS_PER_REPLICA} rows, {STEPS_PER_S} steps/s | tokens/s | front ends by reader: ", end="")
    print(" | ".join(READERS_US), "|\n|---|---|---|---|")
    for n in (1, 8, 16, 64, 256):
        needed = [front_ends(n, message, token_us, reader_us) for reader_us in READERS_US.values()]
        shown = " | ".join("more than can be" if math.isinf(each) else f"{math.ceil(each)}" for each in needed)
        print(f"| {n} | {n * STEPS_PER_S * ROWS_PER_REPLICA:,} | {shown} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"request_us": requests, "message_us": messages}))


if __name__ == "__main__":
    asyncio.run(main())
