"""Kernels against plain torch on this device, in child processes: one that hangs or kills its process costs that.

At the first start on a GPU each of Triton's kernels runs on small and odd shapes, in as few variants as show it. One
that does not compile, raises, hangs or differs is left to plain torch. What was found is kept by device, driver, torch,
Triton, dtype and the kernels' sources. ``aioengine check`` runs all cases and prints them, for native kernels, too.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from aioengine.kernels.cache_folder import cache_folder, keep
from aioengine.kernels.kernel_cases import GROUPS, ODD, USUAL, Case, Inputs
from aioengine.kernels.operations import Operations, plain_torch
from aioengine.kernels.torch.quantized import read_lines

logger = logging.getLogger("aioengine")

TOLERANCES = {
    **{torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3},
    **{torch.float8_e4m3fn: 0.13, torch.int8: 0.03},
}
"""Largest difference of two results, relative to 1 + the expected one: a few units in the last place. int8 is that of
KV caches; other integers are equal."""

DEADLINE_S = 60.0
"""Longest time of a case, compiling included; also of the child's imports."""

POLL_S = 0.1
NUM_CHILDREN = 6
"""Children of a first check: Triton compiles in one thread, and they share 25 compilations."""

NO_MEMORY = 75
"""Exit code of a child for which the device has no memory, which is no fault of a kernel."""


class CheckWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work of a child.

    Attributes:
        device: such as "cuda:0"; on "cpu" native kernels, unless there are ``modules``.
        dtype: of activations.
        modules: that have launchers beside `aioengine.kernels.triton`'s, which they replace.
        operations: to be checked; empty: all that have kernels.
        done: operations to be passed over.
        is_brief: as in `Inputs`.
        is_timed: cases run at usual sizes, too, and are timed.
    """

    device: str
    dtype: str
    modules: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    is_brief: bool = False
    is_timed: bool = False


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a case.

    Attributes:
        error: as `TOLERANCES` count it; None: it brought no result; without a problem: it begins.
        problem: why its kernel must not be used; empty: it may be.
        kernel_s, plain_s: medians; bytes_s: what the bytes that it must read and write take; 0: not timed.
    """

    operation: str
    size: str = ""
    error: float | None = None
    problem: str = ""
    kernel_s: float = 0.0
    plain_s: float = 0.0
    bytes_s: float = 0.0


# The parent's side


def run_checks(
    work: CheckWork, *, deadline_s: float = DEADLINE_S, check_stopped: Callable[[], object] = lambda: None
) -> Iterator[Checked]:
    """Check operations in a child, and in another one without the operation that ended it; each ends with this process.

    Args:
        deadline_s: of a case.
        check_stopped: called about each `POLL_S`; what it raises ends the check.
    Raises:
        RuntimeError: a child could not begin, and the message is the end of what it wrote.
        OSError: there is no process to be had.
    """
    seen = dict.fromkeys(work.done)
    problem = "begins"
    while problem:
        begun: Checked | None = None
        with tempfile.TemporaryFile() as errors:  # a pipe would hold up a child that writes much
            encoded = msgspec.json.encode(msgspec.structs.replace(work, done=tuple(seen))).decode()
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHECK, str(os.getpid()), encoded],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            try:
                for checked in _read_results(child, deadline_s, check_stopped):
                    seen[checked.operation] = None
                    is_over = checked.error is not None or bool(checked.problem)
                    begun = None if is_over else checked
                    if is_over:
                        yield checked
                code = child.wait(deadline_s)
                problem = f"it ended its process with code {code}" if code else ""
                if code == NO_MEMORY:
                    begun, problem = None, "the device has too little memory left"
            except TimeoutError:
                problem = f"it did not end within {deadline_s:g} s"
            finally:
                child.kill()
                child.communicate()
            if problem and begun is None:
                errors.seek(0)
                raise RuntimeError(f"{problem}: {errors.read().decode(errors='replace').strip()[-1000:]}")
        if begun is not None:
            yield msgspec.structs.replace(begun, problem=problem)


def _read_results(
    child: subprocess.Popen[bytes], deadline_s: float, check_stopped: Callable[[], object]
) -> Iterator[Checked]:
    """Yield what a child writes until its end.

    Raises:
        TimeoutError: a case took longer than the deadline.
    """
    assert child.stdout is not None
    pipe, rest, ends_at_s = child.stdout.fileno(), b"", time.monotonic() + max(deadline_s, DEADLINE_S)
    while True:
        check_stopped()
        if not select.select([pipe], [], [], POLL_S)[0]:
            if time.monotonic() > ends_at_s:
                raise TimeoutError
            continue
        data = os.read(pipe, 65536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        ends_at_s = time.monotonic() + deadline_s
        yield from (msgspec.json.decode(line, type=Checked) for line in lines)


def find_faulty(
    device: torch.device,
    dtype: torch.dtype,
    *,
    deadline_s: float = DEADLINE_S,
    check_stopped: Callable[[], object] = lambda: None,
    **fields: Any,
) -> set[str]:
    """Operations whose Triton kernels must not be used on a device; checks them where no earlier start has.

    A warning names those that are found, at each start. If kernels cannot be checked, a warning is logged and all are
    used.

    Args:
        dtype: of activations.
        fields: of `CheckWork`.
    Raises:
        Exception: what ``check_stopped`` raises.
    """
    work = CheckWork(device=str(device), dtype=str(dtype).removeprefix("torch."), is_brief=True, **fields)
    kept_as = f"gpu-kernels-{_key(device, work)}.json"
    try:
        problems = msgspec.json.decode((cache_folder() / kept_as).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        logger.info("checking the GPU's kernels against plain torch, once a device")
        from aioengine.kernels.triton import find_launchers

        names = work.operations or tuple(sorted(find_launchers(work.modules)))
        shares = [names[first::NUM_CHILDREN] for first in range(min(NUM_CHILDREN, len(names)))]

        def check_share(share: tuple[str, ...]) -> list[Checked]:
            replaced = msgspec.structs.replace(work, operations=share)
            return list(run_checks(replaced, deadline_s=deadline_s, check_stopped=check_stopped))

        try:
            with ThreadPoolExecutor(NUM_CHILDREN) as pool:
                found = [checked for share in pool.map(check_share, shares) for checked in share]
        except (RuntimeError, OSError) as error:
            logger.warning("the GPU's kernels could not be checked, and are used as they are: %s", error)
            return set()
        problems = {each.operation: each.problem for each in reversed(found) if each.problem}
        try:
            keep(cache_folder() / kept_as, msgspec.json.encode(problems))
        except OSError as error:
            logger.info("what was found of the GPU's kernels cannot be kept: %s", error)
    if problems:
        logger.warning(
            "these GPU kernels do not work here, and plain torch computes in their place, slower: %s. "
            "To have them checked again delete aioengine/%s in the cache folder",
            "; ".join(f"{operation}: {problem}" for operation, problem in sorted(problems.items())),
            kept_as,
        )
    return set(problems)


def _key(device: torch.device, work: CheckWork) -> str:
    """Return a digest of all that a kernel's result may depend on."""
    key = hashlib.blake2b(digest_size=16)
    here = Path(__file__).parent
    for source in (*sorted((here / "triton").glob("*.py")), here / "kernel_cases.py", here / "operations.py"):
        key.update(source.read_bytes())
    about: list[object] = [work.dtype, work.modules, work.operations, torch.__version__, version("triton")]
    if device.type == "cuda":
        about += [torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]
        about.append(getattr(torch._C, "_cuda_getDriverVersion", int)())
        driver = Path("/proc/driver/nvidia/version")
        about.append(driver.read_text() if driver.exists() else "")
    key.update(repr(about).encode())
    return key.hexdigest()


# The child's side

_CHECK = """
import sys
from aioengine.processes.own_side import die_with_parent
die_with_parent(int(sys.argv[1]))
from aioengine.kernels.kernel_check import check
check(sys.argv[2])
"""


def check(encoded: str) -> None:
    """Do a `CheckWork`, given as JSON, and write to stdout each case as it begins, and its result."""
    work = msgspec.json.decode(encoded, type=CheckWork)
    device, dtype = torch.device(work.device), getattr(torch, work.dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one
    with torch.inference_mode():
        operations = _make_operations(work, device)
        bytes_per_s = copy_bytes_per_s(device) if work.is_timed else math.inf
        cases: dict[str, list[Case]] = {}
        for sizes in (ODD, USUAL) if work.is_timed else (ODD,):
            inputs = Inputs(sizes, device, dtype, operations, is_brief=work.is_brief)
            for case in (case for make in GROUPS for case in make(inputs)):
                is_wanted = operations.has_kernel(case.operation) and case.operation not in work.done
                if is_wanted and (not work.operations or case.operation in work.operations):
                    cases.setdefault(case.operation, []).append(case)
        for case in (case for of_operation in cases.values() for case in of_operation):
            _write(Checked(operation=case.operation, size=case.size))
            checked = _check_case(case, operations, device, bytes_per_s)
            _write(checked)
            if checked.error is None and device.type == "cuda":
                torch.cuda.synchronize()  # a device that it has broken ends this process, and another goes on


def _make_operations(work: CheckWork, device: torch.device) -> Operations:
    if device.type == "cuda" or work.modules:
        from aioengine.kernels.triton import triton_operations

        return triton_operations(modules=work.modules)
    from aioengine.kernels.native.compilation import compile_library
    from aioengine.kernels.native.native_operations import NativeOperations
    from aioengine.kernels.native.parts import parts_of
    from aioengine.kernels.native.team import Team

    return NativeOperations(Team(compile_library(parts_of(work.dtype, "int4")), torch.get_num_threads()))


def _write(message: Checked) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _check_case(case: Case, operations: Operations, device: torch.device, bytes_per_s: float) -> Checked:
    checked = Checked(operation=case.operation, size=case.size)
    try:
        expected = results_of(case, plain_torch)
        error = difference(results_of(case, operations), expected)
        if math.isfinite(bytes_per_s):
            kernel_s, plain_s = (
                statistics.median(call_times(case.prepare(each)[0], device, repetitions=7))
                for each in (operations, plain_torch)
            )
            bytes_s = case.count_bytes(operations) / bytes_per_s
            checked = msgspec.structs.replace(checked, kernel_s=kernel_s, plain_s=plain_s, bytes_s=bytes_s)
    except torch.OutOfMemoryError:
        sys.exit(NO_MEMORY)
    except Exception as raised:
        return msgspec.structs.replace(checked, problem=f"{type(raised).__name__}: {raised}".splitlines()[0][:300])
    problem = "" if error <= 1 else f"it differs from plain torch by {error:.3g} times the tolerance ({case.size})"
    return msgspec.structs.replace(checked, error=error, problem=problem)


def results_of(case: Case, operations: Operations) -> list[Tensor]:
    """Return the results of a call, and its arguments as it leaves them; not weights, whose layouts differ."""
    call, arguments = case.prepare(operations)
    returned = call()
    return [leaf.clone() for leaf in tree_leaves((returned, arguments)) if isinstance(leaf, Tensor)]


def difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, in shares of what is tolerated; infinite where shapes, dtypes, integers or NaN differ."""
    largest = 0.0
    for ours, theirs in zip(results, expected, strict=True):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return math.inf
        if ours.dtype not in TOLERANCES:
            if not torch.equal(ours, theirs):
                return math.inf
            continue
        a, b = read_lines(ours, torch.float64), read_lines(theirs, torch.float64)
        is_same = (a == b) | (a.isnan() & b.isnan())
        gaps = torch.where(is_same, 0.0, (a - b).abs() / (1 + b.abs())).nan_to_num(nan=math.inf, posinf=math.inf)
        if gaps.numel():
            largest = max(largest, float(gaps.max()) / TOLERANCES[ours.dtype])
    return largest


# Times

CACHE_BYTES = 256 * 2**20
"""More than any GPU's L2: what is written between two calls, so that none finds its inputs there."""

AHEAD = 20
"""Calls that are queued before the first of them is waited for."""


def call_times(
    call: Callable[[], object], device: torch.device, *, repetitions: int, is_cold: bool = True
) -> list[float]:
    """Seconds of each call: on a GPU between CUDA events, on a CPU by the clock.

    Args:
        is_cold: whether the GPU's cache is overwritten before each.
    """
    for _ in range(3):
        call()
    times: list[float] = []
    if device.type != "cuda":
        for _ in range(repetitions):
            begin_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin_s)
        return times
    trash = torch.empty(CACHE_BYTES if is_cold else 1, dtype=torch.int8, device=device)
    for first in range(0, repetitions, AHEAD):
        events = []
        for _ in range(min(AHEAD, repetitions - first)):
            # It also keeps the GPU busy while the host launches the call, whose launch is then not in its time.
            trash.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) / 1e3 for begin, end in events]
    return times


def copy_bytes_per_s(device: torch.device, num_bytes: int = 2**28) -> float:
    """Bytes read and written a second in copies. They are random, since a GPU's clock is higher on zeros."""
    source = torch.randint(0, 2**31, (num_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = call_times(lambda: target.copy_(source), device, repetitions=7, is_cold=False)
    return 2 * num_bytes / statistics.median(times)
