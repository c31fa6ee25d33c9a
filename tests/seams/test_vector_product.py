"""A row that brings the vector of its last hidden state: from a plan to the caller, here and over the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from checkpoints import load_reference, make_checkpoint
from transport.life_scripts.serving import served

from aioengine import Engine, EngineConfig, SamplingParams
from aioengine.core.listener import UNLIMITED
from aioengine.core.protocol import Core
from aioengine.errors import AioEngineError, InvalidRequest
from aioengine.executor.torch_executor import TorchExecutor
from aioengine.models.folder import ModelFolder
from aioengine.scheduler.plan import Float32, Purpose, StepPlan, int32
from aioengine.scheduler.sequence import Request, Sequence
from doubles.fake_executor import FakeExecutor

CONFIG: dict[str, Any] = {
    "device": "cpu", "kv_cache_memory_bytes": 2**20, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16,
}  # fmt: skip
PROMPT = [(7 * index) % 300 + 3 for index in range(40)]


class Pooling:
    """The `Listener` of a sequence that brings a vector."""

    num_allowed = UNLIMITED

    def __init__(self) -> None:
        self.events: list[str] = []
        self.vector: Float32
        self.error: AioEngineError | None = None
        self.is_over = asyncio.Event()

    def on_started(self) -> None:
        self.events.append("started")

    def on_vector(self, vector: Float32) -> None:
        self.events.append("vector")
        self.vector = vector

    def on_end(self) -> None:
        self.events.append("end")
        self.is_over.set()

    def on_error(self, error: AioEngineError) -> None:
        self.error = error
        self.is_over.set()


async def pool(core: Core, prompt: list[int], **params: Any) -> tuple[Pooling, Sequence]:
    """What a request for a vector brings, and its sequence."""
    request = Request(
        request_id="vector",
        prompt_token_ids=int32(prompt),
        params=SamplingParams(**params),
        seed=0,
        max_total_tokens=len(prompt) + 1,
        product="vector",
    )
    sequence, listener = core.make_sequence(request), Pooling()
    core.add(sequence, [listener])
    with anyio.fail_after(60):
        await listener.is_over.wait()
    return listener, sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama3", tokenizer=True)


@pytest.mark.parametrize("way", ["here", "sockets"])
async def test_it_is_the_hidden_state_that_transformers_computes(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, way: str
) -> None:
    """Beside requests that sample, in chunks, and preempted once."""
    executor = await TorchExecutor.start(await asyncio.to_thread(ModelFolder.read, folder), EngineConfig(**CONFIG))
    plans: list[StepPlan] = []
    address = f"ipc://{tmp_path_factory.mktemp('s')}/engine"
    async with (
        served(address, executor, model=str(folder), **CONFIG) as server,
        await Engine.connect(server.address) as engine,
    ):
        launch = executor.launch

        def launch_and_preempt(plan: StepPlan) -> Any:
            plans.append(plan)
            chunks = [len(added.token_ids) for known in plans for added in known.added].count(len(PROMPT))
            if chunks == 1 and any(len(added.token_ids) == len(PROMPT) for added in plan.added):
                asyncio.get_running_loop().call_soon(server.core.scheduler.preempt_all)
            return launch(plan)

        executor.launch = launch_and_preempt  # type: ignore[method-assign]
        core: Core = server.core if way == "here" else engine._here().core
        asked = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.0}
        alone = [(await engine.generate(prompt, **asked)).outputs[0].token_ids for prompt in ([5, 6, 7], [8] * 9)]
        plans.clear()
        beside = [engine.generate(prompt, **asked) for prompt in ([5, 6, 7], [8] * 9)]
        *outputs, (listener, sequence) = await asyncio.gather(*beside, pool(core, PROMPT))
        assert [output.outputs[0].token_ids for output in outputs] == alone
        again, _ = await pool(core, PROMPT)  # most of it is in the prefix cache

    reference = load_reference(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference.model(torch.tensor([PROMPT])).last_hidden_state[0, -1].numpy()
    assert listener.events == ["started", "vector", "end"]
    assert (sequence.finish_reason, sequence.num_preemptions, sequence.output_ids) == ("stop", 1, [])
    assert listener.vector.dtype == np.float32
    np.testing.assert_allclose(listener.vector, expected, atol=1e-4)
    np.testing.assert_allclose(again.vector, expected, atol=1e-4)
    purposes = [set(plan.purposes.tolist()) for plan in plans]
    assert {Purpose.SAMPLE, Purpose.POOL} in purposes, "in a step with rows that sample"
    assert sum(Purpose.NOTHING in of_step for of_step in purposes) >= 3, "in chunks"


async def test_many_vectors_come_in_messages_of_bounded_size(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Wide(FakeExecutor):
        def _vector(self, work: Any) -> Float32:
            return np.full(4096, super()._vector(work)[0], np.float32)

    address = f"ipc://{tmp_path_factory.mktemp('s')}/engine"
    async with (
        served(address, Wide(vocab_size=1000, num_blocks=256), max_num_seqs=64) as server,
        await Engine.connect(server.address) as engine,
    ):
        far = engine._here().core
        prompts = [[number + 3, 5] for number in range(60)]
        pooled = await asyncio.gather(*(pool(far, prompt) for prompt in prompts))
        alone = await asyncio.gather(*(pool(server.core, prompt) for prompt in prompts))
        for (found, _), (wanted, _) in zip(pooled, alone, strict=True):
            assert np.array_equal(found.vector, wanted.vector)
        assert len({float(found.vector[0]) for found, _ in pooled}) == 60


async def test_a_vector_of_several_choices_is_refused_over_the_wire(tmp_path_factory: pytest.TempPathFactory) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('s')}/engine"
    async with served(address, FakeExecutor()) as server, await Engine.connect(server.address) as engine:
        listener, _ = await pool(engine._here().core, PROMPT, n=2)
        assert isinstance(listener.error, InvalidRequest)
        assert listener.error.param == "n"
        listener, _ = await pool(engine._here().core, PROMPT)
        assert listener.error is None
