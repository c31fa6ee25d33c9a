"""The API as an OpenAPI 3.1 document, made of its routes and the structs of their bodies; and as a page for people."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

import msgspec

import aioengine
from aioengine.server.config import ServerConfig
from aioengine.server.exchange import Response
from aioengine.server.metrics import OPEN_PATHS
from aioengine.server.page import page_of
from aioengine.server.schema import Body, integer_fields

REF = "#/components/schemas/"
RAW_TYPES: dict[str, Any] = {
    "input": str | list[dict[str, Any]],
    "instructions": str | None,
    "messages": list[dict[str, Any]],
    "prompt": str | list[str | int | list[int]],
    "system": str | list[dict[str, Any]] | None,
    "tokens": list[int],
    "tools": list[dict[str, Any]] | None,
}
"""The types of fields that are decoded apart from their bodies, by name."""
NEEDED = ("input", "messages", "prompt", "tokens")
TEXT = {"type": ["string", "null"]}
ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {"type": "object", "properties": dict.fromkeys(("message", "type", "param", "code"), TEXT)}
    },
}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


def make_document(routes: Iterable[tuple[str, str, type[Body] | None]], config: ServerConfig) -> dict[str, Any]:
    """The document.

    Args:
        routes: method, path and body of each.
    """
    routes = list(routes)
    paths: dict[str, Any] = {}
    for method, path, body in routes:
        error = {"description": "refused or failed", "content": _json_of("Error")}
        operation: dict[str, Any] = {
            "operationId": "_".join(re.findall(r"\w+", f"{method.lower()} {path}")),
            "responses": {"200": {"description": "done"}, "default": error},
        }
        if "{id}" in path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        if body is not None:
            operation["requestBody"] = {"required": True, "content": _json_of(body.__name__)}
        if config.api_keys and path not in OPEN_PATHS:
            operation["security"] = [{name: []} for name in KEYS]
        paths.setdefault(path, {})[method.lower()] = operation
    bodies = [_shown(body) for body in dict.fromkeys(body for _, _, body in routes if body is not None)]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=f"{REF}{{name}}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "aioengine", "version": aioengine.__version__},
        "servers": [{"url": config.root_path or "."}],  # relative to where the document is, also under a mount
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": ERROR}, "securitySchemes": KEYS},
    }


def _json_of(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"{REF}{name}"}}}


def _shown(body: type[Body]) -> type[msgspec.Struct]:
    """A body with the types of all its fields, also of those that are decoded apart."""
    needed = [name for name in NEEDED if name in body.__struct_fields__]
    types = {field.name: field.type for field in msgspec.structs.fields(body)}
    types |= dict.fromkeys(integer_fields(body), int | None)
    types |= {name: RAW_TYPES[name] for name, kind in types.items() if kind is msgspec.Raw}
    # Of several needed ones one is to be given.
    fields = [(name, kind) if [name] == needed else (name, kind, None) for name, kind in types.items()]
    return msgspec.defstruct(body.__name__, fields, kw_only=True)


def make_page(document: dict[str, Any]) -> Response:
    """The document for people: each path, and the schema of its body; it has no script."""
    parts = [f"<h1>aioengine {document['info']['version']}</h1><p><a href=openapi.json>openapi.json</a></p>"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<details><summary><code>{method.upper()} {html.escape(path)}</code></summary>")
            for media in operation.get("requestBody", {"content": {}})["content"].values():
                schema = document["components"]["schemas"][media["schema"]["$ref"].removeprefix(REF)]
                shown = msgspec.json.format(msgspec.json.encode(schema), indent=1).decode()
                parts.append(f"<pre>{html.escape(shown)}</pre>")
            parts.append("</details>")
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>aioengine</title><style>'
    return page_of(f"{head}body{{font:16px sans-serif;margin:2em}}</style>{''.join(parts)}".encode())
