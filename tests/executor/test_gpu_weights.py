"""The weights on a GPU: replaced where they lie, under the graphs that read them; moved away and back, all or none."""

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from executor.gpu import start_gpu
from executor.plans import PROMPT, PlanWriter, greedy_tokens
from executor.weight_changes import (
    FAMILIES,
    QUERY,
    Checkpoint,
    changed_checkpoint,
    cut_short,
    drawn,
    fail_when_loaded,
    send,
    without_a_tensor,
)
from nightly import nightly
from safetensors.torch import load_file
from torch import Tensor

from aioengine.core.executor_protocol import DeviceLost, Part
from aioengine.errors import ConfigError, InvalidRequest, ModelLoadError
from aioengine.executor import weights as weights_module
from aioengine.executor.torch_executor import TorchExecutor
from aioengine.models.checkpoint import EMBEDDING, HEAD, SINGLE_FILE
from aioengine.models.loader import Placement
from doubles.fake_accelerator import FakeAccelerator

BOTH: frozenset[Part] = frozenset(("weights", "kv_cache"))
GATE = "model.layers.0.mlp.gate_proj.weight"
QUERY_NORM = "model.layers.1.self_attn.q_norm.weight"


class Started:
    """An executor on a fake GPU.

    Attributes:
        accelerator: its GPU.
    """

    def __init__(self, executor: TorchExecutor, accelerator: FakeAccelerator) -> None:
        self.executor = executor
        self.accelerator = accelerator

    async def tokens(self) -> list[int]:
        """Those of a short greedy sequence. All but the first are of decode steps."""
        return await greedy_tokens(self.executor)

    async def addresses(self) -> dict[str, int]:
        (held,) = await self.executor.apply_model(
            lambda decoder: {name: parameter.data_ptr() for name, parameter in decoder.named_parameters()}
        )
        return held

    @asynccontextmanager
    async def keeping_graphs(self) -> AsyncIterator[None]:
        """In here graphs are replayed, and none is captured or voided; and the weights stay where they are."""
        num_held, num_replays, before = self.num_graphs, self.num_replays, await self.addresses()
        num_captured = len(self.accelerator.graphs)
        assert num_held > 0
        yield
        assert await self.addresses() == before
        assert len(self.accelerator.graphs) == num_captured
        assert self.num_graphs == num_held
        assert self.num_replays > num_replays

    @property
    def num_graphs(self) -> int:
        runner: Any = self.executor._device.held.runner
        return len(runner.graphs)

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.accelerator.graphs)


@asynccontextmanager
async def started(folder: Path, **fields: Any) -> AsyncIterator[Started]:
    accelerator = FakeAccelerator()
    executor = await start_gpu(folder, accelerator, **fields)
    try:
        yield Started(executor, accelerator)
    finally:
        await executor.aclose()


async def tokens_of(folder: Path, **fields: Any) -> list[int]:
    async with started(folder, **fields) as other:
        return await other.tokens()


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


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
async def test_the_weights_of_a_folder_come_to_where_the_old_ones_were(
    checkpoint: Checkpoint, family: str, dtype: torch.dtype
) -> None:
    other = checkpoint(family, dtype=dtype, seed=1)
    async with started(checkpoint(family, dtype=dtype)) as gpu:
        before = await gpu.tokens()
        async with gpu.keeping_graphs():
            await gpu.executor.update_weights(other)
            after = await gpu.tokens()
        assert after != before
        assert after == await tokens_of(other)


async def test_the_weights_of_a_folder_come_in_the_models_dtype(checkpoint: Checkpoint) -> None:
    wide = checkpoint("qwen3", seed=1)
    async with started(checkpoint("qwen3", dtype=torch.bfloat16)) as gpu:
        await gpu.tokens()
        async with gpu.keeping_graphs():
            await gpu.executor.update_weights(wide)
            assert await gpu.tokens() == await tokens_of(wide, dtype="bfloat16")


@pytest.mark.parametrize(
    ("family", "dtype", "sent_as"),
    [
        ("llama2", torch.float32, torch.float32),
        ("qwen3", torch.bfloat16, torch.float32),
        *nightly(("qwen3", torch.float32, torch.float32), ("qwen3", torch.bfloat16, torch.bfloat16)),
    ],
)
async def test_tensors_come_to_where_the_old_ones_were(
    checkpoint: Checkpoint, tmp_path: Path, family: str, dtype: torch.dtype, sent_as: torch.dtype
) -> None:
    folder = checkpoint(family, dtype=dtype)
    held = load_file(folder / SINGLE_FILE)
    names = [name for name in (QUERY, GATE, QUERY_NORM, EMBEDDING, "model.norm.weight") if name in held]
    sent = {name: drawn(tuple(held[name].shape), seed).to(sent_as) for seed, name in enumerate(names)}
    expected = changed_checkpoint(folder, tmp_path / "expected", sent)
    async with started(folder) as gpu:
        before = await gpu.tokens()
        await send(gpu.executor, sent)
        async with gpu.keeping_graphs():
            await gpu.executor.commit_weights("t")
            after = await gpu.tokens()
        assert after != before
        assert after == await tokens_of(expected)


async def test_a_tied_head_goes_where_the_embedding_is(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, sent = checkpoint("qwen3"), drawn((384, 64))
    expected = changed_checkpoint(folder, tmp_path / "expected", {EMBEDDING: sent})
    async with started(folder) as gpu:
        await gpu.tokens()
        await send(gpu.executor, {HEAD: sent})
        async with gpu.keeping_graphs():
            await gpu.executor.commit_weights("t")
            assert await gpu.tokens() == await tokens_of(expected)


async def test_a_step_on_its_way_has_the_weights_of_its_launch(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device begins with it no earlier than it is waited for."""
    async with started(checkpoint("llama2")) as gpu:
        expected = await gpu.tokens()
        writer = PlanWriter(gpu.executor.info.num_blocks, gpu.executor.info.block_size)
        writer.add(0, list(PROMPT))
        await send(gpu.executor, {EMBEDDING: drawn((384, 64))})
        synchronize = gpu.accelerator.synchronize

        def go_on_and_synchronize() -> None:
            gpu.accelerator.go_on()
            synchronize()

        monkeypatch.setattr(gpu.accelerator, "synchronize", go_on_and_synchronize)
        gpu.accelerator.hold()
        plan = writer.plan()
        step = gpu.executor.launch(plan)
        await gpu.executor.commit_weights("t")
        assert writer.read(plan, await step.finish()) == {0: expected[0]}


@pytest.mark.parametrize("level", [0, 1, 2], ids=["awake", "in a light sleep", "in a deep sleep"])
@pytest.mark.parametrize(("damage", "message"), [(cut_short, "cut short"), (without_a_tensor, "lacks tensor")])
async def test_a_damaged_checkpoint_changes_nothing(
    checkpoint: Checkpoint, tmp_path: Path, damage: Callable[[Path], None], message: str, level: Literal[0, 1, 2]
) -> None:
    misfit = Path(shutil.copytree(checkpoint("llama2", seed=1), tmp_path / "misfit"))
    damage(misfit)
    async with started(checkpoint("llama2")) as gpu:
        before = await gpu.tokens()
        if level:
            await gpu.executor.sleep(level)
        with pytest.raises(ModelLoadError, match=message):
            await gpu.executor.update_weights(misfit)
        await gpu.executor.wake_up(BOTH if level else frozenset())
        assert await gpu.tokens() == before


async def test_a_reading_that_fails_late_changes_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "load_weights", fail_when_loaded)
    async with started(checkpoint("llama2")) as gpu:
        before = await gpu.tokens()
        async with gpu.keeping_graphs():
            with pytest.raises(MemoryError):
                await gpu.executor.update_weights(checkpoint("llama2", seed=1))
            assert await gpu.tokens() == before


async def test_a_commit_that_the_host_has_no_memory_for_changes_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, made = weights_module._tensor, []

    def fail_later(staged: Any) -> Tensor:
        made.append(staged)
        if len(made) == 2:
            raise MemoryError
        return read(staged)

    monkeypatch.setattr(weights_module, "_tensor", fail_later)
    async with started(checkpoint("llama2")) as gpu:
        before = await gpu.tokens()
        await send(gpu.executor, {QUERY: drawn((64, 64)), EMBEDDING: drawn((384, 64))})
        async with gpu.keeping_graphs():
            with pytest.raises(MemoryError):
                await gpu.executor.commit_weights("t")
            assert await gpu.tokens() == before
        await gpu.executor.sleep(2)  # they came from a folder, as before


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
    async with started(checkpoint("llama2")) as gpu:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await gpu.executor.update_weights(checkpoint("llama2", seed=1))
        with pytest.raises(DeviceLost, match="some are new and others old"):
            await gpu.tokens()


# Asleep


@pytest.mark.parametrize("comes_as", ["folder", "tensors"])
async def test_what_comes_in_a_light_sleep_comes_into_the_memory_of_the_host(
    checkpoint: Checkpoint, comes_as: str
) -> None:
    other = checkpoint("qwen3", seed=1)
    async with started(checkpoint("qwen3")) as gpu:
        awake = await gpu.addresses()
        table = gpu.executor._device.held.weights.decoder.rope_table  # type: ignore[union-attr]
        await gpu.executor.sleep(1)
        asleep = await gpu.addresses()
        assert not set(awake.values()) & set(asleep.values())
        if comes_as == "folder":
            await gpu.executor.update_weights(other)
        else:
            await send(gpu.executor, load_file(other / SINGLE_FILE))
            await gpu.executor.commit_weights("t")
        assert await gpu.addresses() == asleep
        await gpu.executor.wake_up(BOTH)
        assert gpu.executor._device.held.weights.decoder.rope_table is table  # type: ignore[union-attr]
        assert await gpu.tokens() == await tokens_of(other)


async def test_with_the_weights_awake_and_the_cache_asleep_they_are_replaced_in_place(checkpoint: Checkpoint) -> None:
    other = checkpoint("llama2", seed=1)
    async with started(checkpoint("llama2")) as gpu:
        await gpu.executor.sleep(1)
        await gpu.executor.wake_up(frozenset(("weights",)))
        before = await gpu.addresses()
        await gpu.executor.update_weights(other)
        assert await gpu.addresses() == before
        await gpu.executor.wake_up(frozenset(("kv_cache",)))
        assert await gpu.tokens() == await tokens_of(other)


async def test_the_weights_go_to_page_locked_memory_and_back_to_the_device(checkpoint: Checkpoint) -> None:
    async with started(checkpoint("llama2")) as gpu:
        expected = await gpu.tokens()
        gpu.executor._device.held.weights._placement = Placement(torch.device("cuda", 0), is_bound=False)
        (num_parameters,) = await gpu.executor.apply_model(lambda decoder: len(list(decoder.parameters())))
        with memory_for(num_parameters) as asked:
            await gpu.executor.sleep(1)
        assert asked == [{"device": torch.device("cpu"), "pin_memory": True}] * num_parameters
        with memory_for(num_parameters) as asked:
            await gpu.executor.wake_up(frozenset(("weights",)))
        assert asked == [{"device": torch.device("cuda", 0), "pin_memory": False}] * num_parameters
        await gpu.executor.wake_up(BOTH)
        assert await gpu.tokens() == expected


@pytest.mark.parametrize("num_tensors", [0, 5])
async def test_a_host_without_room_refuses_a_light_sleep_and_all_is_as_it_was(
    checkpoint: Checkpoint, num_tensors: int
) -> None:
    async with started(checkpoint("llama2")) as gpu:
        before = await gpu.tokens()
        async with gpu.keeping_graphs():
            with (
                memory_for(num_tensors),
                pytest.raises(InvalidRequest, match=r"out of memory.*sleep at level 2") as refused,
            ):
                await gpu.executor.sleep(1)
            assert refused.value.param == "level"
            assert await gpu.tokens() == before
        levels: tuple[Literal[1, 2], ...] = (1, 2)
        for level in levels:
            await gpu.executor.sleep(level)
            await gpu.executor.wake_up(BOTH)
            assert await gpu.tokens() == before


async def test_waking_waits_for_room_for_the_weights(checkpoint: Checkpoint) -> None:
    async with started(checkpoint("llama2")) as gpu:
        before = await gpu.tokens()
        await gpu.executor.sleep(1)
        asleep = await gpu.addresses()
        for _ in range(2):
            num_releases = gpu.accelerator.num_releases
            with memory_for(5), pytest.raises(ModelLoadError, match=r"out of memory.*wake up again"):
                await gpu.executor.wake_up(BOTH)
            assert await gpu.addresses() == asleep
            assert gpu.accelerator.num_releases > num_releases
        with pytest.raises(AssertionError, match=r"asleep.*kv_cache.*weights"):
            await gpu.tokens()
        await gpu.executor.wake_up(BOTH)
        assert await gpu.tokens() == before


@pytest.mark.parametrize("level", [1, 2])
async def test_waking_waits_for_room_for_the_cache(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, level: Literal[1, 2]
) -> None:
    def fail(block_tables: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with started(checkpoint("llama2")) as gpu:
        before = await gpu.tokens()
        await gpu.executor.sleep(level)
        with monkeypatch.context() as patch:
            patch.setattr(gpu.executor._device.held.runner, "_make_attention", fail)
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"KV cache: CUDA out of memory.*wake up again"):
                    await gpu.executor.wake_up(BOTH)
        with pytest.raises(AssertionError, match=r"asleep: \['kv_cache'\]"):
            await gpu.tokens()
        await gpu.executor.execute_dummy_batch()  # the weights are back
        await gpu.executor.wake_up(BOTH)
        assert await gpu.tokens() == before
