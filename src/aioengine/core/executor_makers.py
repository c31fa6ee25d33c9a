"""Makers of executors, by name; the package's root fills the table, since executors stand on a higher floor."""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing: each import of the package imports this, see aioengine/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

EXECUTOR_MAKERS: dict[str, Callable[[], Any]] = {}
"""Each imports an executor's module, which may take a second, and returns the coroutine function that starts it with
a model's folder, the engine's config and ``on_progress``."""
