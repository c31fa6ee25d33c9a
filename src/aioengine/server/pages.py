"""Answers that are the same for all: the built-in page, the API as an OpenAPI 3.1 document, other servers' paths."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from importlib import resources
from typing import Any

import msgspec

import aioengine
from aioengine.server.config import ServerConfig
from aioengine.server.exchange import Response
from aioengine.server.record import OPEN_PATHS
from aioengine.server.schema import Body, integer_fields


def page_of(data: bytes) -> Response:
    """An HTML page, with the headers that keep everything else out of it.

    Only its own script and style run, and they reach only the server that it came from. A model's texts may hold
    anything. The page puts them in as text; should it ever forget to, the trusted types make the browser refuse.
    """

    def hashes(tag: bytes) -> str:
        """The texts between each ``<tag …>`` and its end, as CSP sources (W3C CSP 3, section 6.7.3.3)."""
        texts: list[bytes] = re.findall(rb"<%b\b[^>]*>(.*?)</%b>" % (tag, tag), data, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts)

    policy = {
        "default-src": "'none'",
        "script-src": hashes(b"script"),
        "style-src": hashes(b"style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(f"{directive} {sources}" for directive, sources in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(200, data, headers)


# Read here: no request waits for a disk. A browser hashes the text after it has made its line ends \n.
PAGE = page_of((resources.files("aioengine.server") / "page.html").read_bytes().replace(b"\r\n", b"\n"))
"""The chat and the plots of the engine's numbers: one file, which fetches nothing from elsewhere."""

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
OF_ERROR = {"type": "object", "properties": dict.fromkeys(("message", "type", "param", "code"), TEXT)}
ERROR = {"type": "object", "properties": {"error": OF_ERROR}}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


def make_document(routes: Iterable[tuple[str, str, type[Body] | None]], config: ServerConfig) -> dict[str, Any]:
    """The document.

    Args:
        routes: method, path and body of each.
    """

    def json_of(name: str) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": f"{REF}{name}"}}}

    paths: dict[str, Any] = {}
    bodies: dict[str, type[msgspec.Struct]] = {}
    for method, path, body in routes:
        error = {"description": "refused or failed", "content": json_of("Error")}
        operation: dict[str, Any] = {
            "operationId": "_".join(re.findall(r"\w+", f"{method.lower()} {path}")),
            "responses": {"200": {"description": "done"}, "default": error},
        }
        if "{id}" in path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        if body is not None:
            bodies.setdefault(body.__name__, _shown(body))
            operation["requestBody"] = {"required": True, "content": json_of(body.__name__)}
        if config.api_keys and path not in OPEN_PATHS:
            operation["security"] = [{name: []} for name in KEYS]
        paths.setdefault(path, {})[method.lower()] = operation
    _, schemas = msgspec.json.schema_components(bodies.values(), ref_template=f"{REF}{{name}}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "aioengine", "version": aioengine.__version__},
        "servers": [{"url": config.root_path or "."}],  # relative to where the document is, also under a mount
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": ERROR}, "securitySchemes": KEYS},
    }


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


COMPACT_PATH = "/v1/responses/compact"
ELSEWHERE = tuple((re.compile(paths), hint) for paths, hint in (
    (r"/api/(chat|ps|show|tags|version|generate|embed|embeddings|pull|create|copy|delete|push)|/api/blobs/.*",
     "that is Ollama's API, and here is OpenAI's: /v1/chat/completions, /v1/completions and /v1/models"),
    (r"/v1.*/.+:((streamG|g)enerate|(batchE|e)mbed|count|predict)[A-Za-z]*|/(upload/)?v1(alpha|beta).*",
     "that is Gemini's API, and here is OpenAI's: use /v1/chat/completions"),
    (r"/(v1|v2)/chat", "that is Cohere's API, and here is OpenAI's: use /v1/chat/completions"),
    (r"/model/.+/(converse|invoke).*", "that is Bedrock's API, and here is OpenAI's: use /v1/chat/completions"),
    (r"/openai(/.*)?", "take /openai and the deployment out of the base URL: /v1/chat/completions is here"),
    (r"/generate(_stream)?|/completion|/infill|/invocations|/v1/complete|/v1/engines/.+",
     "use /v1/completions, or /v1/chat/completions"),
    (r"/info|/props|/slots|/get_model_info|/model_info|/get_server_info|/server_info",
     "use /v1/models, /load and /metrics"),
    (r"(/v1|/v2)?/(embed|embeddings?|embed_all|pooling|classify|score|rerank)|/v1/engines/.+/embeddings",
     "it needs an embedding model, or one that scores or classifies, and this server's language model generates text"),
    (r"/v1/(moderations|audio/.+|images/.+|videos(/.*)?|realtime(/.*)?)",
     "this server generates text; use another one for that"),
    (r"/v1/(files|uploads|vector_stores|containers|assistants|threads|evals|fine_tuning)(/.*)?",
     "nothing is kept here but responses (/v1/responses): send texts and tools with each request"),
    (r"/v1/(messages/)?batches(/.*)?", "send its requests one by one: the engine computes them together"),
    (r"/v1/responses/.+/cancel", "close the connection of the response, or use /abort"),
    (r"/v1/conversations(/.*)?", "give the previous_response_id of /v1/responses, or the whole conversation"),
    (COMPACT_PATH, "leave messages out of the input instead"),
    (r"/v1/(un)?load_lora_adapter", "this server has no adapters"),
))  # fmt: skip
"""Paths of other servers and of the OpenAI API, with what is here in their place; the first that fits counts."""


def instead_of(path: str) -> str | None:
    """Name what is here in the place of another server's path; None: no other server is known to have the path."""
    path = path[:256]  # searching a pattern may take time by the square of its length
    return next((hint for paths, hint in ELSEWHERE if paths.fullmatch(path)), None)
