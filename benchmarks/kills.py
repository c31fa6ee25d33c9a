"""Replicas that die under load: is a request lost, does a token come twice, and how long does a reader wait?

    python -m benchmarks.kills [--kills 200] [--replicas 3] [--clients 16] [--device fake] [--rolling 3] [--seed S]

Clients read streams of every kind (greedy, seeded, several choices, log-probabilities, grammars, stop strings, bounded
ones that rest unread) all the time; each is one of a set of requests that were answered before, by an engine that
nothing disturbed, and has to bring the same. Meanwhile replicas are killed (SIGKILL), stopped (SIGSTOP: known by the
deadline ``--stall-timeout``), or lose their device, at random moments, also while others start, and now and then the
last one that serves. Then all replicas are restarted in turn, under the same load. Exits with 1 if a request was lost,
or brought something else.

``fake``: a device whose tokens are a hash of all before them (`cluster.mortal`), each step takes 4 ms. ``demo``: the
bundled model in float32, by torch, where SIGSEGV stands for a lost device. What is drawn depends on the seed; how it
interleaves does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from cluster.harness import CONFIG, Cluster, Reader, brought, cluster, is_alike, plain, prompts
from cluster.mortal import EXECUTOR, FAULTS, STEP_TIME, Mortal

from aioengine import Engine, EngineConfig

TESTS = Path(__file__).parents[1] / "tests"

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "choices": {"n": 3},
    "log-probabilities": {"logprobs": 2},
    "grammar": {"structured": SCHEMA, "ignore_eos": False},
    "stop string": {},
    "bounded": {"max_unread_tokens": 4},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "top_k": 50, "top_p": 0.9},
}
STEP_TIME_S = 0.004
MAX_TOKENS = (20, 40, 80, 120)
DEADLINE_S = 60.0
"""Of a request: one that takes longer is lost."""
POLL_S = 0.01
LAST_ONE = 1 / 8
"""Of the moments those in which a replica is killed though no other one serves."""


class Setting(msgspec.Struct, kw_only=True):
    """What is run."""

    num_kills: int = 200
    num_replicas: int = 3
    num_clients: int = 16
    num_references: int = 48
    num_rolling: int = 3
    device: str = "fake"
    stall_timeout_s: float = 2.0
    pause_s: float = 1.0
    """Mean of the time between two kills."""
    seed: int = 0


@dataclass
class Report:
    """What came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    num_tokens: int = 0
    num_broken: int = 0
    """Requests that had a replica die under them."""
    max_breaks: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    """Pieces that were read are not the whole: a token came twice, or is missing."""
    differing: list[str] = field(default_factory=list)
    delays_s: dict[str, list[float]] = field(default_factory=dict)
    """By the way of dying, the longest gap between two deltas of each request that went through one death."""
    usual_gaps_s: list[float] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    rolling_s: list[float] = field(default_factory=list)
    rolling_errors: list[str] = field(default_factory=list)
    num_requests_of_rolling: int = 0

    @property
    def num_problems(self) -> tuple[int, int, int]:
        return len(self.lost), len(self.doubled), len(self.differing)

    @property
    def problems(self) -> list[str]:
        return [*self.lost, *self.doubled, *self.differing, *self.rolling_errors]


DEATHS: dict[str, dict[str, int]] = {
    "fake": {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "device lost": signal.SIGUSR1},
    "demo": {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV},
}
WORDS_OF = {
    "SIGKILL": "SIGKILL",
    "SIGSTOP": "stall_timeout_s",
    "device lost": "fell off the bus",
    "SIGSEGV": "SIGSEGV",
}


class Client(Reader):
    """A reader that knows afterwards through which deaths its request went."""

    def __init__(self, number: int, rests: bool, prompt: Any, **sampling: Any) -> None:
        super().__init__(prompt, **sampling)
        self.number = number
        self.rests = rests

    async def on_delta(self) -> None:
        if self.rests and len(self.deltas) == 2:
            await asyncio.sleep(0.1)

    def reasons(self) -> list[str]:
        """Of the deaths that a choice of it went through."""
        if self.stream is None:
            return []
        core: Any = self.stream._state.core
        reasons = (core.placing.recovery.reasons_of(each.sequence) for each in self.stream._state.completions)
        return max(reasons, key=len, default=[])


class Run:
    """One run of the benchmark."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.report = Report()
        self._rng = random.Random(setting.seed)
        self._references: list[tuple[Any, dict[str, Any]]] = []
        self._expected: list[dict[str, Any]] = []
        self._is_over = False
        self._is_rolling = False

    async def run(self) -> Report:
        known = os.environ.get("PYTHONPATH", "")
        with tempfile.TemporaryDirectory() as faults:
            environment = {FAULTS: faults, STEP_TIME: str(STEP_TIME_S), "PYTHONPATH": f"{TESTS}{os.pathsep}{known}"}
            with mock.patch.dict(os.environ, environment):
                return await self._run()

    async def _run(self) -> Report:
        await self._answer_undisturbed()
        async with self._cluster() as replicas, anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_restarts, replicas)
            async with anyio.create_task_group() as clients:
                for number in range(self.setting.num_clients):
                    rng = random.Random(f"{self.setting.seed} {number}")
                    clients.start_soon(self._be_client, replicas.engine, rng)
                await self._kill_many(replicas)
                await self._restart_all(replicas)
                self._is_over = True
            tasks.cancel_scope.cancel()
        return self.report

    @contextlib.asynccontextmanager
    async def _cluster(self) -> AsyncIterator[Cluster]:
        options: dict[str, Any] = {"stall_timeout_s": self.setting.stall_timeout_s}
        if self.setting.device == "demo":
            options |= {"dtype": "float32", "max_model_len": 1024, "num_threads": 1, "kv_cache_memory_bytes": 2**26}
        executor = EXECUTOR if self.setting.device == "fake" else None
        async with cluster(self.setting.num_replicas, executor=executor, **options) as replicas:
            yield replicas

    # What is asked

    async def _answer_undisturbed(self) -> None:
        """Draw the requests, and have each answered by one engine in this process."""
        rng, kinds = self._rng, list(KINDS)
        for number, prompt in enumerate(prompts(rng, self.setting.num_references)):
            sampling = {"seed": number, "max_tokens": rng.choice(MAX_TOKENS), "ignore_eos": True}
            self._references.append((prompt, sampling | KINDS[kinds[number % len(kinds)]]))
        async with self._one_engine() as engine:
            for number, (prompt, sampling) in enumerate(self._references):
                if kinds[number % len(kinds)] == "stop string":
                    text = (await engine.generate(prompt, **sampling)).text
                    sampling["stop"] = [text[len(text) * 3 // 4 :][:6]]
            self._expected = [brought(output) for output in await asyncio.gather(*self._ask_all(engine))]

    def _ask_all(self, engine: Engine) -> list[Any]:
        return [engine.generate(prompt, **plain(sampling)) for prompt, sampling in self._references]

    def _one_engine(self) -> Engine:
        if self.setting.device == "demo":
            return Engine(dtype="float32", max_model_len=1024, num_threads=1, kv_cache_memory_bytes=2**26, **CONFIG)
        config = EngineConfig(**CONFIG)
        return Engine(executor=Mortal(config, is_mortal=False), **CONFIG)

    # What clients do

    async def _be_client(self, engine: Engine, rng: random.Random) -> None:
        while not self._is_over:
            number = rng.randrange(len(self._references))
            prompt, sampling = self._references[number]
            client = Client(number, "max_unread_tokens" in sampling and rng.random() < 0.5, prompt, **sampling)
            is_rolling = self._is_rolling
            try:
                with anyio.fail_after(DEADLINE_S):
                    await client.read(engine)
            except AssertionError as error:
                self.report.doubled.append(f"request {number}: {error}")
            except TimeoutError:
                self.report.lost.append(f"request {number} has not ended in {DEADLINE_S:g} s")
            else:
                self._note(client, is_rolling or self._is_rolling)

    def _note(self, client: Client, is_rolling: bool) -> None:
        report = self.report
        report.num_requests += 1
        report.num_requests_of_rolling += is_rolling
        report.num_tokens += client.num_tokens
        if client.error is not None:
            where = report.rolling_errors if is_rolling else report.lost
            where.append(f"request {client.number}: {type(client.error).__name__}: {client.error}")
            return
        assert client.output is not None
        if not is_alike(brought(client.output), self._expected[client.number]):
            report.differing.append(f"request {client.number} brought other tokens")
        reasons, longest = client.reasons(), max(client.gaps_s[1:], default=0.0)
        report.num_broken += bool(reasons)
        report.max_breaks = max(report.max_breaks, len(reasons))
        if not client.rests and not reasons and not is_rolling:
            report.usual_gaps_s.append(longest)
        if not client.rests and len(reasons) == 1:
            name = next((name for name, words in WORDS_OF.items() if words in reasons[0]), "other")
            # With no token before the death the reader waits for the first one.
            report.delays_s.setdefault(name, []).append(max(client.gaps_s, default=0.0))

    # What is done to replicas

    async def _kill_many(self, replicas: Cluster) -> None:
        deaths = DEATHS[self.setting.device]
        while self.report.kills.total() < self.setting.num_kills:
            await asyncio.sleep(self._rng.uniform(0.0, 2 * self.setting.pause_s))
            # Else at another moment: not in that in which one is there again.
            if len(serving := replicas.ranks()) >= (1 if self._rng.random() < LAST_ONE else 2):
                name = self._rng.choice(list(deaths))
                with contextlib.suppress(ProcessLookupError):
                    replicas.kill(self._rng.choice(serving), deaths[name])
                    self.report.kills[name] += 1
        with anyio.move_on_after(DEADLINE_S):
            await replicas.until_restarted(1, self.setting.num_replicas)

    async def _restart_all(self, replicas: Cluster) -> None:
        self._is_rolling = True
        for _ in range(self.setting.num_rolling):
            began = time.monotonic()
            await replicas.engine.restart_replicas()
            self.report.rolling_s.append(time.monotonic() - began)

    async def _watch_restarts(self, replicas: Cluster) -> None:
        """Note how long each replica was away."""
        away_since: dict[int, float] = {}
        while not self._is_rolling:
            serving, now = replicas.ranks(), time.monotonic()
            for rank in {status.rank for status in replicas.engine.replicas()}:
                if rank not in serving:
                    away_since.setdefault(rank, now)
                elif rank in away_since:
                    self.report.restarts_s.append(now - away_since.pop(rank))
            await asyncio.sleep(POLL_S)


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


def print_report(setting: Setting, report: Report, took_s: float) -> None:
    rows = [
        ("replicas, clients, seed", f"{setting.num_replicas}, {setting.num_clients}, {setting.seed}"),
        ("kills", ", ".join(f"{count} {name}" for name, count in sorted(report.kills.items()))),
        ("requests, tokens, seconds", f"{report.num_requests:,}, {report.num_tokens:,}, {took_s:.0f}"),
        ("requests whose replica died, most deaths of one", f"{report.num_broken:,}, {report.max_breaks}"),
        ("lost, with a token twice or missing, with other tokens", ", ".join(map(str, report.num_problems))),
        ("longest gap of an undisturbed request, ms: median, p99", in_ms(report.usual_gaps_s)),
        *(
            (f"gap around a break by {name}, ms: median, p99 (of {len(delays)})", in_ms(delays))
            for name, delays in sorted(report.delays_s.items())
        ),
        ("a replica was away, ms: median, p99", in_ms(report.restarts_s)),
        ("rolling restarts of all, s each", ", ".join(f"{each:.1f}" for each in report.rolling_s) or "-"),
        ("requests meanwhile, errors", f"{report.num_requests_of_rolling:,}, {len(report.rolling_errors)}"),
    ]  # fmt: skip
    print("| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")
    for problem in report.problems[:20]:
        print(problem, file=sys.stderr)


def in_ms(values: list[float]) -> str:
    return f"{at(values, 0.5) * 1000:.0f}, {at(values, 0.99) * 1000:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--device", choices=["fake", "demo"], default="fake")
    parser.add_argument("--rolling", type=int, default=3, help="rolling restarts of all replicas after the kills")
    parser.add_argument("--stall-timeout", type=float, default=2.0, help="seconds")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two kills, on average")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    setting = Setting(
        num_kills=asked.kills,
        num_replicas=asked.replicas,
        num_clients=asked.clients,
        num_rolling=asked.rolling,
        device=asked.device,
        stall_timeout_s=asked.stall_timeout,
        pause_s=asked.pause,
        seed=asked.seed,
    )
    print(f"seed {setting.seed}", flush=True)
    logging.getLogger("aioengine").setLevel(logging.CRITICAL + 1)
    began = time.monotonic()
    report = asyncio.run(Run(setting).run())
    print_report(setting, report, time.monotonic() - began)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
