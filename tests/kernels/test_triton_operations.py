"""The kernels together: each replaces an operation, and says how it is compiled."""

import ast
import inspect
from pathlib import Path

from kernels.harness import KERNELS, OPERATIONS, triton

import aioengine.kernels.triton as package
from aioengine.kernels.operations import Operations, plain_torch
from aioengine.kernels.triton import find_launchers, triton_operations


def test_each_launcher_has_the_arguments_of_its_operation() -> None:
    def described(function: object) -> list[tuple[object, ...]]:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [(p.name, p.kind, p.default, p.annotation) for p in parameters]

    for name, launcher in find_launchers().items():
        assert described(launcher) == described(getattr(Operations, name))[1:], name
        assert getattr(triton, name) is launcher


def test_plain_torch_computes_what_has_no_kernel_or_a_faulty_one() -> None:
    some = triton_operations(faulty={"rms_norm"})
    for name in OPERATIONS:
        if name == "rms_norm" or name not in find_launchers():
            assert getattr(some, name).__func__ is getattr(plain_torch, name).__func__
        else:
            assert getattr(some, name) is find_launchers()[name]


def test_every_launch_says_whether_products_and_sums_may_be_fused() -> None:
    """Triton 3.9 warns where a launch does not, and 3.10 changes what that means."""
    said: dict[str, set[bool]] = {}
    for file in Path(package.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if name.endswith("_kernel"):
                    keywords = {each.arg: each.value for each in call.keywords}
                    said.setdefault(name, set()).add(ast.literal_eval(keywords["enable_fp_fusion"]))
    assert said.keys() == KERNELS
    assert {name for name, fused in said.items() if fused != {True}} == {"_apply_kernel"}
