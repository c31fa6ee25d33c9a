"""What a decoder over a paged cache and transformers say of whole sequences."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference
from kernels.paged_cases import as_cached
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.errors import ModelLoadError
from aioengine.kernels.operations import LayerAttention
from aioengine.kernels.operations import plain_torch as oracles
from aioengine.kernels.torch.quantized import read_lines
from aioengine.models.decoder import Decoder
from aioengine.models.folder import ModelFolder
from aioengine.models.implementations import load_model
from aioengine.models.loader import load_decoder

Checkpoint = Callable[..., Path]

FILE = "model.safetensors"
NUM_TOKENS = 100  # past every window and past the length that llama3 and yarn stretch
VOCAB_SIZE = 384
BLOCK_SIZE = 4


class PagedStep:
    """A `StepContext` over a paged cache, which holds NaN where nothing was written: attention in plain float32.

    Args:
        num_rows, length: rows of tokens, and the most tokens of one.
        operations: whose `rotate_and_write` it calls.
        cache_dtype: absent: the decoder's.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_rows: int = 1,
        length: int = NUM_TOKENS,
        *,
        operations: Any = oracles,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        c, self.device = decoder.config, decoder.embedding.weight.device
        self.operations, self.embeddings = operations, None
        blocks_a_row = -(-length // BLOCK_SIZE)
        order = torch.randperm(num_rows * blocks_a_row, generator=torch.Generator().manual_seed(1))
        self.block_tables = order.int().view(num_rows, blocks_a_row).to(self.device)
        nothing = torch.full((2, c.num_layers, len(order), BLOCK_SIZE, c.num_kv_heads, c.head_dim), torch.nan)
        self.k, self.v = as_cached(nothing.to(self.device), cache_dtype or c.dtype)
        self.step_rows: list[list[int]] = []

    @property
    def rows(self) -> Tensor:
        table = torch.tensor(self.step_rows, dtype=torch.int32, device=self.device)
        return oracles.rows_of_tokens(table, len(self.block_tables), len(self.positions))

    def begin_step(self, rows: list[list[int]], history: Tensor) -> Tensor:
        """Token ids of the tokens of rows (row, start, index of the first, count)."""
        self.step_rows = rows
        table = torch.tensor(rows, dtype=torch.int32, device=self.device)
        num_tokens = sum(row[3] for row in rows)
        token_ids, self.positions, slots = oracles.gather_tokens(
            table, history.to(self.device), self.block_tables[None], BLOCK_SIZE, num_tokens
        )
        self.slots = slots[0]
        return token_ids

    def attend(self, qkv: Tensor, layer: LayerAttention) -> Tensor:
        k_cache, v_cache, rotate = self.k[layer.index], self.v[layer.index], self.operations.rotate_and_write
        q = rotate(
            qkv, self.positions, self.slots, layer.rope_table, layer.qk_weight, layer.eps, k_cache, v_cache,
            layer.qk_offset, is_qk_norm_wide=layer.is_qk_norm_wide,
        )  # fmt: skip
        out = torch.zeros_like(q)
        for row, start, first, count in self.step_rows:
            if row < 0:
                continue
            key = torch.arange(start + count, device=self.device)
            slots = self.block_tables[row, key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE
            keys, values = (
                read_lines(cache.flatten(0, 1)[slots], torch.float32).repeat_interleave(q.shape[1] // cache.shape[2], 1)
                for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", q[first : first + count].float(), keys) * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            query = key[start:, None]
            is_seen = key <= query
            if layer.window is not None:
                is_seen &= key > query - layer.window
            scores = scores.masked_fill(~is_seen, -torch.inf)
            if layer.sinks is not None:
                scores = torch.cat((scores, layer.sinks.float()[:, None, None].expand(*scores.shape[:2], 1)), -1)
            weights = scores.softmax(-1)[..., : len(key)]
            out[first : first + count] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out.flatten(1)


def token_ids(seed: int = 0, num_tokens: int = NUM_TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator, dtype=torch.int32)


@torch.inference_mode()
def logprobs(decoder: Decoder, ids: Tensor, chunks: list[int] | None = None, step: PagedStep | None = None) -> Tensor:
    """Of one sequence, after each of its tokens."""
    step = step or PagedStep(decoder, length=len(ids))
    hidden, start = [], 0
    for count in chunks or [len(ids)]:
        # A copy: where native kernels leave it the next step's is.
        hidden.append(decoder(step.begin_step([[0, start, 0, count]], ids[None]), step).clone())
        start += count
    logits = decoder.logits(torch.cat(hidden), step)
    assert logits.dtype == torch.float32
    return logits.log_softmax(-1)


@torch.inference_mode()
def reference(
    folder: Path, ids: Tensor, dtype: torch.dtype = torch.float32, *, attn_implementation: str = "eager"
) -> Tensor:
    model = load_reference(folder, dtype=dtype, attn_implementation=attn_implementation)
    return model(ids[None].long()).logits[0].float().log_softmax(-1)


def edit_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; ``...`` takes one away."""
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object], file: str = FILE) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})


def refused(folder: Path, *named: str, **config: Any) -> None:
    """Loading must raise a `ModelLoadError` that holds all of ``named``."""
    with pytest.raises(ModelLoadError) as raised:
        load_model(ModelFolder.read(folder), EngineConfig(**config))
    for text in named:
        assert text in str(raised.value)


def load(folder: Path, **config: Any) -> Decoder:
    return load_decoder(ModelFolder.read(folder), EngineConfig(**config))
