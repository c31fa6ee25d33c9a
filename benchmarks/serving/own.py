"""``serve.py --self``: what one core of the HTTP face carries, and what it does with twice of what it can."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from serving.figures import Bin, Figures, Slo, bins_of, figures_of, recovered_after, tokens_between
from serving.load import Phase, Run, Target, arrival_times, first_model, generate, generate_closed

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
BIN_S = 0.25
RAMP_S = 1.0
"""First part of a phase, in which it is not yet what it will be; its figures are of the rest."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        streams: at once.
        rounds: of each server, in turns.
        seconds: of a round, about.
        overload_tokens: of each request there, in and out.
        max_waiting: requests that may wait for a place in the overload; they wait for at most as long as the server
            takes to serve so many.
    """

    endpoint: Literal["chat", "completions"] = "chat"
    streams: int = 256
    rounds: int = 5
    seconds: float = 1.5
    step_ms: float = 1.0
    prompt_tokens: int = 16
    overload_tokens: int = 64
    max_waiting: int = 16
    calm_s: float = 5.0
    overload_s: float = 6.0
    recovery_s: float = 6.0
    capacity_s: float = 3.0
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
        capacity_per_s: requests/s that were completed with all places taken and no queue ("full" among the phases).
        recovered_s: see `recovered_after`.
        others_busy: as in a `Round`.
    """

    capacity_per_s: float
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
        async with open_server("engine", setting, "--max-waiting", str(setting.max_waiting)) as engine:
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


def _undisturbed(rounds: list[Round]) -> list[Round]:
    return [one for one in rounds if not one.is_disturbed]


async def _calibrate(server: Server, setting: Setting) -> int:
    """How many tokens a stream has in ``seconds``, when all are there. It also warms the server up."""
    num_tokens, took_s = FEWEST_TOKENS, 0.0
    while num_tokens < MOST_TOKENS and took_s < setting.seconds / 3:
        num_tokens = min(MOST_TOKENS, 3 * num_tokens)
        run = await _burst(server, num_tokens, setting, seed=num_tokens)
        # Beginning and ending so many streams takes a while, too.
        took_s = max(record.counter.read_at[-1] for record in run.records) - run.records[0].ttft_s
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
        target, endpoint=setting.endpoint, prompt_tokens=num_in, max_tokens=(num_out, num_out)
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
    capacity, full = await _capacity(target, setting)
    phases = {
        "before": Phase(CALM * capacity, setting.calm_s),
        "overload": Phase(OVERLOAD * capacity, setting.overload_s),
        "after": Phase(CALM * capacity, setting.recovery_s),
    }
    times = arrival_times(list(phases.values()), setting.seed)
    run = await generate(target, times, seed=setting.seed + 1000, server_pid=server.pid, cores=CORES)
    figures, begin, slo = {"full": full}, 0.0, Slo()
    for name, phase in phases.items():
        ramp_s = min(RAMP_S, phase.seconds / 4)
        figures[name] = figures_of(run, begin + ramp_s, begin + phase.seconds, rate=phase.rate, slo=slo)
        begin += phase.seconds
    calm_until, overload_until = setting.calm_s, setting.calm_s + setting.overload_s
    bins = bins_of(run, begin, seconds=BIN_S, slo=slo)
    recovered_s = recovered_after(bins, calm_until, overload_until)
    return Overload(
        capacity_per_s=capacity,
        phases=figures,
        recovered_s=recovered_s,
        bins=bins,
        others_busy=_others_busy(run, 0.0, begin),
    )


async def _capacity(target: Target, setting: Setting) -> tuple[float, Figures]:
    """Requests/s with as many open as there are places, whose number is steady then; and what they saw of it."""
    await generate(target, np.zeros(1))  # a first chat makes the server load its templates, which takes a while
    run = await generate_closed(
        target, concurrency=setting.streams, seconds=setting.capacity_s, seed=setting.seed + 500
    )
    ended_at = np.array([record.answered_at for record in run.records if record.kind == "ok"])
    begin = setting.capacity_s / 4
    num_ended = int((ended_at >= begin).sum())
    if not num_ended:
        raise SystemExit("the server completed nothing")
    rate = num_ended / (setting.capacity_s - begin)
    return rate, figures_of(run, begin, setting.capacity_s, rate=rate, slo=Slo())
