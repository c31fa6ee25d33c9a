"""A layer that keeps a state of fixed size, through admission, chunks, preemption, forks and prefix hits.

The model is made up here: a decaying sum of its inputs beside a layer of attention. Nothing in the engine knows it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from integrity import check_integrity
from torch import Tensor

from aioengine import Engine
from aioengine.config import EngineConfig
from aioengine.executor.host import HostAccelerator
from aioengine.executor.torch_executor import TorchExecutor
from aioengine.kernels.operations import LayerAttention, Operations
from aioengine.models.model import ModelConfig, StateRows, StepContext
from aioengine.scheduler.cache_layout import AttentionSpec, CacheSpec, StateSpec

VOCAB, HIDDEN, HEADS, HEAD_DIM, DECAY = 64, 16, 2, 8, 0.8
BLOCK_SIZE, MAX_MODEL_LEN, MAX_TOKENS = 4, 96, 24
SCALE = HEAD_DIM**-0.5
SUMS, ATTENTION = 0, 1
CACHES: tuple[CacheSpec, ...] = (
    StateSpec(num_bytes=HIDDEN * 4),
    AttentionSpec(num_kv_heads=1, key_size=HEAD_DIM, value_size=HEAD_DIM),
)


class SumModel:
    """Embeddings, a layer of decaying sums, a layer of attention; logits by the embeddings."""

    quantization = None
    is_capturable = False
    weight_bytes = 4 * (VOCAB * HIDDEN + HIDDEN * (HEADS + 2) * HEAD_DIM + HEADS * HEAD_DIM * HIDDEN)
    operations: Operations

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.config = ModelConfig(
            architecture="SumModel",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_layers=2,
            num_heads=HEADS,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            max_model_len=MAX_MODEL_LEN,
            dtype=torch.float32,
            caches=CACHES,
        )
        sizes = (VOCAB, HIDDEN), (HIDDEN, (HEADS + 2) * HEAD_DIM), (HEADS * HEAD_DIM, HIDDEN)
        self.embedding, self.qkv, self.output = (torch.randn(size, generator=generator) for size in sizes)

    def use(self, operations: Operations) -> None:
        self.operations = operations

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        x = self.embedding[token_ids]
        x = x + sums_of(x, *step.find_states(SUMS))
        layer = LayerAttention(index=ATTENTION, rope_table=None, qk_weight=None, eps=0.0, scale=SCALE, window=None)
        return x + step.attend(x @ self.qkv, layer) @ self.output

    def logits(self, hidden: Tensor, step: StepContext) -> Tensor:
        return hidden @ self.embedding.T

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def ties(self) -> dict[str, str]:
        return {}

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The likeliest tokens, computed from all tokens anew each time."""
        ids = list(prompt)
        for _ in range(num_tokens):
            x = self.embedding[ids]
            state, sums = torch.zeros(HIDDEN), []
            for line in x:
                state = DECAY * state + line
                sums.append(state)
            x = x + torch.stack(sums)
            q, k, v = (x @ self.qkv).split((HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM), 1)
            q = q.view(len(ids), HEADS, HEAD_DIM).transpose(0, 1)
            scores = q @ k.T * SCALE + torch.full((len(ids), len(ids)), -torch.inf).triu(1)
            attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            hidden = x + attended @ self.output
            ids.append(int((hidden[-1] @ self.embedding.T).argmax()))
        return ids[len(prompt) :]


def sums_of(x: Tensor, states: Tensor, rows: StateRows) -> Tensor:
    """Sums over each row's tokens, from the state before its first; the states are kept where the rows say."""
    sums = torch.empty_like(x)
    for first, count, before, num_to_boundary, at_boundary, after in zip(*(c.tolist() for c in rows), strict=True):
        state = torch.zeros(HIDDEN) if before < 0 else states[before].view(torch.float32).clone()
        for nth in range(count):
            state = sums[first + nth] = DECAY * state + x[first + nth]
            if nth + 1 == num_to_boundary:
                states[at_boundary] = state.view(torch.uint8)
        if after >= 0:
            states[after] = state.view(torch.uint8)
    return sums


@pytest.mark.parametrize("caching", [True, False], ids=["prefix hits", "no prefix cache"])
@pytest.mark.parametrize(("depth", "budget"), [(1, 7), (2, 24)], ids=["small chunks", "two steps in flight"])
async def test_tokens_are_those_of_a_computation_without_a_cache(depth: int, budget: int, caching: bool) -> None:
    model, rng = SumModel(), random.Random(0)
    fields: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": budget,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_in_flight": depth,
        "enable_prefix_caching": caching,
        "kv_cache_memory_bytes": 8_000,  # one sequence of full length, and a little more
    }
    executor = await TorchExecutor.start(
        None,
        EngineConfig(**fields),
        load=lambda **_: model,
        find_accelerator=HostAccelerator,  # type: ignore[arg-type,return-value]
    )
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    lengths = [1, 3, 8, 23, 32, 41, 60, 60]
    prompts = [shared[:length] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))] for length in lengths]
    wanted = [model.generate(prompt, MAX_TOKENS) for prompt in prompts]

    async def check(engine: Engine, number: int) -> None:
        # The likeliest token alone is drawn, by each choice for itself.
        chosen: dict[str, Any] = {"temperature": 1.0, "top_k": 1, "n": 1 + number % 3}
        answer = await engine.generate(prompts[number], max_tokens=MAX_TOKENS, ignore_eos=True, **chosen)
        assert [output.token_ids for output in answer.outputs] == [wanted[number]] * chosen["n"]

    async with Engine(executor=executor, **fields) as engine:
        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                for number in range(len(prompts)):
                    group.create_task(check(engine, number))
        assert engine._runtime is not None
        scheduler = engine._runtime.core.scheduler  # type: ignore[attr-defined]
        stats = scheduler.stats()
        assert stats.preemptions > 0
        assert (stats.prefix_cache_hits > 0) == caching
        check_integrity(scheduler)
        assert len(scheduler.kv.pools) == 2
        assert all(pool.num_free == pool.num_blocks for pool in scheduler.kv.pools)
