"""A child process that compiles what is missing of the native kernels, while this one computes without them.

An engine in a program of the user's ends its compiler when it closes. A command of ours may end within seconds, so its
compiler outlives it (`own_process.COMPILER_OUTLIVES`): one at a time a cache, bounded in time and memory. Each part
is kept as soon as it is compiled, so that a compiler that is killed has not worked for nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from aioengine.errors import InternalError
from aioengine.kernels.native.kernels.parts import ALL_PARTS, COMMON, compile_seconds
from aioengine.kernels.native.library import PACKAGE, Library, find_library, library_path, read_part
from aioengine.own_process import COMPILER_OUTLIVES

logger = logging.getLogger("aioengine")

NOT_WRITTEN = os.EX_CANTCREAT
"""The compiling child's exit status where the system refused it something, such as a file."""

MESSAGE_BYTES, MESSAGE_LINES = 4000, 10
"""The most that is said of what a child has written before it failed."""

HEAD_START_S = 5.0
"""How long a compiler that has its modules leaves the cores to an engine that starts, unless `begin` comes
before. On two cores of Zen 4, with an empty cache, the first token of Qwen3-0.6B came 6.3 s after the program began
with both at once, and comes after 3.5; with int8 8.7 and 4.2."""

OUTLIVING_S, OUTLIVING_BYTES = 1800, 4 * 2**30
"""Most wall-clock seconds and address space of a compiler that may outlive its parent; it takes a minute of a core and
0.9 GB for all parts."""


class Compilation:
    """The library, or a child process that compiles it while this one serves without it.

    With `COMPILER_OUTLIVES` in the environment `close` leaves the child alone; while the compiler of another command is
    at work it waits.

    Where the user's folder cannot be written to, which may show when the child tries, it compiles into one that goes
    with this object.

    Args:
        parts: of the library.
        may_outlive: False: the environment does not count.

    Attributes:
        problem: why there is no library.
    """

    def __init__(self, parts: Iterable[str], *, may_outlive: bool = True) -> None:
        self._parts = tuple(parts)
        self._has_begun = False
        self._begins_at_s = 0.0
        self._is_over = False
        self._child: subprocess.Popen[bytes] | None = None
        self._cache_home: str | None = None
        self._errors: IO[bytes] = io.BytesIO()
        self._outlives = False
        self.problem = ""
        if missing := [part for part in self._parts if read_part(part) is None]:
            why_not_kept = _why_not_kept()
            self._outlives = may_outlive and bool(os.environ.get(COMPILER_OUTLIVES)) and why_not_kept is None
            if self._outlives:
                logger.warning(
                    "compiling kernels for this CPU in the background, about %d s, once; until then plain torch "
                    "computes, slower and rounded otherwise: a seed may give another text then",
                    compile_seconds(missing),
                )
            else:
                logger.info("compiling native kernels beside this program, once a machine; until then steps are slow")
            self._start(why_not_kept)

    def begin(self) -> None:
        """Let the child compile from now on. Idempotent."""
        if not self._has_begun:
            self._has_begun = True
            self._let_child_begin()

    def _let_child_begin(self) -> None:
        """Close the pipe that it waits on."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()

    @property
    def is_running(self) -> bool:
        """Whether the child takes a core, or is about to: begun or by itself."""
        if self._child is None or self._is_over:
            return False
        return self._has_begun or time.monotonic() >= self._begins_at_s

    def poll(self) -> Library | None:
        """The library, once, when it is there."""
        if self._is_over or (self._child is not None and self._child.poll() is None):
            return None
        if self._child is not None and self._child.returncode == NOT_WRITTEN and self._cache_home is None:
            self.begin()  # no second head start, and the first child's pipe is closed
            self._outlives = False
            self._start(self._last_words())
            return None
        library = find_library(self._parts, self._cache_home)
        if library is None:
            self._give_up(self._last_words())
        elif self._child is not None:
            logger.info("native kernels are compiled")
        self.close()
        return library

    def wait(self) -> Library | None:
        """The library, once, as soon as it is there."""
        self.begin()
        library = None
        while library is None and not self._is_over:
            if self._child is not None:
                self._child.wait()
            library = self.poll()
        return library

    def _start(self, why_not_kept: str | None) -> None:
        try:
            if why_not_kept is not None:
                logger.warning("native kernels are not kept, but compiled for this engine alone: %s", why_not_kept)
                self._cache_home = tempfile.mkdtemp(prefix="aioengine-")
            self._errors.close()
            # In memory: a pipe would hold up a child that writes much, and a folder for a file might not be there.
            self._errors = io.FileIO(os.memfd_create("aioengine-compiler"), "r+")
            self._child = _start_child(self._parts, self._cache_home, self._errors, outlives=self._outlives)
            self._begins_at_s = time.monotonic() + HEAD_START_S
            if self._has_begun:
                self._let_child_begin()
        except (OSError, AttributeError) as error:  # no room for a folder or a process, or a system without memfd
            self._give_up(str(error))

    def _last_words(self) -> str:
        """The last lines that the child has written."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - MESSAGE_BYTES))
        return "\n".join(self._errors.read().decode(errors="replace").splitlines()[-MESSAGE_LINES:])

    def close(self) -> None:
        """End the child, unless it may outlive this process, and remove what it leaves behind. Idempotent."""
        self._is_over = True
        self._errors.close()
        if self._child is not None:
            self._let_child_begin()
            if self._outlives:
                self._child.poll()
                self._child.returncode = self._child.returncode or 0  # or its end would be waited for, with a warning
                return
            self._child.kill()
            self._child.wait()
            for unfinished in library_path(COMMON, self._cache_home).parent.glob(f"*.{self._child.pid}"):
                unfinished.unlink(missing_ok=True)
        if self._cache_home is not None:
            shutil.rmtree(self._cache_home, ignore_errors=True)

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        logger.warning("no native kernels, so that steps are slow: %s", problem)
        self.close()


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


def _why_not_kept() -> str | None:
    """What is wrong with the folder of the library, as far as that can be seen."""
    try:
        folder = library_path(COMMON).parent
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


def outlive_parent(parent_pid: int, die_with_parent: Callable[[int], None]) -> None:
    """Let this process, a compiler, run on when its parent ends, at the lowest priority from then on, and bounded.

    Where another such compiler is at work it waits for that one's end, and ends with its parent until then.

    Raises:
        OSError: the folder cannot be written to.
    """
    lock = os.open(library_path(COMMON).with_name("compiler.lock"), os.O_RDWR | os.O_CREAT, 0o600)  # until the end
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        die_with_parent(parent_pid)
        fcntl.flock(lock, fcntl.LOCK_EX)
    signal.signal(signal.SIGUSR1, lambda *_: os.nice(19))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.nice(19)
    signal.alarm(OUTLIVING_S)
    resource.setrlimit(resource.RLIMIT_AS, (OUTLIVING_BYTES, OUTLIVING_BYTES))
    Path("/proc/self/oom_score_adj").write_text("1000")  # the first to go where memory runs out


_PR_SET_PDEATHSIG = 1


def _start_child(
    parts: Iterable[str], cache_home: str | None, errors: IO[bytes], *, outlives: bool = False
) -> subprocess.Popen[bytes]:
    # Without the working folder, whose files may be called as any module; this package may have come from there.
    paths = os.pathsep.join((*(os.path.abspath(path) for path in sys.path if path), str(PACKAGE.parent)))
    # numpy would start a thread a core, of which a compiler needs none, each with 40 MB of its address space.
    environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_OPT": "0", "OPENBLAS_NUM_THREADS": "1"}
    if cache_home is not None:
        environment["XDG_CACHE_HOME"] = cache_home
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _COMPILE, str(os.getpid()), str(HEAD_START_S), str(int(outlives)), *parts],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=environment,
        start_new_session=outlives,
    )


_COMPILE = """
import select
import sys
from aioengine.transport.child import die_with_parent
parent_pid, head_start_s, outlives = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "1"
if not outlives:
    die_with_parent(parent_pid)
from aioengine.kernels.native.compilation import NOT_WRITTEN, outlive_parent
from aioengine.kernels.native.library import compile_parts
try:
    if outlives:
        outlive_parent(parent_pid, die_with_parent)
    import aioengine.kernels.native.kernels.compiler
    select.select([sys.stdin], [], [], head_start_s)  # until its other end is closed
    compile_parts(sys.argv[4:])
except OSError as error:
    sys.stderr.write(str(error))
    sys.exit(NOT_WRITTEN)
"""
