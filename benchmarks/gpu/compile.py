"""Compile every kernel ahead of time, without a GPU, and list what the machine code takes.

    python -m benchmarks.gpu.compile [--capability 80 90] [--quick] [--only NAME] [--jobs N] [--json FILE]

Each case of ``tests/kernels/compile_cases.py``, which is a launch at a size that serving has, goes through Triton to a
cubin for each capability. Columns:

- **registers**: of a thread. **spilled**: bytes of a thread's stack, which lies in memory, if there is one in use.
- **shared**: KiB of a block; more than the GPU's limit is a failure here as it would be there. What 8.0 launches by
  default must fit into the 99 KiB of 8.6 and 8.9, too; what is only tried need not fit into those, nor into 12.0.
- **tensor cores**: which matrix instructions there are in the PTX: wgmma, mma, or none.
- **seconds**: to compile.

Exits with 1 if a case does not compile or spills more than `ALLOWED_SPILLS` has for its kernel, with 2 if there is
nothing to compile. ``--quick`` takes the first case of each kernel alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import command

CAPABILITIES = (80, 90)
LEAST_SHARED = 99 * 1024
MAX_SHARED = {
    **{80: 163 * 1024, 86: LEAST_SHARED, 87: 163 * 1024, 89: LEAST_SHARED},
    **{90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024, 120: LEAST_SHARED, 121: LEAST_SHARED},
}
"""Bytes of a block, by capability; "CUDA C++ Programming Guide", technical specifications."""
ALLOWED_SPILLS = {"_prefill_kernel": 40}
"""Bytes of stack, by kernel; 0 for those that are not here. With each goes why it is not worth avoiding: of the first,
with slopes, the choice of 128 rows and 128 keys at once, which is taken only where it was measured to be fastest."""
TIMEOUT_S = 300.0
"""Of one case: a compiler that loops would otherwise hold CI until its own limit."""
LOCAL_ACCESS = re.compile(r"\b(LDL|STL)\b")
TENSOR_CORES = {"wgmma": re.compile(r"\bwgmma\.mma_async"), "mma": re.compile(r"\bmma\.sync")}
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What became of a case for one capability; of a failed one ``error`` says why, and the figures are 0."""

    name: str
    kernel: str
    capability: int
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    tensor_cores: str = ""
    seconds: float = 0.0
    is_default: bool = True
    error: str = ""

    def fault(self) -> str:
        """Why this does not pass; empty if it does."""
        allowed = ALLOWED_SPILLS.get(self.kernel, 0)
        limit = MAX_SHARED.get(self.capability)
        if self.is_default and self.capability < 90:
            limit = LEAST_SHARED  # 8.6 and 8.9 run the same
        elif not self.is_default and limit == LEAST_SHARED:
            limit = None
        if self.error:
            return self.error
        if self.spilled_bytes > allowed:
            return f"spills {self.spilled_bytes} bytes, of which {allowed} are allowed"
        if limit is not None and self.shared_bytes > limit:
            return f"takes {self.shared_bytes} bytes of shared memory, of {limit} that there are"
        return ""


# In a worker: the only place that imports Triton and torch.


def compile_one(case: Any, capability: int) -> Compiled:
    """Compile in this process.

    Raises:
        Exception: whatever the compiler makes of a kernel that it does not like.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(case.kernel, case.signature, case.constants, case.attributes)
    begin = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=case.options)
    seconds = time.perf_counter() - begin
    registers, spilled = resource_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Compiled(
        name=case.name,
        kernel=case.kernel.__name__,
        capability=capability,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        tensor_cores=" ".join(name for name, pattern in TENSOR_CORES.items() if pattern.search(ptx)),
        seconds=round(seconds, 2),
        is_default=case.is_default,
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes that are spilled, of a thread, by the ``cuobjdump`` and ``nvdisasm`` that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = _tool("cuobjdump", "--dump-resource-usage", file.name)
        usage = {name: list(map(int, re.findall(rf"\b{name}:(\d+)", shown))) for name in ("REG", "STACK", "LOCAL")}
        if not usage["REG"]:
            raise RuntimeError(f"cuobjdump told nothing of the resources: {shown!r}")
        stack = max(usage["STACK"]) + max(usage["LOCAL"])
        # ptxas reserves 8 bytes for some kernels, and no instruction touches them.
        is_used = stack > 0 and LOCAL_ACCESS.search(_tool("nvdisasm", "-c", file.name)) is not None
    return max(usage["REG"]), stack if is_used else 0


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def work() -> None:
    """Tell of all cases in a line, then compile those asked for: a line with index and capability each."""
    sys.path.append(str(REPOSITORY / "tests"))
    from kernels.compile_cases import compile_cases

    # What a compiler prints must not come between the lines.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cases = compile_cases()
    known = [[case.name, case.kernel.__name__, case.min_capability] for case in cases]
    print(json.dumps({"about": _about(), "cases": known}), file=answers, flush=True)
    for line in sys.stdin:
        index, capability = map(int, line.split())
        try:
            answer = compile_one(cases[index], capability)
        except Exception as error:
            reason = "\n".join(filter(None, (str(error), str(error.__cause__ or ""))))
            answer = _failed(known[index], capability, f"{type(error).__name__}: {reason}")
        print(json.dumps(asdict(answer)), file=answers, flush=True)


def _about() -> dict[str, str]:
    import torch
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}


# In the parent


def _failed(known: list[Any], capability: int, error: str) -> Compiled:
    return Compiled(name=known[0], kernel=known[1], capability=capability, error=error)


class Worker:
    """A process that compiles; one that died or took too long is replaced for the next case.

    Args:
        folder: for what it and Triton's tools write; one that is killed leaves files.
    """

    def __init__(self, cache: Path, folder: Path) -> None:
        self._environ = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TMPDIR": str(folder)}
        # Set where kernels are tested; nothing would be compiled.
        self._environ.pop("TRITON_INTERPRET", None)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self.about: dict[str, str] = {}
        self.cases: list[list[Any]] = []

    def start(self) -> None:
        """Raises:
        SystemExit: the kernels cannot be imported; what is wrong has been printed by then.
        """
        with self._lock:
            if self._is_over:
                raise SystemExit("this worker was ended")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.compile", "--worker"],
                cwd=REPOSITORY,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the kernels cannot be imported")
        told = json.loads(line)
        self.about, self.cases = told["about"], told["cases"]

    def compile(self, index: int, capability: int) -> Compiled:
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(TIMEOUT_S, command.kill_group, [process])
        timer.start()
        try:
            process.stdin.write(f"{index} {capability}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
            timer.join()
        if line:
            return Compiled(**json.loads(line))
        self.close()
        error = f"the compiler ended with {process.returncode}; a negative number is a signal, -9 after {TIMEOUT_S:g} s"
        return _failed(self.cases[index], capability, error)

    def kill(self) -> None:
        """For good, from any thread: a call that waits for it is told that it ended."""
        with self._lock:
            self._is_over = True
            process = self._process
        if process is not None:
            command.kill_group(process)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._process = None


def compile_all(jobs: list[tuple[int, int]], workers: list[Worker]) -> Generator[Compiled, None, None]:
    """Yield what becomes of each job, an index and a capability, in their order.

    At the end, whichever that is, the workers are killed.
    """
    results: dict[int, Compiled] = {}
    errors: list[BaseException] = []
    news = threading.Condition()
    places = itertools.count()  # next() is atomic

    def serve(worker: Worker) -> None:
        while (place := next(places)) < len(jobs) and not errors:
            try:
                result = worker.compile(*jobs[place])
            except BaseException as error:
                errors.append(error)
            else:
                results[place] = result
            with news:
                news.notify()

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for place in range(len(jobs)):
            with news:
                news.wait_for(functools.partial(lambda place: place in results or errors, place))
            if errors:
                raise errors[0]
            yield results[place]
    except BaseException as error:
        errors.append(error)  # the threads look there
        raise
    finally:
        for worker in workers:
            worker.kill()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def choose(cases: list[list[Any]], args: argparse.Namespace) -> list[tuple[int, int]]:
    """Which cases to compile for which capabilities."""
    chosen = [index for index, (name, kernel, _) in enumerate(cases) if args.only in f"{name} {kernel}"]
    if args.quick:
        first: dict[str, int] = {}
        for index in chosen:
            first.setdefault(cases[index][1], index)
        chosen = list(first.values())
    return [(i, capability) for i in chosen for capability in args.capability if capability >= cases[i][2]]


def show(compiled: Compiled) -> str:
    line = f"{compiled.kernel:28} {compiled.name:60} sm_{compiled.capability}"
    if not compiled.error:
        line += f" {compiled.registers:9} {compiled.spilled_bytes:7} {compiled.shared_bytes / 1024:7.1f}"
        line += f"  {compiled.tensor_cores or '-':12} {compiled.seconds:7.2f}"
    lines = [each for each in compiled.fault().splitlines() if each.strip()]
    # A compiler tells where first, and what last.
    return line + (f"  FAILED: {' … '.join(dict.fromkeys((lines[0], lines[-1])))}" if lines else "")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES), help="such as 80 90")
    parser.add_argument("--quick", action="store_true", help="one case of each kernel")
    parser.add_argument("--only", default="", metavar="NAME", help="those with this in the case's or kernel's name")
    parser.add_argument("--jobs", type=command.positive(int), default=min(cores, 4), help="processes that compile")
    parser.add_argument("--cache", type=Path, help="Triton's cache folder; a temporary one by default")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def check(args: argparse.Namespace) -> None:
    """Raises:
    SystemExit: this cannot be done.
    """
    for capability in args.capability:
        if capability < min(MAX_SHARED):
            command.refuse(f"a capability of 8.0 or newer is needed, such as --capability 80, not {capability}")
        if capability not in MAX_SHARED:
            command.refuse(f"there is no capability {capability}; known are {', '.join(map(str, MAX_SHARED))}")
    if importlib.util.find_spec("triton") is None:
        command.refuse("Triton is not installed: pip install triton, or '.[dev]'")
    if args.json is not None:
        command.check_file(args.json)


def run(args: argparse.Namespace, cache: Path, folder: Path) -> int:
    workers = [Worker(cache, folder) for _ in range(args.jobs)]
    compiled = []
    try:
        workers[0].start()
        for worker in workers[1:]:
            worker.cases = workers[0].cases
        about, jobs = workers[0].about, choose(workers[0].cases, args)
        if not jobs:
            command.refuse(f"no case matches {args.only!r} for {', '.join(map(str, args.capability))}")
        print(f"triton {about['triton']}, torch {about['torch']}; {len(jobs)} to compile", flush=True)
        columns = f"{'registers':>9} {'spilled':>7} {'shared':>7}  {'tensor cores':12} {'seconds':>7}"
        print(f"{'kernel':28} {'case':60} {'':5} {columns}")
        with contextlib.closing(compile_all(jobs, workers)) as results:
            for result in results:
                compiled.append(result)
                print(show(result), flush=True)
    finally:
        for worker in workers:
            worker.kill()
            worker.close()
    failed = [result for result in compiled if result.fault()]
    print(f"{len(compiled)} compiled, {len(failed)} of them failed")
    if args.json is not None:
        lines = [{**asdict(result), "fault": result.fault()} for result in compiled]
        args.json.write_text(json.dumps({"about": about, "kernels": lines}, indent=1) + "\n")
    return 1 if failed else 0


def main() -> int:
    args = parse()
    if args.worker:
        work()
        return 0
    check(args)
    with tempfile.TemporaryDirectory(prefix="aioengine-compile-", ignore_cleanup_errors=True) as folder:
        return run(args, args.cache.absolute() if args.cache else Path(folder), Path(folder))


if __name__ == "__main__":
    command.run(main)
