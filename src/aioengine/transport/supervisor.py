"""Child processes as one async context manager: started side by side, watched, ended with all their descendants."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import anyio

from aioengine.errors import ConfigError, EngineClosed
from aioengine.transport.process import Child, ChildSpec, ProcessTree

logger = logging.getLogger("aioengine")

KILL_DEADLINE_S = 5.0
"""How long a process may take to die of SIGKILL. One that the kernel holds for longer is given up, and this logged."""


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
        """Kill all children and what descends from them, without a wait on a loop.

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
        if not self.children:  # the look for descendants takes a file descriptor, and a start may fail for want of one
            return
        worker = ThreadPoolExecutor(1, "aioengine-supervisor")
        tree = ProcessTree(self._family, self._roots())
        try:
            # Before they end, since a process that has lost its parent is harder to find.
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
