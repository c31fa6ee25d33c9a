"""A plugin for ``aioengine engine``, which has no flag for it: a fake device where torch's would be made."""

import sys
import types
from typing import Any

from transport.life_scripts.devices import ToldExecutor


class TorchExecutor:
    @classmethod
    async def start(cls, *_: Any, **__: Any) -> ToldExecutor:
        return ToldExecutor().listen()


sys.modules["aioengine.executor.torch_executor"] = types.SimpleNamespace(TorchExecutor=TorchExecutor)  # type: ignore[assignment]
