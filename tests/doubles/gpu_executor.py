"""The executor of a GPU, for tests without one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aioengine.config import EngineConfig
from aioengine.executor.make_runner import Gpu
from aioengine.executor.torch_executor import TorchExecutor
from aioengine.kernels.operations import Operations
from aioengine.kernels.torch import operations as reference
from aioengine.models.folder import ModelFolder
from aioengine.models.loader import load_decoder
from doubles.fake_accelerator import FakeAccelerator
from doubles.fake_graph import as_launches


async def start_gpu_executor(
    accelerator: FakeAccelerator, model: str | None = None, *, operations: Operations = reference, **fields: Any
) -> TorchExecutor:
    """For ``Engine(executor=...)``: a real model on a GPU that is none, with all that a GPU's steps do but the kernels.

    Args:
        model: as in `EngineConfig`: a folder, a hub id, or None for the bundled model.
        operations: what computes: plain torch, or Triton's kernels in its interpreter, which are very much slower.
        fields: others of `EngineConfig`.
    Raises:
        ConfigError, ModelLoadError: as a start of the engine does.
    """
    config = EngineConfig(**{"model": model, "kv_cache_memory_bytes": 2**25, "cuda_graphs": "lazy", **fields})
    resolve = partial(ModelFolder.resolve, config.model, with_weights=config.load_format != "dummy")
    folder = await asyncio.to_thread(resolve)
    gpu = Gpu(accelerator, as_launches(operations))
    load = partial(load_decoder, folder, config)
    return await TorchExecutor.start_with(load, config, folder=folder, find_gpu=lambda: gpu)
