"""The engine on this machine's CPU, beside the machine's limits, and beside other engines.

    python -m benchmarks.cpu [--model 0.6b|30m|demo|FOLDER] [--quantization int8] [--only W1,W3] [--rounds 3]
                             [--runners FOLDER --peer NAME=PYTHON[,MODEL] ...] [--json FILE]

In each round each engine runs each workload in a new process, one engine after the other, the next round in the
opposite order, so that a machine that drifts meets all alike; ratios are of the same round. All workloads are greedy,
end of sequence ignored, all requests at once:

    W1  one request, 128 tokens in, 128 out        W4  a prompt of 2048, 1 out (prompt tokens/s)
    W2  16 requests, 128 in, 128 out               W5  16 requests that share 1024 tokens, 32 own, 32 out
    W3  32 requests, 32 to 512 in, 16 to 128 out
    lag    how late a 1 ms ticker on the engine's loop is during W3
    start  from the process's start to the first token, with no kernels in the cache (in the files' cache all is)

The bound of a workload is the time that the limits of this run allow (see `benchmarks.cpu.workloads.bound_s`).

A peer is another engine's Python and FOLDER/run_NAME.py, less what follows a hyphen in NAME, so that llama-q8 and
llama-bf16 may be two. Where there is no such file, the peer is another version of
this engine, in the environment of that Python. A runner is called as

    PYTHON FOLDER/run_NAME.py --model MODEL --out FILE --workloads W1 --reps N --threads N

MODEL being the one of --peer, in whatever form that engine reads, or else the folder of --model. Repetition r (from 0)
of a workload has the prompts of `benchmarks.cpu.workloads.make_jobs`: equal token ids for all, of which each
repetition has its own. The runner writes JSON to FILE:

    {"startup": {"to_first_token_s": seconds since the process was made},
     "results": {"W1": {"out_tok_s": output tokens/s, "prompt_tok_s": prompt tokens/s, "ttft_s": mean, "itl_s": mean,
                        "peak_rss": bytes that the process has held at most, children included,
                        "runs": [{"ids": the first 16 token ids of the first request}]}}}

Numbers are medians of the repetitions. A runner that ends with another code than 0, or brings no such result, has its
message in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cpu.workloads import MODEL_HELP, TITLES, Limits, bound_s, find_model, make_jobs, read_shape
from benchmarks.gpu.command import check_file, positive, refuse, run

REPOSITORY = Path(__file__).parents[2]
OURS = "aioengine"
LAG, START = "lag", "start"
DISTURBING_CORES = 0.1
"""From this many cores on that other programs used, on average, a figure is marked."""


class Engine(msgspec.Struct, frozen=True):
    """An engine that is measured.

    Attributes:
        command: without the arguments of a runner's contract.
        is_ours: it runs our runner, which has more arguments.
    """

    name: str
    command: list[str]
    model: str
    is_ours: bool


class Figure(msgspec.Struct, frozen=True):
    """One process.

    Attributes:
        report: what it wrote; empty where it failed.
        other_cores: that other programs used meanwhile.
    """

    engine: str
    workload: str
    round: int
    report: dict[str, Any]
    other_cores: float
    error: str = ""

    @property
    def rate(self) -> float | None:
        """Tokens/s: of the prompt where the workload is a prefill."""
        result = self.report.get("results", {}).get(self.workload, {})
        return result.get("prompt_tok_s" if self.workload == "W4" else "out_tok_s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.6b", help=MODEL_HELP)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of our EngineConfig")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="W1,W3", help="absent: all")
    parser.add_argument("--rounds", type=positive(int), default=3)
    parser.add_argument("--reps", type=positive(int), default=1, help="repetitions in each process")
    parser.add_argument("--threads", type=positive(int), help="of peers and limits; absent: one a core")
    parser.add_argument("--runners", type=Path, help="folder of the peers' runners")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON[,MODEL]")
    parser.add_argument("--python", default=sys.executable, help="ours; absent: this one")
    parser.add_argument("--timeout", type=positive(float), default=600.0, help="seconds of a process")
    parser.add_argument("--json", type=Path, help="all figures")
    parser.add_argument("--tiny", action="store_true", help="short requests, to try the command; measures nothing")
    args = parser.parse_args()
    args.only = args.only or [*TITLES, LAG, START]
    if unknown := {*args.only} - {*TITLES, LAG, START}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join((*TITLES, LAG, START))}")
    args.threads = args.threads or len(os.sched_getaffinity(0))
    if args.json is not None:
        check_file(args.json)
    return args


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="aioengine-cpu-") as scratch:
        bench = Bench(args, Path(scratch))
        bench.measure()
    bench.show()
    if args.json is not None:
        args.json.write_text(json.dumps(bench.as_json(), indent=1) + "\n")
    return 1 if any(figure.error for figure in bench.figures) else 0


class Bench:
    """One run of the command.

    Attributes:
        figures: of all processes so far, in order.
        limits: by round.
    """

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args = args
        self._scratch = scratch
        self.figures: list[Figure] = []
        self.limits: list[Limits] = []
        folder = find_model(args.model, scratch)
        self.shape = read_shape(folder)
        self.engines = [self._ours(OURS, args.python, str(folder))]
        for peer in args.peer:
            name, is_pair, rest = peer.partition("=")
            python, _, model = rest.partition(",")
            if not is_pair or not python:
                refuse(f"--peer {peer}: NAME=PYTHON or NAME=PYTHON,MODEL is needed")
            script = args.runners / f"run_{name.partition('-')[0]}.py" if args.runners is not None else None
            if script is not None and script.exists():
                command = [python, str(script), "--threads", str(args.threads)]
                self.engines.append(Engine(name, command, model or str(folder), is_ours=False))
            else:
                self.engines.append(self._ours(name, python, model or str(folder)))

    def _ours(self, name: str, python: str, model: str) -> Engine:
        command = [python, "-m", "benchmarks.cpu.runner"]
        command += [word for pair in self.args.set for word in ("--set", pair)]
        if self.args.quantization:
            command += ["--quantization", self.args.quantization]
        if self.args.tiny:
            command.append("--tiny")
        return Engine(name, command, model, is_ours=True)

    def measure(self) -> None:
        compared = [workload for workload in self.args.only if workload in TITLES]
        own = [workload for workload in self.args.only if workload not in TITLES]
        for number in range(self.args.rounds):
            self._measure_limits()
            engines = self.engines if number % 2 == 0 else self.engines[::-1]
            for workload in compared:
                for engine in engines:
                    self._run(engine, workload, number)
            for workload in own:
                for engine in engines:
                    if engine.is_ours or workload == START:
                        self._run(engine, workload, number)

    def _measure_limits(self) -> None:
        out = self._scratch / "limits.json"
        command = [self.args.python, "-m", "benchmarks.cpu.limits", "--out", str(out)]
        command += ["--threads", str(self.args.threads), *(["--tiny"] if self.args.tiny else [])]
        subprocess.run(command, cwd=REPOSITORY, check=True, timeout=self.args.timeout)
        self.limits.append(msgspec.json.decode(out.read_bytes(), type=Limits))

    def _run(self, engine: Engine, workload: str, number: int) -> None:
        out = self._scratch / "report.json"
        out.unlink(missing_ok=True)
        command = [*engine.command, "--model", engine.model, "--out", str(out), "--reps", str(self.args.reps)]
        environ = dict(os.environ)
        if workload == START:
            # What an engine of ours compiles it keeps by the XDG Base Directory Specification.
            environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=self._scratch)
            command += ["--workloads", "" if engine.is_ours else "W1"]
        elif workload == LAG:
            command += ["--workloads", "W3", "--lag"]
        else:
            command += ["--workloads", workload]
        used_s = other_cpu_s()
        began_at = os.times().elapsed
        error, report = "", {}
        try:
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=self.args.timeout
            )
            if done.returncode:
                last = done.stderr.strip().rpartition("\n")[2]
                error = f"it ended with {done.returncode}: {last[:300]}"
            else:
                report = json.loads(out.read_bytes())
                failed = [result["error"] for result in report["results"].values() if "error" in result]
                error = failed[0] if failed else ""
        except (OSError, ValueError, subprocess.TimeoutExpired) as exc:
            error = f"{type(exc).__name__}: {exc}"
        wall_s = max(0.01, os.times().elapsed - began_at)
        used_now_s = other_cpu_s()
        others = 0.0 if used_s is None or used_now_s is None else max(0.0, used_now_s - used_s) / wall_s
        figure = Figure(engine.name, workload, number, report, others, error)
        self.figures.append(figure)
        said = error or (f"{figure.rate:,.1f} tokens/s" if figure.rate else "done")
        print(f"round {number + 1}, {workload}, {engine.name}: {said}", file=sys.stderr, flush=True)

    def of(self, engine: str, workload: str) -> list[Figure]:
        """The figures that have no error, by round."""
        return [each for each in self.figures if (each.engine, each.workload) == (engine, workload) and not each.error]

    def bound(self, workload: str, limits: Limits) -> float:
        """Tokens/s that the limits allow."""
        jobs = make_jobs(workload, 0, vocab_size=self.shape.vocab, is_tiny=self.args.tiny)
        num_tokens = sum(len(job.prompt) if workload == "W4" else job.num_output for job in jobs)
        return num_tokens / bound_s(jobs, self.shape, limits, self.args.quantization)

    def ratios(self, workload: str, peer: str) -> list[float]:
        """Ours over the peer's, of the rounds that both have."""
        ours = {figure.round: figure.rate for figure in self.of(OURS, workload)}
        pairs = ((ours.get(figure.round), figure.rate) for figure in self.of(peer, workload))
        return [own / other for own, other in pairs if own and other]

    def show(self) -> None:
        """Markdown."""
        print(f"\n{self.args.model}, {self.args.quantization or 'bfloat16'}, {self.args.threads} cores, ", end="")
        print(f"{self.args.rounds} rounds; median (least–most)\n")
        print("| limit | | by |\n|---|---|---|")
        read = [each.read_bytes_per_s / 1e9 for each in self.limits]
        print(f"| read, GB/s | {spread(read)} | {self.limits[0].found_by['read']} |")
        for dtype in self.limits[0].flops:
            rates = [each.flops[dtype] / 1e9 for each in self.limits]
            print(f"| {dtype} product, GFLOP/s | {spread(rates)} | {self.limits[0].found_by[dtype]} |")
        peers = [engine.name for engine in self.engines[1:]]
        self._show_rates(peers)
        self._show_latencies()
        print("\n| | start to first token, s | the same, caches empty | peak memory on W1, GB |\n|---|---|---|---|")
        for engine in self.engines:
            print(f"| {engine.name} | " + " | ".join(map(spread, self._costs(engine.name))) + " |")
        for engine in self.engines:
            for figure in self.of(engine.name, LAG):
                p50, p99, most = figure.report["results"]["W3"]["lag_ms"]
                print(f"\n{engine.name}, loop lag during W3, ms: p50 {p50:.2f}, p99 {p99:.2f}, max {most:.1f}")
        for figure in self.figures:
            where = f"{figure.engine}, {figure.workload}, round {figure.round + 1}"
            if figure.error:
                print(f"\n{where} failed: {figure.error}")
            elif figure.other_cores > DISTURBING_CORES:
                print(f"\n{where}: other programs used {figure.other_cores:.1f} cores meanwhile")

    def _show_rates(self, peers: Sequence[str]) -> None:
        headings = ["workload", OURS, "bound", "of it", *(cell for peer in peers for cell in (peer, "ratio", "equal"))]
        print("\n| " + " | ".join(headings) + " |\n" + "|---" * len(headings) + "|")
        for workload, title in TITLES.items():
            if workload not in self.args.only:
                continue
            ours = [figure.rate for figure in self.of(OURS, workload)]
            bounds = [self.bound(workload, limits) for limits in self.limits]
            share = f"{statistics.median(ours) / statistics.median(bounds):.0%}" if ours else "–"
            cells = [f"{workload}: {title}", spread(ours), spread(bounds), share]
            for peer in peers:
                theirs = self.of(peer, workload)
                cells += [spread([figure.rate for figure in theirs]), spread(self.ratios(workload, peer), ".2f")]
                cells.append(self._equal_tokens(workload, peer))
            print("| " + " | ".join(cells) + " |")

    def _show_latencies(self) -> None:
        """Means over the requests; the 99th percentile over all gaps between tokens, of ours alone."""
        print("\n| | | time to first token, ms | between tokens, ms | p99 |\n|---|---|---|---|---|")
        for workload in (each for each in TITLES if each in self.args.only):
            for engine in self.engines:
                results = [figure.report["results"][workload] for figure in self.of(engine.name, workload)]
                cells = [
                    spread([1e3 * result[name] if result.get(name) is not None else None for result in results])
                    for name in ("ttft_s", "itl_s", "itl_p99_s")
                ]
                print(f"| {workload} | {engine.name} | " + " | ".join(cells) + " |")

    def _equal_tokens(self, workload: str, peer: str) -> str:
        """How many of the first tokens of each repetition's first request come before one that is another.

        A runner may have done fewer repetitions than it was asked for.
        """
        ours, theirs = self.of(OURS, workload), self.of(peer, workload)
        if not ours or not theirs:
            return "–"
        equal = total = 0
        runs = (figure.report["results"][workload]["runs"] for figure in (ours[0], theirs[0]))
        for own, other in zip(*runs, strict=False):
            pairs = list(zip(own["ids"], other["ids"], strict=False))
            equal += next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
            total += len(pairs)
        return f"{equal}/{total}"

    def _costs(self, engine: str) -> tuple[list[float], list[float], list[float]]:
        figures = [each for each in self.figures if each.engine == engine and not each.error]
        warm = [each for each in figures if each.workload != START]
        return (
            [each.report["startup"]["to_first_token_s"] for each in warm],
            [each.report["startup"]["to_first_token_s"] for each in figures if each.workload == START],
            [each.report["results"]["W1"]["peak_rss"] / 1e9 for each in warm if each.workload == "W1"],
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.args.model,
            "quantization": self.args.quantization,
            "threads": self.args.threads,
            "shape": msgspec.to_builtins(self.shape),
            "limits": msgspec.to_builtins(self.limits),
            "figures": msgspec.to_builtins(self.figures),
        }


def spread(values: Sequence[float | None], form: str = "") -> str:
    """Median, least and most."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    median = statistics.median(numbers)
    form = form or (",.0f" if median >= 100 else ".1f" if median >= 10 else ".2f")
    if len(numbers) == 1:
        return f"{median:{form}}"
    return f"{median:{form}} ({min(numbers):{form}}–{max(numbers):{form}})"


def other_cpu_s(stat: Path = Path("/proc/stat")) -> float | None:
    """CPU time since the machine's start that went to other programs, on the cores that this one may use, in seconds.

    Good to some 0.01. What a hypervisor gave to other machines is in it; None where there is no ``stat``.
    """
    with contextlib.suppress(OSError):
        lines = stat.read_text(encoding="ascii").splitlines()
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        busy_ticks = 0
        for line in lines:
            core, *ticks = line.split()
            if core in ours:  # user nice system idle iowait irq softirq steal …, guests being in user (proc(5))
                busy_ticks += sum(map(int, ticks[:8])) - int(ticks[3]) - int(ticks[4])
        return busy_ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
    return None


if __name__ == "__main__":
    run(main)
