"""Compiling the native kernels into object files."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numba
from llvmlite import binding

from aioengine.kernels.native.kernels.parts import part_of

MODULES = ("threads", "linear", "layers", "attend_decode", "attend_prefill", "rows", "sampling", "rules")

_OPTIONS = {"nogil": True, "error_model": "numpy"}

_kernels: dict[str, tuple[Any, str]] = {}


def kernel(signature: str = "void(int64, int64, int64)", *, name: str = "") -> Callable[[Any], Any]:
    """A function of the library, compiled by numba when its part is; it must raise nothing and make no arrays.

    Args:
        signature: of a kernel that records name: the address of its arguments, the chunk, the thread.
        name: absent: the function's. It says which part the kernel is in, see `part_of`.
    """

    def define(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)
        _kernels[name or function.__name__] = compiled, signature
        return compiled

    return define


inlined = numba.njit(**_OPTIONS)
"""A function that kernels call; LLVM puts small ones in place."""


def compile_part(part: str, machine: Any) -> bytes:
    """Compile the kernels of a part into an object file; seconds. They are called as in Python, with "aioengine."
    before.

    LLVM optimises them once, all together: with ``NUMBA_OPT=0`` numba does not do it before, which is as fast when run,
    and takes a third less time.

    Args:
        machine: LLVM's target machine.
    """
    for module in MODULES:
        import_module(f"{__package__}.{module}")
    whole = binding.parse_assembly("")
    for name, (function, signature) in _kernels.items():
        if part_of(name) == part:
            function.compile(signature)
            (compiled,) = function.overloads.values()
            text = compiled.library.get_llvm_str().replace(compiled.fndesc.llvm_func_name, f"aioengine.{name}")
            whole.link_in(binding.parse_assembly(text))
    for function in whole.functions:
        if not function.is_declaration and not function.name.startswith("aioengine."):
            function.linkage = "internal"  # need not be kept once it is in place
    tuning = binding.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = True
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(whole, passes)
    code: bytes = machine.emit_object(whole)
    return code
