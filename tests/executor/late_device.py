"""An executor whose device is late, as a GPU is: a fake accelerator, with the oracles or the interpreted kernels."""

import asyncio
from pathlib import Path
from typing import Any

from aioengine.config import EngineConfig
from aioengine.executor.torch_executor import TorchExecutor
from aioengine.kernels.operations import plain_torch as reference
from aioengine.models.folder import ModelFolder
from doubles.fake_accelerator import FakeAccelerator
from doubles.fake_graph import as_launches


def late_config(**fields: Any) -> EngineConfig:
    defaults = {"max_num_seqs": 4, "block_size": 4, "kv_cache_memory_bytes": 2**20, "max_model_len": 128}
    return EngineConfig(**{**defaults, "cuda_graphs": "lazy", **fields})


async def start_late(
    folder: Path, accelerator: FakeAccelerator, operations: Any = reference, **fields: Any
) -> TorchExecutor:
    """An executor of the checkpoint in ``folder``."""
    config = late_config(**fields)
    model = await asyncio.to_thread(ModelFolder.read, folder)
    accelerator.operations = as_launches(operations)
    return await TorchExecutor.start(model, config, find_accelerator=lambda: accelerator)


class InjectedFailure(Exception):
    pass


def let_steps_fail(executor: TorchExecutor) -> set[int]:
    """Numbers of steps that cannot be launched, such as for want of memory, from when they are put in."""
    failing: set[int] = set()
    runner: Any = executor._device.runner
    compute = runner._compute

    def compute_or_fail(step: Any, *arguments: Any) -> Any:
        if step.plan.step in failing:
            raise InjectedFailure(f"step {step.plan.step}")
        return compute(step, *arguments)

    runner._compute = compute_or_fail
    return failing
