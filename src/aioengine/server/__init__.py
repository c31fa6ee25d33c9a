"""The OpenAI-compatible API, to mount or to serve; docs/internals/http.md explains how.

- `api`: routes, keys, limits. `exchange`: what a handler sees of HTTP; `asgi` and `aiohttp_adapter` implement it.
- `schema`, `decoding`: bodies of requests. `generation`, `answers`: from a body to an answer or events.
  `responses`, `stored_responses`, `anthropic_messages`: two more forms of a chat.
- `record`, `metrics`, `access_log`: what is kept of a request. `security`, `errors`, `config`, `pages`: keys, error
  bodies, settings, and pages such as /docs.
- `http_server`, `http_listener`, `http_protocol`: sockets, TLS, limits below HTTP. `group/`: several servers of a
  port.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aioengine.server.config import HttpLimits, ServerConfig
from aioengine.server.http_server import HttpServer, start_server

if TYPE_CHECKING:
    from aioengine.server.aiohttp_adapter import aiohttp_errors, aiohttp_routes
    from aioengine.server.asgi import StreamResponse, create_app, engine_errors, while_connected

__all__ = [
    "HttpLimits",
    "HttpServer",
    "ServerConfig",
    "StreamResponse",
    "aiohttp_errors",
    "aiohttp_routes",
    "create_app",
    "engine_errors",
    "start_server",
    "while_connected",
]


def __getattr__(name: str) -> Any:
    """An adapter's names are imported when they are first used: an aiohttp app loads no Starlette."""
    if name not in __all__:
        raise AttributeError(f"module 'aioengine.server' has no attribute {name!r}")
    module = "aiohttp_adapter" if name.startswith("aiohttp_") else "asgi"
    return getattr(importlib.import_module(f"aioengine.server.{module}"), name)
