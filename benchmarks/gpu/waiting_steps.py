"""Steps of a known length, for `benchmarks.gpu.waiting`: spins on a GPU, or a timer of the kernel instead."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import time
from typing import Literal, Protocol

libc = ctypes.CDLL(None, use_errno=True)

TFD_TIMER_ABSTIME = 1

Fd = Literal["none", "kept", "relayed", "new"]
"""What a step's end makes readable: nothing; the same descriptor each time, which reading 8 bytes clears; the same by a
detour over a second thread that does without our GIL; one of its own, to be closed by the caller."""


class Steps(Protocol):
    """Makes steps, one at a time, and knows when each ended.

    Attributes:
        device: in words.
        fds: what there is of "kept", "relayed" and "new", the latter of the last step that asked for it.
        ended_at: when the last step ended, by ``perf_counter``; NaN if that cannot be told. To be read after its end.
    """

    device: str
    fds: dict[Fd, int]

    @property
    def ended_at(self) -> float: ...

    def launch(self, step_s: float, fd: Fd) -> None: ...

    def close(self) -> None: ...

    def wait(self) -> None:
        """Block without the GIL until the step ends."""
        ...

    def is_over(self) -> bool: ...


class TimerSteps:
    """A timer of the kernel instead of a GPU. Linux only."""

    device = "stand-in (timerfd); the GPU's half is not measured"

    def __init__(self) -> None:
        # Each has a timer of its own: a loop makes what it reads from non-blocking.
        kept, self._waited_for, self._relayed = _new_timer(), _new_timer(), _new_timer()
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.fds: dict[Fd, int] = {"kept": kept, "relayed": event, "new": -1}
        self._relay = subprocess.Popen(
            [sys.executable, "-c", RELAY, str(self._relayed), str(event)],
            pass_fds=(self._relayed, event),
            process_group=0,  # or Ctrl-C would have it print a traceback
        )
        self._poll = select.poll()
        self._poll.register(self._waited_for, select.POLLIN)
        self.ended_at = 0.0

    def launch(self, step_s: float, fd: Fd) -> None:
        if fd == "new":
            self.fds["new"] = _new_timer()
        timer = {**self.fds, "none": self._waited_for, "relayed": self._relayed}[fd]
        self.ended_at = time.perf_counter() + step_s  # on Linux by CLOCK_MONOTONIC, as the timer
        seconds, nanoseconds = divmod(int(self.ended_at * 1e9), 10**9)
        spec = (ctypes.c_long * 4)(0, 0, seconds, nanoseconds)  # setting it also clears it
        assert libc.timerfd_settime(timer, TFD_TIMER_ABSTIME, spec, None) == 0, os.strerror(ctypes.get_errno())

    def wait(self) -> None:
        os.read(self._waited_for, 8)

    def is_over(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        self._relay.kill()
        self._relay.wait()


# A process in place of the driver's thread: it sleeps until the step's end, then writes, and needs no GIL of ours.
RELAY = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent process
timer, event = map(int, sys.argv[1:])
while True:
    os.read(timer, 8)
    os.eventfd_write(event, 1)
"""


def _new_timer() -> int:
    fd: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    return fd


class EventFile:
    """An eventfd that a C function of one argument makes readable, called by any thread, with no Python in it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        libc.fdopen.restype = ctypes.c_void_p
        libc.fwrite.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
        self.argument = ctypes.c_void_p(libc.fdopen(self.fd, b"w"))
        assert self.argument.value is not None
        self.function = ctypes.cast(libc.fflush, ctypes.c_void_p)
        self._one = ctypes.c_uint64(1)

    def arm(self) -> None:
        """Before each call of ``function(argument)``: buffer what it will write."""
        assert libc.fwrite(ctypes.byref(self._one), 8, 1, self.argument) == 1


class CudaSteps:
    """Spins on a GPU. A first spin, at whose end the host looks hard, ties the device's clock to the host's."""

    ANCHOR_S = 0.0003

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.device = torch.cuda.get_device_name()
        self._stream = torch.cuda.Stream()
        self._anchor, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._done = torch.cuda.Event(blocking=True)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._event_file = EventFile()
        self._close = ctypes.cast(libc.close, ctypes.c_void_p)
        self.fds: dict[Fd, int] = {"kept": self._event_file.fd, "new": -1}
        self._anchored_at = float("nan")
        self._cycles_a_second = 1e9
        for _ in range(3):  # the first spins find the clock low
            self._spin(0.01, 0.01)
            self._done.synchronize()
            self._cycles_a_second *= 10.0 / self._anchor.elapsed_time(self._end)

    def _spin(self, anchor_s: float, step_s: float) -> None:
        with self._torch.cuda.stream(self._stream):
            self._torch.cuda._sleep(int(anchor_s * self._cycles_a_second))
            self._anchor.record(self._stream)
            self._torch.cuda._sleep(int(step_s * self._cycles_a_second))
            self._end.record(self._stream)
            self._done.record(self._stream)

    @property
    def ended_at(self) -> float:
        return self._anchored_at + self._anchor.elapsed_time(self._end) / 1e3

    def launch(self, step_s: float, fd: Fd) -> None:
        self._spin(self.ANCHOR_S, step_s)
        if fd == "kept":
            self._event_file.arm()
            self._call_at_end(self._event_file.function, self._event_file.argument)
        elif fd == "new":
            self.fds["new"], write_end = os.pipe()
            self._call_at_end(self._close, ctypes.c_void_p(write_end))
        is_late = True
        while not self._anchor.query():
            is_late = False
        self._anchored_at = float("nan") if is_late else time.perf_counter()

    def _call_at_end(self, function: ctypes.c_void_p, argument: ctypes.c_void_p) -> None:
        error = self._driver.cuLaunchHostFunc(ctypes.c_void_p(self._stream.cuda_stream), function, argument)
        assert error == 0, f"cuLaunchHostFunc: error {error}"

    def wait(self) -> None:
        self._done.synchronize()

    def is_over(self) -> bool:
        return bool(self._done.query())

    def close(self) -> None:
        self._torch.cuda.synchronize()
