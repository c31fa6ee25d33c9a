"""Compiling the native kernels into object files."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numba
from llvmlite import binding
from numba.core import cgutils, compiler
from numba.core.codegen import CodeLibrary

from aioengine.kernels.native.parts import part_of

MODULES = (
    *("team_kernels", "linear_kernels", "coded_kernels", "expert_kernels", "layer_kernels"),
    *("decode_kernels", "prefill_kernels", "row_kernels", "draw_kernels", "rule_kernels"),
)

_kernels: dict[str, tuple[Any, str]] = {}


class _Module(CodeLibrary):
    """A function as LLVM's text, and the libraries of what it calls.

    Numba would link each function with all that it calls and make machine code of that, which took 40 % of its time: it
    is needed but once, of a whole part.
    """

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.text = ""
        self.called: list[Any] = []

    def add_ir_module(self, ir_module: Any) -> None:
        self.text = cgutils.normalize_ir_text(str(ir_module))

    def add_linking_library(self, library: Any) -> None:
        self.called.append(library)

    def finalize(self) -> None:
        self._finalized = True

    def get_llvm_str(self) -> str:
        return self.text

    def get_asm_str(self) -> str:
        raise NotImplementedError

    def get_function(self, name: str) -> Any:
        raise NotImplementedError

    def get_pointer_to_function(self, name: str) -> int:
        """There is no wrapper for Python."""
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Functions need it to raise, which none does."""


class _Compiler(compiler.Compiler):
    """Numba's, into a `_Module`."""

    def define_pipelines(self) -> Any:
        self.state.library = _Module(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()


_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _Compiler,
}


def kernel(signature: str = "void(int64, int64, int64)", *, name: str = "") -> Callable[[Any], Any]:
    """A function of the library, compiled by numba when its part is; it must raise nothing and make no arrays.

    Args:
        signature: of a kernel that records name: the address of its arguments, the chunk, the thread.
        name: absent: the function's. It says which part the kernel is in, see `part_of`.
    """

    def define(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(**_OPTIONS)(function)
        _kernels[name or function.__name__] = compiled, signature
        return compiled

    return define


inlined = numba.njit(**_OPTIONS)
"""A function that kernels call; LLVM puts small ones in place."""


def compile_part(part: str, machine: Any) -> bytes:
    """Compile the kernels of a part into an object file; seconds. They are called as in Python, with "aioengine."
    before. LLVM optimises them once, all together.

    Args:
        machine: LLVM's target machine.
    """
    for module in MODULES:
        import_module(f"{__package__}.{module}")
    whole = _link_part(part)
    for function in whole.functions:
        if not function.is_declaration and not function.name.startswith("aioengine."):
            function.linkage = "internal"  # need not be kept once it is in place
    tuning = binding.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = True
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(whole, passes)
    code: bytes = machine.emit_object(whole)
    return code


def _link_part(part: str) -> Any:
    """LLVM's module of a part's kernels and of all that they call."""
    whole, to_link, linked = binding.parse_assembly(""), [], set()
    for name, (function, signature) in _kernels.items():
        if part_of(name) == part:
            function.compile(signature)
            (compiled,) = function.overloads.values()
            text = compiled.library.text.replace(compiled.fndesc.llvm_func_name, f"aioengine.{name}")
            whole.link_in(binding.parse_assembly(text))
            to_link.extend(compiled.library.called)
    while to_link:
        library = to_link.pop()
        if library in linked:
            continue
        linked.add(library)
        if isinstance(library, _Module):
            whole.link_in(binding.parse_assembly(library.text))
            to_link.extend(library.called)
        else:  # numba's own, which is used by others, too
            whole.link_in(library._get_module_for_linking(), preserve=True)
    return whole
