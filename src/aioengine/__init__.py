"""An LLM inference engine that lives inside an asyncio program.

```python
from aioengine import Engine

async with Engine() as engine:
    print((await engine.generate("Once upon a time", max_tokens=64)).text)
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aioengine._version import __version__ as __version__

if TYPE_CHECKING:
    from aioengine.blocking.llm import LLM
    from aioengine.blocking.llm_engine import LLMEngine
    from aioengine.config import EngineConfig, ProcessOptions
    from aioengine.core.executor_protocol import ExecutorInfo
    from aioengine.core.health import Health
    from aioengine.core.worker_functions import Worker, worker_function
    from aioengine.engine import Engine, Stream
    from aioengine.errors import (
        AioEngineError,
        ConfigError,
        EngineClosed,
        EngineDead,
        EngineOverloaded,
        InternalError,
        InvalidRequest,
        ModelLoadError,
        PromptTooLong,
        StepFailed,
        WireError,
    )
    from aioengine.metrics import EngineMetrics, EngineStats, Observer, RequestMetrics, StepRecord
    from aioengine.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput
    from aioengine.sampling_params import SamplingParams
    from aioengine.scheduler.plan import LogitsProcessor, LogitsRow


__all__ = [
    "LLM",
    "AioEngineError",
    "CompletionDelta",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineMetrics",
    "EngineOverloaded",
    "EngineStats",
    "ExecutorInfo",
    "Health",
    "InternalError",
    "InvalidRequest",
    "LLMEngine",
    "LogitsProcessor",
    "LogitsRow",
    "Logprob",
    "ModelLoadError",
    "Observer",
    "ProcessOptions",
    "PromptTooLong",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StepFailed",
    "StepRecord",
    "Stream",
    "WireError",
    "Worker",
    "worker_function",
]

_HOMES = {
    "blocking.llm": ["LLM"],
    "blocking.llm_engine": ["LLMEngine"],
    "config": ["EngineConfig", "ProcessOptions"],
    "core.executor_protocol": ["ExecutorInfo"],
    "core.health": ["Health"],
    "core.worker_functions": ["Worker", "worker_function"],
    "engine": ["Engine", "Stream"],
    "errors": [
        *("AioEngineError", "ConfigError", "EngineClosed", "EngineDead", "EngineOverloaded", "InternalError"),
        *("InvalidRequest", "ModelLoadError", "PromptTooLong", "StepFailed", "WireError"),
    ],
    "metrics": ["EngineMetrics", "EngineStats", "Observer", "RequestMetrics", "StepRecord"],
    "outputs": ["CompletionDelta", "CompletionOutput", "Logprob", "RequestOutput"],
    "sampling_params": ["SamplingParams"],
    "scheduler.plan": ["LogitsProcessor", "LogitsRow"],
}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: programs that only look at the package pay for no numpy."""
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"aioengine.{module}"), name)
            return value
    raise AttributeError(f"module 'aioengine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
