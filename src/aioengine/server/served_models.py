"""By what names requests may call the model that is served."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from aioengine.engine import Engine
from aioengine.server.config import ServerConfig
from aioengine.server.errors import ApiError

BUNDLED = "demo"
"""The bundled model's own name, by which the page knows it under whatever name it is served."""


class ServedModels:
    """The one model that an engine has, by all its names.

    Args:
        find_engine: where the engine is; a connected one knows its model once it is connected.
        config: may give it other names than its own.
    """

    def __init__(self, find_engine: Callable[[], Engine], config: ServerConfig) -> None:
        self._find_engine = find_engine
        self._config = config
        self._created = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        """At least one. A folder's path is nobody's business, so that its last part is its name."""
        if self._config.served_model_name:
            return self._config.served_model_name
        model = self._find_engine().config.model
        if model is None:
            return (BUNDLED,)
        return (PurePath(model).name or "model",) if PurePath(model).is_absolute() or model[0] in ".~" else (model,)

    def choose(self, asked: str | None) -> str:
        """The name to answer with for the one that was asked for, if any.

        Raises:
            ApiError: 404; it is another model.
        """
        names = self.names
        if asked is None or asked == "":
            return names[0]
        if asked not in names:
            raise ApiError(
                404,
                f"the model {asked[:100]!r} is not served here; there is {', '.join(map(repr, names))}",
                param="model",
                code="model_not_found",
            )
        return asked

    def describe(self, name: str) -> dict[str, Any]:
        """As ``/v1/models`` tells of it."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "aioengine",
            "root": BUNDLED if self._find_engine().config.model is None else self.names[0],
            "parent": None,
            "max_model_len": self._find_engine().info.max_model_len,
        }
