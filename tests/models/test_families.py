"""In what families differ: names and order of weights on their way in and out, lengths, the text part of a wrapper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, LONG_ROPE
from models.reference import Checkpoint, load, logprobs, reference, token_ids
from nightly import few
from safetensors.torch import load_file, save_file

from aioengine.errors import ConfigError
from aioengine.models.checkpoint import SINGLE_FILE, of_text
from aioengine.models.decoder_config import head_order, read_decoder_config
from aioengine.models.families import ARCHITECTURES
from aioengine.models.folder import ModelFolder
from aioengine.models.saver import save_checkpoint

MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"]
SOME = few(["gemma3-images", "phi4-mini", "olmo2", "glm4", *MIXTURES], of=FAMILIES)


def test_each_architecture_has_a_family_in_the_tests() -> None:
    assert set(ARCHITECTURES) <= {f"{family.transformers}ForCausalLM" for family in FAMILIES.values()}


@pytest.mark.parametrize("family", SOME)
def test_weights_are_saved_as_they_came(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    source = checkpoint(family)
    decoder = load(source)
    save_checkpoint(decoder, ModelFolder.read(source), tmp_path / "saved", max_shard_bytes=2**30)
    held, saved = of_text(load_file(source / SINGLE_FILE)), load_file(tmp_path / "saved" / SINGLE_FILE)
    assert saved.keys() == held.keys()
    for name, values in held.items():
        assert torch.equal(saved[name], values), name
    ids = token_ids(3, 40)
    for again in (logprobs(load(tmp_path / "saved"), ids), reference(tmp_path / "saved", ids)):
        torch.testing.assert_close(again, logprobs(decoder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", SOME)
def test_weights_that_come_take_the_place_of_the_old_ones(checkpoint: Checkpoint, family: str) -> None:
    decoder, other = load(checkpoint(family)), checkpoint(family, seed=1)
    tensors = {
        name: values for name, values in of_text(load_file(other / SINGLE_FILE)).items() if name in decoder.shapes()
    }
    with torch.inference_mode():
        for target, values in decoder.changes(tensors):
            target.copy_(values)
    ids = token_ids(4, 40)
    torch.testing.assert_close(logprobs(decoder, ids), logprobs(load(other), ids), atol=1e-4, rtol=0)


# The text part of a model of texts and images


@pytest.mark.parametrize("family", ["gemma3-images", "mistral3-images"])
def test_the_text_part_has_its_names_of_before_transformers_5_too(
    checkpoint: Checkpoint, copied: Checkpoint, family: str
) -> None:
    source, old = checkpoint(family), copied(family)
    renamed = {
        re.sub(
            r"^model\.language_model\.", "language_model.model.", re.sub(r"^lm_head", "language_model.lm_head", name)
        ): x
        for name, x in load_file(source / SINGLE_FILE).items()
    }
    save_file(renamed, old / SINGLE_FILE, metadata={"format": "pt"})
    ids = token_ids(5, 40)
    assert torch.equal(logprobs(load(old), ids), logprobs(load(source), ids))


# Rotations


def test_long_factors_are_taken_where_a_sequence_may_be_longer_than_the_first_length(checkpoint: Checkpoint) -> None:
    rope = {**LONG_ROPE, "original_max_position_embeddings": 64}
    folder = checkpoint("phi3", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=64)
    short, long = load(folder, max_model_len=64), load(folder, max_model_len=65)
    for decoder, factors in ((short, rope["short_factor"]), (long, rope["long_factor"])):
        frequencies = [10000.0 ** (-index / 8) / factor for index, factor in enumerate(factors)]
        assert decoder.config.ropes[0] is not None
        assert decoder.config.ropes[0].inv_freq == pytest.approx(frequencies, rel=1e-6)
    ids = token_ids(6, 64)
    torch.testing.assert_close(logprobs(short, ids), reference(folder, ids), atol=1e-4, rtol=0)
    assert (logprobs(long, ids) - reference(folder, ids)).abs().max() > 1e-2


def test_queries_that_grow_with_their_position_bound_the_length(checkpoint: Checkpoint) -> None:
    folder = ModelFolder.read(checkpoint("ministral3"))
    assert read_decoder_config(folder).max_model_len == 256
    with pytest.raises(ConfigError, match="max_model_len=257 is more than the 256 tokens"):
        read_decoder_config(folder, max_model_len=257)


def test_a_field_of_another_family_is_not_read(checkpoint: Checkpoint, copied: Checkpoint) -> None:
    fields = {"residual_multiplier": 0.5, "final_logit_softcapping": 3.0, "no_rope_layers": [0, 0, 0]}
    changed = copied("llama2", fields)
    assert read_decoder_config(ModelFolder.read(changed)) == read_decoder_config(ModelFolder.read(checkpoint("llama2")))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 8, 12, 16])
def test_pairs_that_turn_lie_half_a_head_apart(rotary_dim: int, is_interleaved: bool) -> None:
    order = head_order(16, rotary_dim, is_interleaved=is_interleaved) or tuple(range(16))
    assert sorted(order) == list(range(16))
    for pair in range(rotary_dim // 2):
        first = 2 * pair if is_interleaved else pair
        assert (order[pair], order[pair + 8]) == (first, first + (1 if is_interleaved else rotary_dim // 2))
