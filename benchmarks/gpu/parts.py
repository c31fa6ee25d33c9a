"""The parts of a run: each measures its rows, in a process of its own on a GPU, whose end takes no other part along."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.emulation import emulated_gpu
from benchmarks.gpu.rows import Bounds, KernelResult, Result
from benchmarks.gpu.running import Setting, describe
from benchmarks.gpu.sizes import FULL, KERNELS, TINY, TINY_KERNELS

PARTS = {
    "bounds": "benchmarks.gpu.bounds",
    "kernels": "benchmarks.gpu.kernels",
    "large": "benchmarks.gpu.workloads",
    "small": "benchmarks.gpu.workloads",
    "peer": "benchmarks.gpu.peer",
    "equality": "benchmarks.gpu.equality",
    "life": "benchmarks.gpu.workloads",
}
"""In the order in which they run; "bounds" goes first, since the others need them."""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """A line from a child: one of these.

    Attributes:
        ended: a part, with the error that ended it, or "".
    """

    bounds: Bounds | None = None
    result: Result | None = None
    kernel: KernelResult | None = None
    ended: tuple[str, str] | None = None


FIELD_OF = {Bounds: "bounds", Result: "result", KernelResult: "kernel", tuple: "ended"}


def run_child(names: list[str], device: str, is_tiny: bool, bounds: Bounds | None) -> None:
    """Measure parts, and tell of each result in a line of JSON on what was stdout; what is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(news: Bounds | Result | KernelResult | tuple[str, str]) -> None:
        line = msgspec.json.encode(News(**{FIELD_OF[type(news)]: news}))
        print(line.decode(), file=answers, flush=True)

    for name in names:
        with tempfile.TemporaryDirectory(prefix="aioengine-gpu-") as folder:
            try:
                with emulated_gpu() if device == "cpu" else contextlib.nullcontext():
                    bounds = _run_part(name, device, is_tiny, bounds, Path(folder), report)
            except Exception as error:
                traceback.print_exc()
                report((name, describe(error)))
            else:
                report((name, ""))


def _run_part(
    name: str,
    device: str,
    is_tiny: bool,
    bounds: Bounds | None,
    folder: Path,
    report: Callable[[Any], None],
) -> Bounds:
    """Returns the bounds, which the first part measures."""
    module = importlib.import_module(PARTS[name])
    sizes = TINY if is_tiny else FULL
    if name == "bounds":
        measured: Bounds = module.measure(sizes, device)
        report(measured)
        return measured
    if bounds is None:
        raise RuntimeError("there are no bounds to compare with")
    if name == "kernels":
        of_kernels, repetitions = (TINY_KERNELS, 2) if is_tiny else (KERNELS, 50)
        for result in module.measure(of_kernels, device, bounds, repetitions):
            report(result)
    else:
        setting = Setting(device=device, sizes=sizes, folder=folder, bounds=bounds, report=report)
        asyncio.run(getattr(module, name)(setting))
    return bounds
