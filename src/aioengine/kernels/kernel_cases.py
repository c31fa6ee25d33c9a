"""Calls of each operation that has kernels, with what they must read, write and compute.

`aioengine.kernels.kernel_check` runs them at `ODD` sizes against plain torch; ``aioengine check`` times them at `USUAL`
ones, and the benchmarks at sizes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from aioengine.kernels.attention_launches import choose_num_splits
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.operations import Activation, ExpertWeights, Operations, PagedKV, plain_torch
from aioengine.kernels.packed_weight import CodedWeight, Quantization, in_panels
from aioengine.kernels.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow, param_of
from aioengine.kernels.torch.quantized import quantize_lines
from aioengine.sampling_params import FILTERS, PENALTIES

NUM_EXPERTS, NUM_CHOSEN = 8, 2
FP8 = torch.float8_e4m3fn
FP8_CAPABILITY = (8, 9)


def has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


class CaseSizes(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of ``decode`` sequences of ``context`` tokens, and a step of ``prefill`` tokens, of a model."""

    hidden: int = 1024
    intermediate: int = 3072
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936
    layers: int = 4
    decode: int = 8
    prefill: int = 256
    context: int = 512
    long_context: int = 4096
    block_size: int = 16


USUAL = CaseSizes()
ODD = CaseSizes(
    hidden=104, intermediate=72, heads=6, kv_heads=2, head_dim=40, vocab=1003, layers=1,
    decode=7, prefill=37, context=45, long_context=123, block_size=4,
)  # fmt: skip


class ToPack(NamedTuple):
    """A weight among the arguments of a case, to be packed by the operations that are called."""

    weight: Tensor | CodedWeight
    quantization: Quantization | None = None
    dtype: torch.dtype | None = None

    def pack(self, operations: Operations) -> Any:
        weight = self.weight.clone() if isinstance(self.weight, Tensor) else self.weight
        return operations.pack(weight, self.quantization, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call of an operation.

    Attributes:
        num_bytes: that it must read and write; flops: that it must compute.
    """

    operation: str
    size: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    num_bytes: float
    flops: float = 0.0

    def prepare(self, operations: Operations) -> tuple[Callable[[], object], tuple[Any, ...]]:
        """The call, and its arguments: copies, with weights as these operations pack them."""
        arguments = tuple(_prepared(each, operations) for each in self.arguments)
        function, keywords = getattr(operations, self.operation), self.keywords
        return lambda: function(*arguments, **keywords), arguments


def _prepared(argument: Any, operations: Operations) -> Any:
    if isinstance(argument, ToPack):
        return argument.pack(operations)
    if isinstance(argument, ExpertWeights):
        gate_up, down = (_prepared(each, operations) for each in (argument.gate_up, argument.down))
        return replace(argument, gate_up=gate_up, down=down)
    return tree_map_only(Tensor, Tensor.clone, argument)


class Inputs:
    """Random inputs on a device, the same at each run.

    Args:
        dtype: of activations.
        operations: that are called: they cut prompts into tiles, and know narrow KV caches.
    """

    def __init__(
        self, sizes: CaseSizes, device: torch.device, dtype: torch.dtype, operations: Operations = plain_torch
    ) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        narrow = torch.int8 if isinstance(operations, NativeOperations) else FP8 if has_float8(device) else dtype
        self.cache_dtypes = dict.fromkeys((dtype, narrow))
        self.prefill_tile = operations.prefill_tile(sizes.heads, sizes.kv_heads, sizes.head_dim)
        self.is_gpu = device.type == "cuda"
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, dtype=torch.float32, device=self.device, generator=self._generator)
        return values.to(dtype or self.dtype)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, device=self.device, generator=self._generator)

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def caches(self, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        s = self.sizes
        k, v = self.normal(2, num_blocks, s.block_size, s.kv_heads, s.head_dim, dtype=torch.float32)
        if dtype == torch.int8:
            k, v = (quantize_lines(each.flatten(0, -2)).view(*each.shape[:-1], -1) for each in (k, v))
        return k.to(dtype), v.to(dtype)

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

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def codes(self, num_outputs: int, num_inputs: int, bits: int, group: int, *, has_offsets: bool) -> CodedWeight:
        codes = self.below(1 << bits, num_outputs, num_inputs).to(torch.uint8)
        scales = self.normal(num_outputs, -(-num_inputs // group), dtype=torch.float32).bfloat16().float() / (1 << bits)
        offsets = scales / 2 if has_offsets else None
        return CodedWeight(codes, bits, None, scales / num_inputs**0.5, offsets, group)


def _norms(i: Inputs) -> Iterator[Case]:
    for tokens in (i.sizes.decode, i.sizes.prefill):
        x, residual = i.normal(tokens, i.sizes.hidden), i.normal(tokens, i.sizes.hidden)
        weight, size = i.normal(i.sizes.hidden), f"[{tokens}, {i.sizes.hidden}]"
        added = (x, residual, weight, 1e-5, 1.0)
        yield Case(operation="rms_norm", size=size, arguments=(x, weight, 1e-5), num_bytes=2 * x.nbytes)
        yield Case(operation="add_rms_norm", size=size, arguments=(*added, 0.5), num_bytes=4 * x.nbytes)
        yield Case(operation="rms_norm_add", size=size, arguments=added, num_bytes=3 * x.nbytes)
        yield Case(operation="scale", size=size, arguments=(x, 0.7, 30.0), num_bytes=2 * x.nbytes)


def _activations(i: Inputs) -> Iterator[Case]:
    for activation in get_args(Activation):
        x = i.normal(i.sizes.prefill, 2 * i.sizes.intermediate)
        size = f"[{i.sizes.prefill}, 2 · {i.sizes.intermediate}], {activation}"
        yield Case(operation="gated_activation", size=size, arguments=(x, activation), num_bytes=1.5 * x.nbytes)


def _products(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    shape, hidden = (s.intermediate, s.hidden), s.hidden // 8 * 8
    weights: dict[str, ToPack] = {}
    if not i.is_gpu:  # there plain torch multiplies what is not coded
        weights["dense"] = ToPack(i.normal(*shape) * s.hidden**-0.5)
        weights["int8"] = ToPack(i.normal(*shape) * s.hidden**-0.5, "int8")
    for bits, group, has_offsets in ((4, 32, True), (8, hidden, False)):
        coded = i.codes(s.intermediate, hidden, bits, group, has_offsets=has_offsets)
        weights[f"codes of {bits} bits, groups of {group}"] = ToPack(coded, None, i.dtype)
    for name, weight in weights.items():
        for tokens in (s.decode, s.prefill):
            x = i.normal(tokens, weight.weight.shape[1])
            bits = 4 if "4 bits" in name else 8 if name != "dense" else 8 * i.dtype.itemsize
            yield Case(
                operation="linear",
                size=f"{tokens} tokens, {s.hidden} → {s.intermediate}, {name}",
                arguments=(x, weight, i.normal(s.intermediate)),
                num_bytes=bits / 8 * s.hidden * s.intermediate + x.nbytes * (1 + s.intermediate / s.hidden),
                flops=2 * tokens * s.hidden * s.intermediate,
            )
        arguments = i.below(s.intermediate, s.prefill), weight
        num_bytes = 2 * s.prefill * s.hidden * i.dtype.itemsize
        yield Case(operation="embed", size=f"{s.prefill} of {name}", arguments=arguments, num_bytes=num_bytes)


def _experts(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    sizes = [(2 * s.intermediate, s.hidden), (s.hidden, s.intermediate)]
    # Each matrix begins a panel.
    stacks = [i.normal(NUM_EXPERTS * in_panels(rows), columns) * columns**-0.5 for rows, columns in sizes]
    gate_up, down = map(ToPack, stacks)
    layer = ExpertWeights(
        num_experts=NUM_EXPERTS,
        hidden=s.hidden,
        intermediate=s.intermediate,
        gate_up=gate_up,  # type: ignore[arg-type]  # packed by `Case.prepare`
        down=down,  # type: ignore[arg-type]
    )
    for tokens in (1, s.decode, s.prefill):
        logits, x = i.normal(tokens, NUM_EXPERTS, dtype=torch.float32), i.normal(tokens, s.hidden)
        yield Case(
            operation="route",
            size=f"{tokens} tokens to {NUM_CHOSEN} of {NUM_EXPERTS} experts",
            arguments=(logits, NUM_EXPERTS, NUM_CHOSEN),
            keywords={"is_normalised": True},
            num_bytes=logits.nbytes + 8 * tokens * NUM_CHOSEN,
        )
        weights, chosen = logits.softmax(-1).topk(NUM_CHOSEN)
        ids = chosen.to(torch.int32)
        share = len(ids.unique()) / NUM_EXPERTS
        yield Case(
            operation="experts",
            size=f"{tokens} tokens, {NUM_CHOSEN} of {NUM_EXPERTS} experts of 3 · {s.hidden} · {s.intermediate}",
            arguments=(x, ids, weights, layer),
            num_bytes=share * sum(stack.nbytes for stack in stacks) + 2 * x.nbytes,
            flops=6 * tokens * NUM_CHOSEN * s.hidden * s.intermediate,
        )


def _rotations(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    cos, sin = (each(i.normal(s.prefill, s.head_dim // 2, dtype=torch.float32)) for each in (torch.cos, torch.sin))
    table = torch.cat((cos, cos, -sin, sin), dim=1)
    weight = i.normal(s.heads + s.kv_heads, s.head_dim)
    for tokens in (s.decode, s.prefill):
        for dtype in i.cache_dtypes:
            qkv = i.normal(tokens, (s.heads + 2 * s.kv_heads) * s.head_dim)
            positions = torch.arange(tokens, dtype=torch.int32, device=i.device)
            slots = torch.where(positions % 5 == 3, -1, positions)
            caches = i.caches(-(-tokens // s.block_size), dtype)
            for name, qk_weight in (("", None), (", with norms", weight)):
                yield Case(
                    operation="rotate_and_write",
                    size=f"{tokens} tokens of {s.heads} + 2 · {s.kv_heads} heads of {s.head_dim}, {_in(dtype)}{name}",
                    arguments=(qkv, positions, slots, table, qk_weight, 1e-6, *caches),
                    num_bytes=2 * qkv.nbytes,
                )


def _decode_attention(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    for dtype in i.cache_dtypes:
        for batch, context in ((1, s.context), (s.decode, s.context), (1, s.long_context)):
            tables = i.tables(batch, context)
            caches = i.caches(tables.numel(), dtype)
            q, contexts = i.normal(batch, s.heads, s.head_dim), [context - row % 7 for row in range(batch)]
            decodes = i.ints([[row, row, length] for row, length in enumerate(contexts)])
            for name, kv in _kinds(i, PagedKV(*caches, tables, s.head_dim**-0.5, None), context):
                yield Case(
                    operation="attend_decode",
                    size=f"batch {batch}, context {context}, {_in(dtype)}{name}",
                    arguments=(q, kv, decodes, torch.zeros_like(q)),
                    keywords={"num_splits": _num_splits(i, batch, context), "max_context": context},
                    num_bytes=2 * sum(contexts) * s.kv_heads * s.head_dim * dtype.itemsize,
                    flops=4 * sum(contexts) * s.heads * s.head_dim,
                )


def _kinds(i: Inputs, kv: PagedKV, context: int) -> Iterator[tuple[str, PagedKV]]:
    """As most models attend; at odd sizes by all that others have, too."""
    yield "", kv
    if i.sizes is ODD:
        heads = i.normal(i.sizes.heads, dtype=torch.float32)
        extras = kv._replace(window=context // 2, soft_cap=20.0, sinks=heads)
        yield ", window, soft cap, sinks", extras


def _num_splits(i: Inputs, batch: int, context: int) -> int:
    multiprocessors = torch.cuda.get_device_properties(i.device).multi_processor_count if i.is_gpu else 8
    return choose_num_splits(batch, i.sizes.kv_heads, context, multiprocessors)


def _prefill_attention(i: Inputs) -> Iterator[Case]:
    s, tile = i.sizes, i.prefill_tile
    for dtype in i.cache_dtypes:
        tables = i.tables(1, s.prefill)
        q, caches = i.normal(s.prefill, s.heads, s.head_dim), i.caches(tables.numel(), dtype)
        tiles = i.ints([[0, first, min(tile, s.prefill - first), first] for first in range(0, s.prefill, tile)])
        for name, kv in _kinds(i, PagedKV(*caches, tables, s.head_dim**-0.5, None), s.prefill):
            yield Case(
                operation="attend_prefill",
                size=f"one prompt of {s.prefill}, {_in(dtype)}{name}",
                arguments=(q, kv, tiles, torch.zeros_like(q)),
                num_bytes=2 * q.nbytes + 2 * s.prefill * s.kv_heads * s.head_dim * dtype.itemsize,
                flops=2 * s.prefill**2 * s.heads * s.head_dim,
            )


def _in(dtype: torch.dtype) -> str:
    return f"cache {str(dtype).removeprefix('torch.')}"


def _row_state(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    width = s.context + 64
    history, tables, words = i.below(s.vocab, s.decode, width), i.tables(s.decode, width), i.below(s.vocab, s.decode)
    spans = i.ints([[row, 3, row, 1] for row in range(s.decode)])
    size, num_bytes = f"{s.decode} of one word", spans.nbytes + 2 * words.nbytes
    yield Case(operation="put_spans", size=size, arguments=(history, spans, words), num_bytes=num_bytes)
    for name, each in (("decode", 1), ("prefill", max(s.prefill // s.decode, 1))):
        rows, num_tokens = i.ints([[row, 0, row * each, each] for row in range(s.decode)]), each * s.decode
        yield Case(
            operation="gather_tokens",
            size=f"{name}: {s.decode} rows of {each}",
            arguments=(rows, history, tables[None].contiguous(), s.block_size, num_tokens),
            num_bytes=20 * num_tokens,
        )
        yield Case(
            operation="rows_of_tokens",
            size=f"{name}: {s.decode} rows of {each}",
            arguments=(rows, s.decode, num_tokens),
            num_bytes=rows.nbytes + 4 * num_tokens,
        )
    samples = i.samples(s.decode)
    size, num_bytes = f"{s.decode} samples", samples.nbytes + 2 * words.nbytes
    yield Case(operation="append_tokens", size=size, arguments=(history, samples, words), num_bytes=num_bytes)
    caches = i.normal(2 * s.layers, 2 * s.decode, s.block_size, s.kv_heads, s.head_dim)
    sources = torch.arange(s.decode, dtype=torch.int32, device=i.device)
    size = f"{s.decode} blocks of {s.block_size} tokens in {2 * s.layers} caches"
    arguments = caches, sources, sources + s.decode
    yield Case(operation="copy_blocks", size=size, arguments=arguments, num_bytes=caches.nbytes)
    rows = i.below(s.vocab, s.decode, s.vocab)
    size, arguments = f"{s.decode} rows of {s.vocab} words", (i.zeros(*rows.shape), rows, sources)
    yield Case(operation="copy_rows", size=size, arguments=arguments, num_bytes=2 * rows.nbytes)


def _edits(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    count = 50 * s.decode
    logits, samples = i.normal(s.decode, s.vocab, dtype=torch.float32), i.samples(s.decode)
    sample_of_row = torch.arange(s.decode, dtype=torch.int32, device=i.device)
    rows, tokens, values = i.below(s.decode, count), i.below(s.vocab, count), i.zeros(count, dtype=torch.float32)
    values[::3] = -torch.inf
    edits = torch.stack((rows, tokens, values.view(torch.int32), torch.full_like(rows, 2**30)))
    size, arguments = f"{s.decode} rows with 50 each", (logits, samples, sample_of_row, edits)
    yield Case(operation="edit_logits", size=size, arguments=arguments, num_bytes=24 * count)
    offsets = torch.arange(count + 1, dtype=torch.int32, device=i.device) * 2
    history, ids = i.below(s.vocab, s.decode, s.context + 64), i.below(s.vocab, 2 * count)
    yield Case(
        operation="ends_of_bad_words",
        size=f"{size}, of three tokens",
        arguments=(samples, sample_of_row, history, rows, offsets, ids, values),
        num_bytes=28 * count,
    )


def _penalties(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    logits, history = i.normal(s.decode, s.vocab, dtype=torch.float32), i.below(s.vocab, s.decode, s.context + 64)
    samples = i.samples(s.decode, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)
    yield Case(
        operation="penalise",
        size=f"{s.decode} rows of {s.context} tokens",
        arguments=(logits, samples, history, i.zeros(s.decode, s.vocab)),
        # For each token its id, and its counter and its logit, read and written.
        num_bytes=20 * s.decode * s.context,
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
    # As spread as a model's: filters keep tens of tokens.
    logits = i.normal(s.decode, s.vocab, dtype=torch.float32) * 2.5
    masks = i.below(2**31 - 1, 1, -(-s.vocab // 32))
    for name, params, has_filters, is_greedy in settings:
        for masked in (None, masks) if has_filters and "top_p" in params else (None,):
            samples = i.samples(s.decode, **params)
            samples[:, SampleRow.MASK] = -1 if masked is None else 0
            yield Case(
                operation="draw",
                size=f"[{s.decode}, {s.vocab}], {name}{'' if masked is None else ', masked'}",
                arguments=(logits, samples, masked, i.zeros(s.decode), i.zeros(s.decode)),
                keywords={"has_filters": has_filters, "is_greedy": is_greedy},
                num_bytes=logits.nbytes,
            )


def _logprobs(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    logits, samples = i.normal(s.decode, s.vocab, dtype=torch.float32) * 2.5, i.samples(s.decode)
    mass = logits.logsumexp(dim=1)
    for k in (0, 5, 20):
        results = i.zeros(s.decode, k), i.zeros(s.decode, k, dtype=torch.float32)
        arguments = logits, samples, torch.zeros_like(mass), *results
        size = f"[{s.decode}, {s.vocab}], {k}"
        yield Case(operation="top_logprobs", size=size, arguments=arguments, num_bytes=logits.nbytes)
    lines, tokens = torch.arange(s.decode, dtype=torch.int32, device=i.device), i.below(s.vocab, s.decode)
    yield Case(
        operation="look_up",
        size=f"{s.decode} rows of {s.vocab}",
        arguments=(logits, lines, tokens, mass, torch.zeros_like(mass), i.zeros(s.decode)),
        num_bytes=logits.nbytes,
    )


GROUPS: tuple[Callable[[Inputs], Iterator[Case]], ...] = (
    *(_norms, _activations, _products, _experts, _rotations),
    *(_decode_attention, _prefill_attention, _row_state, _edits, _penalties, _draws, _logprobs),
)
