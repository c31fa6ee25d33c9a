"""An open-loop load on any server that speaks OpenAI's API; and what our own HTTP API carries.

    python benchmarks/serve.py --url http://127.0.0.1:8000/v1 --rate 1 2 4 8 [--json FILE]
    python benchmarks/serve.py --self [--rate 400 800] [--json FILE]

**By URL.** For each ``--rate`` requests are sent as a Poisson process, the same one for a seed, for ``--warmup`` and
``--duration`` seconds; what the warm-up sent does not count. ``--rate inf`` sends ``--num-requests`` at once. No
request waits for another's answer (an open loop: a slow server gets no easier load); with ``--max-open`` requests open
one more is not sent, and counted.

Latencies have the names that `vllm bench serve` gives them:

- **TTFT, E2EL** run from when a request was to be sent to when its first text, and its last, was read: a generator that
  is late makes them longer. By how much it was late stands beside them.
- **TPOT** is (last - first) / (tokens - 1) of a request. Tokens are those of the usage block, or else the events.
- **ITL** is the time between two reads with text, whole, however many tokens came then; its percentiles are over gaps.
- **Longest stall** is the longest of those of a request; its percentiles are over requests.
- **Goodput** counts requests whose TTFT, TPOT and longest stall are within ``--slo-ttft-ms``, ``--slo-tpot-ms`` and
  ``--slo-stall-ms``.
- **Shed** are answers of 503 with Retry-After. All else that is no whole answer is an error, by kind.
- **CPU** is the generator's, and with ``--server-pid`` the server's and its children's, for each streamed token, the
  warm-up's included.

**--self** starts servers of its own, each pinned to one core, with the generator on another. Without ``--rate``, rounds
of ``--streams`` streams in turns of two of them: **engine**, which is ``create_app`` over an engine whose device is a
stand-in that has a token for each stream after each step of a millisecond; **bare**, a plain ASGI app that writes a
JSON event a token. With ``--rate``, an engine alone, at these rates: twice of what it sustains is an overload.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import os
import platform
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import uvloop
from serving.figures import Figures, Slo, figures_of, print_figures
from serving.load import Target, arrival_times, find_model, generate

from aioengine.cli.bench import Range

STARTUP_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
FREE_CORES = sorted(os.sched_getaffinity(0))[:2]
CORES = FREE_CORES if len(FREE_CORES) == 2 else []
"""One for the server and one for the generator; none where there is but one."""


class Report(msgspec.Struct, kw_only=True):
    """The JSON: figures by rate, or by server and round."""

    about: dict[str, object]
    target: Target
    slo: Slo
    levels: dict[str, Figures] = {}


@contextlib.asynccontextmanager
async def open_server(kind: str, *arguments: str) -> AsyncIterator[tuple[int, str]]:
    """A server in a child on the first core: its pid, and its URL."""
    folder = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
    pinned = ("--core", str(CORES[0])) if CORES else ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serving.child", kind, "--parent", str(os.getpid()), *pinned, *arguments),
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
        yield process.pid, f"{line}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def target_of(args: argparse.Namespace, url: str) -> Target:
    names = ("model", "endpoint", "api_key", "prompt_tokens", "max_tokens", "ignore_eos")
    return Target(url=url, **{name: getattr(args, name) for name in names})


async def measure_rates(args: argparse.Namespace, report: Report, server_pid: int | None) -> None:
    """An open loop at each of the rates."""
    target = report.target if report.target.model else await find_model(report.target)
    for rate in args.rate:
        is_burst = math.isinf(rate)
        warmup_s = 0.0 if is_burst else args.warmup
        end = warmup_s + args.duration
        run = await generate(
            target,
            arrival_times(rate, end, args.num_requests, args.seed),
            seed=args.seed,
            max_open=args.max_open,
            timeout_s=args.timeout,
            linger_s=args.linger,
            server_pid=server_pid,
        )
        end = run.seconds if is_burst else end
        report.levels[f"{rate:g}/s"] = figures_of(run, warmup_s, end, rate=None if is_burst else rate, slo=report.slo)
    print_figures(report.levels, f"{target.model} at {target.url}, {target.endpoint}")


async def measure_streams(args: argparse.Namespace, report: Report) -> None:
    """Rounds of streams that begin at once, of both servers in alternating order: a drifting machine hurts both."""
    async with open_server("bare") as bare, open_server("engine", "--max-num-seqs", str(args.streams)) as engine:
        servers = {"bare": bare, "engine": engine}
        for number in range(-1, args.rounds):  # the first one warms them up
            for kind in servers if number % 2 else reversed(servers):
                pid, url = servers[kind]
                target = msgspec.structs.replace(
                    await find_model(target_of(args, url)),
                    ignore_eos=kind == "engine",
                    max_tokens=Range(args.stream_tokens, args.stream_tokens),
                )
                run = await generate(
                    target, arrival_times(math.inf, 0.0, args.streams, 0), seed=args.seed + number + 1, server_pid=pid
                )
                figures = figures_of(run, 0.0, run.seconds, rate=None, slo=report.slo)
                if figures.num_ok < args.streams:
                    raise SystemExit(f"{args.streams - figures.num_ok} of {args.streams} streams broke")
                if number >= 0:
                    report.levels[f"{kind}, round {number + 1}"] = figures
    print_figures(dict(sorted(report.levels.items())), f"{args.streams} streams at once, one core")


async def measure(args: argparse.Namespace) -> Report:
    slo = Slo(ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms, stall_ms=args.slo_stall_ms)
    about = {"python": platform.python_version(), "cpus": os.cpu_count(), "load_before": os.getloadavg()}
    report = Report(about=about, target=target_of(args, args.url or ""), slo=slo)
    if not args.is_self:
        await measure_rates(args, report, args.server_pid)
        return report
    if CORES:
        os.sched_setaffinity(0, {CORES[1]})
    if not args.rate:
        await measure_streams(args, report)
        return report
    limits = ("--max-waiting", str(args.max_waiting), "--max-concurrent", str(args.max_concurrent))
    async with open_server("engine", *limits) as (pid, url):
        report.target = await find_model(target_of(args, url))
        await measure_rates(args, report, pid)
    return report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of the API, such as http://127.0.0.1:8000/v1")
    where.add_argument("--self", action="store_true", dest="is_self", help="measure our own HTTP API")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    parser.add_argument("--model", default="", help="default: the first one that the server lists")
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="chat")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="about: so many common words")
    parser.add_argument("--max-tokens", type=Range.parse, default=Range(64, 64), metavar="N or LOW:HIGH")
    parser.add_argument("--ignore-eos", action="store_true", help="a field that not all servers know")
    parser.add_argument("--rate", type=float, nargs="+", help="requests/s; inf: all at once; default by URL: 1")
    parser.add_argument("--num-requests", type=int, default=256, help="of --rate inf")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds that count, of each rate")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-open", type=int, default=4096, help="requests open at once, here")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer")
    parser.add_argument("--linger", type=float, default=30.0, help="seconds for open answers when all was sent")
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=50.0)
    parser.add_argument("--slo-stall-ms", type=float, default=500.0, help="of the longest gap in an answer")
    parser.add_argument("--server-pid", type=int, help="the server's process, to count its CPU time")
    parser.add_argument("--streams", type=int, default=256, help="of --self")
    parser.add_argument("--stream-tokens", type=int, default=500, help="of each of the streams")
    parser.add_argument("--rounds", type=int, default=5, help="of --self")
    parser.add_argument("--max-concurrent", type=int, default=128, help="of --self --rate: requests served at once")
    parser.add_argument("--max-waiting", type=int, default=64, help="of --self --rate: requests that wait")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    args.rate = args.rate or ([] if args.is_self else [1.0])
    return args


def main() -> None:
    args = parse()
    gc.disable()  # a collection would hold all streams for longer than a token takes; a run's garbage has room
    report = uvloop.run(measure(args))
    report.target = msgspec.structs.replace(report.target, api_key=None)  # a key is in no file
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
