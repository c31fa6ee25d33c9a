"""Compiling the native kernels into one object file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numba
from llvmlite import binding

MODULES = ("threads", "linear", "layers", "attend_decode", "attend_prefill", "rows", "sampling", "rules")

_kernels: dict[str, Any] = {}


def kernel(signature: str = "void(int64, int64, int64)", *, name: str = "") -> Callable[[Any], Any]:
    """A function of the library, compiled by numba; it must raise nothing and make no arrays.

    Args:
        signature: of a kernel that records name: the address of its arguments, the chunk, the thread.
        name: absent: the function's.
    """

    def define(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(
            signature, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy"
        )(function)
        _kernels[name or function.__name__] = compiled
        return compiled

    return define


inlined = numba.njit(nogil=True, error_model="numpy")
"""A function that kernels call; LLVM puts small ones in place."""


def compile_all(machine: Any) -> bytes:
    """Compile the kernels of all modules; seconds. They are called as in Python, with "aioengine." before.

    Args:
        machine: LLVM's target machine.
    """
    for module in MODULES:
        import_module(f"{__package__}.{module}")
    whole = binding.parse_assembly("")
    for name, function in _kernels.items():
        (compiled,) = function.overloads.values()
        text = compiled.library.get_llvm_str().replace(compiled.fndesc.llvm_func_name, f"aioengine.{name}")
        whole.link_in(binding.parse_assembly(text))
    code: bytes = machine.emit_object(whole)
    return code
