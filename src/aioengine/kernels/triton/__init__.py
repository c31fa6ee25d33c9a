"""The operations that a GPU computes by Triton kernels, an operation a file.

Each kernel replaces the plain torch form of its operation, which `replaces` names. Small operations have none: plain
torch computes them on the device, and a CUDA graph records that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cache
from importlib import import_module
from inspect import isfunction
from pkgutil import iter_modules
from typing import Any, Concatenate, ParamSpec, TypeVar

from aioengine.kernels.operations import Operations

P = ParamSpec("P")
R = TypeVar("R")
Launcher = Callable[..., Any]


def replaces(operation: Callable[Concatenate[Operations, P], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a launcher that computes an operation by Triton: ``@replaces(Operations.rms_norm)``.

    Type checkers hold the launcher to the operation's arguments and result.
    """

    def define(launcher: Callable[P, R]) -> Callable[P, R]:
        launcher.operation = operation.__name__  # type: ignore[attr-defined]
        return launcher

    return define


@cache
def find_launchers(modules: Iterable[str] = ()) -> dict[str, Launcher]:
    """The launchers of this package, and of other modules, by their operations; a later one replaces an earlier one."""
    ours = (f"{__name__}.{module.name}" for module in iter_modules(__path__))
    found: dict[str, Launcher] = {}
    for module in (*ours, *modules):
        for launcher in vars(import_module(module)).values():
            if isfunction(launcher) and hasattr(launcher, "operation") and launcher.__module__ == module:
                found[launcher.operation] = launcher
    return found


def triton_operations(faulty: Collection[str] = (), modules: tuple[str, ...] = ()) -> Operations:
    """The operations of a GPU.

    Args:
        faulty: operations whose kernels are left out; plain torch computes them.
        modules: other modules that have launchers.
    """
    operations = Operations()
    for name, launcher in find_launchers(modules).items():
        if name not in faulty:
            setattr(operations, name, launcher)
    return operations
