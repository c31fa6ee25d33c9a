"""What the choice of a replica does to the time to the first token, with hundreds of replicas under a virtual clock.

    python benchmarks/balance.py [--replicas 200] [--only WORKLOAD ...] [--seed 1] [--processes 2] [--json FILE]

Each replica is a real `EngineCore`: scheduler, KV blocks and prefix cache. Its device is a stand-in that computes
nothing and takes a modelled time: `STEP_S` a step, `PREFILL_S` a prompt token, `DECODE_S` a row that decodes. They are
those of Qwen3-0.6B's shape in bfloat16 on two cores of Zen 5 (W1, W2 and W4 in benchmarks/README.md). All replicas are
on one loop, whose clock jumps to the next step's end.

Prompts are random token ids, requests come as a Poisson process. TTFT is from the call to the first token; *hits* is
the share of prompt tokens that a replica's prefix cache had. What comes in the first quarter of the
time is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from aioengine.cluster.balancer import BalancePolicy, Balancer, Candidate
from aioengine.config import EngineConfig
from aioengine.core.engine_core import EngineCore
from aioengine.core.listener import UNLIMITED
from aioengine.outputs.metrics import StepRecord
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import StepPlan, int32
from aioengine.scheduler.prefix_cache import PrefixKey
from aioengine.scheduler.sequence import Request
from aioengine.testing import FakeExecutor, FakeStep, run

STEP_S, PREFILL_S, DECODE_S = 29e-3, 1.57e-3, 0.76e-3
BLOCK_SIZE = 16
VOCAB = 150_000
CONFIG = EngineConfig(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=16384, log_stats_interval_s=0)
WARM_UP = 0.25
"""The share of a run that is not counted."""


class Policy(NamedTuple):
    name: str
    balance: BalancePolicy
    has_sessions: bool = False


POLICIES = (
    Policy("round robin", "round_robin"),
    Policy("least load", "load"),
    Policy("session, least load", "load", has_sessions=True),
    Policy("prefix", "prefix"),
    Policy("session, prefix", "prefix", has_sessions=True),
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run: seconds, and shares; ``busiest``: the requests of the replica that had most, over the mean."""

    workload: str
    policy: str
    requests: int
    ttft_median_s: float
    ttft_p99_s: float
    hits: float
    busiest: float
    steps: int
    wall_s: float


# Replicas


class ModelledExecutor(FakeExecutor):
    """A device whose steps take as long as a model of it says. ``slowness``: how many times as long."""

    def __init__(self, num_blocks: int, slowness: float) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=CONFIG.max_model_len or 0,
            vocab_size=VOCAB,
            sampler=lambda token_ids, sampling: (token_ids[-1] * 31 + len(token_ids)) % VOCAB,
        )
        self._slowness = slowness

    def launch(self, plan: StepPlan) -> FakeStep:
        decodes = int((plan.num_tokens == 1).sum())
        prefill_tokens = int(plan.num_tokens.sum()) - decodes
        self.step_time_s = self._slowness * (STEP_S + PREFILL_S * prefill_tokens + DECODE_S * decodes)
        return super().launch(plan)


class Replica:
    """An engine core, and its load as it last told: after each step, or every ``report_s`` (then by `report`)."""

    def __init__(self, rank: int, num_blocks: int, slowness: float, *, report_s: float) -> None:
        executor = ModelledExecutor(num_blocks, slowness)
        self.core = EngineCore(executor, CONFIG, clock=asyncio.get_running_loop().time)
        self.core.observers.stop_metrics()
        self.num_requests = 0
        self.num_steps = 0
        self.is_reporting = report_s == 0
        self.reported = Candidate(rank, 0, 0, num_blocks, num_blocks, CONFIG.max_num_seqs, 0)
        self.num_reports = 0
        self.core.observers.add(self)

    def on_step(self, record: StepRecord) -> None:
        self.num_steps += 1
        if self.is_reporting:
            self.report()

    def on_request(self, metrics: object, finish_reasons: tuple[str, ...]) -> None:
        pass

    def report(self) -> None:
        scheduler = self.core.scheduler
        stats = scheduler.stats()
        self.num_reports += 1
        self.reported = self.reported._replace(
            running=stats.running,
            waiting=stats.waiting + stats.blocked,
            free_blocks=stats.free_blocks,
        )


class FrontEnd:
    """One front end of all replicas: its balancer, and what it has sent to each since that one's last report."""

    def __init__(self, replicas: list[Replica], policy: Policy, offset: int) -> None:
        self._replicas = replicas
        self._has_sessions = policy.has_sessions
        self._balancer = Balancer(policy.balance, offset=offset)
        self._sent = [0] * len(replicas)
        self._seen_reports = [0] * len(replicas)

    def _candidates(self) -> list[Candidate]:
        for rank, replica in enumerate(self._replicas):
            if self._seen_reports[rank] != replica.num_reports:
                self._seen_reports[rank], self._sent[rank] = replica.num_reports, 0
        return [
            replica.reported._replace(num_sent=sent) if sent else replica.reported
            for replica, sent in zip(self._replicas, self._sent, strict=True)
        ]

    def choose(self, hashes: list[bytes], session: str) -> Replica:
        rank = self._balancer.choose(self._candidates(), hashes, session if self._has_sessions else "")
        self._sent[rank] += 1
        return self._replicas[rank]


class Answer:
    """Follows one sequence."""

    num_allowed = UNLIMITED

    def __init__(self) -> None:
        self.first_token_at = math.nan
        self.ended = asyncio.Event()

    def on_started(self) -> None:
        pass

    def on_token(self, token_id: int, logprobs: object) -> None:
        if math.isnan(self.first_token_at):
            self.first_token_at = asyncio.get_running_loop().time()

    def on_prompt_logprobs(self, position: int, logprobs: object) -> None:
        raise AssertionError("none was asked for")

    def on_end(self) -> None:
        self.ended.set()

    def on_error(self, error: Exception) -> None:
        raise error


class Cluster:
    """All replicas, their front ends, and the figures of the requests."""

    def __init__(self, workload: Workload, policy: Policy, num_replicas: int) -> None:
        slow = workload.num_slow * num_replicas // 100
        self.replicas = [
            Replica(rank, workload.num_blocks, workload.slowness if rank < slow else 1.0, report_s=workload.report_s)
            for rank in range(num_replicas)
        ]
        self._front_ends = [FrontEnd(self.replicas, policy, offset) for offset in range(workload.num_front_ends)]
        self._turns = itertools.count()
        self.counted_from_s = workload.duration_s * WARM_UP
        self.times_s: list[float] = []
        self.num_prompt_tokens = self.num_cached_tokens = 0

    async def ask(self, prompt: list[int], max_tokens: int, session: str = "") -> list[int]:
        """A request to one of the replicas, through one of the front ends; the tokens of its answer."""
        params = SamplingParams(max_tokens=max_tokens)
        token_ids = int32(prompt)
        total = len(prompt) + max_tokens
        request = Request(request_id="", prompt_token_ids=token_ids, params=params, seed=0, max_total_tokens=total)
        front_end = self._front_ends[next(self._turns) % len(self._front_ends)]
        replica = front_end.choose(PrefixKey().hash_blocks(token_ids, BLOCK_SIZE), session)
        replica.num_requests += 1
        now = asyncio.get_running_loop().time()
        sequence = replica.core.make_sequence(request)
        answer = Answer()
        replica.core.add(sequence, [answer])
        await answer.ended.wait()
        if now >= self.counted_from_s:
            self.times_s.append(answer.first_token_at - now)
            self.num_prompt_tokens += len(prompt)
            self.num_cached_tokens += sequence.num_cached_tokens
        return sequence.output_ids


# Workloads


class Workload(NamedTuple):
    """Requests, or chats, that come at ``rate`` a second and a replica for ``duration_s``; one is made by ``one``."""

    name: str
    told: str
    rate: float
    duration_s: float
    one: Callable[[Cluster, random.Random, list[list[int]]], Awaitable[None]]
    systems: tuple[int, int] = (0, 0)
    """System prompts, and the tokens of each."""
    num_blocks: int = 1024
    num_front_ends: int = 1
    report_s: float = 0.0
    num_slow: int = 0
    """Of a hundred replicas."""
    slowness: float = 3.0


async def chat(cluster: Cluster, rng: random.Random, systems: list[list[int]]) -> None:
    """Five turns, each with all before it, behind a system prompt."""
    history = list(rng.choice(systems))
    session = f"{rng.getrandbits(64):x}"
    for _ in range(5):
        history += text(rng, rng.randint(40, 120))
        history += await cluster.ask(history, rng.randint(4, 12), session)
        await asyncio.sleep(rng.expovariate(1 / 3.0))


async def alone(cluster: Cluster, rng: random.Random, _: object) -> None:
    """A prompt like no other, of 50 to 3,000 tokens, short ones more often (log-uniform: 720 on the average)."""
    await cluster.ask(text(rng, int(50 * 60 ** rng.random())), rng.randint(4, 12))


async def tenant(cluster: Cluster, rng: random.Random, systems: list[list[int]]) -> None:
    """A question behind a tenant's system prompt; the n-th tenant has 1/n as many as the first (Zipf)."""
    rank = min(int(len(systems) ** rng.random()), len(systems)) - 1
    await cluster.ask(systems[rank] + text(rng, rng.randint(40, 120)), rng.randint(4, 12))


async def hot(cluster: Cluster, rng: random.Random, systems: list[list[int]]) -> None:
    """Two of three have one long prefix, the others are like no other."""
    await (tenant if rng.random() < 2 / 3 else alone)(cluster, rng, systems)


def text(rng: random.Random, num_tokens: int) -> list[int]:
    ids: list[int] = (np.frombuffer(rng.randbytes(4 * num_tokens), np.uint32) % VOCAB).tolist()
    return ids


def systems(count: int, num_tokens: int) -> list[list[int]]:
    rng = random.Random(count)
    return [text(rng, num_tokens) for _ in range(count)]


WORKLOADS = (
    Workload("chats", "five turns, one system prompt of 300", 0.15, 30, chat, (1, 300)),
    Workload("random", "no two prompts alike, 50 to 3,000", 0.7, 25, alone),
    Workload("few tenants", "8 system prompts of 1,000", 1.6, 12, tenant, (8, 1000)),
    Workload("many tenants", "1,000 system prompts of 1,000", 0.6, 25, tenant, (1000, 1000)),
    Workload("hot", "2/3 begin with the same 2,000; 2 % of replicas 3 times slower", 1.2, 15, hot, (1, 2000),
             num_slow=2),
    Workload("stale", "chats; 4 front ends, told of loads every 100 ms", 0.15, 30, chat, (1, 300),
             num_front_ends=4, report_s=0.1),
)  # fmt: skip


async def simulate(workload: Workload, policy: Policy, num_replicas: int, seed: int) -> Figures:
    began = time.perf_counter()
    cluster = Cluster(workload, policy, num_replicas)
    shared, rng = systems(*workload.systems), random.Random(seed)
    loop = asyncio.get_running_loop()

    async def report() -> None:
        while True:
            await asyncio.sleep(workload.report_s)
            for replica in cluster.replicas:
                replica.report()

    async with anyio.create_task_group() as cores:
        for replica in cluster.replicas:
            cores.start_soon(replica.core.run)
        if workload.report_s:
            cores.start_soon(report)
        async with anyio.create_task_group() as requests:
            while loop.time() < workload.duration_s:
                await asyncio.sleep(rng.expovariate(workload.rate * num_replicas))
                requests.start_soon(workload.one, cluster, random.Random(rng.getrandbits(64)), shared)
        cores.cancel_scope.cancel()
    for replica in cluster.replicas:
        await replica.core.executor.aclose()
    times = sorted(cluster.times_s)
    counts = [replica.num_requests for replica in cluster.replicas]
    return Figures(
        workload=workload.name,
        policy=policy.name,
        requests=sum(counts),
        ttft_median_s=statistics.median(times),
        ttft_p99_s=times[len(times) * 99 // 100],
        hits=cluster.num_cached_tokens / cluster.num_prompt_tokens,
        busiest=max(counts) / statistics.mean(counts),
        steps=sum(replica.num_steps for replica in cluster.replicas),
        wall_s=time.perf_counter() - began,
    )


def measure(name: str, policy_name: str, num_replicas: int, seed: int) -> Figures:
    """One run, by names, so that it can be asked of another process."""
    (workload,) = (one for one in WORKLOADS if one.name == name)
    (policy,) = (one for one in POLICIES if one.name == policy_name)
    return run(simulate(workload, policy, num_replicas, seed), seed=seed)


def pairs(only: list[str] | None) -> Iterator[tuple[str, str]]:
    for workload in WORKLOADS:
        if only is None or workload.name in only:
            for policy in POLICIES:
                if not policy.has_sessions or workload.one is chat:
                    yield workload.name, policy.name


def show(figures: list[Figures]) -> None:
    table = Table("workload", "policy", "requests", "TTFT median, s", "p99", "hits", "busiest", "wall, s")
    for one in figures:
        times = f"{one.ttft_median_s:.2f}", f"{one.ttft_p99_s:.2f}"
        shares = f"{100 * one.hits:.0f} %", f"{one.busiest:.1f}"
        table.add_row(one.workload, one.policy, f"{one.requests:,}", *times, *shares, f"{one.wall_s:.0f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as pool:
        runs = [pool.submit(measure, *pair, args.replicas, args.seed) for pair in pairs(args.only)]
        figures = [one.result() for one in runs]
    show(figures)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))


if __name__ == "__main__":
    main()
