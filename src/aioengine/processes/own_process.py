"""What a process of the engine's own does and a guest in another program never: how threads wait, what signals ask."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator

logger = logging.getLogger("aioengine")

SWITCH_INTERVAL_S = 0.001
SPIN_COUNT = 10_000
"""Some 0.2 ms: longer than the host's part of any operation, and much shorter than a scheduler's time slice. With 1,000
one stream of a 0.6B model is a tenth slower on an idle machine (benchmarks/README.md)."""

OPENMP_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""How threads of torch's OpenMP runtime, libgomp on Linux, wait for each other; read when torch is imported."""

COMPILER_OUTLIVES = "AIOENGINE_COMPILER_OUTLIVES"
"""Set in the environment, as commands do, many of which end before the kernels are there: the compiler of native
kernels goes on when the program that started it and its children end, within its bounds."""


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


received_signals: list[signal.Signals] = []
"""Of the last `asked_by_signals`, the oldest first: how the process is to end."""


@contextlib.contextmanager
def asked_by_signals(ask: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``ask`` on the running loop for each SIGTERM and SIGINT within the block, for a process of one's own."""

    def receive(number: signal.Signals) -> None:
        received_signals.append(number)
        ask(number)

    received_signals.clear()
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, receive, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if before is not None:  # that of the loop's runner, where there is one
            signal.signal(signal.SIGINT, before)


def prepare_interpreter() -> None:
    """Settings of a process that serves, once its engine is loaded: threads that switch sooner, and no old garbage.

    Beside a thread that runs Python (templates, tokenizations, a device's dispatch) the loop was late by 1.1 ms instead
    of 5.1, beside two by 1.2 instead of 16, at a hundredth of the thread's own speed and at none of the engine's.
    What was loaded stays, and no full collection looks through it again: 345,000 objects held the loop for 0.1 s.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    # At the exit libraries look for objects that they have made, and print a page on those that are still there.
    atexit.register(gc.unfreeze)


def allow_files(number: int) -> None:
    """Let this process open so many files: many systems allow 1,024 at first, and many more when asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    allowed = number if hard == unlimited else min(number, hard)
    if soft != unlimited and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < number:
        logger.warning("%d connections may be more than the %d files that this process may open", number, allowed)
