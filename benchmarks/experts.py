"""Mixtures of experts on a CPU: ``python -m benchmarks.experts [--quantization int8|int4] [--rounds N] [--json FILE]``.

A model of random weights decodes one stream, alternately with a measurement of how fast this machine reads memory. The
bound of a token is the bytes of the weights that it needs over that rate: the experts that it chose, the routers,
attention, norms, and the head; of the embedding one row. Keys and values, some MB, and all arithmetic count as nothing,
so that no engine reaches it. Beside it stand the bytes of all experts, which a token would cost if each was read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from aioengine import Engine
from aioengine.models.decoder import Experts
from benchmarks.cpu.limits import fastest, native_operations, reads
from benchmarks.cpu.runner import read
from benchmarks.cpu.workloads import Job

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""1.6 GB of experts in bfloat16, of which a token chooses an eighth."""
PROMPT = list(range(20, 84))
NUM_TOKENS = 128
MEASURE_S = 1.0
GB = 1e9


def weight_bytes(decoder: Any) -> dict[str, float]:
    """Bytes of a decoder's weights: all, all experts', those of the experts of a token, and all that a token needs."""
    experts, chosen = 0, 0.0
    for layer in decoder.layers:
        if isinstance(layer.mlp, Experts):
            of_layer = layer.mlp.gate_up.packed.nbytes + layer.mlp.down.packed.nbytes
            experts += of_layer
            chosen += of_layer * layer.mlp.of.num_chosen / layer.mlp.of.count
    row = decoder.embedding.packed.nbytes / decoder.config.vocab_size
    others = decoder.weight_bytes - experts - decoder.embedding.packed.nbytes + row
    return {"all": decoder.weight_bytes, "experts": experts, "chosen": chosen, "token": others + chosen}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    native = native_operations(compiles=True)
    config = CONFIG | ({"num_hidden_layers": 2} if args.tiny else {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = Engine(folder, load_format="dummy", quantization=args.quantization, max_model_len=1024, max_num_seqs=1)
        async with engine:
            (of_weights,) = await engine.apply_model(weight_bytes)
            for _ in range(2):  # steps as programs are captured when they come a second time
                await read(engine, Job(PROMPT, NUM_TOKENS))
            rounds = []
            for _ in range(args.rounds):
                read_s, found_by = fastest(reads(native), MEASURE_S / 10 if args.tiny else MEASURE_S)
                began_at = time.perf_counter()
                result = await read(engine, Job(PROMPT, 8 if args.tiny else NUM_TOKENS))
                gaps_s = [b - a for a, b in zip(result.times, result.times[1:], strict=False)]
                rate = 2**30 / read_s
                bound_s = of_weights["token"] / rate
                rounds.append(
                    {
                        "read_gb_s": rate / GB,
                        "read_by": found_by,
                        "token_ms": 1e3 * statistics.median(gaps_s),
                        "bound_ms": 1e3 * bound_s,
                        "share": bound_s / statistics.median(gaps_s),
                        "first_token_s": result.times[0] - began_at,
                    }
                )
    return {
        "quantization": args.quantization,
        "threads": torch.get_num_threads(),
        "bytes": of_weights,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="to try the command; measures nothing")
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    sizes = ", ".join(f"{name} {size / GB:.3f}" for name, size in found["bytes"].items())
    print(f"{found['threads']} threads, quantization {args.quantization}; GB of weights: {sizes}\n")
    print("| round | reads, GB/s | bound, ms a token | ms a token | of the bound |\n|---|---|---|---|---|")
    for nth, each in enumerate(found["rounds"]):
        cells = each["read_gb_s"], each["bound_ms"], each["token_ms"], each["share"]
        print(f"| {nth} | {cells[0]:.1f} | {cells[1]:.2f} | {cells[2]:.2f} | {cells[3]:.0%} |")
    shares = sorted(each["share"] for each in found["rounds"])
    tokens = sorted(each["token_ms"] for each in found["rounds"])
    print(
        f"\nmedian {statistics.median(shares):.0%} of the bound ({shares[0]:.0%} to {shares[-1]:.0%}), "
        f"{statistics.median(tokens):.2f} ms a token ({tokens[0]:.2f} to {tokens[-1]:.2f})"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
