"""The kernels together, and the oracles together, are the operations of the protocol."""

import inspect
from types import ModuleType

import pytest

from aioengine.kernels import reference, triton_operations
from aioengine.kernels.operations import Operations

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
    assert sorted(triton_operations.__all__) == sorted([*OPERATIONS, "specimens"])
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
        assert specimen.min_capability in (80, 90), specimen.name
