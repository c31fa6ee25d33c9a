"""Measure what the GPU path reaches, and write RESULTS.md and results.json.

    python -m benchmarks.gpu [--parts large small] [--out DIR]
    python -m benchmarks.gpu --device cpu --tiny --out DIR

On a GPU each part has a process of its own, so that one that breaks the device takes no other part along, and what it
has measured until then counts. Parts that are not run keep the results of an earlier run of the same commit, GPU and
versions; the bounds are measured in each run. With ``--device cpu --tiny`` everything runs to its end on the CPU in
half a minute: nothing is measured thereby, and the rows say so.

Exits with 1 if a part ended early or a row failed; aims that are missed are results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from benchmarks.gpu import report
from benchmarks.gpu.parts import PARTS, News, run_child
from benchmarks.gpu.rows import NEEDS_GPU, ROWS, Bounds

REPOSITORY = Path(__file__).parents[2]
PART_TIMEOUT_S = 1200.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="absent: all")
    parser.add_argument("--out", type=Path, help="where the results go; absent: benchmarks/gpu, on a CPU build/gpu")
    parser.add_argument("--timeout", type=float, default=PART_TIMEOUT_S, help="seconds of a part")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # with the bounds as JSON, or null
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.child is not None:
        run_child(args.parts, args.device, args.tiny, msgspec.json.decode(args.child, type=Bounds | None))
        return 0
    folder = args.out or REPOSITORY / ("benchmarks/gpu" if args.device == "cuda" else "build/gpu")
    earlier = report.load(folder)
    check(args, earlier)
    results = report.Results(about=report.about(args.device, args.tiny))
    if earlier is not None and earlier.about.is_same_setup(results.about):
        kept = [row.key for row in ROWS if row.part not in args.parts and row.key in earlier.results]
        results.results = {key: earlier.results[key] for key in kept}
        results.kernels = [] if "kernels" in args.parts else earlier.kernels
    names = ["bounds", *(name for name in PARTS if name in args.parts and name != "bounds")]
    # A CPU does not break: there, one process saves the imports.
    for together in [names] if args.device == "cpu" else [[name] for name in names]:
        run_parts(together, args, results)
        report.save(results, folder)
    print(report.markdown(results))
    print(f"written to {folder}")
    reasons = [each.reason for each in (*results.results.values(), *results.kernels)]
    return 1 if results.failed or set(reasons) - {"", NEEDS_GPU} else 0


def check(args: argparse.Namespace, earlier: report.Results | None) -> None:
    """Raises:
    SystemExit: this run makes no sense.
    """
    if args.device == "cpu" and not args.tiny:
        raise SystemExit("on a CPU the table's shapes take days: add --tiny")
    if args.device == "cuda" and args.tiny and args.out is None:
        raise SystemExit("what tiny shapes reach on a GPU is not what the table asks for: add --out DIR")
    if args.device == "cpu" and earlier is not None and earlier.about.device == "cuda":
        raise SystemExit("a GPU's results lie there, and a CPU's must not take their place: give another --out")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; to try the command without one: --device cpu --tiny")


def run_parts(names: list[str], args: argparse.Namespace, results: report.Results) -> None:
    """In a child; what it tells goes into ``results`` at once."""
    bounds = msgspec.json.encode(results.bounds).decode()
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", args.device, "--child", bounds]
    command += [*(["--tiny"] if args.tiny else []), "--parts", *names]
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    left = list(names)
    with subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        timer = threading.Timer(args.timeout * len(names), child.kill)
        timer.start()
        for line in child.stdout:
            take(msgspec.json.decode(line, type=News), results, left)
        timer.cancel()
        timer.join()
    for name in left:
        code = child.returncode
        results.failed[name] = f"the process ended with {code}; a negative number is a signal, -9 at the time limit"


def take(news: News, results: report.Results, left: list[str]) -> None:
    if news.bounds is not None:
        results.bounds = news.bounds
    if news.kernel is not None:
        results.kernels.append(news.kernel)
    if news.result is not None:
        results.results[news.result.row] = news.result
        print(f"{news.result.row}: {news.result.reason or news.result.value}", file=sys.stderr, flush=True)
    if news.ended is not None:
        name, error = news.ended
        left.remove(name)
        if error:
            results.failed[name] = error


if __name__ == "__main__":
    sys.exit(main())
