"""Launch every operation at the sizes of a start, then at many others, and tell what would be compiled for them.

    python launch_storm.py

To be run without ``TRITON_INTERPRET``; it takes no GPU, as nothing is compiled and nothing launched: a `Recorder` is
in the compiler's place. Tensors are on the CPU, and never touched.

Prints JSON: by model and kernel the variants after the start, how many of them the kernel's constants alone account
for, and those that come later, each of which would hold a device for a second in the middle of serving.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aioengine.kernels.operations import Activation, ExpertWeights, PagedKV
from aioengine.kernels.packed_weight import CodedWeight, Coding, PackedWeight, in_panels
from aioengine.kernels.sample_rows import SAMPLE_WORDS
from aioengine.kernels.triton import triton_operations

ops = triton_operations()
BF16, FP8, INT32, FLOAT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.float32
NUM_ROWS = 256


class NoDriver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Recorder:
    """Stands in the compiler's place from now on, and tells ``on_asked`` what it is asked for.

    Args:
        on_asked: called with the kernel, the key of the variant, signature, constants, options, attributes.
    """

    def __init__(self, on_asked: Callable[[Any, str, Any, Any, Any, Any], None]) -> None:
        def do_compile(
            kernel: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, *_: Any
        ) -> None:
            on_asked(kernel, str(key), signature, constants, options, attributes)

        driver.set_active(NoDriver())
        JITFunction._do_compile = do_compile


@dataclass(frozen=True, kw_only=True)
class Model:
    vocab: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_norm: bool = False
    window: int | None = None
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype = BF16
    max_len: int = 8192


LLAMA_8B = Model(vocab=128_256, hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, head_dim=128)
ODD = Model(
    vocab=32_003, hidden=897, intermediate=4867, num_heads=14, num_kv_heads=2, head_dim=72, max_len=4095,
    cache_dtype=FP8, has_norm=True, window=1023,
)  # fmt: skip


class Asked:
    """What the compiler was asked for, by kernel: keys of variants, and what of them the kernel's constants say."""

    def __init__(self) -> None:
        self.variants: dict[str, dict[str, str]] = defaultdict(dict)

    def add(self, kernel: Any, key: str, signature: Any, constants: Any, options: Any, attributes: Any) -> None:
        names = {parameter.num: parameter.name for parameter in kernel.params if parameter.is_constexpr}
        declared = {names[path[0]]: value for path, value in constants.items() if path[0] in names}
        self.variants[kernel.fn.__name__][key] = f"{declared} {options}"


class Storm:
    """Arguments as a runner has them: views that begin at any word of a larger tensor, and tensors of their own."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model = m = model
        self.random = random.Random(seed)
        self.is_start = True
        self.history = torch.empty(NUM_ROWS, m.max_len + 1, dtype=INT32)
        self.block_tables = torch.empty(NUM_ROWS, -(-m.max_len // 16), dtype=INT32)
        self.counters = torch.empty(NUM_ROWS, m.vocab, dtype=INT32)
        stacks = (torch.empty(60 * in_panels(n), k, dtype=m.dtype) for n, k in ((704, m.hidden), (m.hidden, 352)))
        gate_up, down = (ops.pack(stack) for stack in stacks)
        self.experts = ExpertWeights(num_experts=60, hidden=m.hidden, intermediate=352, gate_up=gate_up, down=down)
        sizes = (704, m.hidden), (m.hidden, 352)
        gate_up, down = (stack_of_codes(60 * in_panels(n), k, m.dtype) for n, k in sizes)
        self.coded_experts = replace(self.experts, gate_up=gate_up, down=down)
        self.coded = [ops.pack(each, None, m.dtype) for each in of_codes(m.hidden)]
        self.caches = torch.empty(4, 1001, 16, m.num_kv_heads, m.head_dim, dtype=m.cache_dtype)

    def view(self, *shape: int, dtype: torch.dtype = INT32) -> Tensor:
        size = torch.Size(shape).numel()
        first = 0 if self.is_start else self.random.randrange(16)
        return torch.empty(first + size, dtype=dtype)[first:].view(shape)

    def forward(self, num_tokens: int, num_decodes: int, num_tiles: int, num_splits: int, max_context: int) -> None:
        m = self.model
        x = torch.empty(num_tokens, m.hidden, dtype=m.dtype)
        ops.rms_norm(x, x.new_empty(m.hidden), 1e-5)
        ops.add_rms_norm(x, torch.empty_like(x), x.new_empty(m.hidden), 1e-5)
        ops.rms_norm_add(x, torch.empty_like(x), x.new_empty(m.hidden), 1e-5, 1.0)
        for activation in get_args(Activation):
            ops.gated_activation(x.new_empty(num_tokens, 2 * m.intermediate), activation)
        for coded in self.coded:
            ops.linear(x, coded, None, torch.float32)
        ids, weights = torch.empty(num_tokens, 4, dtype=INT32), torch.empty(num_tokens, 4)
        ops.experts(x, ids, weights, self.experts)
        ops.experts(x, ids, weights, self.coded_experts)
        positions, slots = self.view(num_tokens), self.view(num_tokens)
        num_rotated = m.num_heads + m.num_kv_heads
        qkv = x.new_empty(num_tokens, (num_rotated + m.num_kv_heads) * m.head_dim)
        rope = x.new_empty(m.max_len, 2 * m.head_dim)
        weight = x.new_empty(num_rotated, m.head_dim) if m.has_norm else None
        caches = self.caches[2], self.caches[3]
        for is_wide in (False, True) if m.has_norm else (False,):
            q = ops.rotate_and_write(qkv, positions, slots, rope, weight, 1e-5, *caches, 1.0, is_qk_norm_wide=is_wide)
        kv = PagedKV(*caches, self.block_tables, 0.1, m.window)
        out = torch.empty_like(q)
        decodes = self.view(num_decodes, 3)
        ops.attend_decode(q, kv, decodes, out, num_splits=num_splits, max_context=max_context)
        ops.attend_prefill(q, kv, self.view(num_tiles, 4), out)

    def sample(self, num_samples: int, num_masks: int, num_top: int) -> None:
        vocab = self.model.vocab
        logits, samples = torch.empty(num_samples, vocab), self.view(num_samples, SAMPLE_WORDS)
        log_mass = self.view(num_samples, dtype=FLOAT32)
        top = self.view(num_samples, num_top), self.view(num_samples, num_top, dtype=FLOAT32)
        ops.top_logprobs(logits, samples, log_mass, *top)
        counters = torch.empty(num_samples, vocab, dtype=INT32) if num_samples > NUM_ROWS else self.counters
        token_ids, status = self.view(num_samples), self.view(num_samples)
        ops.penalise(logits, samples, self.history, counters)
        for masks in (None, torch.empty(num_masks, -(-vocab // 32), dtype=INT32)):
            for is_greedy, has_filters in ((False, False), (False, True), (True, False)):
                ops.draw(logits, samples, masks, token_ids, status, has_filters=has_filters, is_greedy=is_greedy)

    def start(self) -> None:
        """What a runner rehearses: one of each, and many tokens; with and without splits; ."""
        self.forward(1, 1, 1, 2, self.model.max_len)
        self.forward(2048, NUM_ROWS, 1, 1, self.model.max_len)
        for num_top in (0, 5, 20):
            self.sample(1, 1, num_top)
        self.is_start = False

    def serve(self) -> None:
        pick = self.random.randint
        sizes = (*range(1, 40), 48, 63, 64, 255, 256, 257, 1000, 1024, 2049, 8192)
        for num_tokens in sizes:
            num_splits = self.random.choice((1, 2, 3, 16, 17, 64))
            max_context = self.random.choice((1, 16, 17, 63, 64, 65, 128, 129, 1000, self.model.max_len))
            self.forward(num_tokens, min(num_tokens, pick(1, 48)), pick(1, 48), num_splits, max_context)
        for num_samples in (*range(1, NUM_ROWS + 1), 257, 272, 500, 512, 1000, 1024, 9000):
            self.sample(num_samples, pick(1, 64), pick(0, 32))


def of_codes(num_inputs: int) -> Iterator[CodedWeight]:
    """Of each kind of codes one weight."""
    e4m3 = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    for bits, table, group in ((4, None, 128), (4, torch.zeros(16), 32), (8, None, num_inputs), (8, e4m3, 128)):
        codes, scales = torch.zeros(256, num_inputs, dtype=torch.uint8), torch.ones(256, -(-num_inputs // group))
        yield CodedWeight(codes, bits, table, scales, scales if bits == 4 else None, group)


def stack_of_codes(num_rows: int, num_inputs: int, dtype: torch.dtype) -> PackedWeight:
    """As MXFP4's."""
    values = torch.empty(num_rows, -(-num_inputs // 2), dtype=torch.uint8)
    scales = torch.empty(1, num_rows, -(-num_inputs // 32), dtype=BF16)
    return PackedWeight(values, scales, (num_rows, num_inputs), dtype, "coded", Coding(4, torch.zeros(16), 32))


def _specialised(x: Any, size: Any) -> None:
    tl.store(x + size, 1)


def careless() -> None:
    """A kernel that takes no care, four times, of which each is another variant."""
    kernel: Any = triton.jit(_specialised)
    words = torch.empty(100, dtype=INT32)
    for first, size in ((0, 5), (0, 1), (0, 16), (1, 5)):
        kernel[1,](words[first:], size)


def tell(asked: Asked, started: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {
        name: {
            "started": len(started.get(name, {})),
            "by_constants": len({*started.get(name, {}).values()}),
            "later": [key for key in variants if key not in started.get(name, {})],
        }
        for name, variants in asked.variants.items()
    }


def main() -> None:
    asked = Asked()
    Recorder(asked.add)
    told = {}
    for name, model in (("8B", LLAMA_8B), ("odd", ODD)):
        asked.variants.clear()
        storm = Storm(model, seed=0)
        storm.start()
        started = {kernel: dict(variants) for kernel, variants in asked.variants.items()}
        storm.serve()
        told[name] = tell(asked, started)
    asked.variants.clear()
    careless()
    told["careless"] = tell(asked, {})
    print(json.dumps(told))


if __name__ == "__main__":
    main()
