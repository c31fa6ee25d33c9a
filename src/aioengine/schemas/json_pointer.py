"""References inside a JSON document: ``#/…`` (RFC 6901)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MAX_REFERENCES = 32
"""References that lead to one another; more are taken for a circle."""


def referred(root: Any, reference: Any) -> Any:
    """The target of a reference inside ``root``; None where there is none."""
    if not isinstance(reference, str) or reference[:1] != "#" or reference[1:2] not in ("", "/"):
        return None
    found = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema that one refers to inside ``root``; keywords beside the reference replace its own."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(target := referred(root, schema.get("$ref")), dict):
            break
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema if isinstance(schema, dict) else {}
