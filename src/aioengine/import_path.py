"""What users name by its place, ``module:attribute``, for a process that has it not at hand."""

from __future__ import annotations

import importlib
import operator
import re
from typing import Any

from aioengine.errors import ConfigError

PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"


def path_of(value: Any) -> str:
    """Where a class or a function is found again.

    Raises:
        ConfigError: it is local to a function.
    """
    path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', repr(value))}"
    if re.fullmatch(PATTERN, path) is None:
        raise ConfigError(f"{path} cannot be found by its name: define it at the top of a module")
    return path


def load(path: str, what: str) -> Any:
    """What ``module:attribute`` names.

    Args:
        what: names the setting in the error.
    Raises:
        ConfigError: there is no such thing, or its module cannot be imported.
    """
    module, _, attribute = path.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # a module of the user's own may raise anything
        raise ConfigError(
            f"{what}={path!r} cannot be imported in the engine's process: {type(error).__name__}: {error}"
        ) from error
