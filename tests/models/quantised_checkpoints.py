"""Quantised checkpoints of a dense one, and what their codes stand for, as a dense checkpoint again.

Those of compressed-tensors and bitsandbytes are written by their libraries, which dequantise them, too. The others are
written here by their published layouts, from integer codes, with loops where the reader has views: FP8 as in Qwen's and
DeepSeek's model cards, GPTQ as in AutoGPTQ's ``QuantLinear.pack``, AWQ as in AutoAWQ's ``WQLinear_GEMM.from_linear``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models.reference import FILE, edit_json
from safetensors.torch import load_file, save_file
from torch import Tensor

Encoded = tuple[dict[str, Tensor], Tensor]
"""What stands in place of ``module.weight``, by the suffix of ``module``; and what it stands for."""

Encode = Callable[[Tensor], Encoded]


def is_layers_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(
    source: Path,
    folder: Path,
    encode: Encode,
    config: dict[str, Any],
    is_quantised: Callable[[str], bool] = is_layers_matrix,
) -> tuple[Path, Path]:
    """Quantise the checkpoint in ``source``; returns the folders of the result and of its dense equal.

    Args:
        config: the quantization_config.
        is_quantised: which tensors are, by name.
    """
    coded, dense = {}, {}
    for name, tensor in load_file(source / FILE).items():
        if is_quantised(name):
            parts, dense[name] = encode(tensor.float())
            coded.update({name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()})
        else:
            coded[name] = dense[name] = tensor
    for kind, tensors in (("coded", coded), ("dense", dense)):
        shutil.copytree(source, folder / kind)
        save_file(tensors, folder / kind / FILE, metadata={"format": "pt"})
    edit_json(folder / "coded" / "config.json", quantization_config=config)
    return folder / "coded", folder / "dense"


# Rounding: to integer codes in groups of inputs


def in_groups(weight: Tensor, group: int, *, bits: int, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 to 2^bits - 1, [out, in]; float16 scales and integer zeros, [out, groups]."""
    most, half = 2**bits - 1, 2 ** (bits - 1)
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if is_symmetric:
        scales = (torch.maximum(-low, high) / (half - 0.5)).half()
        zeros = torch.full(scales.shape, half)
    else:
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(1, most).int()  # zero 0 has no place in the older GPTQ files
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most).int().flatten(1)
    return codes, scales, zeros


def decoded(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return (codes - zeros[:, group_of]) * scales.float()[:, group_of]


def words(codes: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """[rows, columns] → int32 [rows, columns · bits / 32]: of each word's worth of columns those of ``order``, from the
    word's low end."""
    packed = torch.zeros(len(codes), codes.shape[1] // len(order), dtype=torch.int64)
    for place, column in enumerate(order):
        packed |= codes[:, column :: len(order)].long() << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def gptq(
    bits: int, group: int, *, is_symmetric: bool = True, zeros_less: int = 1, order: Tensor | None = None
) -> Encode:
    """``order``: in which inputs were quantised (desc_act): neighbours in it share a group."""

    def encode(weight: Tensor) -> Encoded:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        group_of = torch.arange(columns) // size
        if order is not None:
            group_of = torch.empty(columns, dtype=torch.int64)
            group_of[order[:columns].argsort()] = torch.arange(columns) // size
        sorted_inputs = group_of.argsort(stable=True)
        codes, scales, zeros = in_groups(weight[:, sorted_inputs], size, bits=bits, is_symmetric=is_symmetric)
        codes = codes[:, sorted_inputs.argsort()]
        in_word = tuple(range(32 // bits))
        parts = {
            ".qweight": words(codes, bits, in_word).T,
            ".qzeros": words(zeros.T - zeros_less, bits, in_word),
            ".scales": scales.T,
            ".g_idx": group_of.int(),
        }
        return parts, decoded(codes, scales, zeros, group_of)

    return encode


def awq(group: int) -> Encode:
    def encode(weight: Tensor) -> Encoded:
        columns = weight.shape[1]
        codes, scales, zeros = in_groups(weight, min(group, columns), bits=4, is_symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {".qweight": words(codes.T, 4, order), ".qzeros": words(zeros.T, 4, order), ".scales": scales.T}
        return parts, decoded(codes, scales, zeros, torch.arange(columns) // min(group, columns))

    return encode


def fp8(rows: int | None, columns: int | None, suffix: str, shape: tuple[int, ...] = (), **others: float) -> Encode:
    """By blocks of so many outputs and inputs; None: all of them.

    Args:
        suffix: what the scales are called. shape: they are saved in, if not [blocks, blocks].
        others: further tensors of the module.
    """

    def encode(weight: Tensor) -> Encoded:
        size = rows or weight.shape[0], columns or weight.shape[1]
        down, across = (torch.arange(length) // block for length, block in zip(weight.shape, size, strict=True))
        scales = torch.zeros(int(down[-1]) + 1, int(across[-1]) + 1)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                scales[i, j] = weight[down == i][:, across == j].abs().max() / 448
        expanded = scales[down][:, across]
        codes = (weight / expanded).to(torch.float8_e4m3fn)
        saved = scales if not shape else scales.reshape(shape)
        parts = {".weight": codes, suffix: saved, **{f".{name}": torch.tensor(value) for name, value in others.items()}}
        return parts, codes.float() * expanded

    return encode


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 blocks [..., out, groups, 16] and scales [..., out, groups] of [..., out, in]; and what they stand for."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    scaled = groups / torch.exp2(exponents)[..., None]
    nearest = (scaled.abs()[..., None] - torch.tensor(FP4)).abs().argmin(-1)
    values = torch.tensor(FP4)[nearest] * torch.where(scaled < 0, -1.0, 1.0)
    codes = nearest + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), (values * torch.exp2(exponents)[..., None]).flatten(-2)


# By the libraries


def bitsandbytes_4bit(kind: str, *, is_nested: bool = False, blocksize: int = 64) -> Encode:
    def encode(weight: Tensor) -> Encoded:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        # Flat: of a matrix whose rows are shorter than a block the library's CPU code takes other scales back.
        codes, state = quantize_4bit(weight.flatten(), None, None, blocksize, is_nested, kind)
        dense, state.shape = dequantize_4bit(codes, state).view(weight.shape), weight.shape
        parts = {f".weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return {".weight": codes, **parts}, dense

    return encode


def bitsandbytes_8bit(weight: Tensor) -> Encoded:
    from bitsandbytes.functional import int8_vectorwise_quant

    codes, scales, _ = int8_vectorwise_quant(weight.half())
    parts = {".weight": codes, ".SCB": scales.float(), ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * (scales.float()[:, None] / 127)


def compressed_tensors(
    source: Path,
    folder: Path,
    *,
    activations: dict[str, Any] | None = None,
    others: dict[str, dict[str, Any]] | None = None,
    **weights: Any,
) -> tuple[Path, Path]:
    """As `write`, with the library's whole way from a model of transformers to its files.

    Args:
        activations, weights: the fields of the scheme; without ``activations`` these are not quantised.
        others: the weights' fields of modules that are quantised otherwise, by target.
    """
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    inputs = QuantizationArgs(**activations) if activations else None
    schemes = {
        f"group_{index}": QuantizationScheme(
            targets=[target], weights=QuantizationArgs(**fields), input_activations=inputs
        )
        for index, (target, fields) in enumerate({**(others or {}), "Linear": weights}.items())
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    apply_quantization_config(model, QuantizationConfig(config_groups=schemes, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _calibrate(module, module.quantization_scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder / "coded")
    compressor.update_config(folder / "coded")
    exact = {f"{name}.weight": _nvfp4(module) for name, module in model.named_modules() if _is_nvfp4(module)}
    compressor.decompress_model(model)
    dense = {name: tensor.float() for name, tensor in model.state_dict().items() if name in load_file(source / FILE)}
    dense |= exact
    shutil.copytree(source, folder / "dense")
    save_file(dense, folder / "dense" / FILE, metadata={"format": "pt"})
    return folder / "coded", folder / "dense"


def _is_nvfp4(module: Any) -> bool:
    return hasattr(module, "weight_global_scale")


def _nvfp4(module: Any) -> Tensor:
    """What the codes stand for, in float32: the library's own way rounds to bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    rows, num_bytes = module.weight_packed.shape
    values = unpack_fp4_from_uint8(module.weight_packed, rows, 2 * num_bytes, dtype=torch.float32)
    return values * (module.weight_scale.float() / module.weight_global_scale).repeat_interleave(16, 1)


def _calibrate(module: Any, args: Any) -> None:
    """Give a module's scales and zero points the values that its weight's extremes make."""
    from compressed_tensors.quantization.utils import calculate_qparams

    weight, global_scale = module.weight.detach().float(), None
    rows, columns = weight.shape
    num_groups = module.weight_scale.shape[-1] if module.weight_scale.dim() == 2 else 1
    groups = weight.reshape(rows, num_groups, -1)
    dims = (2,) if module.weight_scale.shape[0] == rows else (0, 1, 2)
    if getattr(args, "block_structure", None):
        height, width = args.block_structure
        groups, dims = weight.reshape(rows // height, height, columns // width, width), (1, 3)
    if hasattr(module, "weight_global_scale"):
        global_scale = 448 * 6 / weight.abs().max()
        module.weight_global_scale.data.fill_(global_scale)
    scales, zeros = calculate_qparams(groups.amin(dims), groups.amax(dims), args, global_scale)
    module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zeros.reshape(module.weight_zero_point.shape))
