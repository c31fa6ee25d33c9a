"""What a process of the engine's own does and a guest in another program never: how threads wait, what signals ask."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

SPIN_COUNT = 10_000
"""Some 0.2 ms: longer than the host's part of any operation, and much shorter than a scheduler's time slice. With 1,000
one stream of a 0.6B model is a tenth slower on an idle machine (benchmarks/README.md)."""

OPENMP_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""How threads of torch's OpenMP runtime, libgomp on Linux, wait for each other; read when torch is imported."""


def open_standard_files() -> None:
    """Have stdin, stdout and stderr lead nowhere where the process was given none: the next files that are opened
    would take their numbers, and libuv aborts the process when it closes such a one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            os.open(os.devnull, os.O_RDWR)  # takes the smallest number that is free
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def limit_spinning() -> None:
    """Have torch's threads sleep soon when they wait for each other, unless the environment says how they wait.

    By libgomp's default they spin for 300,000 turns, some 5 ms: with another program on a core, the thread that they
    wait for gets no core for so long. For processes that are the engine's own, before torch is imported.
    """
    if not any(name in os.environ for name in OPENMP_WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


@contextlib.contextmanager
def asked_by_signals(ask: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``ask`` on the running loop for each SIGTERM and SIGINT within the block, for a process of one's own."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if before is not None:  # that of the loop's runner, where there is one
            signal.signal(signal.SIGINT, before)
