"""The kernels together, and the oracles together, are the operations of the protocol."""

import ast
import inspect
import os
from pathlib import Path
from types import ModuleType

import pytest

from aioengine.kernels import triton_operations
from aioengine.kernels.operations import Operations
from aioengine.kernels.torch import operations as reference

OPERATIONS = [name for name in vars(Operations) if not name.startswith("_")]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("module", [triton_operations, reference], ids=["kernels", "oracles"])
def test_each_operation_is_there_with_its_arguments(module: ModuleType, name: str) -> None:
    wanted = list(inspect.signature(getattr(Operations, name)).parameters.values())[1:]
    found = list(inspect.signature(getattr(module, name)).parameters.values())
    assert [(p.name, p.kind, p.default, p.annotation) for p in found] == [
        (p.name, p.kind, p.default, p.annotation) for p in wanted
    ]


def test_they_give_nothing_else() -> None:
    assert sorted(triton_operations.__all__) == sorted([*OPERATIONS, "TUNABLE", "specimens"])
    assert sorted(reference.__all__) == sorted(OPERATIONS)


def test_specimens_say_all_that_a_compiler_asks() -> None:
    specimens = list(triton_operations.specimens())
    names = [specimen.name for specimen in specimens]
    assert len(set(names)) == len(names)
    for specimen in specimens:
        arguments = inspect.signature(specimen.kernel.fn).parameters
        assert set(specimen.signature) == set(arguments), specimen.name
        constants = {name for name, kind in specimen.signature.items() if kind == "constexpr"}
        assert set(specimen.constants) == constants, specimen.name
        assert specimen.min_capability in (80, 89, 90), specimen.name


def test_the_interpreter_has_nothing_to_choose() -> None:
    assert (triton_operations.TUNABLE is None) == bool(os.environ.get("TRITON_INTERPRET"))


def test_every_launch_says_whether_products_and_sums_may_be_fused() -> None:
    """As its specimen does: Triton 3.9 warns where a launch does not, and 3.10 changes what that means."""
    said: dict[str, set[bool]] = {}
    for file in Path(triton_operations.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if name.endswith("_kernel"):
                    keywords = {each.arg: each.value for each in call.keywords}
                    said.setdefault(name, set()).add(ast.literal_eval(keywords["enable_fp_fusion"]))
    compiled: dict[str, set[bool]] = {}
    for specimen in triton_operations.specimens():
        compiled.setdefault(specimen.kernel.__name__, set()).add(specimen.enable_fp_fusion)
    assert said == compiled
