"""Native kernels as one object file: compiled by numba once a machine, loaded by LLVM's linker in milliseconds.

Loading it takes neither numba nor its imports: `aioengine.kernels.native.kernels` is for the compiler alone.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llvmlite import binding

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
    """Compile it in this process, which takes a core for seconds, and keep it for the next one, where that can be."""
    from aioengine.kernels.native.kernels.compiler import compile_all

    code = compile_all(target_machine())
    path = library_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)  # whole or not at all, whatever other processes do
    except OSError:
        pass
    return Library(code)
