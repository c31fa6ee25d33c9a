"""All that descends from a child, found in /proc and killed by pidfd.

A process that forked, left its session and lost its parent has still inherited its environment, with the family's name
in it; one that has overwritten its environment is still the child of somebody. Both ways are followed. A process is
held by a pidfd from the moment it is found, and what was read about its pid counts only if it was not reaped until
after the reading: a pid that now belongs to somebody else is never hit.

Everything here blocks, for some 30 µs a process of the machine: in threads only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial


class ProcessTree:
    """The descendants of some processes of one family; used by one thread at a time.

    Args:
        family: a name that is in the environment of the family's processes, and nobody else's.
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
                self._hold(pid, self._is_of_family)
        queue = [*self._roots, *self._members]
        for parent in queue:  # it grows
            for pid in children[parent]:
                if self._hold(pid, partial(self._is_child_of, parent)):
                    queue.append(pid)
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

    def _hold(self, pid: int, is_member: Callable[[int], bool]) -> bool:
        """Hold a process that lives and is a member. → whether it is held now and was not before."""
        if pid in self._roots or pid in self._members or pid == os.getpid():
            return False
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it has ended
            return False
        # First what is read about the pid, then whether the pid is still the one's that is held: see above.
        if not is_member(pid) or not is_unreaped(pidfd) or wait_for_exit(pidfd, deadline=0):
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
    """Whether the pid is still this process's: it lives, or nobody has asked for its exit status yet."""
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
