"""A runner that computes by native kernels: from the start, or from some step on, beside one of plain torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from executor.plans import PlanWriter, greedy_tokens
from executor.tiny_decoder import tiny_decoder

from aioengine.config import EngineConfig
from aioengine.core.control import Sleep, WakeUp
from aioengine.core.executor_protocol import ExecutorStats
from aioengine.executor.device_thread import DeviceThread
from aioengine.executor.host import HostAccelerator
from aioengine.executor.make_runner import make_runner
from aioengine.executor.runner import START_FEATURES
from aioengine.executor.torch_executor import TorchExecutor, _host
from aioengine.kernels.native.compilation import compile_library
from aioengine.kernels.native.library import Library, find_library
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.parts import parts_of
from aioengine.kernels.native.team import Team
from aioengine.kernels.packed_weight import CodedWeight
from aioengine.models.decoder import Linear
from aioengine.models.folder import DEMO_MODEL, ModelFolder

PROMPT = [5, 11, 3, 70, 2]


class Compiling:
    """A library that is there from some step on, or cannot be loaded then."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.is_ready = False

    is_running = False

    def begin(self) -> None:
        pass

    def poll(self) -> Library | None:
        if not self.is_ready:
            return None
        self.is_ready = False
        return self._library

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def library() -> Library:
    return compile_library()


def accelerator_of(library: Library) -> Any:
    made: Any = HostAccelerator(num_threads=2)
    made._compilation = Compiling(library)
    return made


@pytest.fixture
def accelerator(library: Library) -> Iterator[Any]:
    made = accelerator_of(library)
    with torch.inference_mode():
        yield made
    made.close()


def start(accelerator: HostAccelerator, **fields: Any) -> Any:
    config = EngineConfig(max_num_seqs=8, block_size=4, kv_cache_memory_bytes=2**20)
    runner, _ = make_runner(accelerator, tiny_decoder(**fields), config, ExecutorStats(), lambda *_: None)
    return runner


def tokens_of(runner: Any, writer: PlanWriter, count: int) -> list[int]:
    """Of row 0, greedily."""
    return [int(runner.step(writer.plan()).token_ids[0]) for _ in range(count)]


def expected_tokens(count: int) -> list[int]:
    writer = PlanWriter(128, 4)
    writer.add(0, PROMPT)
    return tokens_of(start(HostAccelerator()), writer, count)


def test_native_kernels_take_over_between_two_steps(accelerator: Any) -> None:
    runner, writer = start(accelerator), PlanWriter(128, 4)
    writer.add(0, PROMPT)
    tokens = tokens_of(runner, writer, 4)
    accelerator._compilation.is_ready = True
    assert tokens + tokens_of(runner, writer, 8) == expected_tokens(12)
    assert len(runner.graphs) == 1


def test_a_cache_that_is_made_after_the_change_is_of_native_kernels(accelerator: Any) -> None:
    runner, writer = start(accelerator), PlanWriter(128, 4)
    accelerator._compilation.is_ready = True
    writer.add(0, PROMPT)
    tokens_of(runner, writer, 1)
    runner.drop_cache()
    runner.make_cache()
    writer = PlanWriter(128, 4)
    writer.add(1, PROMPT)
    assert tokens_of(runner, writer, 12) == expected_tokens(12)
    assert runner._attention.operations is runner._operations


@pytest.mark.parametrize("failing", ["address", "pack"])
def test_steps_go_on_without_native_kernels_that_cannot_take_over(
    accelerator: Any, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_calls = 0

    def fail_later(self: Any, *args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise MemoryError("no room for another weight")
        return right(self, *args)

    of: Any = NativeOperations if failing == "pack" else Library
    right = getattr(of, failing)
    monkeypatch.setattr(of, failing, fail_later)
    runner, writer = start(accelerator), PlanWriter(128, 4)
    writer.add(0, PROMPT)
    tokens = tokens_of(runner, writer, 4)
    accelerator._compilation.is_ready = True
    assert tokens + tokens_of(runner, writer, 8) == expected_tokens(12)
    assert "could not take over" in caplog.text
    assert not len(runner.graphs)
    assert {linear.packed.layout for linear in runner._decoder.linears()} == {"rows"}


def kept_bytes(runner: Any, sizes: range) -> int:
    """By the programs of these sizes, beside the weights and the KV cache."""
    programs = [program for key, program in runner.graphs._graphs.items() if key.size in sizes]
    assert len(programs) == len(START_FEATURES) * len(sizes)
    kept = {storage.data_ptr(): storage.nbytes() for program in programs for storage in program._kept}
    for own in (*runner._decoder.parameters(), *runner._attention.caches):
        kept.pop(own.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def test_programs_of_all_sizes_and_layers_share_their_memory(library: Library, accelerator: Any) -> None:
    def captured(num_layers: int) -> Any:
        accelerator.operations = NativeOperations(team)
        runner = start(accelerator, num_layers=num_layers, windows=(None,) * num_layers)
        runner.warm_up(captures_all=True, on_capture=lambda *_: None)
        return runner

    accelerator._team = team = Team(library, 1)
    runner, shallow = captured(num_layers=4), captured(num_layers=1)
    assert kept_bytes(runner, range(1, 9)) == kept_bytes(runner, range(8, 9)) == kept_bytes(shallow, range(1, 9))


async def test_weights_that_are_read_again_are_packed_once(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_num_seqs=8, block_size=4, kv_cache_memory_bytes=2**22, max_model_len=128)
    folder = await asyncio.to_thread(ModelFolder.read, DEMO_MODEL)
    executor = await TorchExecutor.start(folder, config, find_accelerator=lambda: accelerator)
    tokens = await greedy_tokens(executor)
    accelerator._compilation.is_ready = True
    assert await greedy_tokens(executor) == tokens
    packed: list[Any] = []
    pack = Linear.pack
    monkeypatch.setattr(Linear, "pack", lambda self, operations: (packed.append(operations), pack(self, operations)))
    await executor.perform(Sleep(2))
    await executor.perform(WakeUp(frozenset(("weights", "kv_cache"))))
    (num_linears,) = await executor.apply_model(lambda decoder: len(list(decoder.linears())))
    assert len(packed) == num_linears
    assert {type(operations) for operations in packed} == {NativeOperations}
    assert await greedy_tokens(executor) == tokens
    await executor.aclose()


async def test_kernels_have_room_on_the_stack_though_the_program_s_threads_have_little(library: Library) -> None:
    def compute() -> list[int]:
        accelerator = accelerator_of(library)
        accelerator._compilation.is_ready = True
        runner, writer = start(accelerator), PlanWriter(128, 4)
        for row in range(8):
            writer.add(row, PROMPT)
        tokens = tokens_of(runner, writer, 12)
        accelerator.close()
        return tokens

    before = threading.stack_size(256 * 1024)
    try:
        thread = DeviceThread()
        assert await thread.submit(compute).finish() == await thread.submit(expected_tokens, 12).finish()
        await thread.aclose()
        assert threading.stack_size() == 256 * 1024
    finally:
        threading.stack_size(before)


def test_what_is_compiled_for_a_quantised_checkpoint_are_kernels_of_codes(library: Library) -> None:
    demo = ModelFolder.read(DEMO_MODEL)
    quantised = msgspec.structs.replace(demo, config={**demo.config, "quantization_config": {"quant_method": "fp8"}})
    for folder, has_codes in ((demo, False), (quantised, True)):
        accelerator = _host(EngineConfig(dtype="bfloat16"), folder)
        assert accelerator._team is not None
        assert ("embed_coded" in accelerator._team.library) == has_codes
        accelerator.close()


def test_codes_without_kernels_for_them_are_left_to_plain_torch(library: Library) -> None:
    weight = CodedWeight(torch.full((64, 64), 9, dtype=torch.uint8), 4, None, torch.ones(64, 1), None, 64)
    found = find_library(parts_of("bfloat16"))
    assert found is not None
    for part_of_library, layout in ((library, "coded-panels"), (found, "coded")):
        team = Team(part_of_library, 1)
        assert NativeOperations(team).pack(weight, None, torch.bfloat16).layout == layout
        team.close()
