"""A child process, seen from its parent: what it writes, its end, and all that descends from it.

A child is ``python -m module``. Its exit is awaited through a pidfd: it is known at once, and a pid that belongs to
another process by now is never signalled. What it writes is logged; the end of its stderr is kept as its last words.
The child's own half is `aioengine.transport.child`, which binds its life to this process's.

Descendants are found in /proc. A process that forked, left its session and lost its parent has still inherited its
environment, with the family's name in it; one that has overwritten its environment is still a member's child. Both ways
are followed. A process is held by a pidfd from the moment it is found, and what was read about its pid counts only if
it was not reaped until after the reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import IO

import msgspec

from aioengine.errors import ConfigError
from aioengine.transport.child import FAMILY, LOG_LEVEL, PARENT_PID, read_log_line
from aioengine.validation import check_fields

logger = logging.getLogger("aioengine")

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

READ_BYTES = 8192
"""At once; then the loop goes on with others. With the lines below at most about 2 ms."""

MAX_LINES_PER_READ = 100
MAX_LINE_BYTES = 4096
MAX_LAST_LINES = 64
MAX_LAST_BYTES = 16_384

_TRACEBACK = "Traceback (most recent call last):"
_TELLING = re.compile(r"\b(\w*Error|ERROR|CRITICAL|Fatal \w+)\b")


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One child: ``python -m module *args``.

    Attributes:
        name: what errors and the log call it, such as "engine 0".
        env: added to this process's environment.
        visible_devices: CUDA_VISIBLE_DEVICES of the child; none for an empty tuple; what this process sees for None.

    Raises:
        ConfigError: a field is none of its type, or CUDA_VISIBLE_DEVICES is in ``env``.
    """

    name: str
    module: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    visible_devices: tuple[int | str, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, lambda _, message: ConfigError(message))
        if VISIBLE_DEVICES in self.env:
            raise ConfigError(f"{self.name}: say which devices it sees by visible_devices, not by {VISIBLE_DEVICES}")

    def environment(self, family: str) -> dict[str, str]:
        """The child's whole environment."""
        environment = {
            # What it prints is seen at once, and a crash in C says where it was; both may be asked away.
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            **os.environ,
            **self.env,
            PARENT_PID: str(os.getpid()),
            LOG_LEVEL: str(logger.getEffectiveLevel()),
            # Below another supervisor's child: its family, too.
            FAMILY: ":".join(filter(None, (os.environ.get(FAMILY), family))),
        }
        if self.visible_devices is not None:
            environment[VISIBLE_DEVICES] = ",".join(map(str, self.visible_devices))
        return environment


class Child:
    """A child process. Made by `Supervisor.start`.

    Attributes:
        name, pid: it.
    """

    def __init__(self, spec: ChildSpec, family: str, on_exit: Callable[[Child], None]) -> None:
        self.name = spec.name
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._callbacks = [on_exit]
        # Held while the pid is used, since it may be reaped in any thread; reentrant, since finalizers run anywhere.
        self._lock = threading.RLock()
        self._popen = _spawn(spec, family)
        self.pid = self._popen.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._popen.kill()
            with self._popen:  # which closes its pipes and waits for it
                raise
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._stdout = ChildOutput(self.name, self._popen.stdout, self._loop)
        self._stderr = ChildOutput(self.name, self._popen.stderr, self._loop)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def returncode(self) -> int | None:
        """None while it lives; -N: killed by signal N."""
        return self._popen.returncode

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines of its stderr; final once it has exited."""
        return self._stderr.tail

    async def wait(self) -> int:
        """Wait until it has exited. → its returncode. Cancelling stops the wait."""
        await self._exited.wait()
        assert self._popen.returncode is not None
        return self._popen.returncode

    def add_exit_callback(self, callback: Callable[[Child], None]) -> None:
        """Call back on the loop when it exits; on the loop's next turn if it has."""
        if self._exited.is_set():
            self._loop.call_soon(callback, self)
        else:
            self._callbacks.append(callback)

    def describe_exit(self) -> str:
        """How it ended and why, in one line: "engine 0 (pid 7) was killed by SIGSEGV; its last words: …"."""
        code = self._popen.returncode
        if code is None:
            return f"{self.name} (pid {self.pid}) is running"
        how = f"exited with code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        words = telling_line(self.last_words)
        return f"{self.name} (pid {self.pid}) {how}" + (f"; its last words: {words}" if words else "")

    def send_signal(self, number: int) -> None:
        """Send a signal, to it alone; nothing happens when it has exited."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL to it and to its process group. From any thread."""
        with self._lock:
            self.send_signal(signal.SIGKILL)
            self._kill_group()

    def dup_pidfd(self) -> int | None:
        """A pidfd of it for the caller; None when it is reaped."""
        with self._lock:
            return None if self._is_reaped else os.dup(self._pidfd)

    def reap(self, deadline: float) -> bool:
        """Wait in this thread until it has exited (`time.monotonic`), and ask for its exit status."""
        pidfd = self.dup_pidfd()
        if pidfd is None:
            return True
        try:
            if not wait_for_exit(pidfd, deadline):
                return False
        finally:
            os.close(pidfd)
        self._reap()
        return True

    def close(self) -> None:
        """Let go of it, dead or not. On the loop, or when it is closed."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
            if pidfd < 0:
                return
            if not self._loop.is_closed():
                self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._stdout.close()
        self._stderr.close()

    def close_without_loop(self) -> None:
        """Let go of it if its loop is closed; one that may run again hears of the exit and does so itself."""
        if self._loop.is_closed():
            self.close()

    @property
    def _is_reaped(self) -> bool:
        return self._pidfd < 0 or self._popen.returncode is not None or not is_unreaped(self._pidfd)

    def _kill_group(self) -> None:
        # While it is not reaped its pid, which is the group's number, is no other process's.
        if not self._is_reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        with self._lock:
            self._kill_group()  # the last moment to reach what it has left there
            self._popen.poll()

    def _on_exit(self) -> None:
        self._reap()
        self._stdout.finish()
        self._stderr.finish()
        self.close()
        self._exited.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._loop.call_soon(callback, self)  # one that raises is reported, and the others are called


def _spawn(spec: ChildSpec, family: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", spec.module, *spec.args],
        env=spec.environment(family),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        # A group for each, but in this session: should this process die while a child is stopped, the kernel wakes and
        # hangs up the group that is orphaned by that. Ctrl-C reaches only this process, which ends them in order.
        process_group=0,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ChildOutput:
    """The reading end of a pipe that a child writes to.

    Each line goes to the ``aioengine`` logger. A child that writes faster than they can be logged waits at the full
    pipe, and of many short lines that come at once all but the first are only counted.

    Args:
        name: of the child, put before each line.
        pipe: unbuffered; closed in the end.
    """

    def __init__(self, name: str, pipe: IO[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._pipe = pipe
        self._loop = loop
        self._rest = b""
        """The beginning of a line whose end has not come yet."""
        self._tail: deque[str] = deque(maxlen=MAX_LAST_LINES)
        os.set_blocking(pipe.fileno(), False)
        loop.add_reader(pipe.fileno(), self._on_readable)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, at most `MAX_LAST_LINES` and `MAX_LAST_BYTES`."""
        num_bytes, first = 0, len(self._tail)
        for line in reversed(self._tail):
            num_bytes += len(line.encode())
            if num_bytes > MAX_LAST_BYTES:
                break
            first -= 1
        return tuple(self._tail)[first:]

    def finish(self) -> None:
        """Read what the pipe holds now, and close it. A child's own child that still writes is not waited for."""
        if self._pipe.closed:
            return
        left = int.from_bytes(fcntl.ioctl(self._pipe.fileno(), termios.FIONREAD, bytes(4)), "little")
        if left > 0:
            self._feed(self._read(left))
        self.close()

    def close(self) -> None:
        """Stop reading. On the loop, or when it is closed."""
        if self._pipe.closed:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        if self._rest:
            self._take([self._rest])
            self._rest = b""

    def _on_readable(self) -> None:
        data = self._read(READ_BYTES)
        if data == b"":
            self.close()
        elif data is not None:
            self._feed(data)

    def _read(self, num_bytes: int) -> bytes | None:
        """None: there is nothing now; empty: no process writes any more."""
        try:
            return os.read(self._pipe.fileno(), num_bytes)
        except BlockingIOError:
            return None

    def _feed(self, data: bytes | None) -> None:
        *lines, rest = (self._rest + (data or b"")).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:  # no line, or a very long one: it must not pile up
            lines.append(rest)
            rest = b""
        self._rest = rest
        self._take(lines)

    def _take(self, lines: list[bytes]) -> None:
        for line in lines[-MAX_LAST_LINES:]:
            self._tail.append(_as_text(line))
        for line in lines[:MAX_LINES_PER_READ]:
            level, message = read_log_line(_as_text(line))
            if message.strip():
                logger.log(level, "%s: %s", self._name, message)
        if len(lines) > MAX_LINES_PER_READ:
            logger.info("%s: … %d more lines at once", self._name, len(lines) - MAX_LINES_PER_READ)


def _as_text(line: bytes) -> str:
    """A progress bar rewrites its line: of that the last state."""
    shown = line[-MAX_LINE_BYTES:].rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line[:MAX_LINE_BYTES]
    return shown.decode(errors="replace")


def telling_line(lines: Iterable[str]) -> str:
    """The line that says best why a process ended: what its last traceback or error says, else its last line."""
    telling, last, is_in_traceback = "", "", False
    for line in lines:
        text = read_log_line(line)[1]
        if not text.strip():
            continue
        last = text
        if text.endswith(_TRACEBACK):
            is_in_traceback = True
        elif is_in_traceback:
            if not text[0].isspace():
                telling, is_in_traceback = text, False
        elif _TELLING.search(line):
            telling = text
    return (telling or last).strip()


class ProcessTree:
    """The descendants of some processes of one family; used by one thread at a time.

    Args:
        family: a name that is in the environment of the family's processes, and of no others.
        roots: pid → pidfd of the processes to start from, which are not members themselves. The pidfds are this
            object's from now on.
    """

    def __init__(self, family: str, roots: Mapping[int, int]) -> None:
        self._family = family.encode()
        self._roots = dict(roots)
        self._members: dict[int, int] = {}

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all processes. Not while another thread uses this: leave it to the last reference then."""
        for held in (self._members, self._roots):
            while held:
                os.close(held.popitem()[1])

    def find(self) -> int:
        """Hold all members that live now, also those that lose their parent later. → how many are held."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        children: dict[int, list[int]] = defaultdict(list)
        for pid in pids:
            children[_parent_of(pid)].append(pid)
        for pid in pids:
            if self._is_of_family(pid):
                self._hold(pid)
        queue = [*self._roots, *self._members]
        for parent in queue:  # it grows
            queue += [pid for pid in children[parent] if self._hold(pid, parent)]
        return len(self._members)

    def kill(self, deadline: float) -> bool:
        """Kill members until none is found any more. → False: some were left at the deadline (`time.monotonic`)."""
        while self.find() > 0:
            for pidfd in self._members.values():
                _send(pidfd, signal.SIGKILL)
            for pid in list(self._members):
                if not self._bury(pid, deadline):
                    return False
            if time.monotonic() >= deadline:  # they multiply faster than they are killed
                return False
        return True

    def _bury(self, pid: int, deadline: float) -> bool:
        pidfd = self._members[pid]
        if not wait_for_exit(pidfd, deadline):
            return False
        # Orphans become children of the nearest subreaper: of this very process, where it is the first of a container.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._members.pop(pid))
        return True

    def _hold(self, pid: int, parent: int | None = None) -> bool:
        """Hold a process that lives, of this family, or a child of ``parent``. → whether it is newly held."""
        if pid in self._roots or pid in self._members or pid == os.getpid():
            return False
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it has ended
            return False
        # First what is read about the pid, then whether the pid is still the one's that is held: see above.
        is_member = self._is_of_family(pid) if parent is None else self._is_child_of(parent, pid)
        if not is_member or not is_unreaped(pidfd) or wait_for_exit(pidfd, deadline=0):
            os.close(pidfd)
            return False
        self._members[pid] = pidfd
        return True

    def _is_of_family(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return self._family in file.read()
        except OSError:  # it is gone, or another user's
            return False

    def _is_child_of(self, parent: int, pid: int) -> bool:
        return _parent_of(pid) == parent and is_unreaped(self._held(parent))

    def _held(self, pid: int) -> int:
        return self._roots[pid] if pid in self._roots else self._members[pid]


def wait_for_exit(pidfd: int, deadline: float) -> bool:
    """Whether the process has ended, waiting for it until the deadline (`time.monotonic`); it need not be reaped."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def is_unreaped(pidfd: int) -> bool:
    """Whether the pid is still this process's: it lives, or its parent has not asked for its exit status yet."""
    return _send(pidfd, 0)


def _send(pidfd: int, signal_number: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, signal_number)
    except ProcessLookupError:
        return False
    except PermissionError:  # it has become another user's
        return True
    return True


def _parent_of(pid: int) -> int:
    """0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # pid (name) state parent …; the name may hold anything.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0
