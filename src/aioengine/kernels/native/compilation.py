"""A child process that compiles what is missing of the native kernels, while this one computes without them.

An engine in a user's program ends its compiler when it closes. A command may end within seconds, so its compiler
outlives it (`own_process.COMPILER_OUTLIVES`): one at a time a cache, bounded in time and memory. Each part is kept as
soon as it is compiled, so that a compiler that is killed has not worked for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import IO

import msgspec

from aioengine.errors import InternalError
from aioengine.kernels.native.library import PACKAGE, Library, find_library, library_path, read_part
from aioengine.kernels.native.parts import ALL_PARTS, COMMON, compile_seconds
from aioengine.processes.own_process import COMPILER_OUTLIVES

logger = logging.getLogger("aioengine")

MESSAGE_BYTES, MESSAGE_LINES = 4000, 10
"""Most of a failed child's output that is logged."""

HEAD_START_S = 5.0
"""How long a compiler leaves the cores to an engine that starts, once it has its modules, unless `begin` comes before.
 On two cores of Zen 4, with an empty cache, the first token of Qwen3-0.6B came 6.3 s after the program began
with both at once, and comes after 3.5; with int8 8.7 and 4.2."""


class Compilation:
    """The library, or a child process that compiles it while this one serves without it.

    Kernels that cannot be kept are for this object alone.

    Args:
        parts: of the library.
        is_of_engine: it may outlive a command; if it must not, a warning names what is missing as it closes.

    Attributes:
        problem: why there is no library.
    """

    def __init__(self, parts: Iterable[str], *, is_of_engine: bool = True) -> None:
        self._parts = tuple(parts)
        self._begins_at_s = 0.0
        self._is_over = False
        self._child: subprocess.Popen[bytes] | None = None
        self._unkept: IO[bytes] = io.BytesIO()
        self._errors: IO[bytes] = io.BytesIO()
        self._is_of_engine, self._outlives = is_of_engine, False
        self.problem = ""
        if missing := [part for part in self._parts if read_part(part) is None]:
            lock = self._lock_cache(missing) if is_of_engine and os.environ.get(COMPILER_OUTLIVES) else None
            if lock is None:
                logger.info("compiling native kernels beside this program, once a machine; until then steps are slow")
            try:
                # In memory: a pipe would hold up a child that writes much, and a folder for files might not be there.
                self._unkept = io.FileIO(os.memfd_create("aioengine-kernels"), "r+")
                self._errors = io.FileIO(os.memfd_create("aioengine-compiler"), "r+")
                self._child = _start_child(
                    missing, self._unkept.fileno(), self._errors, lock if self._outlives else None
                )
                self._begins_at_s = time.monotonic() + HEAD_START_S
            except (OSError, AttributeError) as error:  # no room for a process, or a system without memfd
                self._give_up(str(error))
            finally:
                if lock is not None:
                    lock.close()  # the child has it, until its end

    def begin(self) -> None:
        """Let the child compile from now on. Idempotent."""
        self._begins_at_s = 0.0
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()  # it waits for that

    @property
    def is_running(self) -> bool:
        """Whether the child takes a core, or is about to: begun or by itself."""
        return self._child is not None and not self._is_over and time.monotonic() >= self._begins_at_s

    def poll(self) -> Library | None:
        """The library, once, when it is there."""
        if self._is_over or (self._child is not None and self._child.poll() is None):
            return None
        unkept: dict[str, bytes] = {}
        if self._child is not None and self._child.returncode == 0:
            unkept = msgspec.msgpack.decode(_content(self._unkept), type=dict[str, bytes])
        errors = _content(self._errors)[-MESSAGE_BYTES:].decode(errors="replace")
        last_lines = "\n".join(errors.splitlines()[-MESSAGE_LINES:])
        library = find_library(self._parts, unkept)
        if library is None:
            self._give_up(last_lines)
        elif unkept:
            logger.warning("native kernels are not kept, but compiled for this engine alone: %s", last_lines)
        elif self._child is not None:
            logger.info("native kernels are compiled")
        self.close()
        return library

    def wait(self) -> Library | None:
        """The library, once, as soon as it is there."""
        self.begin()
        if self._child is not None:
            self._child.wait()
        return self.poll()

    def close(self) -> None:
        """End the child, unless it may outlive this process, and remove what it leaves behind. Idempotent."""
        was_needed = self._is_of_engine and self.is_running
        self._is_over = True
        self._unkept.close()
        self._errors.close()
        self.begin()
        if self._child is None:
            return
        if self._outlives:
            if self._child.poll() is None:
                os.setpriority(os.PRIO_PROCESS, self._child.pid, 19)
                self._child.returncode = 0  # or its end would be waited for, with a warning
            return
        if was_needed and self._child.poll() is None:
            _warn_of_missing()
        self._child.kill()
        self._child.wait()
        with contextlib.suppress(OSError):
            for unfinished in library_path(COMMON).parent.glob(f"*.{self._child.pid}"):
                unfinished.unlink(missing_ok=True)

    def _lock_cache(self, missing: Iterable[str]) -> IO[bytes]:
        """Lock the cache, unless another command's compiler has it: then this one ends with its command, too."""
        lock: IO[bytes] = io.BytesIO()
        try:
            path = library_path(COMMON).with_name("compiler.lock")
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("ab")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._outlives, outlook = True, "once, also after this command ends"
        except BlockingIOError:
            outlook = "as an earlier command's compiler still does"
        except OSError as error:
            outlook = f"for this command alone, since they cannot be kept ({error}): set XDG_CACHE_HOME"
        logger.warning(
            "compiling kernels for this CPU in the background, about %d s, %s; until then plain torch "
            "computes, slower and rounded otherwise: a seed may give another text then",
            compile_seconds(missing),
            outlook,
        )
        return lock

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        logger.warning("no native kernels, so that steps are slow: %s", problem)
        self.close()


@functools.cache  # once a process
def _warn_of_missing() -> None:
    logger.warning(
        "the engine closed before the kernels for this CPU were compiled, and computed by plain torch, slower, as each "
        "program will that is as short: `aioengine compile` compiles them once"
    )


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def compile_library(parts: Iterable[str] = ALL_PARTS) -> Library:
    """The library, once a child process has compiled what is missing of it, which takes a core for seconds.

    Raises:
        InternalError: it could not be compiled.
    """
    compilation = Compilation(parts, is_of_engine=False)
    try:
        library = compilation.wait()
    finally:
        compilation.close()
    if library is None:
        raise InternalError(f"the native kernels could not be compiled: {compilation.problem}")
    return library


def _start_child(
    parts: Iterable[str], unkept: int, errors: IO[bytes], lock: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a compiler; with a lock, which is its own, too, it outlives this process."""
    # Without the working folder, whose files may be called as any module; this package may have come from there.
    paths = os.pathsep.join((*(os.path.abspath(path) for path in sys.path if path), str(PACKAGE.parent)))
    numbers = map(str, (os.getpid() if lock is None else 0, HEAD_START_S, unkept))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _COMPILE, *numbers, *parts],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        # numpy would start a thread a core, of which a compiler needs none, each with 40 MB of its address space.
        env={**os.environ, "PYTHONPATH": paths, "NUMBA_OPT": "0", "OPENBLAS_NUM_THREADS": "1"},
        pass_fds=[unkept] if lock is None else [unkept, lock.fileno()],
        start_new_session=lock is not None,
    )


_COMPILE = """
import resource
import select
import signal
import sys
from aioengine.processes.own_side import die_with_parent
parent_pid, head_start_s, unkept, *parts = sys.argv[1:]
if parent_pid != "0":
    die_with_parent(int(parent_pid))
else:  # it takes a minute of a core and 0.9 GB for all parts
    signal.alarm(1800)
    resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
import msgspec
from aioengine.kernels.native.library import compile_parts
import aioengine.kernels.native.compiler
select.select([sys.stdin], [], [], float(head_start_s))  # until its other end is closed
with open(int(unkept), "wb") as file:
    file.write(msgspec.msgpack.encode(compile_parts(parts)))
"""
