"""A child process that compiles what is missing of the native kernels, while this one computes without them.

An engine in a program of the user's ends its compiler when it closes. A command of ours may end within seconds, so its
compiler outlives it (`own_process.COMPILER_OUTLIVES`): one at a time a cache, bounded in time and memory. Each part
is kept as soon as it is compiled, so that a compiler that is killed has not worked for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import io
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
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

OUTLIVING_S, OUTLIVING_BYTES = 1800, 4 * 2**30
"""Most wall-clock seconds and address space of a compiler that may outlive its parent; it takes a minute of a core and
0.9 GB for all parts."""


class Compilation:
    """The library, or a child process that compiles it while this one serves without it.

    With `COMPILER_OUTLIVES` in the environment `close` leaves the child alone, which ends with this process all the
    same while the compiler of another command is at work. Kernels that cannot be kept are for this object alone.

    Args:
        parts: of the library.
        may_outlive: False: the environment does not count.

    Attributes:
        problem: why there is no library.
    """

    def __init__(self, parts: Iterable[str], *, may_outlive: bool = True) -> None:
        self._parts = tuple(parts)
        self._begins_at_s = 0.0
        self._is_over = False
        self._child: subprocess.Popen[bytes] | None = None
        self._unkept: IO[bytes] = io.BytesIO()
        self._errors: IO[bytes] = io.BytesIO()
        self._is_of_engine = may_outlive
        self._outlives = may_outlive and bool(os.environ.get(COMPILER_OUTLIVES))
        self.problem = ""
        if missing := [part for part in self._parts if read_part(part) is None]:
            if self._outlives:
                logger.warning(
                    "compiling kernels for this CPU in the background, about %d s, %s; until then plain torch "
                    "computes, slower and rounded otherwise: a seed may give another text then",
                    compile_seconds(missing),
                    _outlook(),
                )
            else:
                logger.info("compiling native kernels beside this program, once a machine; until then steps are slow")
            try:
                # In memory: a pipe would hold up a child that writes much, and a folder for files might not be there.
                self._unkept = io.FileIO(os.memfd_create("aioengine-kernels"), "r+")
                self._errors = io.FileIO(os.memfd_create("aioengine-compiler"), "r+")
                self._child = _start_child(missing, self._unkept.fileno(), self._errors, outlives=self._outlives)
                self._begins_at_s = time.monotonic() + HEAD_START_S
            except (OSError, AttributeError) as error:  # no room for a process, or a system without memfd
                self._give_up(str(error))

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
            self._child.poll()
            self._child.returncode = self._child.returncode or 0  # or its end would be waited for, with a warning
            return
        if was_needed and self._child.poll() is None:
            _warn_of_missing()
        self._child.kill()
        self._child.wait()
        with contextlib.suppress(OSError):
            for unfinished in library_path(COMMON).parent.glob(f"*.{self._child.pid}"):
                unfinished.unlink(missing_ok=True)

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        logger.warning("no native kernels, so that steps are slow: %s", problem)
        self.close()


def _outlook() -> str:
    """Whether a command's compiler goes on after it, which `outlive_parent` decides by the same lock."""
    try:
        path = library_path(COMMON).with_name("compiler.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "as an earlier command's compiler still does"
    except OSError as error:
        return f"for this command alone, since they cannot be kept ({error}): set XDG_CACHE_HOME"
    return "once, also after this command ends"


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
    compilation = Compilation(parts, may_outlive=False)
    try:
        library = compilation.wait()
    finally:
        compilation.close()
    if library is None:
        raise InternalError(f"the native kernels could not be compiled: {compilation.problem}")
    return library


def outlive_parent(parent_pid: int, die_with_parent: Callable[[int], None]) -> None:
    """Let this process, a compiler, run on when its parent ends, at the lowest priority from then on, and bounded.

    Where another such compiler is at work, or the folder takes no files, this one ends with its parent.
    """
    try:
        path = library_path(COMMON).with_name("compiler.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # until the end
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        die_with_parent(parent_pid)
        return
    signal.signal(signal.SIGUSR1, lambda *_: os.nice(19))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.nice(19)
    signal.alarm(OUTLIVING_S)
    resource.setrlimit(resource.RLIMIT_AS, (OUTLIVING_BYTES, OUTLIVING_BYTES))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first to go where memory runs out


_PR_SET_PDEATHSIG = 1


def _start_child(
    parts: Iterable[str], unkept: int, errors: IO[bytes], *, outlives: bool = False
) -> subprocess.Popen[bytes]:
    # Without the working folder, whose files may be called as any module; this package may have come from there.
    paths = os.pathsep.join((*(os.path.abspath(path) for path in sys.path if path), str(PACKAGE.parent)))
    numbers = map(str, (os.getpid(), HEAD_START_S, unkept, int(outlives)))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _COMPILE, *numbers, *parts],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        # numpy would start a thread a core, of which a compiler needs none, each with 40 MB of its address space.
        env={**os.environ, "PYTHONPATH": paths, "NUMBA_OPT": "0", "OPENBLAS_NUM_THREADS": "1"},
        pass_fds=[unkept],
        start_new_session=outlives,
    )


_COMPILE = """
import select
import sys
from aioengine.processes.own_side import die_with_parent
parent_pid, head_start_s, unkept, outlives, *parts = sys.argv[1:]
if outlives == "0":
    die_with_parent(int(parent_pid))
import msgspec
from aioengine.kernels.native.compilation import outlive_parent
from aioengine.kernels.native.library import compile_parts
if outlives == "1":
    outlive_parent(int(parent_pid), die_with_parent)
import aioengine.kernels.native.compiler
select.select([sys.stdin], [], [], float(head_start_s))  # until its other end is closed
with open(int(unkept), "wb") as file:
    file.write(msgspec.msgpack.encode(compile_parts(parts)))
"""
