"""Calls of each operation at serving sizes, with what they must read, write and compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from aioengine.kernels.attention.paged import choose_num_splits
from aioengine.kernels.operations import ExpertWeights, PagedKV
from aioengine.kernels.packed_weight import in_panels
from aioengine.kernels.sampling.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow, param_of
from aioengine.sampling_params import FILTERS, PENALTIES
from benchmarks.gpu.sizes import KernelSizes

NUM_EXPERTS, NUM_CHOSEN = 8, 2
FP8 = torch.float8_e4m3fn


class Case(msgspec.Struct, kw_only=True):
    """A call to be timed.

    Attributes:
        call: what `time_case` calls with the operation.
        num_bytes: that it must read and write; flops: that it must compute.
    """

    operation: str
    size: str
    call: Callable[[Callable[..., Any]], object]
    num_bytes: float
    flops: float = 0.0


class Inputs:
    """Random inputs on a device; of bf16 there, of float32 on a CPU."""

    def __init__(self, sizes: KernelSizes, device: str, operations: Any) -> None:
        self.sizes, self.device, self.operations = sizes, device, operations
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, device=self.device, generator=self._generator)
        return values.to(dtype or self.dtype)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, device=self.device, generator=self._generator)

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def caches(self, num_blocks: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        s = self.sizes
        shape = (num_blocks, s.block_size, s.kv_heads, s.head_dim)
        return self.normal(*shape).to(dtype or self.dtype), self.normal(*shape).to(dtype or self.dtype)

    def tables(self, rows: int, context: int) -> Tensor:
        """Blocks of each row, scattered over the cache, as after hours of serving."""
        each = -(-context // self.sizes.block_size)
        order = torch.randperm(rows * each, device=self.device, generator=self._generator)
        return order.to(torch.int32).view(rows, each)

    def samples(self, count: int, **params: float) -> Tensor:
        """Samples of the rows of logits 0 up to ``count``, each a row's, and first."""
        samples = torch.zeros(count, SAMPLE_WORDS, dtype=torch.int32)
        samples[:, SampleRow.LOGITS_ROW] = samples[:, SampleRow.ROW] = torch.arange(count)
        samples[:, SampleRow.END], samples[:, SampleRow.OUTPUT_POSITION] = self.sizes.context, self.sizes.context // 2
        samples[:, SampleRow.FLAGS], samples[:, SampleRow.MASK] = int(SampleFlag.FIRST | SampleFlag.LOGPROBS), -1
        samples[:, SampleRow.SEED_LOW] = torch.arange(count)
        for name, value in {**FILTERS, **PENALTIES, **params}.items():
            param_of(samples, name).fill_(value)
        return samples.to(self.device)

    def empty_ints(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device)

    def empty_floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def _norms(i: Inputs) -> Iterator[Case]:
    for tokens in (i.sizes.decode, i.sizes.prefill):
        x, residual, weight = (
            i.normal(tokens, i.sizes.hidden),
            i.normal(tokens, i.sizes.hidden),
            i.normal(i.sizes.hidden),
        )
        size = f"[{tokens}, {i.sizes.hidden}]"
        yield Case(
            operation="rms_norm",
            size=size,
            call=lambda f, x=x, weight=weight: f(x, weight, 1e-5),
            num_bytes=2 * x.nbytes,
        )
        yield Case(
            operation="add_rms_norm",
            size=size,
            call=lambda f, x=x, residual=residual, weight=weight: f(x, residual, weight, 1e-5),
            num_bytes=4 * x.nbytes,
        )
        yield Case(
            operation="rms_norm_add",
            size=size,
            call=lambda f, x=x, residual=residual, weight=weight: f(x, residual, weight, 1e-5),
            num_bytes=3 * x.nbytes,
        )
        yield Case(operation="scale", size=size, call=lambda f, x=x: f(x, 1.0, 30.0), num_bytes=2 * x.nbytes)


def _activation(i: Inputs) -> Iterator[Case]:
    for tokens in (i.sizes.decode, i.sizes.prefill):
        x = i.normal(tokens, 2 * i.sizes.intermediate)
        yield Case(
            operation="gated_activation",
            size=f"[{tokens}, 2 · {i.sizes.intermediate}]",
            call=lambda f, x=x: f(x),
            num_bytes=1.5 * x.nbytes,
        )


def _experts(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    sizes = [(2 * s.intermediate, s.hidden), (s.hidden, s.intermediate)]
    # Each matrix begins a panel.
    stacks = [i.normal(NUM_EXPERTS * in_panels(rows), columns) * columns**-0.5 for rows, columns in sizes]
    gate_up, down = map(i.operations.pack, stacks)
    layer = ExpertWeights(
        num_experts=NUM_EXPERTS, hidden=s.hidden, intermediate=s.intermediate, gate_up=gate_up, down=down
    )
    for tokens in (1, s.decode, s.prefill):
        logits, x = i.normal(tokens, NUM_EXPERTS, dtype=torch.float32), i.normal(tokens, s.hidden)
        yield Case(
            operation="route",
            size=f"{tokens} tokens to {NUM_CHOSEN} of {NUM_EXPERTS} experts",
            call=lambda f, logits=logits: f(logits, NUM_EXPERTS, NUM_CHOSEN, is_normalised=True),
            num_bytes=logits.nbytes + 8 * tokens * NUM_CHOSEN,
        )
        weights, chosen = logits.softmax(-1).topk(NUM_CHOSEN)
        ids = chosen.to(torch.int32)
        share = len(ids.unique()) / NUM_EXPERTS
        yield Case(
            operation="experts",
            size=f"{tokens} tokens, {NUM_CHOSEN} of {NUM_EXPERTS} experts of 3 · {s.hidden} · {s.intermediate}",
            call=lambda f, *, a=(x, ids, weights, layer): f(*a),
            num_bytes=share * sum(stack.nbytes for stack in stacks) + 2 * x.nbytes,
            flops=6 * tokens * NUM_CHOSEN * s.hidden * s.intermediate,
        )


def _rotation(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    for tokens in (s.decode, s.prefill):
        qkv = i.normal(tokens, (s.heads + 2 * s.kv_heads) * s.head_dim)
        table = i.normal(s.prefill, 2 * s.head_dim, dtype=torch.float32)
        weight = i.normal(s.heads + s.kv_heads, s.head_dim)
        positions = torch.arange(tokens, dtype=torch.int32, device=i.device)
        caches = i.caches(-(-tokens // s.block_size))
        for name, qk_weight in (("", None), (", with norms", weight)):
            yield Case(
                operation="rotate_and_write",
                size=f"{tokens} tokens of {s.heads} + 2 · {s.kv_heads} heads of {s.head_dim}{name}",
                call=lambda f, *, a=(qkv, positions, positions, table, qk_weight, 1e-6, *caches): f(*a),
                num_bytes=2 * qkv.nbytes,
            )


def _decode_attention(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    shapes = [(1, s.context), (min(64, s.decode), s.context), (s.decode, s.context), (1, s.long_context)]
    for dtype in (i.dtype, FP8):
        for batch, context in dict.fromkeys(shapes):  # tiny ones are the same twice
            tables = i.tables(batch, context)
            caches = i.caches(tables.numel(), dtype)
            q, out = i.normal(batch, s.heads, s.head_dim), i.normal(batch, s.heads, s.head_dim)
            decodes = i.ints([[row, row, context] for row in range(batch)])
            num_splits = _num_splits(i, batch, context)
            kv = PagedKV(*caches, tables, s.head_dim**-0.5, None)
            yield Case(
                operation="attend_decode",
                size=f"batch {batch}, context {context}, {str(dtype).removeprefix('torch.')} cache",
                call=lambda f, *, a=(q, kv, decodes, out), n=num_splits, c=context: f(*a, num_splits=n, max_context=c),
                num_bytes=2 * batch * context * s.kv_heads * s.head_dim * dtype.itemsize,
                flops=4 * batch * context * s.heads * s.head_dim,
            )


def _num_splits(i: Inputs, batch: int, context: int) -> int:
    is_cuda = i.device == "cuda"
    multiprocessors = torch.cuda.get_device_properties(i.device).multi_processor_count if is_cuda else 8
    found: int = choose_num_splits(batch, i.sizes.kv_heads, context, multiprocessors)
    return found


def _prefill_attention(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    tile = i.operations.prefill_tile(s.heads, s.kv_heads, s.head_dim)
    tables = i.tables(1, s.prefill)
    caches = i.caches(tables.numel())
    q = i.normal(s.prefill, s.heads, s.head_dim)
    tiles = i.ints([[0, first, min(tile, s.prefill - first), first] for first in range(0, s.prefill, tile)])
    arguments = (q, PagedKV(*caches, tables, s.head_dim**-0.5, None), tiles, torch.empty_like(q))
    yield Case(
        operation="attend_prefill",
        size=f"one prompt of {s.prefill}",
        call=lambda f: f(*arguments),
        num_bytes=2 * q.nbytes + 2 * s.prefill * s.kv_heads * s.head_dim * q.element_size(),
        flops=2 * s.prefill**2 * s.heads * s.head_dim,
    )


def _row_state(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    width = s.context + 64
    history, tables = i.below(s.vocab, s.decode, width), i.tables(s.decode, width)
    spans = i.ints([[row, 3, row, 1] for row in range(s.decode)])
    words = i.below(s.vocab, s.decode)
    yield Case(
        operation="put_spans",
        size=f"{s.decode} of one word",
        call=lambda f: f(history, spans, words),
        num_bytes=spans.nbytes + 2 * words.nbytes,
    )
    for name, each in (("decode", 1), ("prefill", s.prefill // s.decode)):
        rows = i.ints([[row, 0, row * each, each] for row in range(s.decode)])
        yield Case(
            operation="gather_tokens",
            size=f"{name}: {s.decode} rows of {each}",
            call=lambda f, rows=rows, each=each: f(rows, history, tables[None], s.block_size, each * s.decode),
            num_bytes=4 * each * s.decode * 5,
        )
    samples = i.samples(s.decode)
    yield Case(
        operation="append_tokens",
        size=f"{s.decode} samples",
        call=lambda f: f(history, samples, words),
        num_bytes=samples.nbytes + 2 * words.nbytes,
    )
    count = min(64, s.decode)
    caches = i.normal(2 * s.layers, 2 * count, s.block_size, s.kv_heads, s.head_dim)
    sources = torch.arange(count, dtype=torch.int32, device=i.device)
    yield Case(
        operation="copy_blocks",
        size=f"{count} blocks of {s.block_size} tokens in {2 * s.layers} caches",
        call=lambda f: f(caches, sources, sources + count),
        num_bytes=caches.nbytes,
    )


def _edits(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    count = 50 * s.decode
    logits, samples = i.normal(s.decode, s.vocab, dtype=torch.float32), i.samples(s.decode)
    sample_of_row = torch.arange(s.decode, dtype=torch.int32, device=i.device)
    rows, tokens = i.below(s.decode, count), i.below(s.vocab, count)
    values, until = i.empty_floats(count).zero_(), i.ints([2**30]).repeat(count)
    edits = torch.stack((rows, tokens, values.view(torch.int32), until))
    size = f"{s.decode} rows with 50 each"
    yield Case(
        operation="edit_logits",
        size=size,
        call=lambda f: f(logits, samples, sample_of_row, edits),
        num_bytes=24 * count,
    )
    offsets = torch.arange(count + 1, dtype=torch.int32, device=i.device) * 2
    history, ids = i.below(s.vocab, s.decode, s.context + 64), i.below(s.vocab, 2 * count)
    yield Case(
        operation="ends_of_bad_words",
        size=f"{size}, of three tokens",
        call=lambda f: f(samples, sample_of_row, history, rows, offsets, ids, values),
        num_bytes=28 * count,
    )


def _penalties(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    logits, history = i.normal(s.decode, s.vocab, dtype=torch.float32), i.below(s.vocab, s.decode, s.context + 64)
    samples = i.samples(s.decode, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)
    counters = torch.zeros(s.decode, s.vocab, dtype=torch.int32, device=i.device)
    size = f"{s.decode} rows of {s.context} tokens"
    num_tokens = s.decode * s.context
    # For each token its id, and its counter and its logit, read and written.
    yield Case(
        operation="penalise",
        size=size,
        call=lambda f: f(logits, samples, history, counters),
        num_bytes=20 * num_tokens,
    )


def _draws(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    settings: list[tuple[str, dict[str, float], bool, bool]] = [
        ("greedy", {}, False, True),
        ("temperature", {"temperature": 0.8}, False, False),
        ("min-p 0.05", {"temperature": 0.8, "min_p": 0.05}, True, False),
        ("top-k 50", {"temperature": 0.8, "top_k": 50}, True, False),
        ("top-p 0.9", {"temperature": 0.8, "top_p": 0.9}, True, False),
        ("top-k 50 and top-p 0.9", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}, True, False),
    ]
    for batch in (1, s.decode):
        # As spread as a model's: filters keep tens of tokens.
        logits = i.normal(batch, s.vocab, dtype=torch.float32) * 2.5
        ids, status = i.empty_ints(batch), i.empty_ints(batch)
        for name, params, has_filters, is_greedy in settings:
            samples = i.samples(batch, **params)
            yield Case(
                operation="draw",
                size=f"[{batch}, {s.vocab}], {name}",
                call=lambda f, *, a=(logits, samples, None, ids, status), filters=has_filters, greedy=is_greedy: f(
                    *a, has_filters=filters, is_greedy=greedy
                ),
                num_bytes=logits.nbytes,
            )


def _logprobs(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    logits, samples = i.normal(s.decode, s.vocab, dtype=torch.float32) * 2.5, i.samples(s.decode)
    mass = i.empty_floats(s.decode).fill_(12.0)
    for k in (0, 5, 20):
        ids, logprobs = i.empty_ints(s.decode, k), i.empty_floats(s.decode, k)
        yield Case(
            operation="top_logprobs",
            size=f"[{s.decode}, {s.vocab}], {k}",
            call=lambda f, ids=ids, logprobs=logprobs: f(logits, samples, i.empty_floats(s.decode), ids, logprobs),
            num_bytes=logits.nbytes,
        )
    lines = torch.arange(s.decode, dtype=torch.int32, device=i.device)
    tokens, ranks, logprobs = i.below(s.vocab, s.decode), i.empty_ints(s.decode), i.empty_floats(s.decode)
    yield Case(
        operation="look_up",
        size=f"{s.decode} lines of {s.vocab}",
        call=lambda f: f(logits, lines, tokens, mass, logprobs, ranks),
        num_bytes=logits.nbytes,
    )


CASES: tuple[Callable[[Inputs], Iterator[Case]], ...] = (
    _norms,
    _activation,
    _experts,
    _rotation,
    _decode_attention,
    _prefill_attention,
    _row_state,
    _edits,
    _penalties,
    _draws,
    _logprobs,
)
