"""An open-loop load on any server that speaks OpenAI's API; and what our own HTTP API carries.

    python benchmarks/serve.py --url http://127.0.0.1:8000/v1 --rate 1 2 4 8 [--json FILE]
    python benchmarks/serve.py --self [--quick] [--only sustained overload] [--json FILE]

**By URL.** For each ``--rate`` requests are sent as a Poisson process, the same one for a seed, for ``--warmup`` and
``--duration`` seconds; what the warm-up sent does not count. ``--rate inf`` sends ``--num-requests`` at once. No
request waits for another's answer (an open loop: a slow server gets no easier load); with ``--max-open`` requests open
one more is not sent, and counted.

Latencies have the names that `vllm bench serve` gives them:

- **TTFT, E2EL** run from when a request was to be sent to when its first text, and its last, was read: a generator that
  is late makes them longer. By how much it was late stands beside them.
- **TPOT** is (last - first) / (tokens - 1) of a request. Tokens are what the usage block says; without one, an event is
  a token.
- **ITL** is the time between two reads with text, whole, however many tokens came then; its percentiles are over gaps.
- **Longest stall** is the longest of those of a request; its percentiles are over requests.
- **Goodput** counts requests whose TTFT, TPOT and longest stall are within ``--slo-ttft-ms``, ``--slo-tpot-ms`` and
  ``--slo-stall-ms``.
- **Shed** are answers of 503 with Retry-After; how fast they came stands beside them. All else that is no whole answer
  is an error, by kind.
- **CPU** is the generator's, and with ``--server-pid`` the server's and its children's, for each streamed token.

The generator says by how much it was late, and how busy: its own slowness would else look like the server's.

**--self** starts servers of its own, each pinned to one core, with the generator on another, and takes rounds of
``--streams`` streams in turns of two of them: **engine**, which is ``create_app`` over an engine whose device is a
stand-in that has a token for each stream after each step of a millisecond; **bare**, a plain ASGI app that writes a
JSON event a token. A server whose generator was the limit carries "at least" what is said. Then, with the engine alone:
the rate of requests that it sustains, tried by open loops of a moment each, and phases of 0.8, 1, 2 and 0.8 times that.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
from pathlib import Path

import msgspec
import uvloop
from serving import own, shown
from serving.figures import Bin, Figures, Slo, bins_of, figures_of
from serving.load import Phase, Target, arrival_times, first_model, generate

from aioengine.cli.load import Range

QUICK = own.Setting(
    streams=32,
    rounds=1,
    seconds=0.2,
    overload_tokens=16,
    max_waiting=8,
    calm_s=0.25,
    full_s=0.25,
    overload_s=0.25,
    recovery_s=0.5,
    attempt_s=0.2,
    max_attempts=3,
)
MAX_BINS = 60


class Report(msgspec.Struct, kw_only=True):
    """What a load by URL writes as JSON: figures by rate, and over time where there is one rate alone."""

    about: dict[str, object]
    target: Target
    slo: Slo
    levels: list[Figures] = []
    over_time: list[Bin] = []


def slo_of(args: argparse.Namespace) -> Slo:
    return Slo(ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms, stall_ms=args.slo_stall_ms)


def about() -> dict[str, object]:
    return {"python": platform.python_version(), "cpus": os.cpu_count(), "load_before": os.getloadavg()}


async def measure_rates(args: argparse.Namespace) -> Report:
    model = args.model or await first_model(args.url, args.api_key)
    target = Target(
        url=args.url,
        model=model,
        endpoint=args.endpoint,
        api_key=args.api_key,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        asks_usage=args.usage,
    )
    report = Report(
        about=about(),
        target=msgspec.structs.replace(target, api_key=None),  # a key is in no file
        slo=slo_of(args),
    )
    for rate in args.rate:
        is_burst = math.isinf(rate)
        warmup_s = 0.0 if is_burst else args.warmup
        end = warmup_s + args.duration
        run = await generate(
            target,
            arrival_times([Phase(rate, end, args.num_requests)], args.seed),
            seed=args.seed,
            max_open=args.max_open,
            timeout_s=args.timeout,
            linger_s=args.linger,
            server_pid=args.server_pid,
        )
        answered_at = [record.answered_at for record in run.records if not math.isnan(record.answered_at)]
        if is_burst and answered_at:
            end = max(answered_at)
        figures = figures_of(run, warmup_s, end, rate=None if is_burst else rate, slo=report.slo)
        report.levels.append(figures)
        shown.print_levels({f"{rate:g}/s": figures}, f"{model} at {args.url}, {args.endpoint}")
        if len(args.rate) == 1:
            report.over_time = bins_of(run, end, seconds=max(0.25, end / MAX_BINS), slo=report.slo)
    return report


def save(args: argparse.Namespace, report: Report | own.OwnFigures) -> None:
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of the API, such as http://127.0.0.1:8000/v1")
    where.add_argument("--self", action="store_true", dest="is_self", help="measure our own HTTP API")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="chat")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="about: so many common words")
    parser.add_argument("--max-tokens", type=Range.parse, default=Range(64, 64), metavar="N or LOW:HIGH")
    parser.add_argument("--ignore-eos", action="store_true", help="a field that not all servers know")
    parser.add_argument("--usage", action=argparse.BooleanOptionalAction, default=True, help="ask for a usage block")
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0], help="requests/s; inf: all at once")
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
    parser.add_argument("--rounds", type=int, default=5, help="of --self")
    parser.add_argument(
        "--max-concurrent", type=int, default=own.Setting().max_concurrent, help="of --self, in the overload"
    )
    parser.add_argument("--max-waiting", type=int, default=own.Setting().max_waiting, help="of --self, in the overload")
    parser.add_argument("--only", choices=own.PARTS, nargs="+", default=own.PARTS, help="parts of --self")
    parser.add_argument("--quick", action="store_true", help="of --self: short and small, to see that it works")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    args = parse()
    gc.disable()  # a collection would hold all streams for longer than a token takes; a run's garbage has room
    if args.is_self:
        setting = (
            QUICK
            if args.quick
            else own.Setting(
                endpoint=args.endpoint,
                streams=args.streams,
                rounds=args.rounds,
                max_waiting=args.max_waiting,
                max_concurrent=args.max_concurrent,
                slo=slo_of(args),
                seed=args.seed,
            )
        )
        figures = uvloop.run(own.measure(setting, about(), args.only))
        shown.print_own(figures)
        save(args, figures)
    else:
        save(args, uvloop.run(measure_rates(args)))


if __name__ == "__main__":
    main()
