"""Parametrisations of which `make check` takes a few values and `make nightly` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """The values as parameters of nightly tests: ``parametrize("depth", [1, *nightly(2), 4])``; a tuple is several."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly) for value in values
    ]


def seeds(count: int) -> list[Any]:
    """Seeds of a randomised test: one, and ``count`` with the nightly ones."""
    return [0, *nightly(*range(1, count))]


def few(values: Iterable[Any], of: Iterable[Any]) -> list[Any]:
    """These of all values as they are, and the others as `nightly` ones."""
    taken = list(values)
    return [*taken, *nightly(*(value for value in of if value not in taken))]
