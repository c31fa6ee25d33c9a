"""The HTTP face: an OpenAI-compatible app to mount in another one, or to serve.

```python
app = create_app(engine)  # Starlette: app.mount("/ai", create_app(engine)), or uvicorn.run(create_app(Engine()))
app.add_routes(aiohttp_routes(engine, prefix="/ai"))  # aiohttp
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine.server.aiohttp_routes import aiohttp_routes
    from aioengine.server.asgi import create_app
    from aioengine.server.server_config import ServerConfig

__all__ = ["ServerConfig", "aiohttp_routes", "create_app"]

_HOMES = {"ServerConfig": "server_config", "aiohttp_routes": "aiohttp_routes", "create_app": "asgi"}


def __getattr__(name: str) -> Any:
    """Each framework is imported by who uses it alone."""
    if name not in __all__:
        raise AttributeError(f"module 'aioengine.server' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"aioengine.server.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
