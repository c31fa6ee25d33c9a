"""The memory that a model would need, and how much would fit beside it, by its config and its files' headers.

No weights are read but for a small matrix of each quantised format, which shows how all of them are encoded.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Container
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.executor.accelerator import DeviceMemory
from aioengine.executor.cuda import find_cuda
from aioengine.executor.make_runner import DEVICE_MAX_IN_FLIGHT, HOST_MAX_IN_FLIGHT, cache_dtype
from aioengine.executor.memory import available_memory, granted_kv_bytes, held_by_sequence, num_kv_blocks
from aioengine.executor.paged_attention import layout_of
from aioengine.kernels.native import native_operations as native
from aioengine.kernels.operations import plain_torch
from aioengine.kernels.packed_weight import PANEL, CodedWeight, PackedWeight, Quantization
from aioengine.models.checkpoint import FILE_DTYPES, checkpoint_tensors
from aioengine.models.decoder import META, Decoder
from aioengine.models.decoder_config import DecoderConfig
from aioengine.models.folder import ModelFolder, has_weights
from aioengine.models.formats.catalogue import is_quantised, read_catalogue
from aioengine.models.formats.stored import Files, Stored
from aioengine.models.implementations import choose_path, read_model_config
from aioengine.models.loader import coded_parameters, match, states_dtype
from aioengine.scheduler.cache_layout import CacheLayout

OF_EXPERTS = ".experts."
"""In the names of tensors of which a token uses a share: the expert that all tokens share is called otherwise."""

SHORTEST, STEP = 1024, 4
"""Lengths for which the number of fitting sequences is counted: the first, and the factor to the next."""

MOST_A_BYTE = 4
"""Parameters in a byte, where the layout is unknown: no format that a config.json names has fewer than two bits."""

UNSTATED_DTYPE = "bfloat16"
"""The dtype of weights that are not here, where config.json states none: most are published in it."""


class FormatInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one format in the files: a dtype as safetensors calls it, or what a quantised format is called."""

    format: str
    num_tensors: int
    file_bytes: int


class KVGroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one window, whose keys and values are kept for so many tokens; or layers that keep a state.

    Attributes:
        window: the most tokens of a sequence that they see; None: all.
        bytes_per_token: of all of them, for each token that is kept.
        state_bytes: of their states, for each sequence; 0: they keep none.
    """

    window: int | None
    num_layers: int
    bytes_per_token: int
    state_bytes: int = 0


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How many sequences of so many tokens, prompt and output, have room for their keys and values at once."""

    num_tokens: int
    num_sequences: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of `read_model_info`.

    Attributes:
        folder: where the model is.
        path: "native" or "transformers"; why: it is taken.
        num_active_parameters: those that a token's step uses, fewer than ``num_parameters`` in a mixture of experts;
            with the whole embedding, though a token reads a row of it. All, where transformers' code is what runs.
        formats: of the tensors in the files; none where there are no files of weights, and the config has all.
        weight_bytes: of the weights as they are kept on the device. None: the layout of quantised weights is only in
            the files, and there are none; then nothing is known of what fits.
        device: "cpu" or "cuda".
        memory_bytes: for all. kv_cache_bytes: of it for the KV cache, by the config's shares.
        num_kv_blocks: of ``block_size`` tokens in a group of layers.
        longest: the longest sequence that fits alone, ``max_model_len`` at most; 0: none.
        problem: why an engine with this config would not start in so much memory; empty if it would.
    """

    folder: str
    architecture: str
    path: str
    why: str
    dtype: str
    quantization: Quantization | None
    num_layers: int
    max_model_len: int
    num_parameters: int
    num_active_parameters: int
    formats: list[FormatInfo]
    weight_bytes: int | None
    kv_cache_dtype: str
    kv_groups: list[KVGroupInfo]
    block_size: int
    device: str
    memory_bytes: int
    kv_cache_bytes: int | None
    num_kv_blocks: int | None
    longest: int | None
    fits: list[Fit]
    problem: str


def read_model_info(config: EngineConfig, *, memory_bytes: int | None = None) -> ModelInfo:
    """Find what an engine with this config would need; reads no weights and downloads nothing. Blocks: for a thread.

    Args:
        config: its model, dtypes, path, device, lengths and memory count.
        memory_bytes: of the device, before the weights are loaded; None: what this machine has available, or its GPU.
    Raises:
        ModelLoadError: there is no such model here, or it cannot be run; says why.
        ConfigError: the config does not fit the model or the device.
    """
    is_host = not config.device.startswith("cuda") and (config.device == "cpu" or find_cuda(config.device) is None)
    if config.quantization is not None and not is_host:
        raise ConfigError(f"quantization={config.quantization!r} is for a CPU; give device='cpu', or leave it out")
    folder = ModelFolder.resolve(config.model, revision=config.revision, may_download=False)
    has_files = has_weights(folder.path)
    if not has_files:
        # Of files that are not there none can state a dtype.
        dtype = config.dtype if config.dtype != "auto" or states_dtype(folder) else UNSTATED_DTYPE
        config = msgspec.structs.replace(config, load_format="dummy", dtype=dtype)
    choice, model = choose_path(folder, config), read_model_config(folder, config)
    used = read_catalogue(folder.path) if has_files else {}
    shapes, weight_bytes = {name: tensor.shape for name, tensor in used.items()}, None
    if isinstance(model, DecoderConfig):
        tensors = checkpoint_tensors(model, used)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if has_files:
            used = match(used, tensors, tied=model.tie_word_embeddings)
        if has_files or not is_quantised(folder):
            decoder = Decoder(model, config.quantization)
            _put_codes(decoder, used, coded_parameters(used, tensors, config.quantization))
            weight_bytes = kept_bytes(decoder, is_host=is_host)
    else:
        from aioengine.models.transformers.transformers_config import parameter_shapes

        shapes = shapes or parameter_shapes(model)
        weight_bytes = sum(map(math.prod, shapes.values())) * model.dtype.itemsize
    if memory_bytes is None:
        memory_bytes = available_memory() if is_host else _gpu_memory(config)
    of_cache = cache_dtype(config, model.dtype, is_host=is_host)
    layout = layout_of(model.caches, config.block_size, of_cache)
    in_flight = config.max_in_flight or (HOST_MAX_IN_FLIGHT if is_host else DEVICE_MAX_IN_FLIGHT)

    def count_fitting(num_tokens: int) -> int:
        held = held_by_sequence(config, layout, num_tokens, in_flight)
        return min(count // most for count, most in zip(num_blocks, held, strict=True) if most)

    kv_bytes = longest = None
    num_blocks: list[int] = []
    fits, problem = [], ""
    least = sum(map(math.prod, shapes.values())) // MOST_A_BYTE if weight_bytes is None else weight_bytes
    if least > memory_bytes:
        problem = f"the weights take {least} bytes{' or more' if weight_bytes is None else ''}"
    if weight_bytes is not None:
        memory = DeviceMemory(memory_bytes, max(0, memory_bytes - weight_bytes), weight_bytes)
        held = held_by_sequence(config, layout, model.max_model_len, in_flight)
        granted, _ = granted_kv_bytes(config, memory, None if is_host else 0, layout.count_bytes(held))
        num_blocks = layout.share_bytes(granted, held, config.max_num_seqs)
        kv_bytes = layout.count_bytes(num_blocks)
        longest = bisect_right(range(1, model.max_model_len + 1), False, key=lambda length: not count_fitting(length))
        lengths = [SHORTEST]
        while lengths[-1] * STEP < model.max_model_len:
            lengths.append(lengths[-1] * STEP)
        lengths = [*(length for length in lengths if length < model.max_model_len), model.max_model_len]
        fits = [Fit(num_tokens=length, num_sequences=count_fitting(length)) for length in lengths]
        try:
            num_kv_blocks(
                config,
                layout,
                max_model_len=model.max_model_len,
                memory=memory,
                peak_bytes=None if is_host else 0,
                max_in_flight=in_flight,
            )
        except ConfigError as error:
            problem = problem or str(error)
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    num_parameters = num_active = sum(counts.values())
    if isinstance(model, DecoderConfig) and model.experts is not None:
        of_experts = sum(count for name, count in counts.items() if OF_EXPERTS in name)
        num_active += of_experts * model.experts.num_chosen // model.experts.count - of_experts
    file_bytes: dict[str, list[int]] = {}
    for tensor in used.values():
        file_bytes.setdefault(tensor.format, []).append(tensor.num_bytes)
    return ModelInfo(
        folder=str(folder.path),
        architecture=model.architecture,
        path=choice.path,
        why=choice.why,
        dtype=_name(model.dtype),
        quantization=config.quantization,
        num_layers=model.num_layers,
        max_model_len=model.max_model_len,
        num_parameters=num_parameters,
        num_active_parameters=num_active,
        formats=[
            FormatInfo(format=name, num_tensors=len(sizes), file_bytes=sum(sizes)) for name, sizes in file_bytes.items()
        ],
        weight_bytes=weight_bytes,
        kv_cache_dtype=_name(of_cache),
        kv_groups=_kv_groups(layout, config.block_size),
        block_size=config.block_size,
        device="cpu" if is_host else "cuda",
        memory_bytes=memory_bytes,
        kv_cache_bytes=kv_bytes,
        num_kv_blocks=num_blocks[0] if num_blocks else None,
        longest=longest,
        fits=fits,
        problem=problem,
    )


def kept_bytes(decoder: Decoder, *, is_host: bool) -> int:
    """Bytes of the weights as a device keeps them, of a decoder without values.

    Args:
        decoder: as its constructor leaves it, or with parts of linears that have no values either; it cannot be used
            afterwards.
        is_host: by the native kernels, where they know its heads.
    """
    c = decoder.config
    is_native = is_host and native.has_kernels(c.num_heads, c.num_kv_heads, c.head_dim)
    pack: Callable[..., PackedWeight] = native.pack if is_native else plain_torch.pack
    samples: dict[tuple[object, ...], PackedWeight] = {}

    def pack_nothing(weight: Tensor | _Unread, quantization: Quantization | None, dtype: torch.dtype) -> PackedWeight:
        """Pack a panel with values to see the layout, and return all of the weight without values."""
        num_rows, num_columns = weight.shape
        key: tuple[object, ...]
        if isinstance(weight, _Unread):
            key = num_columns, weight.bits, weight.group, weight.scales.dtype, weight.offsets is None
        else:
            key = num_columns, weight.dtype, quantization
        if key not in samples:
            samples[key] = pack(
                weight.panel() if isinstance(weight, _Unread) else torch.zeros(PANEL, num_columns, dtype=weight.dtype),
                quantization,
                dtype,
            )
        packed = samples[key]
        kept_rows = -(-num_rows // PANEL) * PANEL if "panels" in packed.layout else num_rows

        def grown(tensor: Tensor) -> Tensor:
            return tensor.new_empty(tensor.numel() * kept_rows // PANEL, device=META)

        scales = None if packed.scales is None else grown(packed.scales)
        return PackedWeight(grown(packed.values), scales, (num_rows, num_columns), dtype, packed.layout, packed.coding)

    sizes: Any = SimpleNamespace(pack=pack_nothing)
    for linear in decoder.linears():
        linear.pack(sizes)
    return decoder.weight_bytes


class _Unread(CodedWeight):
    """Codes without values, on the meta device; the dtype of ``scales`` is one in which all of them are exact."""

    def dense(self) -> Tensor:
        return torch.empty(self.shape, dtype=torch.float32, device=META)

    def panel(self) -> CodedWeight:
        """A panel of it with some values."""
        num_groups, fill = self.scales.shape[1], EXACT_IN[self.scales.dtype]
        scales = torch.full((PANEL, num_groups), fill, dtype=torch.float32)
        codes = torch.zeros(PANEL, self.shape[1], dtype=torch.uint8)
        offsets = None if self.offsets is None else scales
        return CodedWeight(codes, self.bits, self.table, scales, offsets, self.group)


EXACT_IN = {torch.bfloat16: 1.0, torch.float16: 1 + 2**-10, torch.float32: 1 + 2**-20}
"""A number that is not exact in those before."""


def _put_codes(decoder: Decoder, used: dict[str, Stored], coded: Container[str]) -> None:
    """Give linears their parts, where these come as codes, but without values."""
    samples: dict[str, Tensor | CodedWeight] = {}
    with Files() as files:
        for name in {stored.format for stored in used.values()}.difference(FILE_DTYPES):
            matrices = [stored for stored in used.values() if stored.format == name]
            samples[name] = min(matrices, key=lambda stored: stored.num_bytes).read(files)
            if _has_one_group(samples[name]):  # the widest shows whether that is all inputs, or as many as these
                widest = min(matrices, key=lambda stored: (-stored.shape[1], stored.num_bytes))
                samples[name] = widest.read(files)
    for name, tensor in checkpoint_tensors(decoder.config).items():
        linear = decoder.linear_of(tensor.parameter)
        if tensor.parameter in coded and linear is not None:
            sample, num_columns = samples.get(used[name].format), linear.weight.shape[1]
            linear.parts.append((tensor, _unread(used[name].shape, num_columns, sample)))


def _has_one_group(sample: Tensor | CodedWeight) -> bool:
    return isinstance(sample, CodedWeight) and sample.group >= sample.shape[1]


def _unread(shape: tuple[int, ...], num_columns: int, sample: Tensor | CodedWeight | None) -> Tensor | CodedWeight:
    """A matrix, or all that are stacked in this shape, encoded as ``sample`` is, but without values."""
    if not isinstance(sample, CodedWeight):
        return torch.empty(shape, dtype=torch.float32, device=META)
    num_rows = math.prod(shape) // num_columns
    group = num_columns if _has_one_group(sample) else sample.group
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=META)
    scales = torch.empty(num_rows, -(-num_columns // group), dtype=sample.rows().scales_dtype, device=META)
    return _Unread(codes, sample.bits, sample.table, scales, None if sample.offsets is None else scales, group)


def _kv_groups(layout: CacheLayout, block_size: int) -> list[KVGroupInfo]:
    """Groups of one kind together."""
    found: dict[tuple[bool, int | None], KVGroupInfo] = {}
    for group in layout.groups:
        pool = layout.pools[group.pool]
        kind = group.is_state, group.reach
        before = found.get(kind, KVGroupInfo(window=None, num_layers=0, bytes_per_token=0))
        found[kind] = KVGroupInfo(
            window=None if group.is_state else group.reach,
            num_layers=before.num_layers + len(group.layers),
            bytes_per_token=before.bytes_per_token + (0 if group.is_state else pool.block_bytes // block_size),
            state_bytes=before.state_bytes + (pool.block_bytes if group.is_state else 0),
        )
    return list(found.values())


def _gpu_memory(config: EngineConfig) -> int:
    """All that the GPU has.

    Raises:
        ConfigError: there is none.
    """
    try:
        return torch.cuda.get_device_properties(find_cuda(config.device)).total_memory
    except ConfigError as error:
        raise ConfigError(f"{error}, or say how much memory it is to have") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
