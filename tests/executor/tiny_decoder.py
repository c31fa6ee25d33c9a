"""A small decoder with the interface of `aioengine.models.decoder.Decoder`, and its forward pass over a whole sequence.

Its outputs depend on every token and position before them, so that a wrong cache slot, position or mask shows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

VOCAB_SIZE = 97


@dataclass(frozen=True)
class TinyConfig:
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    hidden_size: int = 32
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 64
    dtype: torch.dtype = torch.float32
    windows: tuple[int | None, ...] = (None, 5, None)


class TinyDecoder:
    """Attributes:
    before_forward: called at the start of each forward pass, for tests that want it to fail or to wait.
    """

    def __init__(self, config: TinyConfig | None = None, seed: int = 0) -> None:
        self.config = c = config or TinyConfig()
        self.before_forward: Callable[[], None] = lambda: None
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32) / shape[0] ** 0.5

        num_lines = c.num_heads + 2 * c.num_kv_heads
        self.embedding = weight(c.vocab_size, c.hidden_size) * c.vocab_size**0.5
        self.positions = weight(c.max_model_len, c.hidden_size) * c.max_model_len**0.5
        self.qkv = [weight(c.hidden_size, num_lines * c.head_dim) for _ in range(c.num_layers)]
        self.output = [weight(c.num_heads * c.head_dim, c.hidden_size) for _ in range(c.num_layers)]
        self.head = weight(c.hidden_size, c.vocab_size) * 3

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embedding, self.positions, self.head, *self.qkv, *self.output))

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        self.before_forward()
        assert token_ids.dtype == positions.dtype == torch.int64
        c = self.config
        hidden = self.embedding[token_ids] + self.positions[positions]
        for layer, (qkv, output) in enumerate(zip(self.qkv, self.output, strict=True)):
            heads = (hidden @ qkv).view(len(hidden), -1, c.head_dim)
            q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
            attended = attend(layer, q, k, v, window=c.windows[layer])
            hidden = torch.tanh(hidden + attended.reshape(len(hidden), -1) @ output)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head

    def logits_of(self, token_ids: list[int]) -> Tensor:
        """Of one whole sequence, in one pass and without a cache: float32 [len(token_ids), vocab_size]."""
        return self.logits(self(torch.tensor(token_ids), torch.arange(len(token_ids)), attend_without_cache))


def attend_without_cache(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
    """Causal attention among the tokens given."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    position = torch.arange(len(q))
    hidden_from = position[None, :] > position[:, None]
    if window is not None:
        hidden_from |= position[None, :] <= position[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden_from, -torch.inf).softmax(dim=-1), v)
