"""Calls of each operation that has kernels.

`aioengine.kernels.kernel_check` runs them at `ODD` sizes against plain torch; ``aioengine check`` times them at `USUAL`
ones, and the benchmarks at sizes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.operations import Activation, ExpertWeights, Operations, PagedKV, plain_torch
from aioengine.kernels.packed_weight import CodedWeight, PackedWeight, Quantization, in_panels
from aioengine.kernels.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow, param_of
from aioengine.kernels.torch.quantized import quantize_lines
from aioengine.sampling_params import FILTERS, PENALTIES

T = TypeVar("T")

NUM_EXPERTS, NUM_CHOSEN = 8, 2
FP8 = torch.float8_e4m3fn
FP8_CAPABILITY = (8, 9)


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
    decode=7, prefill=37, context=45, long_context=301, block_size=4,
)  # fmt: skip


class ToPack(NamedTuple):
    """A weight among the arguments of a case, to be packed by the operations that are called."""

    weight: Tensor | CodedWeight
    quantization: Quantization | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A call of an operation.

    Attributes:
        num_bytes: that it must read and write; 0: each tensor among its arguments and results once.
        flops: that it must compute.
    """

    operation: str
    size: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    num_bytes: float
    flops: float

    def prepare(self, operations: Operations) -> tuple[Callable[[], object], tuple[Any, ...]]:
        """Return the call, and its arguments: copies, with weights as these operations pack them."""
        arguments = tuple(_prepare_argument(each, operations) for each in self.arguments)
        function, keywords = getattr(operations, self.operation), self.keywords
        return lambda: function(*arguments, **keywords), arguments

    def count_bytes(self, operations: Operations) -> float:
        """Call it once unless ``num_bytes`` are known."""
        if self.num_bytes:
            return self.num_bytes
        call, arguments = self.prepare(operations)
        leaves: list[Any] = tree_leaves((arguments, call()))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor | PackedWeight))


def _case(
    operation: str, size: str, *arguments: Any, num_bytes: float = 0.0, flops: float = 0.0, **keywords: Any
) -> Case:
    return Case(operation, size, arguments, keywords, num_bytes, flops)


def _prepare_argument(argument: Any, operations: Operations) -> Any:
    if isinstance(argument, ToPack):
        weight = argument.weight.clone() if isinstance(argument.weight, Tensor) else argument.weight
        return operations.pack(weight, argument.quantization, argument.dtype)
    if isinstance(argument, ExpertWeights):
        gate_up, down = (_prepare_argument(each, operations) for each in (argument.gate_up, argument.down))
        return replace(argument, gate_up=gate_up, down=down)
    return tree_map_only(Tensor, Tensor.clone, argument)


class Inputs:
    """Random inputs on a device, the same at each run.

    Args:
        dtype: of activations.
        operations: that are called: they cut prompts into tiles, and know narrow KV caches.
        is_brief: of variants that are compiled apart only the first is called.
    """

    def __init__(
        self,
        sizes: CaseSizes,
        device: torch.device,
        dtype: torch.dtype,
        operations: Operations = plain_torch,
        *,
        is_brief: bool = False,
    ) -> None:
        self.sizes, self.device, self.dtype, self._is_brief = sizes, device, dtype, is_brief
        self.is_gpu = device.type == "cuda"
        narrow = torch.int8 if isinstance(operations, NativeOperations) else dtype
        if self.is_gpu and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
            narrow = FP8
        self.cache_dtypes = self.variants(*dict.fromkeys((dtype, narrow)))
        self.prefill_tile = operations.prefill_tile(sizes.heads, sizes.kv_heads, sizes.head_dim)
        self._generator = torch.Generator(device).manual_seed(0)

    def variants(self, *values: T) -> tuple[T, ...]:
        return values[:1] if self._is_brief else values

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, dtype=torch.float32, device=self.device, generator=self._generator)
        return values.to(dtype or self.dtype)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, device=self.device, generator=self._generator)

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def paged(self, rows: int, context: int) -> Iterator[tuple[str, PagedKV]]:
        """Yield caches of each dtype, with blocks scattered over them as after hours of serving; at odd sizes also
        with all that some models have beside keys and values."""
        s = self.sizes
        each = -(-context // s.block_size)
        order = torch.randperm(rows * each, device=self.device, generator=self._generator)
        for dtype in self.cache_dtypes:
            kv = PagedKV(*self.caches(rows * each, dtype), order.int().view(rows, each), s.head_dim**-0.5, None)
            yield _name_cache(dtype), kv
            if s is ODD and not self._is_brief:
                sinks = self.normal(s.heads, dtype=torch.float32)
                extras = kv._replace(window=context // 2, soft_cap=20.0, sinks=sinks)
                yield f"{_name_cache(dtype)}, window, soft cap, sinks", extras

    def caches(self, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        s = self.sizes
        k, v = self.normal(2, num_blocks, s.block_size, s.kv_heads, s.head_dim, dtype=torch.float32)
        if dtype == torch.int8:
            k, v = (quantize_lines(each.flatten(0, -2)).view(*each.shape[:-1], -1) for each in (k, v))
        return k.to(dtype), v.to(dtype)

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

    def codes(self, num_outputs: int, num_inputs: int, bits: int, group: int, *, has_offsets: bool) -> CodedWeight:
        codes = self.below(1 << bits, num_outputs, num_inputs).to(torch.uint8)
        scales = self.normal(num_outputs, -(-num_inputs // group), dtype=torch.float32).bfloat16().float() / (1 << bits)
        offsets = scales / 2 if has_offsets else None
        return CodedWeight(codes, bits, None, scales / num_inputs**0.5, offsets, group)


def _norms(i: Inputs) -> Iterator[Case]:
    for tokens in (i.sizes.decode, i.sizes.prefill):
        x, residual = i.normal(tokens, i.sizes.hidden), i.normal(tokens, i.sizes.hidden)
        weight, size = i.normal(i.sizes.hidden), f"[{tokens}, {i.sizes.hidden}]"
        yield _case("rms_norm", size, x, weight, 1e-5)
        yield _case("add_rms_norm", size, x, residual, weight, 1e-5, 1.0, 0.5, num_bytes=4 * x.nbytes)
        yield _case("rms_norm_add", size, x, residual, weight, 1e-5, 1.0, num_bytes=3 * x.nbytes)
        yield _case("scale", size, x, 0.7, 30.0, num_bytes=2 * x.nbytes)


def _activations(i: Inputs) -> Iterator[Case]:
    for activation in i.variants(*get_args(Activation)):
        x = i.normal(i.sizes.prefill, 2 * i.sizes.intermediate)
        yield _case("gated_activation", f"{list(x.shape)}, {activation}", x, activation)


def _products(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    shape, hidden = (s.intermediate, s.hidden), s.hidden // 8 * 8
    weights: dict[str, ToPack] = {}
    if not i.is_gpu:  # there plain torch multiplies what is not coded
        weights["dense"] = ToPack(i.normal(*shape) * s.hidden**-0.5)
        weights["int8"] = ToPack(i.normal(*shape) * s.hidden**-0.5, "int8")
    for bits, group, has_offsets in i.variants((4, 32, True), (8, hidden, False)):
        coded = i.codes(s.intermediate, hidden, bits, group, has_offsets=has_offsets)
        weights[f"codes of {bits} bits, groups of {group}"] = ToPack(coded, None, i.dtype)
    for name, weight in weights.items():
        for tokens in (s.decode, s.prefill):
            x, bias = i.normal(tokens, weight.weight.shape[1]), i.normal(s.intermediate)
            if name == "int8":  # whole steps of the scale that activations get: none is halfway between two
                x = (i.below(255, *x.shape) - 127).to(i.dtype)
                x[:, 0] = 127
            size = f"{tokens} tokens, {s.hidden} → {s.intermediate}, {name}"
            yield _case("linear", size, x, weight, bias, flops=2 * tokens * s.hidden * s.intermediate)
        ids, num_bytes = i.below(s.intermediate, s.prefill), 2 * s.prefill * s.hidden * i.dtype.itemsize
        yield _case("embed", f"{s.prefill} of {name}", ids, weight, num_bytes=num_bytes)


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
    for tokens in i.variants(s.decode, 1, s.prefill):
        logits, x = i.normal(tokens, NUM_EXPERTS, dtype=torch.float32), i.normal(tokens, s.hidden)
        size = f"{tokens} tokens, {NUM_CHOSEN} of {NUM_EXPERTS} experts"
        yield _case("route", size, logits, NUM_EXPERTS, NUM_CHOSEN, is_normalised=True)
        weights, chosen = logits.softmax(-1).topk(NUM_CHOSEN)
        share = len(chosen.unique()) / NUM_EXPERTS
        num_bytes = share * sum(stack.nbytes for stack in stacks) + 2 * x.nbytes
        size, flops = f"{size} of 3 · {s.hidden} · {s.intermediate}", 6 * chosen.numel() * s.hidden * s.intermediate
        yield _case("experts", size, x, chosen.int(), weights, layer, num_bytes=num_bytes, flops=flops)


def _rotations(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    cos, sin = (each(i.normal(s.prefill, s.head_dim // 2, dtype=torch.float32)) for each in (torch.cos, torch.sin))
    table = torch.cat((cos, cos, -sin, sin), dim=1)
    norms = (", with norms", i.normal(s.heads + s.kv_heads, s.head_dim)), ("", None)
    for tokens in (s.decode, s.prefill):
        for dtype in i.cache_dtypes:
            qkv = i.normal(tokens, (s.heads + 2 * s.kv_heads) * s.head_dim)
            positions = torch.arange(tokens, dtype=torch.int32, device=i.device)
            slots = torch.where(positions % 5 == 3, -1, positions)
            caches = i.caches(-(-tokens // s.block_size), dtype)
            for name, weight in i.variants(*norms):
                heads = f"{s.heads} + 2 · {s.kv_heads} heads of {s.head_dim}"
                size = f"{tokens} tokens of {heads}, {_name_cache(dtype)}{name}"
                arguments = qkv, positions, slots, table, weight, 1e-6, *caches
                yield _case("rotate_and_write", size, *arguments, num_bytes=2 * qkv.nbytes)


def _name_cache(dtype: torch.dtype) -> str:
    return f"cache {str(dtype).removeprefix('torch.')}"


def _attention(i: Inputs) -> Iterator[Case]:
    s, tile = i.sizes, i.prefill_tile
    for batch, context in ((1, s.context), (s.decode, s.context), (1, s.long_context)):
        q, contexts = i.normal(batch, s.heads, s.head_dim), [context - row % 7 for row in range(batch)]
        decodes = i.ints([[row, row, length] for row, length in enumerate(contexts)])
        for name, kv in i.paged(batch, context):
            num_splits = 4 if batch == 1 else 1
            yield _case(
                *("attend_decode", f"batch {batch}, context {context}, {name}"),
                *(q, kv, decodes, torch.zeros_like(q)),
                num_splits=num_splits,
                max_context=context,
                flops=4 * sum(contexts) * s.heads * s.head_dim,
            )
    q = i.normal(s.prefill, s.heads, s.head_dim)
    tiles = i.ints([[0, first, min(tile, s.prefill - first), first] for first in range(0, s.prefill, tile)])
    for name, kv in i.paged(1, s.prefill):
        size, flops = f"one prompt of {s.prefill}, {name}", 2 * s.prefill**2 * s.heads * s.head_dim
        yield _case("attend_prefill", size, q, kv, tiles, torch.zeros_like(q), flops=flops)


def _row_state(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    width = s.context + 64
    history, words, order = i.below(s.vocab, s.decode, width), i.below(s.vocab, s.decode), i.ints(range(s.decode))
    tables, samples = i.below(99, 1, s.decode, width), i.samples(s.decode)
    spans = i.ints([[row, 3, row, 1] for row in range(s.decode)])
    num_bytes = spans.nbytes + 2 * words.nbytes
    yield _case("put_spans", f"{s.decode} of one word", history, spans, words, num_bytes=num_bytes)
    for each in (1, max(s.prefill // s.decode, 1)):
        size, num_tokens = f"{s.decode} rows of {each}", each * s.decode
        rows = i.ints([[row, 0, row * each, each] for row in range(s.decode)])
        arguments = rows, history, tables, s.block_size, num_tokens
        yield _case("gather_tokens", size, *arguments, num_bytes=20 * num_tokens)
        yield _case("rows_of_tokens", size, rows, s.decode, num_tokens)
    yield _case("append_tokens", f"{s.decode} samples", history, samples, words, num_bytes=samples.nbytes)
    caches = i.normal(2 * s.layers, 2 * s.decode, s.block_size, s.kv_heads, s.head_dim)
    size = f"{s.decode} blocks of {s.block_size} tokens in {2 * s.layers} caches"
    yield _case("copy_blocks", size, caches, order, order + s.decode)
    rows = i.below(s.vocab, s.decode, s.vocab)
    yield _case("copy_rows", f"{s.decode} rows of {s.vocab} words", i.zeros(*rows.shape), rows, order)


def _rules(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    count, order = 50 * s.decode, i.ints(range(s.decode))
    logits, samples = i.normal(s.decode, s.vocab, dtype=torch.float32), i.samples(s.decode)
    rows, tokens, values = i.below(s.decode, count), i.below(s.vocab, count), i.zeros(count, dtype=torch.float32)
    values[::3] = -torch.inf
    edits = torch.stack((rows, tokens, values.view(torch.int32), torch.full_like(rows, 2**30)))
    size = f"{s.decode} rows with 50 each"
    yield _case("edit_logits", size, logits, samples, order, edits, num_bytes=24 * count)
    offsets, ids = 2 * i.ints(range(count + 1)), i.below(s.vocab, 2 * count)
    history = i.below(s.vocab, s.decode, s.context + 64)
    arguments = samples, order, history, rows, offsets, ids, values
    yield _case("ends_of_bad_words", f"{size}, of three tokens", *arguments, num_bytes=28 * count)
    samples = i.samples(s.decode, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)
    size, counters = f"{s.decode} rows of {s.context} tokens", i.zeros(s.decode, s.vocab)
    # For each token its id, and its counter and its logit, read and written.
    yield _case("penalise", size, logits, samples, history, counters, num_bytes=20 * s.decode * s.context)


SETTINGS: dict[str, dict[str, float]] = {
    "top-k 50 and top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "temperature": {"temperature": 0.8},
    "greedy": {},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
}


def _sampling(i: Inputs) -> Iterator[Case]:
    s = i.sizes
    # As spread as a model's: filters keep tens of tokens.
    logits = i.normal(s.decode, s.vocab, dtype=torch.float32) * 2.5
    shape, masks = f"[{s.decode}, {s.vocab}]", i.below(2**31 - 1, 1, -(-s.vocab // 32))
    for name, params in i.variants(*SETTINGS.items()):
        for masked in i.variants(masks, None) if "top_p" in params else (None,):
            samples = i.samples(s.decode, **params)
            samples[:, SampleRow.MASK] = -1 if masked is None else 0
            yield _case(
                *("draw", f"{shape}, {name}{'' if masked is None else ', masked'}"),
                *(logits, samples, masked, i.zeros(s.decode), i.zeros(s.decode)),
                has_filters=len(params) > 1,
                is_greedy=not params,
            )
    samples, mass = i.samples(s.decode), logits.logsumexp(dim=1)
    for k in i.variants(5, 0, 20):
        results = torch.zeros_like(mass), i.zeros(s.decode, k), i.zeros(s.decode, k, dtype=torch.float32)
        yield _case("top_logprobs", f"{shape}, {k}", logits, samples, *results)
    lines, tokens, logprobs = i.ints(range(s.decode)), i.below(s.vocab, s.decode), torch.zeros_like(mass)
    yield _case("look_up", shape, logits, lines, tokens, mass, logprobs, i.zeros(s.decode))


GROUPS: tuple[Callable[[Inputs], Iterator[Case]], ...] = (
    *(_norms, _activations, _products, _experts, _rotations, _attention, _row_state, _rules, _sampling),
)
