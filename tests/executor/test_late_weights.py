"""The weights on a GPU: replaced where they lie, under the graphs that read them; moved away and back, all or none."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from executor.late_device import start_late
from executor.plans import greedy_tokens
from executor.weight_changes import Checkpoint, addresses, keeping_graphs, send
from nightly import nightly
from safetensors.torch import load_file
from torch import Tensor

from aioengine.core.control import CommitWeights, ExecuteDummyBatch, Sleep, UpdateWeights, WakeUp
from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import ConfigError, InvalidRequest, ModelLoadError
from aioengine.executor import weights as weights_module
from aioengine.executor.torch_executor import TorchExecutor
from aioengine.models.checkpoint import SINGLE_FILE
from doubles.fake_accelerator import FakeAccelerator

BOTH = frozenset(("weights", "kv_cache"))


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[TorchExecutor]:
    executor = await start_late(folder, FakeAccelerator())
    try:
        yield executor
    finally:
        await executor.aclose()


def device_of(executor: TorchExecutor) -> Any:
    return executor._device


async def tokens_of(folder: Path) -> list[int]:
    async with started(folder) as other:
        return await greedy_tokens(other)


@contextmanager
def memory_for(num_tensors: int) -> Iterator[list[dict[str, Any]]]:
    """In here so many tensors are made by `Decoder.move` and no more; what was asked for, on the CPU all the same."""
    asked: list[dict[str, Any]] = []
    empty = torch.empty

    def empty_while_there_is_room(*shape: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        asked.append({"device": torch.device(device), "pin_memory": pin_memory})
        if len(asked) > num_tensors:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty_while_there_is_room)
        yield asked


# Replaced in place


async def test_no_step_runs_with_half_of_the_new_weights(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(changes: Any) -> Iterator[Any]:
        for number, change in enumerate(changes):
            if number == 3:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            yield change

    fill = weights_module.Weights._fill
    monkeypatch.setattr(weights_module.Weights, "_fill", lambda self, changes: fill(self, lose(changes)))
    async with started(checkpoint("llama2")) as executor:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await executor.perform(UpdateWeights(checkpoint("llama2", seed=1)))
        with pytest.raises(DeviceLost, match="some are new and others old"):
            await greedy_tokens(executor)


# Asleep


@pytest.mark.parametrize("comes_as", ["folder", "tensors"])
async def test_what_comes_in_a_light_sleep_comes_into_the_memory_of_the_host(
    checkpoint: Checkpoint, comes_as: str
) -> None:
    other = checkpoint("qwen3", seed=1)
    async with started(checkpoint("qwen3")) as executor:
        awake = await addresses(executor)
        (table,) = device_of(executor).weights.decoder.rope_tables.values()
        await executor.perform(Sleep(1))
        asleep = await addresses(executor)
        assert not set(awake.values()) & set(asleep.values())
        if comes_as == "folder":
            await executor.perform(UpdateWeights(other))
        else:
            await send(executor, load_file(other / SINGLE_FILE))
            await executor.perform(CommitWeights("t"))
        assert await addresses(executor) == asleep
        await executor.perform(WakeUp(BOTH))
        (kept,) = device_of(executor).weights.decoder.rope_tables.values()
        assert kept is table
        assert await greedy_tokens(executor) == await tokens_of(other)


async def test_with_the_weights_awake_and_the_cache_asleep_they_are_replaced_in_place(checkpoint: Checkpoint) -> None:
    other = checkpoint("llama2", seed=1)
    async with started(checkpoint("llama2")) as executor:
        await executor.perform(Sleep(1))
        await executor.perform(WakeUp(frozenset(("weights",))))
        before = await addresses(executor)
        await executor.perform(UpdateWeights(other))
        assert await addresses(executor) == before
        await executor.perform(WakeUp(frozenset(("kv_cache",))))
        assert await greedy_tokens(executor) == await tokens_of(other)


async def test_the_weights_go_to_page_locked_memory_and_back_to_the_device(checkpoint: Checkpoint) -> None:
    async with started(checkpoint("llama2")) as executor:
        expected = await greedy_tokens(executor)
        device_of(executor).weights._device = torch.device("cuda", 0)
        (num_parameters,) = await executor.apply_model(lambda decoder: len(list(decoder.parameters())))
        with memory_for(num_parameters) as asked:
            await executor.perform(Sleep(1))
        assert asked == [{"device": torch.device("cpu"), "pin_memory": True}] * num_parameters
        with memory_for(num_parameters) as asked:
            await executor.perform(WakeUp(frozenset(("weights",))))
        assert asked == [{"device": torch.device("cuda", 0), "pin_memory": False}] * num_parameters
        await executor.perform(WakeUp(BOTH))
        assert await greedy_tokens(executor) == expected


@pytest.mark.parametrize("num_tensors", [*nightly(0), 5])
async def test_a_host_without_room_refuses_a_light_sleep_and_all_is_as_it_was(
    checkpoint: Checkpoint, num_tensors: int
) -> None:
    async with started(checkpoint("llama2")) as executor:
        before = await greedy_tokens(executor)
        async with keeping_graphs(executor):
            with (
                memory_for(num_tensors),
                pytest.raises(InvalidRequest, match=r"out of memory.*sleep at level 2") as refused,
            ):
                await executor.perform(Sleep(1))
            assert refused.value.param == "level"
            assert await greedy_tokens(executor) == before
        levels: tuple[Literal[1, 2], ...] = (1, 2)
        for level in levels:
            await executor.perform(Sleep(level))
            await executor.perform(WakeUp(BOTH))
            assert await greedy_tokens(executor) == before


async def test_waking_waits_for_room_for_the_weights(checkpoint: Checkpoint) -> None:
    async with started(checkpoint("llama2")) as executor:
        before = await greedy_tokens(executor)
        await executor.perform(Sleep(1))
        asleep = await addresses(executor)
        for _ in range(2):
            num_releases = device_of(executor)._accelerator.num_releases
            with memory_for(5), pytest.raises(ModelLoadError, match=r"out of memory.*wake up again"):
                await executor.perform(WakeUp(BOTH))
            assert await addresses(executor) == asleep
            assert device_of(executor)._accelerator.num_releases > num_releases
        with pytest.raises(AssertionError, match=r"asleep.*kv_cache.*weights"):
            await greedy_tokens(executor)
        await executor.perform(WakeUp(BOTH))
        assert await greedy_tokens(executor) == before


@pytest.mark.parametrize("level", [1, 2])
async def test_waking_waits_for_room_for_the_cache(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, level: Literal[1, 2]
) -> None:
    def fail(block_tables: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with started(checkpoint("llama2")) as executor:
        before = await greedy_tokens(executor)
        await executor.perform(Sleep(level))
        with monkeypatch.context() as patch:
            patch.setattr(device_of(executor).runner, "_make_attention", fail)
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"KV cache: CUDA out of memory.*wake up again"):
                    await executor.perform(WakeUp(BOTH))
        with pytest.raises(AssertionError, match=r"asleep: \['kv_cache'\]"):
            await greedy_tokens(executor)
        await executor.perform(ExecuteDummyBatch())  # the weights are back
        await executor.perform(WakeUp(BOTH))
        assert await greedy_tokens(executor) == before
