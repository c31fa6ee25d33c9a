"""The decoder for GPUs gives what the plain decoder and transformers give, over a paged cache."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES
from models.reference import VOCAB_SIZE, Checkpoint, load, logprobs, reference
from nightly import few
from torch import Tensor

from aioengine.kernels import triton_operations
from aioengine.kernels.torch import layers as reference_decoder
from aioengine.models import decoder as decoder_module
from aioengine.models.decoder import Decoder
from aioengine.models.fused import FusedDecoder

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
ORACLES: Any = reference_decoder
KERNELS: Any = triton_operations
BLOCK_SIZE = 4
LENGTHS = (70, 19, 30)
# For each step (row, tokens): chunks of prompts and single tokens, together and alone, and padding.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 40), (1, 16)),
    ((1, 1), (0, 13), (-1, 3), (2, 29)),
    ((2, 1), (0, 16), (1, 1)),
    ((-1, 1), (1, 1), (0, 1)),
)
FEW_STEPS = (((0, 5), (2, 3)), ((2, 1), (-1, 1), (0, 1)))


def sequences(seed: int = 0) -> Tensor:
    """The rows' tokens, with rubbish behind their ends."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (len(LENGTHS), max(LENGTHS)), generator=generator, dtype=torch.int32)


class PagedAttend:
    """A `FusedAttend` over a paged cache, which holds NaN where nothing was written: attention in plain float32."""

    def __init__(self, decoder: FusedDecoder, operations: Any) -> None:
        c = decoder.config
        self.config, self.rope_table, self.operations = c, decoder.rope_table, operations
        blocks_a_row = -(-max(LENGTHS) // BLOCK_SIZE)
        num_blocks = len(LENGTHS) * blocks_a_row
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self.block_tables = order.int().view(len(LENGTHS), blocks_a_row).to(DEVICE)
        shape = (c.num_layers, num_blocks, BLOCK_SIZE, c.num_kv_heads, c.head_dim)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=c.dtype, device=DEVICE) for _ in range(2))
        self.rows: list[list[int]] = []

    def begin_step(self, rows: list[list[int]], history: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and positions of the tokens of rows (row, start, index of the first, count)."""
        self.rows = rows
        table = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        num_tokens = sum(row[3] for row in rows)
        token_ids, self.positions, self.slots = reference_decoder.gather_tokens(
            table, history.to(DEVICE), self.block_tables, BLOCK_SIZE, num_tokens
        )
        return token_ids, self.positions

    def __call__(self, layer: int, qkv: Tensor, qk_weight: Tensor | None, *, window: int | None) -> Tensor:
        c, k_cache, v_cache = self.config, self.k[layer], self.v[layer]
        rotate = self.operations.rotate_and_write
        table, eps = self.rope_table, c.rms_norm_eps
        q = rotate(qkv, self.positions, self.slots, table, qk_weight, eps, k_cache, v_cache)
        out = torch.zeros_like(q)
        for row, start, first, count in self.rows:
            if row < 0:
                continue
            key = torch.arange(start + count, device=DEVICE)
            slots = self.block_tables[row, key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE
            keys, values = (
                cache.view(-1, c.num_kv_heads, c.head_dim)[slots]
                .float()
                .repeat_interleave(q.shape[1] // cache.shape[2], 1)
                for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", q[first : first + count].float(), keys) * c.head_dim**-0.5
            query = key[start:, None]
            is_seen = (key <= query) if window is None else (key <= query) & (key > query - window)
            weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
            out[first : first + count] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out.flatten(1)


@torch.inference_mode()
def fused_logprobs(
    decoder: FusedDecoder, operations: Any, history: Tensor, steps: tuple[tuple[tuple[int, int], ...], ...] = STEPS
) -> list[Tensor]:
    """For each row the log-probabilities after each of its tokens."""
    attend = PagedAttend(decoder, operations)
    done = [0] * len(LENGTHS)
    parts: list[list[Tensor]] = [[] for _ in LENGTHS]
    for step in steps:
        rows, first = [], 0
        for row, count in step:
            rows.append([row, done[row] if row >= 0 else 0, first, count])
            first += count
        hidden = decoder.forward(*attend.begin_step(rows, history), attend)
        assert hidden.dtype == decoder.config.dtype
        logits = decoder.logits(hidden)
        assert logits.dtype == torch.float32
        for row, _, first, count in rows:
            if row >= 0:
                parts[row].append(logits[first : first + count].log_softmax(-1).cpu())
                done[row] += count
    assert steps is not STEPS or done == list(LENGTHS)
    return [torch.cat(row) if row else torch.empty(0, VOCAB_SIZE) for row in parts]


def plain_logprobs(decoder: Decoder, history: Tensor) -> list[Tensor]:
    """As `fused_logprobs`, of the plain decoder, each row at once."""
    return [logprobs(decoder, row[:length]) for row, length in zip(history, LENGTHS, strict=True)]


def transformers_logprobs(folder: Path, history: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [reference(folder, row[:length], dtype) for row, length in zip(history, LENGTHS, strict=True)]


def fuse(decoder: Decoder, operations: Any = ORACLES) -> FusedDecoder:
    return FusedDecoder(unbound(decoder).to(DEVICE), operations)


def unbound(decoder: Decoder) -> Decoder:
    """The same decoder as a loader makes it: with dense values, and nothing bound."""
    other = Decoder(decoder.config).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(decoder.dense(name))
    return other


def assert_close(computed: list[Tensor], expected: list[Tensor], atol: float = 1e-4) -> None:
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama-yarn", {}),
    ("qwen2-window", {}),
    ("qwen3", {"tie_word_embeddings": False}),
    ("llama2", {"tie_word_embeddings": True}),
    ("llama3", {"attention_bias": True, "mlp_bias": True}),
]


@pytest.mark.parametrize(("family", "overrides"), few(CASES, of=((family, {}) for family in FAMILIES)))
def test_logprobs_equal_those_of_transformers_and_of_the_plain_decoder(
    checkpoint: Checkpoint, family: str, overrides: dict[str, Any]
) -> None:
    folder, history = checkpoint(family, **overrides), sequences()
    decoder = load(folder)
    layer = next(decoder.decoder_layers())
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    assert all((linear.bias is not None) >= ("mlp_bias" in overrides) for linear in linears)
    computed = fused_logprobs(fuse(decoder), ORACLES, history)
    assert_close(computed, plain_logprobs(decoder, history))
    assert_close(computed, transformers_logprobs(folder, history))


@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3"])
def test_the_kernels_give_the_same(checkpoint: Checkpoint, family: str) -> None:
    decoder, history = load(checkpoint(family, num_hidden_layers=2)), sequences(1)
    computed = fused_logprobs(fuse(decoder, KERNELS), KERNELS, history, FEW_STEPS)
    assert [len(row) for row in computed] == [6, 0, 4]
    expected = plain_logprobs(decoder, history)
    assert_close(computed, [row[: len(ours)] for row, ours in zip(expected, computed, strict=True)])


# As in test_decoder.py: these random models are far more sensitive than trained ones.
@pytest.mark.parametrize(("dtype", "mean"), [(torch.bfloat16, 0.1), (torch.float16, 0.012)], ids=str)
@pytest.mark.parametrize("family", ["llama2", "qwen3"])
def test_half_precision_is_no_worse_than_in_transformers(
    checkpoint: Checkpoint, family: str, dtype: torch.dtype, mean: float
) -> None:
    folder, history = checkpoint(family, dtype=dtype), sequences()
    exact = torch.cat(transformers_logprobs(folder, history))
    decoder = load(folder)
    error = (torch.cat(fused_logprobs(fuse(decoder), ORACLES, history)) - exact).abs().mean()
    error_of_transformers = (torch.cat(transformers_logprobs(folder, history, dtype)) - exact).abs().mean()
    assert error < mean
    assert error < 1.05 * error_of_transformers


@pytest.mark.skipif(DEVICE == "cuda", reason="weights are packed on a CPU")
def test_a_packed_decoder_gives_the_same(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "MIN_PACKED_FLOAT32", 0)
    folder, history = checkpoint("qwen2", tie_word_embeddings=False), sequences()
    decoder = load(folder)
    assert decoder.head is not None
    assert decoder.head.weight.is_mkldnn
    computed = fused_logprobs(FusedDecoder(decoder, ORACLES), ORACLES, history)
    assert_close(computed, transformers_logprobs(folder, history))


@pytest.mark.parametrize("is_moved", [False, True])
def test_values_that_change_or_move_are_seen(checkpoint: Checkpoint, is_moved: bool) -> None:
    first, second = (load(checkpoint("qwen3", seed=seed)) for seed in (0, 1))
    held = unbound(first).to(DEVICE)
    decoder, history = FusedDecoder(held, ORACLES), sequences()
    with torch.no_grad():
        for name, parameter in held.named_parameters():
            if is_moved:
                parameter.data = second.dense(name).to(DEVICE)
            else:
                parameter.copy_(second.dense(name))
    assert_close(fused_logprobs(decoder, ORACLES, history), plain_logprobs(second, history))


def test_a_layer_is_two_norms_one_activation_and_one_attention(checkpoint: Checkpoint) -> None:
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append(name)
            return getattr(reference_decoder, name)(*arguments)

        return run

    names = ("rms_norm", "add_rms_norm", "gated_activation")
    decoder = fuse(load(checkpoint("mistral")), SimpleNamespace(**{name: counted(name) for name in names}))
    seen: list[tuple[int, int | None]] = []

    def attend(layer: int, qkv: Tensor, qk_weight: Tensor | None, *, window: int | None) -> Tensor:
        assert qkv.shape == (5, (4 + 2 * 2) * 16)
        assert qkv.is_contiguous()
        assert qk_weight is None
        calls.append("attend")
        seen.append((layer, window))
        return qkv[:, : 4 * 16]

    ids = torch.arange(5, dtype=torch.int32, device=DEVICE)
    with torch.inference_mode():
        assert decoder.forward(ids, ids, attend).shape == (5, 64)
    assert calls == ["rms_norm"] + ["attend", "add_rms_norm", "gated_activation", "add_rms_norm"] * 3
    assert seen == [(0, 8), (1, 8), (2, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_are_float32_products(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    decoder = load(checkpoint("llama2", dtype=dtype))
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    with torch.inference_mode():
        logits = fuse(decoder).logits(hidden)
    assert (logits.dtype, logits.shape) == (torch.float32, (7, VOCAB_SIZE))
    exact = hidden.double() @ decoder.dense("head.weight").to(DEVICE).double().T
    # A GPU's are not rounded to 16 bits on their way.
    is_rounded = DEVICE == "cpu" and dtype != torch.float32
    tolerance = torch.finfo(dtype).eps if is_rounded else 1e-5
    torch.testing.assert_close(logits.double(), exact, rtol=tolerance, atol=tolerance)
