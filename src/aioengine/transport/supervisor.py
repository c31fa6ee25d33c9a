"""Child processes as one async context manager: started side by side, watched, ended with all that descends from them.

A child is ``python -m module``. Its exit is awaited through a pidfd: it is known at once, and a pid that belongs to
somebody else by now is never signalled. What it writes is logged; the end of its stderr is kept as its last words.
The other half is `aioengine.transport.child_life`, which binds the child's life to this process's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import anyio
import msgspec

from aioengine.errors import ConfigError, EngineClosed
from aioengine.transport.child_life import FAMILY, LOG_LEVEL, PARENT_PID
from aioengine.transport.child_output import ChildOutput, telling_line
from aioengine.transport.process import ProcessTree, is_unreaped, wait_for_exit
from aioengine.validation import check_fields

logger = logging.getLogger("aioengine")

KILL_DEADLINE_S = 5.0
"""How long a process may take to die of SIGKILL. One that the kernel holds for longer is given up, and this logged."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


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
        # While it is not reaped its pid, which is the group's number, is nobody else's.
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


class Supervisor:
    """Children, from their start to the end of the last of their descendants.

    ``async with Supervisor(specs) as supervisor:`` on the loop's thread, which is the children's parent for the kernel:
    its end is theirs. On the way out, whatever the reason: SIGTERM to each child, ``terminate_s`` to end, then SIGKILL;
    and SIGKILL to all that descends from them. All are reaped. The way out is shielded from cancellation; if it is torn
    off nevertheless (`asyncio.Task.cancel` knows no shield) everything is killed at once.

    Args:
        specs: started on the way in; more can be started later.
        terminate_s: how long a child may take to end after SIGTERM.

    Attributes:
        children: all that were started, in order.
        failure: the first child that exited before it was expected to, with whatever code.
    """

    def __init__(self, specs: Iterable[ChildSpec] = (), *, terminate_s: float = 5.0) -> None:
        self.children: list[Child] = []
        self.failure: Child | None = None
        self._specs = tuple(specs)
        self._terminate_s = terminate_s
        self._family = uuid.uuid4().hex
        self._is_exit_expected = False
        self._is_closing = False
        self._is_abandoned = False
        self._failed_or_closed = asyncio.Event()
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Supervisor:
        try:
            self.start(self._specs)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def start(self, specs: Iterable[ChildSpec]) -> list[Child]:
        """Start children, none waiting for another to be ready.

        The loop is held for the vfork and exec of each: 0.5 ms; 2 ms where those before it keep all cores busy.

        Raises:
            ConfigError: one could not be started; those before it run, and end on the way out.
            EngineClosed: on the way out.
        """
        if self._is_closing or self._is_abandoned:
            raise EngineClosed("no child can be started: its supervisor is closed")
        started = []
        for spec in specs:
            try:
                child = Child(spec, self._family, self._on_exit)
            except (OSError, ValueError) as error:  # no such folder, too many processes; a NUL in an argument
                raise ConfigError(f"{spec.name} could not be started: {error}") from error
            self.children.append(child)
            started.append(child)
        return started

    async def wait_failure(self) -> Child:
        """Wait for the first child that exits before it is expected to. Cancelling stops the wait.

        Raises:
            EngineClosed: all children have ended on the way out.
        """
        await self._failed_or_closed.wait()
        if self.failure is None:
            raise EngineClosed("all children have ended as they were told")
        return self.failure

    def expect_exits(self) -> None:
        """From now on an exit is no failure: the children were told to end."""
        self._is_exit_expected = True

    async def aclose(self) -> None:
        """End all children and what descends from them, as said above. Closing twice waits for the first."""
        with anyio.CancelScope(shield=True):
            if self._is_closing:
                await self._closed.wait()
                return
            self._is_closing = True
            self.expect_exits()
            try:
                await self._end_children()
            except BaseException:
                self.abandon()
                raise
            finally:
                self._failed_or_closed.set()
                self._closed.set()

    def abandon(self) -> None:
        """Kill all children and what descends from them, without anyone waiting on a loop.

        From any thread and at any moment, finalizers included, whether the loop runs or is closed; once. On a running
        loop it returns at once and a thread does the rest, else within `KILL_DEADLINE_S`.
        """
        if self._is_abandoned:
            return
        self._is_abandoned = True
        self.expect_exits()
        children, family = list(self.children), self._family
        for child in children:
            child.kill()
        roots = self._roots()

        def bury() -> None:
            deadline = time.monotonic() + KILL_DEADLINE_S
            _kill_tree(ProcessTree(family, roots), deadline)
            for child in children:
                child.reap(deadline)

        if _is_on_a_running_loop():
            # No daemon: the interpreter's end waits for it. At that end there are no more threads.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=bury, name="aioengine-supervisor").start()
                return
        bury()
        for child in children:
            child.close_without_loop()

    async def _end_children(self) -> None:
        worker = ThreadPoolExecutor(1, "aioengine-supervisor")
        tree = ProcessTree(self._family, self._roots())
        try:
            # Before they end, since whoever loses its parent is harder to find.
            await _in_thread(worker, tree.find)
            for child in self.children:
                child.send_signal(signal.SIGTERM)
                child.send_signal(signal.SIGCONT)  # a stopped one could not act on it
            if not await self._wait_for_all(self._terminate_s):
                await _in_thread(worker, tree.find)
            for child in self.children:
                if child.returncode is None:
                    logger.warning("%s (pid %d) did not end in %g s: killed", child.name, child.pid, self._terminate_s)
                child.kill()
            deadline = time.monotonic() + KILL_DEADLINE_S
            await _in_thread(worker, lambda: _kill_tree(tree, deadline))
            await self._wait_for_all(deadline - time.monotonic())
        finally:
            with contextlib.suppress(RuntimeError):  # the interpreter ends; so do they
                worker.submit(tree.close)  # after what the thread may still do with it
            worker.shutdown(wait=False)
        for child in self.children:
            if child.returncode is None:
                logger.error("%s (pid %d) has not died of SIGKILL; it is left to the kernel", child.name, child.pid)
            child.close()

    async def _wait_for_all(self, timeout_s: float) -> bool:
        with anyio.move_on_after(max(0.0, timeout_s)):
            for child in self.children:
                await child.wait()
        return all(child.returncode is not None for child in self.children)

    def _roots(self) -> dict[int, int]:
        pidfds = {child.pid: child.dup_pidfd() for child in self.children}
        return {pid: pidfd for pid, pidfd in pidfds.items() if pidfd is not None}

    def _on_exit(self, child: Child) -> None:
        if self._is_exit_expected:
            logger.debug("%s", child.describe_exit())
            return
        logger.error("%s", child.describe_exit())
        if self.failure is None:
            self.failure = child
            self._failed_or_closed.set()


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


def _kill_tree(tree: ProcessTree, deadline: float) -> None:
    try:
        if not tree.kill(deadline):
            logger.error("not all that the children have started could be killed in time")
    finally:
        tree.close()


async def _in_thread(worker: ThreadPoolExecutor, function: Callable[[], object]) -> None:
    """Call a function that has a deadline; not waited for much longer if the kernel holds it nevertheless."""
    try:
        work = asyncio.get_running_loop().run_in_executor(worker, function)
    except RuntimeError:  # the interpreter exits, and has no more threads; there is not much else that this holds up
        function()
        return
    with anyio.move_on_after(KILL_DEADLINE_S + 1.0):
        await work


def _is_on_a_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
