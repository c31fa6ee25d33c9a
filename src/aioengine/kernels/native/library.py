"""Native kernels as object files, one a part: compiled by numba once a machine, loaded by LLVM in milliseconds.

Loading it takes neither numba nor its imports: `aioengine.kernels.native.kernels` is for the compiler alone.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from llvmlite import binding

from aioengine.errors import InternalError
from aioengine.kernels.native.kernels.parts import ALL_PARTS, COMMON, part_of

logger = logging.getLogger("aioengine")

DIGEST_BYTES = 16

NOT_WRITTEN = os.EX_CANTCREAT
"""The compiling child's exit status where the system refused it something, such as a file."""

MESSAGE_BYTES, MESSAGE_LINES = 4000, 10
"""The most that is said of what a child has written before it failed."""

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1]
SOURCES = (
    *sorted((HERE / "kernels").glob("*.py")),
    *(HERE / name for name in ("library.py", "../sampling/sample_rows.py", "../../sampling_params.py")),
)
"""The kernels, what they take constants from, and what the files look like."""


class Library:
    """The kernels of object files, in this process.

    Args:
        codes: object files, by their parts.
    """

    def __init__(self, codes: dict[str, bytes]) -> None:
        # An engine each: LLVM's linker takes an object's offsets from the first table of offsets that it finds.
        self._engines = {
            part: binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine()) for part in codes
        }
        for part, engine in self._engines.items():
            engine.add_object_file(binding.ObjectFileRef.from_data(codes[part]))
            engine.finalize_object()
        self._addresses: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        """Whether it has the part that a kernel is in."""
        return part_of(name) in self._engines

    def address(self, name: str) -> int:
        """Of a kernel."""
        found = self._addresses.get(name)
        if found is None:
            found = self._addresses[name] = int(self._engines[part_of(name)].get_function_address(f"aioengine.{name}"))
            assert found, f"there is no native kernel {name}"
        return found


def target_machine() -> Any:
    """What LLVM makes code for: this processor, with all its instructions."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        jit=True,
    )


@cache
def _cache_key() -> str:
    """Of the sources, the compiler and the processor."""
    key = hashlib.blake2b(digest_size=16)
    for source in SOURCES:
        key.update(source.read_bytes())
    features = binding.get_host_cpu_features().flatten()
    key.update(repr((version("numba"), version("llvmlite"), binding.get_host_cpu_name(), features)).encode())
    return key.hexdigest()


def library_path(part: str, cache_home: str | None = None) -> Path:
    """Where this machine's part of the library is kept.

    Args:
        cache_home: absent: the user's.
    Raises:
        FileNotFoundError: there is no home directory.
    """
    cache_home = cache_home or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache_home.startswith("~"):
        raise FileNotFoundError("there is no home directory to keep native kernels in; set XDG_CACHE_HOME")
    return Path(cache_home) / "aioengine" / f"kernels-{_cache_key()}-{part}.o"


def read_part(part: str, cache_home: str | None = None) -> bytes | None:
    """The object file of a part; None: it is not there, or not whole, which LLVM would take without a look."""
    try:
        kept = library_path(part, cache_home).read_bytes()
    except OSError:
        return None
    digest, code = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
    return code if digest == _digest(code) else None


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=DIGEST_BYTES).digest()


def find_library(parts: Iterable[str] = ALL_PARTS, cache_home: str | None = None) -> Library | None:
    """The library, if these parts of it were compiled on this machine."""
    codes: dict[str, bytes] = {}
    for part in parts:
        code = read_part(part, cache_home)
        if code is None:
            return None
        codes[part] = code
    return Library(codes)


def compile_library(parts: Iterable[str] = ALL_PARTS) -> Library:
    """The library, once a child process has compiled what is missing of it, which takes a core for seconds.

    Raises:
        InternalError: it could not be compiled.
    """
    compilation = Compilation(parts)
    try:
        library = compilation.wait()
    finally:
        compilation.close()
    if library is None:
        raise InternalError(f"the native kernels could not be compiled: {compilation.problem}")
    return library


def compile_parts(parts: Iterable[str]) -> None:
    """Compile what is missing, in this process, and keep it. Of several processes that ask for a part one compiles it.

    Raises:
        OSError: the folder cannot be written to.
    """
    from aioengine.kernels.native.kernels.compiler import compile_part

    gc.disable()  # what a compiler makes stays: a fifth of the time was spent looking through it
    for part in parts:
        path = library_path(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if read_part(part) is not None:
                continue
            code = compile_part(part, target_machine())
            unfinished = path.with_suffix(f".{os.getpid()}")
            try:
                unfinished.write_bytes(_digest(code) + code)
                os.replace(unfinished, path)  # whole or not at all, whatever other processes do
            finally:
                unfinished.unlink(missing_ok=True)


HEAD_START_S = 5.0
"""How long a compiler that has its modules leaves the cores to an engine that starts, unless it is told to `begin`
before. On two cores of Zen 4, with an empty cache, the first token of Qwen3-0.6B came 6.3 s after the program began
with both at once, and comes after 3.5; with int8 8.7 and 4.2."""


class Compilation:
    """The library, or a child process that compiles it while this one serves without it.

    Where the user's folder cannot be written to, which may show when the child tries, it compiles into one that goes
    with this object.

    Args:
        parts: of the library.

    Attributes:
        problem: why there is no library.
    """

    def __init__(self, parts: Iterable[str]) -> None:
        self._parts = tuple(parts)
        self._has_begun = False
        self._begins_at_s = 0.0
        self._is_over = False
        self._child: subprocess.Popen[bytes] | None = None
        self._cache_home: str | None = None
        self._errors: IO[bytes] = io.BytesIO()
        self.problem = ""
        if any(read_part(part) is None for part in self._parts):
            logger.info("compiling native kernels beside this program, once a machine; until then steps are slow")
            self._start(_why_not_kept())

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
            self._child = _start_child(self._parts, self._cache_home, self._errors)
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
        """End the child, if it has not ended, and remove what it leaves behind. Idempotent."""
        self._is_over = True
        self._errors.close()
        if self._child is not None:
            self._let_child_begin()
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


def _why_not_kept() -> str | None:
    """What is wrong with the folder of the library, as far as that can be seen."""
    try:
        folder = library_path(COMMON).parent
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


def _start_child(parts: Iterable[str], cache_home: str | None, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # Without the working folder, whose files may be called as any module; this package may have come from there.
    paths = os.pathsep.join((*(path for path in sys.path if path), str(PACKAGE.parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_OPT": "0"}
    if cache_home is not None:
        environment["XDG_CACHE_HOME"] = cache_home
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _COMPILE, str(os.getpid()), str(HEAD_START_S), *parts],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=environment,
    )


_COMPILE = """
import select
import sys
from aioengine.transport.child import die_with_parent
die_with_parent(int(sys.argv[1]))
import aioengine.kernels.native.kernels.compiler
from aioengine.kernels.native.library import NOT_WRITTEN, compile_parts
select.select([sys.stdin], [], [], float(sys.argv[2]))  # until its other end is closed
try:
    compile_parts(sys.argv[3:])
except OSError as error:
    sys.stderr.write(str(error))
    sys.exit(NOT_WRITTEN)
"""
