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
    schemas = _schemas(body for _, _, body in routes if body is not None) | {"Error": ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "aioengine", "version": aioengine.__version__},
        "servers": [{"url": config.root_path or "."}],  # relative to where the document is, also under a mount
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": KEYS},
    }


def _json_of(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"{REF}{name}"}}}


def _schemas(bodies: Iterable[type[Body]]) -> dict[str, Any]:
    types = {
        (body, field.name): int | None
        if field.name in integer_fields(body)
        else RAW_TYPES.get(field.name, field.type)
        if field.type is msgspec.Raw
        else field.type
        for body in dict.fromkeys(bodies)
        for field in msgspec.structs.fields(body)
    }
    made, schemas = msgspec.json.schema_components(types.values(), ref_template=f"{REF}{{name}}")
    for (body, name), schema in zip(types, made, strict=True):
        needed = [name for name in NEEDED if name in body.__struct_fields__]
        # Of several one is to be given.
        fresh = {"type": "object", "properties": {}, "required": needed if len(needed) == 1 else []}
        schemas.setdefault(body.__name__, fresh)["properties"][name] = schema
    return schemas


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
