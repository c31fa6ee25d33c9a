"""Makers of other packages' clients over an engine, by name; the package's root fills the table."""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing: each import of the package imports this, see aioengine/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CLIENT_MAKERS: dict[str, Callable[..., Any]] = {}
"""Each is called with an `Engine` or an `LLM`, and with the client's options."""
