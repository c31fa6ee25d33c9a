"""A model's step context: a product that adds what its token's row says, and embeddings that are given.

Both are written against `aioengine.models.model.StepContext` alone, run by the runner, and held against transformers:
on the same weights with biases of their own, and with ``inputs_embeds``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference, make_checkpoint
from executor.plans import PlanWriter
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorStats
from aioengine.executor.host import HostAccelerator
from aioengine.executor.make_runner import make_runner
from aioengine.kernels.native.compilation import compile_library
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import plain_torch as operations
from aioengine.models.decoder import Decoder, Linear, Product
from aioengine.models.folder import ModelFolder
from aioengine.models.implementations import load_model
from aioengine.models.model import GivenEmbeddings, StepContext
from doubles.fake_graph import FakeGraph, as_launches

NUM_ROWS, CHUNK, HIDDEN, VOCAB_SIZE = 8, 5, 64, 384
ADDED = {0: 11, 2: 12}
"""Rows whose products have an addend, and the seeds of these."""

PROMPTS = {row: [(7 * index * (row + 2)) % 300 + 3 for index in range(9 + 4 * row)] for row in range(3)}
GIVEN = 5
"""A token that stands for a given embedding."""


@pytest.fixture(params=["plain", "graphs", "programs"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The host by plain torch, with graphs of what torch launches, and with programs of native kernels."""
    made: Any = HostAccelerator()
    if request.param == "graphs":

        def record(work: Any) -> FakeGraph:
            graph = FakeGraph(lambda replay: replay())
            graph.record(work)
            return graph

        made.operations, made.can_capture, made.capture = as_launches(operations), True, record
    elif request.param == "programs":
        made._team = Team(compile_library(), 2)
        made.operations, made.can_capture = NativeOperations(made._team), True
    yield made
    made.close()


def run(accelerator: Any, model: Any, prompts: dict[int, list[int]], num_tokens: int) -> tuple[Any, dict[int, Any]]:
    """Serve prompts in chunks and decode steps; the runner, and each row's greedy tokens."""
    config = EngineConfig(max_num_seqs=NUM_ROWS, block_size=4, kv_cache_memory_bytes=2**22)
    with torch.inference_mode():
        runner: Any
        runner, info = make_runner(accelerator, model, config, ExecutorStats(), lambda *_: None)
        writer = PlanWriter.of(info)
        for row, prompt in prompts.items():
            writer.add(row, prompt)
        while any(len(state.token_ids) < len(prompts[row]) + num_tokens for row, state in writer.rows.items()):
            chunks = {row: min(CHUNK, state.num_known - state.num_computed) for row, state in writer.rows.items()}
            plan = writer.plan(chunks)
            writer.read(plan, runner.step(plan))
    return runner, {row: state.token_ids[len(prompts[row]) :][:num_tokens] for row, state in writer.rows.items()}


def greedy(logits_of: Callable[[list[int]], Tensor], prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(logits_of(ids)[0, -1].argmax()))
    return ids[len(prompt) :]


def with_addends(linear: Linear, addends: dict[int, Tensor]) -> Callable[[Product], Product]:
    """A product that adds to a token's output the addend of its row, if that has one; by recordable operations."""

    def around(product: Product) -> Product:
        width = len(next(iter(addends.values())))
        table, ones = torch.zeros(NUM_ROWS + 1, width), torch.ones(width)
        for row, addend in addends.items():
            table[row] = addend
        packed = linear.operations.pack(table, None, torch.float32)
        embed, add_rms_norm = linear.operations.embed, linear.operations.add_rms_norm

        def added(x: Tensor, step: StepContext) -> Tensor:
            y = product(x, step)
            add_rms_norm(embed(step.rows, packed), y, ones, 1.0)
            return y

        return added

    return around


THEIRS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Matrices of a layer of ours, and those that transformers has for each."""


def addend(name: str, seed: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    return 0.5 * torch.randn(width, generator=generator)


def test_a_product_adds_what_the_row_of_each_token_says(accelerator: Any, tmp_path: Path) -> None:
    folder, num_tokens = make_checkpoint(tmp_path / "model", "llama2"), 12
    decoder: Any = load_model(ModelFolder.read(folder), EngineConfig())
    assert isinstance(decoder, Decoder)
    theirs = {row: load_reference(folder, dtype=torch.float32) for row in (*ADDED, 1)}
    matrices = [(f"layers.{layer}.{ours}", f"model.layers.{layer}.", names)
                for layer in range(3) for ours, names in THEIRS.items()]  # fmt: skip
    for ours, prefix, names in [*matrices, ("head", "", ("lm_head",))]:
        linear, addends = decoder.get_submodule(ours), {}
        for row, seed in ADDED.items():
            parts = [theirs[row].get_submodule(prefix + name) for name in names]
            for name, part in zip(names, parts, strict=True):
                part.bias = torch.nn.Parameter(addend(prefix + name, seed, part.out_features))
            addends[row] = torch.cat([part.bias.detach() for part in parts])
        linear.around = with_addends(linear, addends)
    runner, found = run(accelerator, decoder, PROMPTS, num_tokens)
    for row, prompt in PROMPTS.items():
        model = theirs[row]
        wanted = greedy(lambda ids, model=model: model(torch.tensor([ids]), use_cache=False).logits, prompt, num_tokens)
        assert found[row] == wanted
    assert (len(runner.graphs) > 0) == accelerator.can_capture, "no decode step was recorded"


@pytest.mark.parametrize("model_path", ["native", "transformers"])
def test_embeddings_that_are_given_take_the_place_of_a_tokens(tmp_path: Path, model_path: Any) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama2")
    model, theirs = load_model(ModelFolder.read(folder), EngineConfig(model_path=model_path)), load_reference(folder)
    given = torch.randn(NUM_ROWS, 64, HIDDEN, generator=torch.Generator().manual_seed(3))
    """By row and position."""

    class WithGiven:
        """The model, with embeddings in place of each `GIVEN`."""

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
            (tokens,) = torch.nonzero(token_ids == GIVEN, as_tuple=True)
            step.embeddings = GivenEmbeddings(tokens, given[step.rows[tokens], step.positions[tokens]])
            return model(token_ids, step)

    prompts = {row: [*prompt[:3], *[GIVEN] * (row + 2), *prompt[3:]] for row, prompt in PROMPTS.items()}
    _, found = run(HostAccelerator(), WithGiven(), prompts, 8)
    for row, prompt in prompts.items():

        def logits(ids: list[int], row: int = row) -> Tensor:
            embeds = theirs.model.embed_tokens(torch.tensor([ids])).clone()
            for position, token_id in enumerate(ids):
                if token_id == GIVEN:
                    embeds[0, position] = given[row, position]
            return theirs(inputs_embeds=embeds, use_cache=False).logits

        assert found[row] == greedy(logits, prompt, 8)
