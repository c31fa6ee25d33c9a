"""``serve.py --self``: what one core of the HTTP API carries, and what it does with twice of what it can."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from aioengine.cli.load import Range
from serving.capacity import Attempt, Search, attempt_of, median_e2el_s
from serving.figures import MAX_BUSY, Bin, Figures, Slo, bins_of, figures_of, recovered_after, tokens_between
from serving.load import Phase, Run, Target, arrival_times, first_model, generate

PARTS = ("sustained", "overload")
STARTUP_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
FEWEST_TOKENS = 32
NEARLY_ALL = 0.9
MAX_OTHERS = 0.06
"""CPU seconds a second that others may use of the two cores in a round that counts."""
MOST_TRIES = 2
"""Rounds that are tried for one that counts."""
MOST_TOKENS = 4000
"""Of a stream: the stand-in device holds 256 of them."""
CALM, OVERLOAD = 0.8, 2.0
"""Of the sustainable rate."""
LIGHT = 0.1
"""Of the first rate that is tried."""
BIN_S = 0.25
LINGER_S = 0.7
"""After an attempt: whoever is not answered by then was not served at a rate that is sustained."""
RAMP_S = 1.0
"""First part of a phase, in which it is not yet what it will be; its figures are of the rest."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        streams: at once.
        rounds: of each server, in turns.
        seconds: of a round, about.
        overload_tokens: of each request there, in and out.
        max_waiting: requests that may wait for a place in the overload, for about ``max_waiting`` / (requests/s that
            it completes): 64 at 550/s is 0.12 s. With 16 a hiccup of 30 ms has requests shed while places are free,
            since those that came meanwhile all come at once.
        max_concurrent: requests that the server takes at once, some more than are open when it is full. In an overload
            a request takes (those that are open) / (requests/s that are completed), by Little's law: this is what keeps
            the latency of those that are taken.
        calm_s, full_s, overload_s, recovery_s: of the phases.
        attempt_s: of each rate that is tried for the sustainable one, at most ``max_attempts`` times.
    """

    endpoint: Literal["chat", "completions"] = "chat"
    streams: int = 256
    rounds: int = 5
    seconds: float = 1.5
    step_ms: float = 1.0
    prompt_tokens: int = 16
    overload_tokens: int = 64
    max_waiting: int = 64
    max_concurrent: int = 128
    calm_s: float = 5.0
    full_s: float = 5.0
    overload_s: float = 6.0
    recovery_s: float = 6.0
    attempt_s: float = 2.0
    max_attempts: int = 7
    slo: Slo = Slo()
    seed: int = 0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """All streams at once, while nine in ten of them or more were being answered.

    Attributes:
        server_us, client_us: of CPU a token.
        server_busy, client_busy: CPU seconds a second. Below 1 somebody else had the core, or there was nothing to do.
        others_busy: the same of everybody else on these two cores.
    """

    seconds: float
    tokens_per_s: float
    tokens_per_event: float
    server_us: float
    client_us: float
    server_busy: float
    client_busy: float
    others_busy: float

    @property
    def is_disturbed(self) -> bool:
        return self.others_busy > MAX_OTHERS


class Overload(msgspec.Struct, frozen=True, kw_only=True):
    """Before, during and after an overload.

    Attributes:
        capacity_per_s: the sustainable rate, found by ``attempts``. Phases: 0.8 ("before"), 1 ("full"), 2
            ("overload") and 0.8 times ("after") that. What overload does to accepted requests is its latency by that
            of "full".
        bound, doubts: whether that rate is but a bound, "at least " or "below ", and why.
        recovered_s: see `recovered_after`.
        others_busy: as in a `Round`.
    """

    capacity_per_s: float
    attempts: list[Attempt]
    bound: str
    doubts: list[str]
    phases: dict[str, Figures]
    recovered_s: float | None
    bins: list[Bin]
    others_busy: float


class OwnFigures(msgspec.Struct, kw_only=True):
    """What ``--self`` writes as JSON."""

    about: dict[str, object]
    setting: Setting
    sustained: dict[str, list[Round]] = {}
    overload: Overload | None = None


class Server(msgspec.Struct, frozen=True):
    """A server in a child."""

    pid: int
    target: Target


def _two_cores() -> tuple[int, ...]:
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return tuple(available[:2]) if len(available) > 1 else ()


CORES = _two_cores()
"""One for the server and one for the generator; empty where there is but one, or no way to pin. Looked up once: the
generator's own pinning would leave none for servers that are started later."""


@contextlib.asynccontextmanager
async def open_server(kind: str, setting: Setting, *arguments: str) -> AsyncIterator[Server]:
    """A server of its own process on the first core; it is ended, one way or another."""
    folder = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
    pinned = ("--core", str(CORES[0])) if CORES else ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serving.child", kind, "--step-ms", str(setting.step_ms)),
        *("--parent", str(os.getpid()), "--max-num-seqs", str(setting.streams), *pinned, *arguments),
        env={**os.environ, "PYTHONPATH": path},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(STARTUP_TIMEOUT_S):
            line = (await process.stdout.readline()).decode().strip()
        if not line.startswith("http://"):
            raise SystemExit(f"the server {kind!r} did not start")
        url = f"{line}/v1"
        yield Server(process.pid, Target(url=url, model=await first_model(url, None), ignore_eos=kind != "bare"))
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def measure(setting: Setting, about: dict[str, object], parts: Sequence[str] = PARTS) -> OwnFigures:
    """All of it, in about ``2 * rounds * seconds`` and half a minute; longer where others disturb it."""
    figures = OwnFigures(about=about, setting=setting)
    if CORES:
        os.sched_setaffinity(0, {CORES[1]})
    if "sustained" in parts:
        async with open_server("bare", setting) as bare, open_server("engine", setting) as engine:
            figures.sustained = await _take_turns({"bare": bare, "engine": engine}, setting)
    if "overload" in parts:
        limits = ("--max-waiting", str(setting.max_waiting), "--max-concurrent", str(setting.max_concurrent))
        async with open_server("engine", setting, *limits) as engine:
            figures.overload = await _overload(engine, setting)
    return figures


# All streams at once


async def _take_turns(servers: dict[str, Server], setting: Setting) -> dict[str, list[Round]]:
    """Both servers in alternating order, so that a drifting machine hurts both alike."""
    num_tokens = {kind: await _calibrate(server, setting) for kind, server in servers.items()}
    rounds: dict[str, list[Round]] = {kind: [] for kind in servers}
    for number in range(MOST_TRIES * setting.rounds):
        for kind in servers if number % 2 else reversed(servers):
            run = await _burst(servers[kind], num_tokens[kind], setting, seed=2 + number)
            rounds[kind].append(round_of(run, num_tokens[kind]))
        if all(len(_undisturbed(of_kind)) >= setting.rounds for of_kind in rounds.values()):
            break
    return {kind: _undisturbed(of_kind) or of_kind for kind, of_kind in rounds.items()}


def doubt_of(rounds: list[Round]) -> str | None:
    """Why their tokens/s may be the generator's own limit and not the server's; None: there is no reason."""
    busy = statistics.median(one.client_busy for one in rounds)
    if busy <= MAX_BUSY:
        return None
    server_busy = statistics.median(one.server_busy for one in rounds)
    return f"the generator used {busy:.0%} of its core, and the server {server_busy:.0%}: it carries at least so much"


def _undisturbed(rounds: list[Round]) -> list[Round]:
    return [one for one in rounds if not one.is_disturbed]


async def _calibrate(server: Server, setting: Setting) -> int:
    """How many tokens a stream has in ``seconds``, when all are there. It also warms the server up."""
    num_tokens, took_s = FEWEST_TOKENS, 0.0
    while num_tokens < MOST_TOKENS and took_s < setting.seconds / 3:
        num_tokens = min(MOST_TOKENS, 3 * num_tokens)
        run = await _burst(server, num_tokens, setting, seed=num_tokens)
        # Beginning and ending so many streams takes a while, too.
        ended_at = max(record.counter.read_at[-1] for record in run.records)
        took_s = ended_at - run.records[0].counter.read_at[0]
    return max(FEWEST_TOKENS, min(MOST_TOKENS, round(num_tokens * setting.seconds / took_s)))


async def _burst(server: Server, num_tokens: int, setting: Setting, seed: int) -> Run:
    """All streams at once, to their end.

    Raises:
        SystemExit: an answer was not whole; nothing could be said then.
    """
    target = _with_tokens(server.target, setting, setting.prompt_tokens, num_tokens)
    times = arrival_times([Phase(float("inf"), 0.0, setting.streams)], seed)
    run = await generate(target, times, seed=setting.seed + seed, server_pid=server.pid, cores=CORES)
    wrong = [record for record in run.records if record.kind != "ok" or record.counter.num_tokens != num_tokens]
    if wrong:
        what = f"{wrong[0].kind} {wrong[0].error}, {wrong[0].counter.num_tokens} tokens"
        raise SystemExit(f"{len(wrong)} of {len(run.records)} streams of {num_tokens} tokens broke: {what}")
    return run


def _with_tokens(target: Target, setting: Setting, num_in: int, num_out: int) -> Target:
    return msgspec.structs.replace(
        target, endpoint=setting.endpoint, prompt_tokens=num_in, max_tokens=Range(num_out, num_out)
    )


def round_of(run: Run, num_tokens: int) -> Round:
    """The part of a burst in which nearly all were being answered; all of it, if it was too short for that.

    Not quite all: a stream that comes first has the server to itself, and may end before the others have begun.
    """
    begun_at = [record.counter.read_at[0] for record in run.records]
    ended_at = [record.counter.read_at[-1] for record in run.records]
    begin, end = float(np.quantile(begun_at, NEARLY_ALL)), float(np.quantile(ended_at, 1.0 - NEARLY_ALL))
    if end <= begin:
        begin, end = min(begun_at), max(ended_at)
    num_read = max(1.0, tokens_between(run.records, begin, end))
    client_s, server_s, _ = run.cpu.between(begin, end)
    return Round(
        seconds=end - begin,
        tokens_per_s=num_read / (end - begin),
        tokens_per_event=len(run.records) * num_tokens / sum(sum(record.counter.num_events) for record in run.records),
        server_us=1e6 * server_s / num_read,
        client_us=1e6 * client_s / num_read,
        server_busy=server_s / (end - begin),
        client_busy=client_s / (end - begin),
        others_busy=_others_busy(run, begin, end),
    )


def _others_busy(run: Run, begin: float, end: float) -> float:
    client_s, server_s, cores_s = run.cpu.between(begin, end)
    others_s = cores_s - client_s - server_s
    return 0.0 if math.isnan(others_s) else max(0.0, others_s) / (end - begin)


# Overload


async def _overload(server: Server, setting: Setting) -> Overload:
    num_tokens = setting.overload_tokens
    target = _with_tokens(server.target, setting, num_tokens, num_tokens)
    search = await _search(target, server.pid, setting)
    phases = {
        "before": Phase(CALM * search.rate, setting.calm_s),
        "full": Phase(search.rate, setting.full_s),
        "overload": Phase(OVERLOAD * search.rate, setting.overload_s),
        "after": Phase(CALM * search.rate, setting.recovery_s),
    }
    times = arrival_times(list(phases.values()), setting.seed)
    run = await generate(target, times, seed=setting.seed + 1000, server_pid=server.pid, cores=CORES)
    figures, begin = {}, 0.0
    for name, phase in phases.items():
        ramp_s = min(RAMP_S, phase.seconds / 4)
        figures[name] = figures_of(run, begin + ramp_s, begin + phase.seconds, rate=phase.rate, slo=setting.slo)
        begin += phase.seconds
    bins = bins_of(run, begin, seconds=BIN_S, slo=setting.slo)
    return Overload(
        capacity_per_s=search.rate,
        attempts=search.attempts,
        bound=search.bound,
        doubts=search.doubts,
        phases=figures,
        recovered_s=recovered_after(bins, setting.calm_s, begin - setting.recovery_s),
        bins=bins,
        others_busy=_others_busy(run, 0.0, begin),
    )


async def _search(target: Target, server_pid: int, setting: Setting) -> Search:
    """The sustainable rate, in at most ``max_attempts`` times ``attempt_s + LINGER_S``."""
    await generate(target, np.zeros(1))  # a first chat makes the server load its templates, which takes a while
    first, light_for_s = float(setting.streams), setting.attempt_s / 2
    # Spread evenly: at so light a load none comes upon another.
    num_light = max(4, round(LIGHT * first * light_for_s))
    light = await generate(target, np.linspace(0.0, light_for_s, num_light), seed=setting.seed + 400)
    light_s = median_e2el_s(light, light_for_s / 4, light_for_s)
    if light_s is None:
        raise SystemExit("the server completed nothing")
    search = Search(first=first)
    while not search.is_over and len(search.attempts) < setting.max_attempts:
        rate, seed = search.next_rate, setting.seed + 500 + len(search.attempts)
        times = arrival_times([Phase(rate, setting.attempt_s)], seed)
        run = await generate(target, times, seed=seed, linger_s=LINGER_S, server_pid=server_pid, cores=CORES)
        others = _others_busy(run, 0.0, setting.attempt_s)
        search.attempts.append(
            attempt_of(run, rate, setting.attempt_s, light_s=light_s, is_disturbed=others > MAX_OTHERS)
        )
    return search
