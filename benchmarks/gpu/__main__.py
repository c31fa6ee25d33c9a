"""Measure what the GPU path reaches, and write RESULTS.md and results.json.

    python -m benchmarks.gpu [--parts large small] [--out DIR]
    python -m benchmarks.gpu --device cpu --tiny --out DIR

On a GPU each part has a process of its own, so that one that breaks the device takes no other part along, and what it
has measured until then counts. Parts that are not run keep the results of an earlier run of the same commit, GPU and
versions; the bounds are measured in each run. With ``--device cpu --tiny`` everything runs to its end on the CPU in
half a minute: nothing is measured thereby, and the rows say so.

Exits with 1 if a part ended early or a row failed; aims that are missed are results. With 2 if nothing could be begun,
and with 130 at Ctrl-C, which keeps what was measured until then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from benchmarks.gpu import command, report
from benchmarks.gpu.parts import PARTS, News, run_child
from benchmarks.gpu.rows import BY_KEY, NEEDS_GPU, Bounds

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
    parser.add_argument("--timeout", type=command.positive(float), default=PART_TIMEOUT_S, help="seconds of a part")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # with the bounds as JSON, or null
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.child is not None:
        run_child(args.parts, args.device, args.tiny, msgspec.json.decode(args.child, type=Bounds | None))
        return 0
    folder = args.out or REPOSITORY / ("benchmarks/gpu" if args.device == "cuda" else "build/gpu")
    earlier = report.load(folder)
    check(args, folder, earlier)
    results = report.Results(about=report.about(args.device, args.tiny))
    if earlier is not None and earlier.about.is_same_setup(results.about):
        results.results, results.kernels = dict(earlier.results), list(earlier.kernels)
    elif earlier is not None:
        print("what an earlier run left there is not of this setup, and goes", file=sys.stderr)
    names = ["bounds", *(name for name in PARTS if name in args.parts and name != "bounds")]
    # A CPU does not break: there, one process saves the imports.
    for together in [names] if args.device == "cpu" else [[name] for name in names]:
        try:
            run_parts(together, args, results)
        except KeyboardInterrupt:
            print(f"interrupted; what was measured until then is in {folder}", file=sys.stderr)
            return command.INTERRUPTED
        finally:
            report.save(results, folder)
    print(report.markdown(results))
    print(f"written to {folder}")
    reasons = [each.reason for each in (*results.results.values(), *results.kernels)]
    return 1 if results.failed or set(reasons) - {"", NEEDS_GPU} else 0


def check(args: argparse.Namespace, folder: Path, earlier: report.Results | None) -> None:
    """Raises:
    SystemExit: this run makes no sense.
    """
    if args.device == "cpu" and not args.tiny:
        command.refuse("on a CPU the table's shapes take days: add --tiny")
    if args.device == "cuda" and args.tiny and args.out is None:
        command.refuse("what tiny shapes reach on a GPU is not what the table asks for: add --out DIR")
    if args.device == "cpu" and earlier is not None and earlier.about.device == "cuda":
        command.refuse("a GPU's results lie there, and a CPU's must not take their place: give another --out")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        command.refuse("torch finds no GPU here; to try the command without one: --device cpu --tiny")
    command.check_folder(folder, report.JSON, report.MARKDOWN)


def run_parts(names: list[str], args: argparse.Namespace, results: report.Results) -> None:
    """In a child; what it tells goes into ``results`` at once, in place of what an earlier run left of these parts.

    Raises:
        KeyboardInterrupt: the child has ended by then.
    """
    results.results = {key: each for key, each in results.results.items() if BY_KEY[key].part not in names}
    if "kernels" in names:
        results.kernels = []
    bounds = msgspec.json.encode(results.bounds).decode()
    line = [sys.executable, "-m", "benchmarks.gpu", "--device", args.device, "--child", bounds]
    line += [*(["--tiny"] if args.tiny else []), "--parts", *names]
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    left = list(names)
    reason = "interrupted"
    # A child that is killed removes no folders of its own: all are in this one.
    with tempfile.TemporaryDirectory(prefix="aioengine-gpu-", ignore_cleanup_errors=True) as folder:
        environ["TMPDIR"] = folder
        child = subprocess.Popen(line, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, process_group=0)
        timer = threading.Timer(args.timeout * len(names), command.kill_group, [child])
        try:
            timer.start()
            read(child, results, left)
            reason = f"the process ended with {child.wait()}; a negative number is a signal, -9 at the time limit"
        finally:
            timer.cancel()
            command.kill_group(child)
            child.wait()
            results.failed |= dict.fromkeys(left, reason)


def read(child: subprocess.Popen[bytes], results: report.Results, left: list[str]) -> None:
    """All that it tells; ``left`` loses the parts that have ended."""
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            take(msgspec.json.decode(line, type=News), results, left)


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
    command.run(main)
