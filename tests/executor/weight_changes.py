"""Weights that an executor may change to: sent as tensors, or read from a changed or damaged folder."""

import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from executor.plans import greedy_tokens
from nightly import nightly
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioengine.core.control import StageWeights
from aioengine.core.executor_protocol import Executor
from aioengine.executor.torch_executor import TorchExecutor
from aioengine.models.checkpoint import SINGLE_FILE
from aioengine.models.decoder import Decoder
from aioengine.models.loader import load_weights

Checkpoint = Callable[..., Path]
FAMILIES = [("llama2", torch.float32), ("qwen3", torch.bfloat16), *nightly(("qwen3", torch.float32))]
"""The second and third with a tied head."""
QUERY = "model.layers.1.self_attn.q_proj.weight"
_FILE_DTYPES: dict[torch.dtype, Any] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def drawn(shape: tuple[int, ...], seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


async def send(executor: Executor, sent: dict[str, Tensor], pieces: int = 1) -> None:
    """Stage tensors, by the names of a checkpoint, in the transfer "t"."""
    for name, tensor in sent.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        size = -(-len(data) // pieces)
        for offset in range(0, len(data), size):
            described = {"transfer": "t", "name": name, "dtype": _FILE_DTYPES[tensor.dtype]}
            piece = {"shape": tuple(tensor.shape), "offset": offset, "data": data[offset : offset + size]}
            await executor.perform(StageWeights(**described, **piece))


def changed_checkpoint(folder: Path, target: Path, changes: dict[str, Tensor]) -> Path:
    """A copy of a checkpoint of one file, with some other tensors."""
    shutil.copytree(folder, target)
    held = load_file(folder / SINGLE_FILE)
    dtype = next(iter(held.values())).dtype
    save_file({**held, **{name: tensor.to(dtype) for name, tensor in changes.items()}}, target / SINGLE_FILE)
    return target


def without_a_tensor(folder: Path) -> None:
    held = load_file(folder / SINGLE_FILE)
    del held[QUERY]
    save_file(held, folder / SINGLE_FILE)


def cut_short(folder: Path) -> None:
    os.truncate(folder / SINGLE_FILE, (folder / SINGLE_FILE).stat().st_size - 1)


def fail_when_loaded(*arguments: Any, **options: Any) -> Decoder:
    """`load_weights`, with no memory for more at its end."""
    load_weights(*arguments, **options)
    raise MemoryError


async def addresses(executor: TorchExecutor) -> dict[str, int]:
    """Of the parameters."""
    (held,) = await executor.apply_model(
        lambda decoder: {name: parameter.data_ptr() for name, parameter in decoder.named_parameters()}
    )
    return held


@asynccontextmanager
async def keeping_graphs(executor: TorchExecutor) -> AsyncIterator[None]:
    """In here the weights change, or stay, where they lie: a GPU's graphs are replayed behind it, and none is captured
    or voided."""
    device = executor._device
    accelerator: Any = device._accelerator
    if accelerator.is_host:
        before = await addresses(executor)
        yield
        assert await addresses(executor) == before
        return
    runner: Any = device.runner

    def graphs() -> tuple[int, int, int]:
        return len(runner.graphs), len(accelerator.graphs), sum(graph.num_replays for graph in accelerator.graphs)

    await greedy_tokens(executor)
    (num_held, num_captured, num_replays), before = graphs(), await addresses(executor)
    assert num_held > 0
    yield
    await greedy_tokens(executor)
    assert await addresses(executor) == before
    assert graphs()[:2] == (num_held, num_captured)
    assert graphs()[2] > num_replays
