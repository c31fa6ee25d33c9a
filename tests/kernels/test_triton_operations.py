"""The kernels together, and the oracles together, are the operations of the protocol."""

import ast
import inspect
import os
from pathlib import Path
from types import ModuleType

from kernels.harness import BOTH, OPERATIONS

from aioengine.kernels import triton_operations
from aioengine.kernels.operations import Operations


@BOTH
def test_the_operations_are_there_with_their_arguments_and_nothing_else(ops: ModuleType) -> None:
    def described(function: object) -> list[tuple[object, ...]]:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [(p.name, p.kind, p.default, p.annotation) for p in parameters]

    for name in OPERATIONS:
        assert described(getattr(ops, name)) == described(getattr(Operations, name))[1:], name
    assert {name for name, value in vars(ops).items() if inspect.isfunction(value)} == set(OPERATIONS)


def test_the_interpreter_has_nothing_to_choose() -> None:
    assert bool(os.environ.get("TRITON_INTERPRET")) != triton_operations.IS_TUNABLE


def test_every_launch_says_whether_products_and_sums_may_be_fused() -> None:
    """Triton 3.9 warns where a launch does not, and 3.10 changes what that means."""
    said: dict[str, set[bool]] = {}
    for file in Path(triton_operations.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if name.endswith("_kernel"):
                    keywords = {each.arg: each.value for each in call.keywords}
                    said.setdefault(name, set()).add(ast.literal_eval(keywords["enable_fp_fusion"]))
    assert {name for name, fused in said.items() if fused != {True}} == {"_apply_kernel"}
