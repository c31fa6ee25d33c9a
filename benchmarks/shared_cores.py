"""Two replicas on one machine's cores: each with a share of them, against each with all.

    python -m benchmarks.shared_cores

A model with random weights, whose steps are large enough for several threads; rounds of the two ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from aioengine import Engine, ReplicaOptions
from aioengine.cluster.devices import NUM_THREADS, count_cores

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
PROMPT = list(range(20, 84))


async def measure(folder: str, num_threads: int | None, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Tokens a second of all streams; the processor time of the replicas for one of them, which foreign load changes
    less; and seconds to the first token of the slowest."""
    os.environ.pop(NUM_THREADS, None)
    if num_threads is not None:
        os.environ[NUM_THREADS] = str(num_threads)
    options = ReplicaOptions(replicas=2, balance="round_robin")
    settings: dict[str, Any] = {"load_format": "dummy", "max_model_len": 1024, "max_num_seqs": 16, "device": "cpu"}
    async with Engine(folder, replicas=options, log_stats_interval_s=0.0, **settings) as engine:

        async def read(number: int, tokens: int) -> float:
            output = await engine.generate([number, *PROMPT], max_tokens=tokens, ignore_eos=True, detokenize=False)
            return output.metrics.time_to_first_token_s or 0.0

        await asyncio.gather(*(read(number, 16) for number in range(num_streams)))
        began, began_cpu_s = time.perf_counter(), cpu_s()
        firsts = await asyncio.gather(*(read(100 + number, num_tokens) for number in range(num_streams)))
        count = num_streams * num_tokens
        return {
            "tokens_s": count / (time.perf_counter() - began),
            "cpu_ms": 1e3 * (cpu_s() - began_cpu_s) / count,
            "first_s": max(firsts),
        }


def cpu_s() -> float:
    """Of all children, so far."""
    times = [child.cpu_times() for child in psutil.Process().children()]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    cores = count_cores()
    rounds: dict[str, list[dict[str, float]]] = {"shared": [], f"{cores} threads each": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for _ in range(args.rounds):
            for way, num_threads in zip(rounds, (None, cores), strict=True):
                rounds[way].append(asyncio.run(measure(folder, num_threads, args.streams, args.tokens)))
    for way, figures in rounds.items():
        rates, costs, firsts = ([each[name] for each in figures] for name in ("tokens_s", "cpu_ms", "first_s"))
        print(
            f"{way:>15}: {statistics.median(rates):6.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f}), "
            f"{statistics.median(costs):.1f} ms of processor time a token ({min(costs):.1f} to {max(costs):.1f}), "
            f"slowest first token {statistics.median(firsts):.2f} s"
        )


if __name__ == "__main__":
    main()
