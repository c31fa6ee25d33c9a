"""Native kernels as object files, one a part: compiled by numba once a machine, loaded by LLVM in milliseconds.

Loading it takes neither numba nor its imports: the compiler alone imports `vectors` and the modules of kernels.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llvmlite import binding

from aioengine.kernels.cache_folder import cache_folder, keep
from aioengine.kernels.native.parts import ALL_PARTS, part_of

DIGEST_BYTES = 16

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1]
LAUNCHING = ("native_operations.py", "compilation.py", "team.py")
SOURCES = (
    *sorted(file for file in HERE.glob("*.py") if file.name not in LAUNCHING),
    *(HERE / name for name in ("../sample_rows.py", "../../sampling_params.py")),
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
        """The address of a kernel."""
        found = self._addresses.get(name)
        if found is None:
            found = self._addresses[name] = int(self._engines[part_of(name)].get_function_address(f"aioengine.{name}"))
            assert found, f"there is no native kernel {name}"
        return found


def target_machine() -> Any:
    """LLVM's target: this processor, with all its instructions."""
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
    """A digest of the sources, the compiler and the processor."""
    key = hashlib.blake2b(digest_size=16)
    for source in SOURCES:
        key.update(source.read_bytes())
    features = binding.get_host_cpu_features().flatten()
    key.update(repr((version("numba"), version("llvmlite"), binding.get_host_cpu_name(), features)).encode())
    return key.hexdigest()


def library_path(part: str) -> Path:
    """Where this machine's part of the library is kept.

    Raises:
        FileNotFoundError: there is no home directory.
    """
    return cache_folder() / f"kernels-{_cache_key()}-{part}.o"


def read_part(part: str) -> bytes | None:
    """The object file of a part; None: it is not there, or not whole, which LLVM would take without a look."""
    try:
        kept = library_path(part).read_bytes()
    except OSError:
        return None
    digest, code = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
    return code if digest == _digest(code) else None


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=DIGEST_BYTES).digest()


def find_library(parts: Iterable[str] = ALL_PARTS, unkept: dict[str, bytes] | None = None) -> Library | None:
    """The library, if these parts of it were compiled on this machine.

    Args:
        unkept: the return value of `compile_parts`.
    """
    codes: dict[str, bytes] = {}
    for part in parts:
        code = (unkept or {}).get(part) or read_part(part)
        if code is None:
            return None
        codes[part] = code
    return Library(codes)


def compile_parts(parts: Iterable[str]) -> dict[str, bytes]:
    """Compile what is missing, in this process, and keep it. Of several processes that ask for a part one compiles it.

    Returns:
        object files that could not be kept, by their parts; stderr has the reason.
    """
    from aioengine.kernels.native.compiler import compile_part

    gc.disable()  # what a compiler makes stays: a fifth of the time was spent looking through it
    unkept: dict[str, bytes] = {}
    for part in parts:
        code = b""
        try:
            path = library_path(part)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if read_part(part) is None:
                    code = compile_part(part, target_machine())
                    keep(path, _digest(code) + code)
        except OSError as error:
            print(error, file=sys.stderr)
            unkept[part] = code or compile_part(part, target_machine())
    return unkept
