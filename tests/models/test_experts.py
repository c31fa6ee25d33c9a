"""Mixtures of experts: what their checkpoints look like, and what is made of them; `test_decoder` has their logits."""

import shutil
from pathlib import Path

import pytest
import torch
from kernels.harness import native
from models.quantised_checkpoints import mxfp4
from models.reference import FILE, Checkpoint, load, logprobs, reference, token_ids
from nightly import few
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioengine.models.decoder import Experts

MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"]


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
def test_experts_may_be_one_tensor_a_layer(checkpoint: Checkpoint, copied: Checkpoint, family: str) -> None:
    source, ids = checkpoint(family), token_ids()
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    folder = copied(source)
    save_file(stacked(load_file(source / FILE), *names), folder / FILE, metadata={"format": "pt"})
    assert torch.equal(logprobs(load(folder), ids), logprobs(load(source), ids))


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


def test_mxfp4_experts_of_gpt_oss_stay_codes(checkpoint: Checkpoint, copied: Checkpoint, tmp_path: Path) -> None:
    source, ids = checkpoint("gpt-oss", intermediate_size=64), token_ids()
    coded: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(source / FILE).items():
        if ".experts." in name and not name.endswith("bias"):
            coded[f"{name}_blocks"], coded[f"{name}_scales"], values = mxfp4(tensor.transpose(1, 2))
            dense[name] = values.transpose(1, 2).contiguous()
        else:
            coded[name] = dense[name] = tensor
    quantised = copied(source, {"quantization_config": {"quant_method": "mxfp4"}})
    equal = Path(shutil.copytree(source, tmp_path / "dense"))
    for folder, tensors in ((quantised, coded), (equal, dense)):
        save_file(tensors, folder / FILE, metadata={"format": "pt"})
    decoder, expected = load(quantised), reference(equal, ids)
    mixtures = [module for module in decoder.modules() if isinstance(module, Experts)]
    codings = [linear.packed.coding for mixture in mixtures for linear in (mixture.gate_up, mixture.down)]
    assert [(coding.bits, coding.group) for coding in codings if coding is not None] == [(4, 32)] * 6
    torch.testing.assert_close(logprobs(decoder, ids), expected, atol=1e-4, rtol=0)
    decoder.use(native)  # type: ignore[arg-type]
    torch.testing.assert_close(logprobs(decoder, ids), expected, atol=1e-3, rtol=0)
