"""Native kernels as one object file: compiled by numba once a machine, loaded by LLVM's linker in milliseconds.

Loading it takes neither numba nor its imports: `aioengine.kernels.native.kernels` is for the compiler alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llvmlite import binding

logger = logging.getLogger("aioengine")

HERE = Path(__file__).parent
SOURCES = (
    *sorted((HERE / "kernels").glob("*.py")),
    *(HERE / name for name in ("team.py", "../sampling/sample_rows.py", "../../sampling_params.py")),
)
"""The kernels, and what they take constants from."""


class Library:
    """The kernels of an object file, in this process."""

    def __init__(self, code: bytes) -> None:
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine())
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._addresses: dict[str, int] = {}

    def address(self, name: str) -> int:
        """Of a kernel."""
        found = self._addresses.get(name)
        if found is None:
            found = self._addresses[name] = int(self._engine.get_function_address(f"aioengine.{name}"))
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
def library_path() -> Path:
    """Where this machine's library is kept: its name depends on the sources, the compiler and the processor."""
    key = hashlib.blake2b(digest_size=16)
    for source in SOURCES:
        key.update(source.read_bytes())
    features = binding.get_host_cpu_features().flatten()
    key.update(repr((version("numba"), version("llvmlite"), binding.get_host_cpu_name(), features)).encode())
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "aioengine" / f"kernels-{key.hexdigest()}.o"


def find_library() -> Library | None:
    """The library, if it was compiled on this machine."""
    try:
        code = library_path().read_bytes()
    except OSError:
        return None
    return Library(code)


def compile_library() -> Library:
    """Compile it in this process, which takes a core for seconds, and keep it for the next one, where that can be.

    Of several processes that ask for it one compiles.
    """
    from aioengine.kernels.native.kernels.compiler import compile_all

    path = library_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = find_library()
            if found is not None:
                return found
            code = compile_all(target_machine())
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(code)
            os.replace(file.name, path)  # whole or not at all, whatever other processes do
    except OSError:  # a folder that cannot be written to
        code = compile_all(target_machine())
    return Library(code)


class Compilation:
    """The library, or a child process that compiles it while this one serves without it."""

    def __init__(self) -> None:
        self._is_over = False
        self._child: subprocess.Popen[bytes] | None = None
        if not library_path().exists():
            self._child = subprocess.Popen(
                [sys.executable, "-c", _COMPILE, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )

    def poll(self) -> Library | None:
        """The library, once, when it is there."""
        if self._is_over or (self._child is not None and self._child.poll() is None):
            return None
        self._is_over = True
        if self._child is not None:
            _, errors = self._child.communicate()
            if self._child.returncode:
                logger.warning("no native kernels, so that steps are slow: %s", errors.decode()[-1000:])
        return find_library()

    def close(self) -> None:
        """End the child, if it has not ended."""
        if self._child is not None and not self._is_over:
            self._is_over = True
            self._child.kill()
            self._child.communicate()


_COMPILE = """
import sys
from aioengine.transport.child import die_with_parent
die_with_parent(int(sys.argv[1]))
from aioengine.kernels.native.library import compile_library
compile_library()
"""
