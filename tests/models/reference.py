"""What the plain decoder and transformers say of whole sequences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.models.decoder import Decoder
from aioengine.models.folder import ModelFolder
from aioengine.models.loader import load_decoder

Checkpoint = Callable[..., Path]

NUM_TOKENS = 100  # past every window and past the length that llama3 and yarn stretch
VOCAB_SIZE = 384


class OneSequence:
    """Attention over one sequence by plain arithmetic in float32; remembers keys and values between calls."""

    def __init__(self, *, ignore_windows: bool = False) -> None:
        self.ignore_windows = ignore_windows
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        if layer in self.cache:
            k, v = torch.cat((self.cache[layer][0], k)), torch.cat((self.cache[layer][1], v))
        self.cache[layer] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[-1] ** -0.5
        key = torch.arange(len(k))
        query = key[len(k) - len(q) :, None]
        visible = key <= query
        if window is not None and not self.ignore_windows:
            visible &= key > query - window
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def token_ids(seed: int = 0, num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logprobs(decoder: Decoder, ids: Tensor, chunks: list[int] | None = None, attend: Any = None) -> Tensor:
    attend = attend or OneSequence()
    ids = ids.long()
    positions = torch.arange(len(ids))
    hidden = [
        decoder(chunk, where, attend)
        for chunk, where in zip(ids.split(chunks or len(ids)), positions.split(chunks or len(ids)), strict=True)
    ]
    logits = decoder.logits(torch.cat(hidden))
    assert logits.dtype == torch.float32
    return logits.log_softmax(-1)


@torch.inference_mode()
def reference(folder: Path, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model(ids[None].long()).logits[0].float().log_softmax(-1)


def load(folder: Path, **config: Any) -> Decoder:
    return load_decoder(ModelFolder.read(folder), EngineConfig(**config))
