"""Kernels against plain torch on this device, in a child process: one that hangs or kills the process costs the child.

At the first start on a GPU each of Triton's kernels runs once, on small and odd shapes. One that does not compile,
raises, hangs or differs is left to plain torch. What was found is kept by device, driver, torch, Triton, dtype and the
kernels' sources. ``aioengine check`` runs the same cases and prints them, for native kernels, too.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from aioengine.kernels.cache_folder import cache_folder, keep
from aioengine.kernels.call_times import call_times, copy_bytes_per_s
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
"""Longest time of all cases of an operation, compiling included; also of the child's imports."""

REPETITIONS = 7

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
        is_timed: cases run at usual sizes, too, and are timed.
    """

    device: str
    dtype: str
    modules: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    is_timed: bool = False


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a case.

    Attributes:
        error: as `TOLERANCES` count it; None: it brought no result.
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


class CheckBegan(msgspec.Struct, frozen=True, tag=True):
    """A child begins the cases of an operation; the last message has the name "": all are done."""

    operation: str


class CheckEnded(msgspec.Struct, frozen=True, tag=True):
    checked: Checked


# The parent's side


def run_checks(work: CheckWork, *, deadline_s: float = DEADLINE_S) -> Iterator[Checked]:
    """Check operations in children, each of which ends with this process.

    Args:
        deadline_s: of the cases of an operation.
    Raises:
        RuntimeError: a child could not begin, and the message is the end of what it wrote.
        OSError: there is no process to be had.
    """
    done: list[str] = []
    while True:
        current = yield from _run_child(msgspec.structs.replace(work, done=(*work.done, *done)), deadline_s, done)
        if current is None:
            return


def _run_child(work: CheckWork, deadline_s: float, done: list[str]) -> Generator[Checked, None, str | None]:
    """As `run_checks`, until the child ends; ``done`` gets the operations that it ended or ended with.

    Returns:
        the operation that it ended with before its time; None: it has done all.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    errors = tempfile.TemporaryFile()  # noqa: SIM115  a pipe would hold up a child that writes much
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _CHECK, str(os.getpid()), msgspec.json.encode(work).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, "PYTHONPATH": paths},
    )
    current, problem = None, ""
    try:
        for message in _messages(child, deadline_s):
            if isinstance(message, CheckEnded):
                yield message.checked
                continue
            if current is not None:
                done.append(current)
            current = message.operation
            if not current:
                return None
        problem = f"it ended its process with code {child.wait(deadline_s)}"
        if child.returncode == NO_MEMORY:
            current, problem = None, "the device has too little memory left"
    except TimeoutError:
        problem = f"it did not end within {deadline_s:g} s"
    finally:
        child.kill()
        child.communicate()
        errors.seek(0)
        last_output = errors.read().decode(errors="replace").strip()[-1000:]
        errors.close()
    if current is None:
        raise RuntimeError(f"{problem}: {last_output}")
    done.append(current)
    yield Checked(operation=current, problem=problem)
    return current


def _messages(child: subprocess.Popen[bytes], deadline_s: float) -> Iterator[CheckBegan | CheckEnded]:
    """Yield the messages of a child until its end.

    Raises:
        TimeoutError: it took longer than the deadline for an operation.
    """
    assert child.stdout is not None
    pipe, rest, ends_at_s = child.stdout.fileno(), b"", time.monotonic() + max(deadline_s, DEADLINE_S)
    while True:
        if not select.select([pipe], [], [], max(0.0, ends_at_s - time.monotonic()))[0]:
            raise TimeoutError
        data = os.read(pipe, 65536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message: CheckBegan | CheckEnded = msgspec.json.decode(line, type=CheckBegan | CheckEnded)
            if isinstance(message, CheckBegan):
                ends_at_s = time.monotonic() + deadline_s
            yield message


def find_faulty(device: torch.device, dtype: torch.dtype, *, deadline_s: float = DEADLINE_S, **fields: Any) -> set[str]:
    """Operations whose Triton kernels must not be used on a device; checks them where no earlier start has.

    A warning names those that are found, at each start. If kernels cannot be checked, a warning is logged and all are
    used.

    Args:
        dtype: of activations.
        fields: of `CheckWork`.
    """
    work = CheckWork(device=str(device), dtype=str(dtype).removeprefix("torch."), **fields)
    kept_as = f"gpu-kernels-{_key(device, work)}.json"
    try:
        problems = msgspec.json.decode((cache_folder() / kept_as).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        logger.info("checking the GPU's kernels against plain torch, once a device")
        try:
            found = list(run_checks(work, deadline_s=deadline_s))
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
    """Do a `CheckWork`, given as JSON, and write messages to stdout."""
    work = msgspec.json.decode(encoded, type=CheckWork)
    device = torch.device(work.device)
    dtype: torch.dtype = getattr(torch, work.dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one
    with torch.inference_mode():
        operations = _operations_of(work, device)
        bytes_per_s = copy_bytes_per_s(device) if work.is_timed else math.inf
        cases: dict[str, list[Case]] = {}
        for sizes in (ODD, USUAL) if work.is_timed else (ODD,):
            inputs = Inputs(sizes, device, dtype, operations)
            for make in GROUPS:
                for case in make(inputs):
                    cases.setdefault(case.operation, []).append(case)
        for operation, of_operation in cases.items():
            is_wanted = operations.has_kernel(operation) and (not work.operations or operation in work.operations)
            if not is_wanted or operation in work.done:
                continue
            _write(CheckBegan(operation))
            for case in of_operation:
                checked = _check_case(case, operations, device, bytes_per_s)
                _write(CheckEnded(checked))
                if checked.error is None and device.type == "cuda":
                    torch.cuda.synchronize()  # a device that it has broken ends this process, and another goes on
    _write(CheckBegan(""))


def _operations_of(work: CheckWork, device: torch.device) -> Operations:
    if device.type == "cuda" or work.modules:
        from aioengine.kernels.triton import triton_operations

        return triton_operations(modules=work.modules)
    from aioengine.kernels.native.compilation import compile_library
    from aioengine.kernels.native.native_operations import NativeOperations
    from aioengine.kernels.native.parts import COMMON, parts_of
    from aioengine.kernels.native.team import Team

    parts = dict.fromkeys((COMMON, *parts_of(work.dtype, "int4")))
    return NativeOperations(Team(compile_library(parts), torch.get_num_threads()))


def _write(message: CheckBegan | CheckEnded) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _check_case(case: Case, operations: Operations, device: torch.device, bytes_per_s: float) -> Checked:
    checked = Checked(operation=case.operation, size=case.size)
    try:
        expected = results_of(case, plain_torch)
        error = difference(results_of(case, operations), expected)
        if math.isfinite(bytes_per_s):
            kernel_s, plain_s = (_median_s(case, each, device) for each in (operations, plain_torch))
            bytes_s = case.num_bytes / bytes_per_s
            checked = msgspec.structs.replace(checked, kernel_s=kernel_s, plain_s=plain_s, bytes_s=bytes_s)
    except torch.OutOfMemoryError:
        sys.exit(NO_MEMORY)
    except Exception as raised:
        return msgspec.structs.replace(checked, problem=f"{type(raised).__name__}: {raised}".splitlines()[0][:300])
    problem = "" if error <= 1 else f"it differs from plain torch by {error:.3g} times the tolerance ({case.size})"
    return msgspec.structs.replace(checked, error=error, problem=problem)


def _median_s(case: Case, operations: Operations, device: torch.device) -> float:
    call, _ = case.prepare(operations)
    times = sorted(call_times(call, device, repetitions=REPETITIONS))
    return times[len(times) // 2]


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
