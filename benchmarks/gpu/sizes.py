"""Shapes of models and workloads: those of the table, and tiny ones that go the same way on a CPU in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from aioengine.kernels.kernel_cases import CaseSizes


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's shape."""

    family: Literal["Llama", "Qwen3"]
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    max_len: int

    def config(self, dtype: str) -> dict[str, Any]:
        """Its config.json."""
        is_llama = self.family == "Llama"
        return {
            "architectures": [f"{self.family}ForCausalLM"],
            "model_type": self.family.lower(),
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_len,
            "rms_norm_eps": 1e-5 if is_llama else 1e-6,
            "rope_theta": 500_000.0 if is_llama else 1_000_000.0,
            "rope_scaling": self._rope() if is_llama else None,
            "attention_bias": False,
            "tie_word_embeddings": self.is_tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": dtype,
        }

    def _rope(self) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": min(8192, self.max_len // 4),
        }

    def save(self, folder: Path, dtype: str) -> Path:
        """Write the folder of a model without weights and tokenizer, for ``load_format="dummy"`` and prompts of ids."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(dtype)))
        return folder

    @property
    def num_matrix_weights(self) -> int:
        """Those that a token is multiplied with: all but the embedding's, and the norms' few."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab

    def kv_bytes(self, item_bytes: int) -> int:
        """Of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes

    def decode_bytes(self, batch: int, context: float, item_bytes: int) -> float:
        """What a step must read: the weights once, and each sequence's keys and values."""
        return self.num_matrix_weights * item_bytes + batch * context * self.kv_bytes(item_bytes)

    def decode_flops(self, batch: int, context: float) -> float:
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * context
        return batch * (2 * self.num_matrix_weights + attention)

    def prefill_flops(self, num_tokens: int) -> float:
        """Of one prompt, whose last token alone goes through the vocabulary; half of the scores are masked."""
        head = self.hidden * self.vocab
        attention = 2 * self.num_layers * self.num_heads * self.head_dim * num_tokens**2
        return 2 * (self.num_matrix_weights - head) * num_tokens + 2 * head + attention


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything.

    Attributes:
        batches: of the three rows of decode, in their order.
        context: tokens of each sequence there, about; steps are timed over ``decode_steps``.
        request_tokens: least and most, in and out, of each of ``num_requests``.
        num_streams: in the gap, the loop's lag and the steady steps, of ``steady_steps``.
        equality: prompts, and tokens of each; the KV cache is of ``equality_kv_bytes``.
        copy_bytes, matrix: of the bounds.
        repetitions: of what is timed call by call.
    """

    large: Model
    small: Model
    batches: tuple[int, int, int] = (1, 64, 256)
    context: int = 1024
    decode_steps: int = 128
    prefill_tokens: int = 8192
    prefills: int = 7
    max_batched: int = 8192
    num_requests: int = 256
    request_tokens: tuple[int, int] = (100, 1024)
    num_streams: int = 256
    stream_prompt: int = 128
    lag_s: float = 20.0
    steady_steps: int = 200
    traced_steps: int = 100
    equality: tuple[int, int] = (64, 128)
    equality_kv_bytes: int = 4 * 2**30
    copy_bytes: int = 4 * 2**30
    matrix: int = 8192
    repetitions: int = 50


FULL = Sizes(
    large=Model(
        family="Llama",
        hidden=4096,
        intermediate=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab=128_256,
        is_tied=False,
        max_len=131_072,
    ),
    small=Model(
        family="Qwen3",
        hidden=1024,
        intermediate=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab=151_936,
        is_tied=True,
        max_len=40_960,
    ),
)
_TINY_SHAPE: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab": 384,
    "max_len": 512,
}
TINY = Sizes(
    large=Model(family="Llama", is_tied=False, **_TINY_SHAPE),
    small=Model(family="Qwen3", is_tied=True, **_TINY_SHAPE),
    batches=(1, 2, 4),
    context=32,
    decode_steps=8,
    prefill_tokens=64,
    prefills=3,
    max_batched=64,
    num_requests=6,
    request_tokens=(8, 32),
    num_streams=4,
    stream_prompt=8,
    lag_s=0.3,
    steady_steps=8,
    traced_steps=4,
    equality=(3, 8),
    equality_kv_bytes=2**24,
    copy_bytes=2**20,
    matrix=64,
    repetitions=3,
)


KERNELS = CaseSizes(
    hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128_256, layers=32,
    decode=256, prefill=8192, context=1024, long_context=65_536,
)  # fmt: skip
"""Of Llama-3.1-8B."""
TINY_KERNELS = CaseSizes(
    hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=384, layers=2,
    decode=4, prefill=32, context=40, long_context=64,
)  # fmt: skip
