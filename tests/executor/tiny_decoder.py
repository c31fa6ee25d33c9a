"""A small decoder with random weights, whose outputs depend on every token and position before them, so that a wrong
cache slot, position or mask shows."""

from collections.abc import Callable
from typing import Any

import torch

from aioengine.kernels.operations import plain_torch as operations
from aioengine.models.decoder import Decoder
from aioengine.models.decoder_config import DecoderConfig, Rope
from aioengine.scheduler.cache_layout import attention_specs

VOCAB_SIZE = 97


def tiny_config(**fields: Any) -> DecoderConfig:
    defaults: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
        "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_model_len": 64, "dtype": torch.float32,
        "rms_norm_eps": 1e-5, "qkv_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": None,
        "tie_word_embeddings": False, "windows": (None, 5, None),
    }  # fmt: skip
    defaults |= fields
    heads = defaults["num_kv_heads"], defaults["head_dim"]
    defaults["caches"] = attention_specs(defaults.pop("windows"), *heads)
    rope = Rope((1.0, 0.3, 0.1, 0.03))
    defaults.setdefault("attention_scale", defaults["head_dim"] ** -0.5)
    return DecoderConfig(**{"ropes": (rope,) * defaults["num_layers"], **defaults})


def tiny_decoder(seed: int = 0, **fields: Any) -> Decoder:
    """On the CPU, ready for a runner; fields as in `tiny_config`."""
    decoder = Decoder(tiny_config(**fields))
    decoder.allocate(torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for name, parameter in decoder.named_parameters():
            gain = 3.0 if name.startswith(("embedding", "head")) else 1.6
            spread = gain * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        decoder.use(operations)
    return decoder


class HookedOperations:
    """Plain torch's, with a call at the start of each forward pass that has tokens."""

    def __init__(self, before_forward: Callable[[], None]) -> None:
        self._before_forward = before_forward

    def gather_tokens(self, *args: Any) -> Any:
        self._before_forward()
        return operations.gather_tokens(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(operations, name)
