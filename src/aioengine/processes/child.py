"""A child process, seen from its parent: what it writes, its end, and that of all that descends from it.

A child is ``python -m module``. Its exit is awaited through a pidfd: it is known at once, and a pid that belongs to
another process by now is never signalled. What it writes is logged; the end of its stderr is kept as its last words.
The child's own half is `aioengine.processes.own_side`, which binds its life to this process's.

What descends from it is its process group, and all that has inherited its environment, with the name of its family in
it: a process that has left the group and lost its parent, too.
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
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import IO

import anyio

from aioengine.errors import ConfigError
from aioengine.processes.own_side import FAMILY, LOG_LEVEL, PARENT_PID, read_log_line
from aioengine.processes.turns import running_loop
from aioengine.processes.worker_threads import run_abandonable

logger = logging.getLogger("aioengine")

KILL_DEADLINE_S = 5.0
"""How long a process may take to die of SIGKILL. One that the kernel holds for longer is given up, and this logged."""

READ_BYTES = 8192
"""At once; then the loop goes on with others. With the lines below at most about 2 ms."""

MAX_LINES_PER_READ = 100
MAX_LINE_BYTES = 4096
MAX_LAST_LINES = 64

_ORDINARY = re.compile(r"(DEBUG|INFO|WARNING) [\w.-]+: ")
"""As `log_to_parent` writes it."""

_TELLING = re.compile(r"\b(\w*(Error|Exception|Dead|Failed)|ERROR|CRITICAL|Fatal \w+)\b")


class Child:
    """A child process, ``python -m module *args``; made on the loop's thread, whose end is the child's.

    The loop is held for the vfork and exec: 0.5 ms; 2 ms where others keep all cores busy.

    Args:
        name: what errors and the log call it, such as "engine 0".
        env: added to this process's environment.
        visible_devices: CUDA_VISIBLE_DEVICES of the child; none for an empty tuple; what this process sees for None.
        pass_fds: descriptors that it inherits, with the same numbers.
        terminate_s: how long it may take to end after SIGTERM.
        on_exit: called on the loop when it has exited.
    Attributes:
        pid: its number.
        is_exit_expected: whether it was told to end, so that its exit is no failure.

    Raises:
        ConfigError: it could not be started.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *args: str,
        env: Mapping[str, str],
        visible_devices: Iterable[int | str] | None = None,
        pass_fds: Collection[int] = (),
        terminate_s: float,
        on_exit: Callable[[], None],
    ) -> None:
        self.name = name
        self.is_exit_expected = False
        self._terminate_s = terminate_s
        self._on_exit = on_exit
        self._family = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._is_abandoned = False
        # Held while the pid is used, since it may be reaped in any thread; reentrant, since finalizers run anywhere.
        self._lock = threading.RLock()
        try:
            self._popen = _spawn([module, *args], _environment(env, visible_devices, self._family), pass_fds)
            self._pidfd = _pidfd_of(self._popen)
        except (OSError, ValueError) as error:  # too many processes, no descriptor; a NUL in an argument
            raise ConfigError(f"{name} could not be started: {error}") from error
        self.pid = self._popen.pid
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._stdout = ChildOutput(name, self._popen.stdout, self._loop)
        self._stderr = ChildOutput(name, self._popen.stderr, self._loop)
        self._loop.add_reader(self._pidfd, self._take_exit)

    @property
    def returncode(self) -> int | None:
        """None while it lives; -N: killed by signal N."""
        return self._popen.returncode

    async def wait(self) -> None:
        """Wait until it has exited. Cancelling stops the wait."""
        await self._exited.wait()

    def terminate(self) -> None:
        """Tell it to end, by SIGTERM. Does not wait."""
        self.is_exit_expected = True
        self._send_signal(signal.SIGTERM)

    def describe_exit(self) -> str:
        """How it ended and why, in one line: "engine 0 (pid 7) was killed by SIGSEGV; its last words: …"."""
        code = self._popen.returncode
        names = {int(each): each.name for each in signal.Signals}
        how = f"exited with code {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal {-code}')}"
        words = telling_line(self._stderr.tail)
        return f"{self.name} (pid {self.pid}) {how}" + (f"; its last words: {words}" if words else "")

    async def aclose(self) -> None:
        """SIGTERM, ``terminate_s`` to end, then SIGKILL to it and to all that descends from it. Idempotent.

        Shielded from cancellation; torn off nevertheless (`asyncio.Task.cancel` knows no shield) it kills all at once.
        """
        self.is_exit_expected = True
        with anyio.CancelScope(shield=True):
            try:
                await self._end()
            except BaseException:
                self.abandon()
                raise

    def kill(self) -> None:
        """SIGKILL to it and its group, now; `aclose` is to follow. Idempotent."""
        self.is_exit_expected = True
        self._kill()

    def abandon(self) -> None:
        """Kill it and what descends from it, without a wait on a loop. Idempotent.

        From any thread and at any moment, finalizers included, whether the loop runs or is closed. On a running loop it
        returns at once and a thread does the rest, else within `KILL_DEADLINE_S`.
        """
        if self._is_abandoned:
            return
        self._is_abandoned = self.is_exit_expected = True
        self._kill()
        with self._lock:
            pidfd = -1 if self._pidfd < 0 else os.dup(self._pidfd)

        def bury() -> None:
            if pidfd >= 0:
                if _wait_for_exit(pidfd, time.monotonic() + KILL_DEADLINE_S):
                    self._reap()
                os.close(pidfd)
            self._kill_family()

        if running_loop() is not None:
            # No daemon: the interpreter's end waits for it. At that end there are no more threads.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=bury, name="aioengine-child").start()
                return
        bury()
        if self._loop.is_closed():  # one that may run again hears of the exit
            self._close()

    async def _end(self) -> None:
        self._send_signal(signal.SIGTERM)
        self._send_signal(signal.SIGCONT)  # a stopped one could not act on it
        with anyio.move_on_after(self._terminate_s):
            await self.wait()
        if self.returncode is None:
            logger.warning("%s (pid %d) did not end in %g s: killed", self.name, self.pid, self._terminate_s)
        self._kill()
        with anyio.move_on_after(KILL_DEADLINE_S):
            await self.wait()
        if self.returncode is None:
            logger.error("%s (pid %d) has not died of SIGKILL; it is left to the kernel", self.name, self.pid)
        try:
            await run_abandonable(self._kill_family)
        except RuntimeError:  # the interpreter exits, and has no more threads
            self._kill_family()
        self._close()

    def _send_signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def _kill(self) -> None:
        with self._lock:
            self._send_signal(signal.SIGKILL)
            self._kill_group()

    def _kill_group(self) -> None:
        # While it is not reaped its pid, which is the group's number, is no other process's.
        if self._pidfd >= 0 and self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, 0)  # another part of this program may have reaped it
                os.killpg(self.pid, signal.SIGKILL)

    def _kill_family(self) -> None:
        """Kill what has the family's name in its environment, until nothing is found; once the child has ended."""
        name, deadline = self._family.encode(), time.monotonic() + KILL_DEADLINE_S
        with contextlib.suppress(OSError):  # no descriptor is left to look with
            while pids := [pid for pid in _pids() if pid != self.pid and _has_in_environment(pid, name)]:
                for pid in pids:
                    _kill_kin(pid, name, deadline)
                if time.monotonic() >= deadline:  # held by the kernel, or more of them than can be killed
                    logger.error("not all that %s has started could be killed in time", self.name)
                    return
        # Orphans become children of this very process, where it is the first of a container: no zombies are left.
        with contextlib.suppress(ChildProcessError):
            while self.returncode is not None and time.monotonic() < deadline:
                if os.waitid(os.P_PGID, self.pid, os.WEXITED | os.WNOHANG) is None:
                    time.sleep(0.001)

    def _reap(self) -> None:
        with self._lock:
            self._kill_group()  # the last moment to reach what it has left there
            self._popen.poll()

    def _take_exit(self) -> None:
        self._reap()
        self._stdout.finish()
        self._stderr.finish()
        self._close()
        self._exited.set()
        logger.log(logging.DEBUG if self.is_exit_expected else logging.ERROR, "%s", self.describe_exit())
        self._on_exit()

    def _close(self) -> None:
        """Let go of it, dead or not. On the loop, or when that is closed."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
            if pidfd < 0:
                return
            if not self._loop.is_closed():
                self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._stdout.close()
        self._stderr.close()


def _environment(env: Mapping[str, str], visible_devices: Iterable[int | str] | None, family: str) -> dict[str, str]:
    environment = {
        # What it prints is seen at once, and a crash in C says where it was; both may be asked away.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **os.environ,
        **env,
        PARENT_PID: str(os.getpid()),
        LOG_LEVEL: str(logger.getEffectiveLevel()),
        # Below another child of ours: its family, too.
        FAMILY: ":".join(filter(None, (os.environ.get(FAMILY), family))),
    }
    if visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible_devices))
    return environment


def _spawn(command: list[str], environment: dict[str, str], pass_fds: Collection[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        pass_fds=tuple(pass_fds),
        # A group of its own, but in this session: should this process die while the child is stopped, the kernel wakes
        # and hangs up the group that is orphaned by that. Ctrl-C reaches only this process, which ends it in order.
        process_group=0,
    )


def _pidfd_of(popen: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(popen.pid)
    except OSError:
        popen.kill()
        with popen:  # which closes its pipes and waits for it
            raise


class ChildOutput:
    """The reading end of a pipe that a child writes to.

    Each line goes to the ``aioengine`` logger. A child that writes faster than they can be logged waits at the full
    pipe, and of many short lines that come at once all but the first are only counted.

    Args:
        name: of the child, put before each line.
        pipe: unbuffered; closed in the end.
    Attributes:
        tail: the last lines.
    """

    def __init__(self, name: str, pipe: IO[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._pipe = pipe
        self._loop = loop
        self._rest = b""
        """The beginning of a line whose end has not come yet."""
        self.tail: deque[str] = deque(maxlen=MAX_LAST_LINES)
        os.set_blocking(pipe.fileno(), False)
        loop.add_reader(pipe.fileno(), self._read, READ_BYTES)

    def finish(self) -> None:
        """Read what the pipe holds now, and close it. A child's own child that still writes is not waited for."""
        if self._pipe.closed:
            return
        left = int.from_bytes(fcntl.ioctl(self._pipe.fileno(), termios.FIONREAD, bytes(4)), "little")
        self._read(left)
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

    def _read(self, num_bytes: int) -> None:
        try:
            data = os.read(self._pipe.fileno(), num_bytes)
        except BlockingIOError:  # there is nothing now
            return
        if not data:  # no process writes any more
            self.close()
            return
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:  # no line, or a very long one: it must not pile up
            lines.append(rest)
            rest = b""
        self._rest = rest
        self._take(lines)

    def _take(self, lines: list[bytes]) -> None:
        for line in lines[-MAX_LAST_LINES:]:
            self.tail.append(_as_text(line))
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
    """The line that says best why a process ended: its last one that names an error, else its last one that is not
    of its log; empty: none."""
    said = [line for line in lines if line.strip()]
    telling = [line for line in said if _TELLING.search(line)]
    telling = telling or [line for line in said if not _ORDINARY.match(line)] or [""]
    return read_log_line(telling[-1])[1].strip()


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def _has_in_environment(pid: int, name: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return name in file.read()
    except OSError:  # it is gone, or another user's
        return False


def _kill_kin(pid: int, name: bytes, deadline: float) -> None:
    """SIGKILL to a process if it has the name in its environment, and wait for its end."""
    with contextlib.suppress(OSError):  # it has ended
        pidfd = os.pidfd_open(pid)
        try:
            # Asked again: were the pid another process's by now, what is held by the pidfd would have ended.
            if _has_in_environment(pid, name):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                _wait_for_exit(pidfd, deadline)
                # It may be a child of this process by now, see above.
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        finally:
            os.close(pidfd)


def _wait_for_exit(pidfd: int, deadline: float) -> bool:
    """Whether the process has ended, waiting for it until the deadline (`time.monotonic`); it need not be reaped."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
