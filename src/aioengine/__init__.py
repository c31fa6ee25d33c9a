"""An LLM inference engine that lives inside an asyncio program.

```python
from aioengine import Engine

async with Engine() as engine:
    print((await engine.generate("Once upon a time", max_tokens=64)).text)
```
"""

from aioengine.config import EngineConfig
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
from aioengine.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput
from aioengine.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AioEngineError",
    "CompletionDelta",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineOverloaded",
    "InternalError",
    "InvalidRequest",
    "Logprob",
    "ModelLoadError",
    "PromptTooLong",
    "RequestOutput",
    "SamplingParams",
    "StepFailed",
    "Stream",
    "WireError",
]
