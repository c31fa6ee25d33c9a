"""Mixtures of experts: what their checkpoints look like, and what is made of them; `test_decoder` has their logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.harness import native
from models.quantised_checkpoints import FILE, edit_config, mxfp4
from models.reference import Checkpoint, load, logprobs, reference, token_ids
from nightly import few
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.models.decoder import Experts
from aioengine.models.folder import ModelFolder
from aioengine.models.saver import save_checkpoint

MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"]


def copied(source: Path, folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """The model in ``source`` with other tensors and fields of its config."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    edit_config(folder, **fields)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def stacked(tensors: dict[str, Tensor], gate: str, up: str, down: str) -> dict[str, Tensor]:
    """With the experts of a layer in one tensor, as transformers has them in memory."""
    found = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
    for layer in range(3):
        prefix, experts = f"model.layers.{layer}.mlp.experts", 0
        while f"{prefix}.{experts}.{gate}.weight" in found:
            experts += 1
        if experts:
            gates, ups, downs = (
                torch.stack([found.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(experts)])
                for name in (gate, up, down)
            )
            found |= {f"{prefix}.gate_up_proj": torch.cat((gates, ups), 1), f"{prefix}.down_proj": downs}
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", *few([], of=["qwen3-moe", "olmoe"])])
def test_experts_may_be_one_tensor_a_layer(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    source, ids = checkpoint(family), token_ids()
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    folder = copied(source, tmp_path / "stacked", stacked(load_file(source / FILE), *names))
    assert torch.equal(logprobs(load(folder), ids), logprobs(load(source), ids))


@pytest.mark.parametrize("family", MIXTURES)
def test_what_is_saved_is_what_transformers_saves(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    source = checkpoint(family)
    save_checkpoint(load(source), ModelFolder.read(source), tmp_path / "saved", max_shard_bytes=2**30)
    saved, expected = load_file(tmp_path / "saved" / FILE), load_file(source / FILE)
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name


@pytest.mark.parametrize("family", few(["qwen2-moe", "gpt-oss"], of=MIXTURES))
def test_native_kernels_give_the_same_to_a_token_in_any_chunk(checkpoint: Checkpoint, family: str) -> None:
    decoder, ids = load(checkpoint(family)), token_ids()
    expected = logprobs(decoder, ids)
    decoder.use(native)  # type: ignore[arg-type]
    whole = logprobs(decoder, ids).clone()
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    # Not to the last bit, for attention, which is plain torch's here.
    torch.testing.assert_close(logprobs(decoder, ids, [1, 30, 2, 67]), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", few(["qwen2-moe", "gpt-oss"], of=MIXTURES))
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_quantised_at_load_and_routers_are_not(
    checkpoint: Checkpoint, family: str, quantization: str
) -> None:
    decoder, ids = load(checkpoint(family), quantization=quantization), token_ids()
    mixtures = [module for module in decoder.modules() if isinstance(module, Experts)]
    assert mixtures
    for mixture in mixtures:
        assert mixture.router.packed.scales is None
        assert mixture.gate_up.packed.scales is not None
        assert mixture.down.packed.scales is not None
    expected = logprobs(decoder, ids)
    decoder.use(native)  # type: ignore[arg-type]
    # Where the last bit decides how an activation is rounded, the two differ.
    assert (logprobs(decoder, ids) - expected).abs().mean() < 1e-2


def test_mxfp4_experts_of_gpt_oss_stay_codes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, ids = checkpoint("gpt-oss", intermediate_size=64), token_ids()
    coded: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(source / FILE).items():
        if ".experts." in name and not name.endswith("bias"):
            coded[f"{name}_blocks"], coded[f"{name}_scales"], values = mxfp4(tensor.transpose(1, 2))
            dense[name] = values.transpose(1, 2).contiguous()
        else:
            coded[name] = dense[name] = tensor
    quantised = copied(source, tmp_path / "coded", coded, quantization_config={"quant_method": "mxfp4"})
    equal = copied(source, tmp_path / "dense", dense)
    decoder, expected = load(quantised), reference(equal, ids)
    mixtures = [module for module in decoder.modules() if isinstance(module, Experts)]
    codings = [linear.packed.coding for mixture in mixtures for linear in (mixture.gate_up, mixture.down)]
    assert [(coding.bits, coding.group) for coding in codings if coding is not None] == [(4, 32)] * 6
    torch.testing.assert_close(logprobs(decoder, ids), expected, atol=1e-4, rtol=0)
    decoder.use(native)  # type: ignore[arg-type]
    torch.testing.assert_close(logprobs(decoder, ids), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ("mixtral", {"num_experts_per_tok": 6}, "6 of 5 experts"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ("qwen3-moe", {"moe_intermediate_size": -1}, "moe_intermediate_size=-1"),
        ("qwen2-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ],
)
def test_what_no_mixture_can_be_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, family: str, fields: dict[str, Any], named: str
) -> None:
    folder = copied(checkpoint(family), tmp_path / "wrong", {}, **fields)
    with pytest.raises(ModelLoadError, match=named):
        load(folder)
