"""The decoder gives what transformers gives, for each family."""

import itertools
import random
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES
from models.reference import NUM_TOKENS, VOCAB_SIZE, Checkpoint, OneSequence, load, logprobs, reference, token_ids
from nightly import few, nightly, seeds
from torch import Tensor

from aioengine.models import decoder as decoder_module

HEADS = [{"tie_word_embeddings": is_tied} for is_tied in (True, False)]
CASES = [*((family, {}) for family in FAMILIES), *itertools.product(("llama2", "qwen2", "qwen3"), HEADS)]


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logprobs_equal_those_of_transformers(checkpoint: Checkpoint, family: str, overrides: dict[str, Any]) -> None:
    folder, ids = checkpoint(family, **overrides), token_ids()
    decoder = load(folder)
    assert (decoder.head is None) == decoder.config.tie_word_embeddings
    torch.testing.assert_close(logprobs(decoder, ids), reference(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", few(["llama2", "qwen3"], of=FAMILIES))
def test_packed_weights_give_the_same(checkpoint: Checkpoint, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ids = checkpoint(family), token_ids()
    plain_bytes = load(checkpoint("llama2")).weight_bytes
    monkeypatch.setattr(decoder_module, "MIN_PACKED_FLOAT32", 0)
    decoder = load(folder)
    if family == "llama2":
        assert decoder.weight_bytes == plain_bytes, "packing frees the plain weights"
    assert all(layer.down.weight.is_mkldnn for layer in decoder.decoder_layers())
    torch.testing.assert_close(logprobs(decoder, ids), reference(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [[3, 1, 60, 1, 7, 28], *nightly([1] * NUM_TOKENS)])
def test_a_prompt_in_chunks_gives_the_same_as_in_one(checkpoint: Checkpoint, family: str, chunks: list[int]) -> None:
    decoder, ids = load(checkpoint(family)), token_ids(1)
    torch.testing.assert_close(logprobs(decoder, ids, chunks), logprobs(decoder, ids), atol=1e-4, rtol=0)


WINDOWS = {"llama2": (None,) * 3, "qwen2": (None,) * 3, "mistral": (8, 8, 8), "qwen2-window": (None, 8, 8)}


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_are_by_layer_where_the_family_says_so_and_matter(checkpoint: Checkpoint, family: str) -> None:
    decoder, ids = load(checkpoint(family)), token_ids()
    assert decoder.config.windows == WINDOWS[family]
    if not any(WINDOWS[family]):
        return
    without = logprobs(decoder, ids, attend=OneSequence(ignore_windows=True))
    difference = (logprobs(decoder, ids) - without).abs().amax(-1)
    assert difference[:8].max() < 1e-4
    assert difference[8:].min() > 1e-2


# Largest error of a log-probability, and on average. These random models are far more sensitive than trained ones:
# transformers in the same dtype is 0.06 to 0.10 (bfloat16) off its own float32 result on average, and 1.3 at most.
TOLERANCES = {"bfloat16": (1.5, 0.1), "float16": (0.3, 0.012)}


@pytest.mark.parametrize("family", few(["mistral", "qwen3"], of=FAMILIES))
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_half_precision_is_no_worse_than_in_transformers(checkpoint: Checkpoint, family: str, dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    # Saved in that dtype, so that both sides start from the same weights.
    folder, ids = checkpoint(family, dtype=torch_dtype), token_ids()
    exact = reference(folder, ids)
    decoder = load(folder)
    assert decoder.config.dtype is torch_dtype
    error = (logprobs(decoder, ids) - exact).abs()
    error_of_transformers = (reference(folder, ids, torch_dtype) - exact).abs()
    largest, mean = TOLERANCES[dtype]
    assert error.max() < largest
    assert error.mean() < mean
    assert error.mean() < 1.05 * error_of_transformers.mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_asked_dtype_wins_over_the_files(checkpoint: Checkpoint, dtype: str) -> None:
    decoder = load(checkpoint("llama2"), dtype=dtype)
    assert {parameter.dtype for parameter in decoder.parameters()} == {getattr(torch, dtype)}
    assert decoder.rope_table.dtype == getattr(torch, dtype)
    assert logprobs(decoder, token_ids()).isfinite().all()


def test_a_tied_head_takes_no_memory_of_its_own(checkpoint: Checkpoint) -> None:
    tied, untied = (load(checkpoint("llama2", tie_word_embeddings=is_tied)) for is_tied in (True, False))
    assert untied.weight_bytes - tied.weight_bytes == tied.embedding.nbytes == VOCAB_SIZE * 64 * 4


def random_overrides(seed: int) -> tuple[str, dict[str, Any]]:
    draw = random.Random(seed)
    family = draw.choice(list(FAMILIES))
    num_kv_heads, head_dim = draw.choice([1, 2, 3]), draw.choice([8, 16, 24])
    num_heads = num_kv_heads * draw.choice([1, 2, 5])
    overrides = {
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        # Qwen2 has no head_dim of its own in its config; the others may have any.
        "hidden_size": num_heads * head_dim if "qwen2" in family else num_heads * draw.choice([8, 12, 20]),
        "intermediate_size": draw.choice([40, 96]),
        "num_hidden_layers": draw.choice([1, 2, 4]),
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-2]),
        "tie_word_embeddings": draw.choice([True, False]),
    }
    if "llama" in family:
        overrides["mlp_bias"] = draw.choice([True, False])
    if "llama" in family or family == "qwen3":
        overrides["attention_bias"] = draw.choice([True, False])
    return family, overrides


@pytest.mark.parametrize("seed", seeds(16))
def test_random_shapes_equal_transformers(checkpoint: Checkpoint, seed: int) -> None:
    family, overrides = random_overrides(seed)
    folder, ids = checkpoint(family, **overrides), token_ids(seed, num_tokens=70)
    torch.testing.assert_close(logprobs(load(folder), ids), reference(folder, ids), atol=1e-4, rtol=0)


def test_inputs_of_attention_are_as_the_protocol_says(checkpoint: Checkpoint) -> None:
    decoder = load(checkpoint("qwen2-window"))
    seen: list[tuple[int, int | None]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        assert (q.shape, k.shape, v.shape) == ((5, 4, 16), (5, 2, 16), (5, 2, 16))
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        seen.append((layer, window))
        return q

    with torch.inference_mode():
        hidden = decoder(torch.arange(5), torch.arange(5), attend)
    assert hidden.shape == (5, 64)
    assert seen == [(0, None), (1, 8), (2, 8)]


def test_rotation_covers_the_last_position_and_no_more(checkpoint: Checkpoint) -> None:
    decoder = load(checkpoint("llama2"), max_model_len=50)
    assert decoder.config.max_model_len == 50
    with torch.inference_mode():
        decoder(torch.tensor([3]), torch.tensor([49]), OneSequence())
        with pytest.raises(IndexError):
            decoder(torch.tensor([3]), torch.tensor([50]), OneSequence())
