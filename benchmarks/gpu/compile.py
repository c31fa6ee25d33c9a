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
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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
"""For a case, on average: a compiler that loops would otherwise hold CI until its own limit."""
LOCAL_ACCESS = re.compile(r"\b(LDL|STL)\b")
TENSOR_CORES = {"wgmma": re.compile(r"\bwgmma\.mma_async"), "mma": re.compile(r"\bmma\.sync")}
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A case for one capability; a failed one has an ``error``, and figures of 0."""

    name: str
    kernel: str
    capability: int
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    tensor_cores: str = ""
    seconds: float = 0.0
    error: str = ""

    def fault(self) -> str:
        """Why this does not pass; empty if it does."""
        allowed = ALLOWED_SPILLS.get(self.kernel, 0)
        # 8.6 and 8.9 run what 8.0 does.
        limit = LEAST_SHARED if self.capability < 90 else MAX_SHARED.get(self.capability)
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


def work(args: argparse.Namespace) -> None:
    """Compile every ``args.jobs``-th of the chosen cases, and print a line of JSON for each, first of all for those
    that are to come."""
    import torch
    import triton

    sys.path.append(str(REPOSITORY / "tests"))
    from kernels.compile_cases import compile_cases

    # What a compiler prints must not come between the lines.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    versions = {"triton": triton.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    jobs = choose(compile_cases(), args)[args.worker :: args.jobs]
    expected = [[case.name, case.kernel.__name__, capability] for case, capability in jobs]
    print(json.dumps({"versions": versions, "expected": expected}), file=answers, flush=True)
    for case, capability in jobs:
        try:
            answer = compile_one(case, capability)
        except Exception as error:
            reason = "\n".join(filter(None, (str(error), str(error.__cause__ or ""))))
            answer = _failed(case.name, case.kernel.__name__, capability, f"{type(error).__name__}: {reason}")
        print(json.dumps(asdict(answer)), file=answers, flush=True)


def choose(cases: list[Any], args: argparse.Namespace) -> list[tuple[Any, int]]:
    """The cases to compile, each with a capability."""
    chosen = [case for case in cases if args.only in f"{case.name} {case.kernel.__name__}"]
    if args.quick:
        chosen = list({case.kernel: case for case in reversed(chosen)}.values())[::-1]
    return [
        (case, capability) for case in chosen for capability in args.capability if capability >= case.min_capability
    ]


# In the parent


def _failed(name: str, kernel: str, capability: int, error: str) -> Compiled:
    return Compiled(name=name, kernel=kernel, capability=capability, error=error)


def compile_share(number: int, arguments: list[str], environ: dict[str, str]) -> tuple[dict[str, str], list[Compiled]]:
    """Compile a share of the cases in a process: its versions, and each case's figures.

    A compiler that crashes or loops fails the rest of its share.

    Raises:
        SystemExit: the kernels cannot be imported; what is wrong has been printed by then.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.compile", "--worker", str(number), *arguments],
        cwd=REPOSITORY,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        if not (line := process.stdout.readline()):
            raise SystemExit("the kernels cannot be imported")
        head = json.loads(line)
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S * max(1, len(head["expected"])))
        except subprocess.TimeoutExpired:
            command.kill_group(process)
            output, _ = process.communicate()
    finally:
        command.kill_group(process)
        process.wait()
    compiled = [Compiled(**json.loads(line)) for line in output.splitlines()]
    error = f"the compiler ended with {process.returncode}; a negative number is a signal, -9 after its time limit"
    return head["versions"], compiled + [_failed(*left, error) for left in head["expected"][len(compiled) :]]


def show(compiled: Compiled) -> str:
    line = f"{compiled.kernel:28} {compiled.name:60} sm_{compiled.capability}"
    if not compiled.error:
        line += f" {compiled.registers:9} {compiled.spilled_bytes:7} {compiled.shared_bytes / 1024:7.1f}"
        line += f"  {compiled.tensor_cores or '-':12} {compiled.seconds:7.2f}"
    lines = [each for each in compiled.fault().splitlines() if each.strip()]
    # A compiler names the place first, and the fault last.
    return line + (f"  FAILED: {' … '.join(dict.fromkeys((lines[0], lines[-1])))}" if lines else "")


def parse() -> argparse.Namespace:
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
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


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


def run(args: argparse.Namespace, folder: Path) -> int:
    """Compile in ``args.jobs`` processes; what they and Triton's tools write goes to ``folder``."""
    cache = args.cache.absolute() if args.cache else folder
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TMPDIR": str(folder)}
    environ.pop("TRITON_INTERPRET", None)  # set where kernels are tested; nothing would be compiled
    with ThreadPoolExecutor(args.jobs) as pool:
        shares = list(pool.map(lambda number: compile_share(number, sys.argv[1:], environ), range(args.jobs)))
    versions = shares[0][0]
    compiled = [result for _, share in shares for result in share]
    if not compiled:
        command.refuse(f"no case matches {args.only!r} for {', '.join(map(str, args.capability))}")
    columns = f"{'registers':>9} {'spilled':>7} {'shared':>7}  {'tensor cores':12} {'seconds':>7}"
    print(f"triton {versions['triton']}, torch {versions['torch']}\n{'kernel':28} {'case':60} {'':5} {columns}")
    for result in compiled:
        print(show(result))
    failed = [result for result in compiled if result.fault()]
    print(f"{len(compiled)} compiled, {len(failed)} of them failed")
    if args.json is not None:
        lines = [{**asdict(result), "fault": result.fault()} for result in compiled]
        args.json.write_text(json.dumps({"about": versions, "kernels": lines}, indent=1) + "\n")
    return 1 if failed else 0


def main() -> int:
    args = parse()
    if args.worker is not None:
        work(args)
        return 0
    check(args)
    with tempfile.TemporaryDirectory(prefix="aioengine-compile-", ignore_cleanup_errors=True) as folder:
        return run(args, Path(folder))


if __name__ == "__main__":
    command.run(main)
