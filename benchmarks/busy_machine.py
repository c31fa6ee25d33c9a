"""What torch's threads cost beside another job, and what sparing them costs on an idle machine.

    python benchmarks/busy_machine.py [--model DIR] [--before SRC] [--ways WAY ...] [--rounds N] [--json FILE]

`aioengine bench latency`, each time in a new process, idle and beside programs that keep every core busy. The ways of
waiting take turns in each round, so that a machine that drifts shows as noise. 64 random tokens in: time to first token
at 1 and 8 in flight on the bundled model. With a model's folder: tokens/s of one stream, 128 tokens in.

The ways: *before*, the version whose sources --before names; *default*; *embedded*, as in a process that is not the
engine's own, where libgomp spins as long as it likes; *passive*, by OMP_WAIT_POLICY; *one thread*, by --num-threads 1;
and a GOMP_SPINCOUNT for each --spin.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBGOMP_SPIN_COUNT = "300000"
OWN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")

BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
"""Until this program has gone, however it went."""

PREFILLS = ["--input-len", "64", "--output-len", "4", "--concurrency", "1,8", "--num-requests", "16"]
DECODES = ["--input-len", "128", "--concurrency", "1", "--max-model-len", "1024"]
SMALL = ["--repeats", "1", "--kv-cache-memory-bytes", "200000000", "--json", "-"]


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """So many other processes that compute without end."""
    programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def bench(flags: list[str], env: dict[str, str]) -> Any:
    """The report of one `aioengine bench latency`."""
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_SETTINGS}
    command = [sys.executable, "-m", "aioengine", "bench", "latency", *SMALL, *flags]
    done = subprocess.run(command, env={**inherited, **env}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def of_prefills(report: Any) -> dict[str, float]:
    """Milliseconds."""
    return {f"TTFT at {each['concurrency']}": each["overall"]["ttft_ms"]["p50"] for each in report["levels"]}


def of_decodes(report: Any) -> dict[str, float]:
    (level,) = report["levels"]
    return {"tokens/s": 1e3 / level["overall"]["itl_ms"]["mean"]}


def other_cores(report: Any) -> float:
    """Of all levels; a version before this one does not say."""
    return max(each["overall"].get("other_cores") or 0.0 for each in report["levels"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model whose single stream is measured in place of prefills")
    parser.add_argument("--output-len", default="32", help="tokens of that stream")
    parser.add_argument("--before", type=Path, help="src folder of an older version")
    parser.add_argument("--ways", nargs="*", help="which of them; absent: all")
    parser.add_argument("--spin", type=int, nargs="*", default=[], help="further values of GOMP_SPINCOUNT")
    parser.add_argument("--beside", type=int, default=os.cpu_count(), help="busy programs; 0: only idle")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    args = parser.parse_args()

    ways: dict[str, tuple[dict[str, str], list[str]]] = {
        "default": ({}, []),
        "embedded": ({"GOMP_SPINCOUNT": LIBGOMP_SPIN_COUNT}, []),
        "passive": ({"OMP_WAIT_POLICY": "passive"}, []),
        "one thread": ({}, ["--num-threads", "1"]),
        **{f"spin {count}": ({"GOMP_SPINCOUNT": str(count)}, []) for count in args.spin},
    }
    if args.before is not None:
        ways = {"before": ({"PYTHONPATH": str(args.before.absolute())}, []), **ways}
    if args.ways is not None:
        ways = {way: ways[way] for way in args.ways}
    flags = PREFILLS
    if args.model is not None:
        flags = [*DECODES, "--model", args.model, "--output-len", args.output_len, "--num-requests", "1"]
    figures: dict[str, dict[str, list[float]]] = {}
    for number in range(args.rounds):
        for title, count in (("idle", 0), ("busy", args.beside))[: 2 if args.beside else 1]:
            with busy_programs(count):
                for way, (env, more) in ways.items():
                    report = bench([*flags, *more], env)
                    found = of_prefills(report) if args.model is None else of_decodes(report)
                    found["other cores"] = other_cores(report)
                    for name, value in found.items():
                        figures.setdefault(way, {}).setdefault(f"{title}: {name}", []).append(value)
                    print(f"round {number + 1}, {title}, {way}: {found}", file=sys.stderr)
    names = list(next(iter(figures.values())))
    print("| median (least to most) | " + " | ".join(names) + " |\n" + "|---" * (1 + len(names)) + "|")
    for way, values in figures.items():
        cells = [f"{statistics.median(each):,.1f} ({min(each):,.1f}–{max(each):,.1f})" for each in values.values()]
        print(f"| {way} | " + " | ".join(cells) + " |")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
