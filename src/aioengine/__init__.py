"""An LLM inference engine that lives inside an asyncio program.

```python
from aioengine import Engine

async with Engine() as engine:
    print((await engine.generate("Once upon a time", max_tokens=64)).text)
```
"""

from __future__ import annotations

from aioengine.core.executor_makers import EXECUTOR_MAKERS
from aioengine.frontend.clients import CLIENT_MAKERS

__version__ = "0.1.0"

TYPE_CHECKING = False  # not from typing: Ctrl-C while that is imported would show a traceback of a command
if TYPE_CHECKING:
    from typing import Any

    from aioengine.blocking.llm import LLM as LLM
    from aioengine.compat.llm_engine import LLMEngine as LLMEngine
    from aioengine.config import EngineConfig as EngineConfig
    from aioengine.config import ProcessOptions as ProcessOptions
    from aioengine.config import ReplicaOptions as ReplicaOptions
    from aioengine.core.executor_protocol import ExecutorInfo as ExecutorInfo
    from aioengine.core.health import Health as Health
    from aioengine.core.named_functions import Worker as Worker
    from aioengine.core.named_functions import worker_function as worker_function
    from aioengine.engine import Engine as Engine
    from aioengine.engine import Stream as Stream
    from aioengine.errors import AioEngineError as AioEngineError
    from aioengine.errors import ConfigError as ConfigError
    from aioengine.errors import EngineClosed as EngineClosed
    from aioengine.errors import EngineDead as EngineDead
    from aioengine.errors import EngineOverloaded as EngineOverloaded
    from aioengine.errors import InternalError as InternalError
    from aioengine.errors import InvalidRequest as InvalidRequest
    from aioengine.errors import ModelLoadError as ModelLoadError
    from aioengine.errors import NoTokenLeft as NoTokenLeft
    from aioengine.errors import OutputNotParsed as OutputNotParsed
    from aioengine.errors import PromptTooLong as PromptTooLong
    from aioengine.errors import StepFailed as StepFailed
    from aioengine.errors import WireError as WireError
    from aioengine.outputs import CompletionDelta as CompletionDelta
    from aioengine.outputs import CompletionOutput as CompletionOutput
    from aioengine.outputs import Logprob as Logprob
    from aioengine.outputs import RequestOutput as RequestOutput
    from aioengine.outputs.metrics import EngineMetrics as EngineMetrics
    from aioengine.outputs.metrics import EngineStats as EngineStats
    from aioengine.outputs.metrics import Observer as Observer
    from aioengine.outputs.metrics import RequestMetrics as RequestMetrics
    from aioengine.outputs.metrics import StepRecord as StepRecord
    from aioengine.sampling_params import SamplingParams as SamplingParams
    from aioengine.scheduler.plan import LogitsProcessor as LogitsProcessor
    from aioengine.scheduler.plan import LogitsRow as LogitsRow
    from aioengine.structured.constraints import Choice as Choice
    from aioengine.structured.constraints import Grammar as Grammar
    from aioengine.structured.constraints import Json as Json
    from aioengine.structured.constraints import Regex as Regex
    from aioengine.structured.constraints import StructuralTags as StructuralTags
    from aioengine.structured.constraints import Tag as Tag
    from aioengine.tool_calls.calls import Tool as Tool
    from aioengine.tool_calls.calls import ToolCall as ToolCall
    from aioengine.tool_calls.formats import ToolFormat as ToolFormat
    from aioengine.tool_calls.formats import register_tool_format as register_tool_format

_HOMES = {
    "blocking.llm": ["LLM"],
    "compat.llm_engine": ["LLMEngine"],
    "config": ["EngineConfig", "ProcessOptions", "ReplicaOptions"],
    "core.executor_protocol": ["ExecutorInfo"],
    "core.health": ["Health"],
    "core.named_functions": ["Worker", "worker_function"],
    "engine": ["Engine", "Stream"],
    "errors": [
        *("AioEngineError", "ConfigError", "EngineClosed", "EngineDead", "EngineOverloaded", "InternalError"),
        *(
            "InvalidRequest",
            "ModelLoadError",
            "NoTokenLeft",
            "OutputNotParsed",
            "PromptTooLong",
            "StepFailed",
            "WireError",
        ),
    ],
    "outputs.metrics": ["EngineMetrics", "EngineStats", "Observer", "RequestMetrics", "StepRecord"],
    "outputs": ["CompletionDelta", "CompletionOutput", "Logprob", "RequestOutput"],
    "sampling_params": ["SamplingParams"],
    "scheduler.plan": ["LogitsProcessor", "LogitsRow"],
    "structured.constraints": ["Choice", "Grammar", "Json", "Regex", "StructuralTags", "Tag"],
    "tool_calls.calls": ["Tool", "ToolCall"],
    "tool_calls.formats": ["ToolFormat", "register_tool_format"],
}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: programs that only look at the package pay for no numpy."""
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"aioengine.{module}"), name)
            return value
    raise AttributeError(f"module 'aioengine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _make_openai_client(engine: Engine, **options: Any) -> Any:
    from aioengine.integrations.openai_client import async_client

    return async_client(engine, **options)


def _make_blocking_openai_client(llm: LLM, **options: Any) -> Any:
    from aioengine.integrations.openai_client import blocking_client

    return blocking_client(llm, **options)


def _import_torch_executor() -> Any:
    from aioengine.executor.torch_executor import TorchExecutor

    return TorchExecutor.start


EXECUTOR_MAKERS["torch"] = _import_torch_executor
# `Engine` and `LLM` have methods that make these clients, and stand on lower floors than the clients' modules.
CLIENT_MAKERS.update({"openai": _make_openai_client, "blocking openai": _make_blocking_openai_client})
