"""What loading a model takes at its peak, beside what its weights are kept in.

    python -m benchmarks.memory [--scale 1.0] [--only NAME] [--json FILE]

Each case is a checkpoint of random weights, about 1 to 2 GB of them as they are kept at scale 1, written to a temporary
folder. A process of its own loads it as an engine on a CPU does, native kernels and all, and reports:

- **weights**: bytes of the weights as they are kept.
- **peak**: the most memory that it had (VmHWM, reset before the load), less what it had before the load. Pages of
  mapped files count: a checkpoint that stayed mapped would show.
- **ratio**: of the two; more than `MAX_RATIO` at scale 1 is a failure.

Exits with 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.executor.host import num_usable_threads
from aioengine.kernels.native.compilation import compile_library
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.models.checkpoint import INDEX_FILE, checkpoint_tensors
from aioengine.models.decoder_config import read_decoder_config
from aioengine.models.folder import ModelFolder
from aioengine.models.loader import Placement, load_decoder

MAX_RATIO = 1.15
"""Of the peak to the weights; a layer that is packed has its memory twice, and of 16 layers one is 6 %."""

TIMEOUT_S = 600.0
DENSE: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "rms_norm_eps": 1e-5},
    **{"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096},
    **{"tie_word_embeddings": False, "hidden_act": "silu"},
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "hidden_size": 1024},
    **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True},
    **{"decoder_sparse_step": 1, "mlp_only_layers": []},
}
GROUP = 128


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and how it is loaded.

    Attributes:
        write: to an empty folder, of its config.json's content.
        quantization: made at load.
    """

    name: str
    config: dict[str, Any]
    write: Callable[[Path, dict[str, Any]], None]
    quantization: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    weight_bytes: int
    peak_bytes: int
    load_s: float

    @property
    def ratio(self) -> float:
        return self.peak_bytes / self.weight_bytes


# Checkpoints


def write_dense(folder: Path, config: dict[str, Any]) -> None:
    _write(folder, config, lambda name, shape: {name: _noise(shape)})


def write_gptq(folder: Path, config: dict[str, Any]) -> None:
    """Symmetric int4 of the layers' matrices, in groups of `GROUP`."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}

    def encode(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        if not name.endswith("_proj.weight"):
            return {name: _noise(shape)}
        (rows, columns), module = shape, name.removesuffix(".weight")
        return {
            f"{module}.qweight": torch.randint(-(2**31), 2**31, (columns // 8, rows), dtype=torch.int32),
            f"{module}.qzeros": torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32),
            f"{module}.scales": torch.full((columns // GROUP, rows), 0.01, dtype=torch.float16),
        }

    _write(folder, {**config, "quantization_config": quantization}, encode)


def write_fp8(folder: Path, config: dict[str, Any]) -> None:
    """The layers' matrices in float8, a scale for each block of 128 by 128."""
    quantization = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"}

    def encode(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        if not name.endswith("_proj.weight"):
            return {name: _noise(shape)}
        codes = torch.randint(0, 0x70, shape, dtype=torch.uint8)  # no NaN
        scales = torch.full((-(-shape[0] // GROUP), -(-shape[1] // GROUP)), 0.001)
        return {name: codes.view(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    _write(folder, {**config, "quantization_config": quantization}, encode)


def write_q4_k(folder: Path, config: dict[str, Any]) -> None:
    """A GGUF file in which all matrices are Q4_K, of random blocks."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_K
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, shape in _shapes(config).items():
        title = names.get_name(name, try_suffixes=(".weight",))
        if len(shape) == 1:
            writer.add_tensor(title, torch.ones(shape).numpy())
            continue
        data = torch.zeros(shape[0], shape[1] // block, block_bytes, dtype=torch.uint8)
        data[..., 4:].random_()
        data[..., 1] = data[..., 3] = 0x14  # of the two scales of a block, in float16: about 0.001
        writer.add_tensor(title, data.flatten(1).numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write(folder: Path, config: dict[str, Any], encode: Callable[[str, tuple[int, ...]], dict[str, Tensor]]) -> None:
    """In a file for each layer, and one for all else."""
    (folder / "config.json").write_text(json.dumps(config))
    layers: dict[str, list[str]] = {}
    shapes = _shapes(config)
    for name in shapes:
        layers.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else "", []).append(name)
    file_of: dict[str, str] = {}
    for number, names in enumerate(layers.values()):
        file, tensors = f"model-{number}.safetensors", dict[str, Tensor]()
        for name in names:
            tensors |= encode(name, shapes[name])
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": file_of}))


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    model = read_decoder_config(ModelFolder(path=Path(), config=config, generation_config={}))
    return {name: tensor.shape for name, tensor in checkpoint_tensors(model).items()}


def _noise(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05)


CASES = [
    Case(name="bfloat16", config=DENSE, write=write_dense),
    Case(name="int8 at load", config=DENSE, write=write_dense, quantization="int8"),
    Case(name="int4 at load", config=DENSE, write=write_dense, quantization="int4"),
    Case(name="GPTQ int4", config=DENSE, write=write_gptq),
    Case(name="FP8 by blocks", config=DENSE, write=write_fp8),
    Case(name="GGUF Q4_K", config=DENSE, write=write_q4_k),
    Case(name="experts, bfloat16", config=EXPERTS, write=write_dense),
    Case(name="experts, GPTQ int4", config=EXPERTS, write=write_gptq),
    Case(name="experts, int8 at load", config=EXPERTS, write=write_dense, quantization="int8"),
]


# Measuring


def measure(case: Case, scale: float) -> Measured:
    """Write the checkpoint and have a child load it.

    Args:
        scale: of the number of layers.
    """
    layers = max(round(case.config["num_hidden_layers"] * scale), 2)
    with tempfile.TemporaryDirectory(prefix="aioengine-memory-") as folder:
        case.write(Path(folder), {**case.config, "num_hidden_layers": layers})
        command = [sys.executable, "-m", "benchmarks.memory", "--load", folder]
        command += ["--quantization", case.quantization] if case.quantization is not None else []
        ended = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    if ended.returncode:
        raise RuntimeError(f"{case.name}: {ended.stderr}")
    return Measured(name=case.name, **json.loads(ended.stdout.splitlines()[-1]))


def load(folder: Path, quantization: Any) -> dict[str, Any]:
    """In this process: what it took, as `Measured` has it."""
    config = EngineConfig(model=str(folder), device="cpu", quantization=quantization)
    operations = NativeOperations(Team(compile_library(), num_usable_threads()))
    found = ModelFolder.read(folder)
    operations.pack(torch.zeros(64, 64))  # what is imported and allocated once
    before, started = _memory("VmRSS"), time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    decoder = load_decoder(found, config, placement=Placement(operations=operations))
    return {
        "weight_bytes": decoder.weight_bytes,
        "peak_bytes": _memory("VmHWM") - before,
        "load_s": time.monotonic() - started,
    }


def _memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def table(measured: list[Measured]) -> Iterator[str]:
    yield f"{'case':<24}{'weights, MB':>12}{'peak, MB':>10}{'ratio':>8}{'load, s':>9}"
    for each in measured:
        yield (
            f"{each.name:<24}{each.weight_bytes / 1e6:>12,.0f}{each.peak_bytes / 1e6:>10,.0f}{each.ratio:>8.2f}"
            f"{each.load_s:>9.1f}" + ("  FAILED" if each.ratio > MAX_RATIO else "")
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of layers")
    parser.add_argument("--only", metavar="NAME", default="", help="cases with this in their names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--quantization", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load(options.load, options.quantization)))
        return 0
    measured = [measure(case, options.scale) for case in CASES if options.only in case.name]
    print("\n".join(table(measured)))
    if options.json is not None:
        options.json.write_text(json.dumps([{**msgspec.to_builtins(each), "ratio": each.ratio} for each in measured]))
    return int(not measured or any(each.ratio > MAX_RATIO for each in measured))


if __name__ == "__main__":
    sys.exit(main())
