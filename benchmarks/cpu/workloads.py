"""The workloads, the time that the machine's limits allow for each, and models of random weights to run them on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec

from aioengine.models.folder import DEMO_MODEL
from benchmarks.gpu.command import refuse
from benchmarks.gpu.sizes import FULL, Model

SHAPES = {
    "0.6b": FULL.small,
    "30m": Model(
        family="Llama",
        hidden=512,
        intermediate=1408,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        vocab=8192,
        is_tied=True,
        max_len=8192,
    ),
}
"""Qwen3-0.6B's, and a Llama so small that a step's cost around the forward pass shows."""
MODEL_HELP = "a folder; demo: the bundled model; 0.6b, 30m: random weights of that shape, made for this run"

FIRST_ID, END_ID = 10, 7990
"""Prompts are of ids from the first up to below the second, or below the vocabulary's end."""
TINY = 8
"""Lengths are divided by it in a trial run, and numbers of requests by half of it."""
KV_ITEM_BYTES = 2


class Job(msgspec.Struct, frozen=True):
    """A request: its prompt, and how many tokens it is to bring."""

    prompt: list[int]
    num_output: int


def make_jobs(workload: str, repetition: int, *, vocab_size: int = END_ID, is_tiny: bool = False) -> list[Job]:
    """The requests of a workload, all to be sent at once. Token ids differ by workload and repetition, lengths do not.

    Args:
        workload: W1 to W5, or S with a number of streams of 128 tokens in and 64 out.
    """
    rng = random.Random(f"{workload}-{repetition}")

    def short(length: int) -> int:
        return -(-length // TINY) if is_tiny else length

    def some(count: int) -> int:
        return -(-2 * count // TINY) if is_tiny else count

    def prompt(length: int) -> list[int]:
        return [rng.randrange(FIRST_ID, min(END_ID, vocab_size)) for _ in range(short(length))]

    match workload:
        case "W1":
            return [Job(prompt(128), short(128))]
        case "W2":
            return [Job(prompt(128), short(128)) for _ in range(some(16))]
        case "W3":
            lengths_rng = random.Random(0)
            lengths = [(lengths_rng.randint(32, 512), lengths_rng.randint(16, 128)) for _ in range(32)]
            return [Job(prompt(num_input), short(num_output)) for num_input, num_output in lengths[: some(32)]]
        case "W4":
            return [Job(prompt(2048), 1)]
        case "W5":
            shared = prompt(1024)
            return [Job(shared + prompt(32), short(32)) for _ in range(some(16))]
        case _ if workload[:1] == "S" and workload[1:].isdigit():
            return [Job(prompt(128), short(64)) for _ in range(int(workload[1:]))]
    raise ValueError(f"{workload}: there is no such workload")


TITLES = {
    "W1": "one request, 128 in, 128 out",
    "W2": "16 requests, 128 in, 128 out",
    "W3": "32 requests, 32–512 in, 16–128 out",
    "W4": "prefill of 2048 (prompt tokens/s)",
    "W5": "16 sharing 1024, 32 own, 32 out",
}


class Limits(msgspec.Struct, frozen=True):
    """What the machine does at best, each number the highest of several operations, all threads together.

    Attributes:
        read_bytes_per_s: of memory.
        flops: multiplications and additions a second in a product of bfloat16 matrices, and of int8 ones.
        found_by: the operation behind each.
    """

    read_bytes_per_s: float
    flops: dict[str, float]
    found_by: dict[str, str]


def bound_s(jobs: list[Job], model: Model, limits: Limits, quantization: str | None) -> float:
    """The time that the limits allow: the prompts at once, then a step for each token of all that are not yet done.

    Each phase takes as long as its bytes or its operations, whichever is longer. A prefix that all prompts share is
    computed once. Only steps that mix prompts and single tokens could be faster, by what their phases leave idle.
    """
    weight_bytes = model.num_matrix_weights * (1 if quantization == "int8" else 0.5 if quantization == "int4" else 2)
    flops_per_s = limits.flops["int8" if quantization == "int8" else "bfloat16"]
    shared = len(jobs[0].prompt) if len(jobs) > 1 else 0
    for job in jobs[1:]:
        pairs = zip(jobs[0].prompt[:shared], job.prompt, strict=False)
        shared = next((index for index, (one, other) in enumerate(pairs) if one != other), shared)
    of_shared = model.prefill_flops(shared) if shared else 0.0
    prefill_flops = of_shared + sum(model.prefill_flops(len(job.prompt)) - of_shared for job in jobs)
    total_s = max(prefill_flops / flops_per_s, weight_bytes / limits.read_bytes_per_s)
    for index in range(1, max(job.num_output for job in jobs)):
        contexts = [len(job.prompt) + index for job in jobs if job.num_output > index]
        context = sum(contexts) / len(contexts)
        step_bytes = weight_bytes + sum(contexts) * model.kv_bytes(KV_ITEM_BYTES)
        step_flops = model.decode_flops(len(contexts), context)
        total_s += max(step_bytes / limits.read_bytes_per_s, step_flops / flops_per_s)
    return total_s


def find_model(name: str, scratch: Path) -> Path:
    """The folder of a model that is given as `MODEL_HELP` says.

    Raises:
        SystemExit: it is none.
    """
    if name == "demo":
        return DEMO_MODEL
    if name in SHAPES:
        return save_model(scratch / name, SHAPES[name])
    if not (Path(name) / "config.json").exists():
        refuse(f"--model {name}: there is no config.json; {MODEL_HELP}")
    return Path(name)


def read_shape(folder: Path) -> Model:
    """A model's shape, from its config.json."""
    config = json.loads((folder / "config.json").read_text())
    num_heads = config["num_attention_heads"]
    return Model(
        family="Qwen3" if config["model_type"] == "qwen3" else "Llama",
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        vocab=config["vocab_size"],
        is_tied=config.get("tie_word_embeddings", False),
        max_len=config["max_position_embeddings"],
    )


def save_model(folder: Path, model: Model) -> Path:
    """Write a model of normally distributed bfloat16 weights without a tokenizer, for prompts of token ids."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {}

    def matrix(name: str, out_features: int, in_features: int) -> None:
        values = torch.randn(out_features, in_features, generator=generator).mul_(0.02)
        tensors[f"{name}.weight"] = values.to(torch.bfloat16)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    hidden, d = model.hidden, model.head_dim
    matrix("model.embed_tokens", model.vocab, hidden)
    for index in range(model.num_layers):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm", hidden)
        for name, heads in (("q", model.num_heads), ("k", model.num_kv_heads), ("v", model.num_kv_heads)):
            matrix(f"{layer}.self_attn.{name}_proj", heads * d, hidden)
        matrix(f"{layer}.self_attn.o_proj", hidden, model.num_heads * d)
        if model.family == "Qwen3":
            norm(f"{layer}.self_attn.q_norm", d)
            norm(f"{layer}.self_attn.k_norm", d)
        norm(f"{layer}.post_attention_layernorm", hidden)
        matrix(f"{layer}.mlp.gate_proj", model.intermediate, hidden)
        matrix(f"{layer}.mlp.up_proj", model.intermediate, hidden)
        matrix(f"{layer}.mlp.down_proj", hidden, model.intermediate)
    norm("model.norm", hidden)
    if not model.is_tied:
        matrix("lm_head", model.vocab, hidden)
    model.save(folder, "bfloat16")
    save_file(tensors, folder / "model.safetensors")
    return folder
