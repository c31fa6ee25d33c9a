"""A plugin for ``aioengine engine``, which has no flag for it: `mortal`'s device where torch's would be made."""

import sys
import types
from typing import Any

from cluster.mortal import Mortal, make

from aioengine.config import EngineConfig


class TorchExecutor:
    @classmethod
    async def start(cls, _: Any, config: EngineConfig, **__: Any) -> Mortal:
        return make(config)


sys.modules["aioengine.executor.torch_executor"] = types.SimpleNamespace(TorchExecutor=TorchExecutor)  # type: ignore[assignment]
