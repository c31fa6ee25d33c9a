"""Weights from a checkpoint's files into a decoder: checked first, then streamed, one tensor at a time."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Container, Iterable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypedDict, Unpack

import msgspec
import torch
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, ModelLoadError
from aioengine.kernels.operations import Operations, plain_torch
from aioengine.kernels.packed_weight import CodedWeight, Quantization
from aioengine.models.checkpoint import EMBEDDING, FILE_DTYPES, HEAD, CheckpointTensor, checkpoint_tensors, of_text
from aioengine.models.decoder import Decoder, Linear
from aioengine.models.decoder_config import DecoderConfig, read_decoder_config
from aioengine.models.families import text_config
from aioengine.models.folder import ModelFolder, find_gguf
from aioengine.models.formats.catalogue import read_catalogue
from aioengine.models.formats.stored import Files, FileTensor, Stored
from aioengine.models.model import ModelConfig

logger = logging.getLogger("aioengine")

# Old checkpoints carry the rotation's frequencies, which follow from the config.
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
CPU = torch.device("cpu")
DUMMY_SEED = 0
DUMMY_RANGE = 0.05


class LoadStopped(Exception):
    """Loading ended early because ``should_stop`` returned True."""


class LoadOptions(TypedDict, total=False):
    """Arguments of `Load`, as functions that load take them."""

    device: torch.device
    operations: Operations
    on_progress: Callable[[int, int], None] | None
    should_stop: Callable[[], bool]


class Load:
    """A load of weights that is under way.

    Args:
        device: of the weights.
        operations: the operations that they are packed for.
        on_progress: called with (bytes done, bytes of all tensors), from (0, all) to (all, all), from any thread.
        should_stop: asked between tensors.
    """

    def __init__(
        self,
        device: torch.device = CPU,
        operations: Operations = plain_torch,
        on_progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.device, self.operations = device, operations
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._done = self._total = 0
        self._lock = Lock()

    def begin(self, total: int) -> None:
        """Report that none of ``total`` bytes have been read."""
        self._total = total
        self.add(0)

    def add(self, num_bytes: int) -> None:
        """Report bytes that have been read."""
        with self._lock:
            self._done += num_bytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)

    def stop_if_asked(self) -> None:
        """Raise LoadStopped if ``should_stop`` returns True."""
        if self._should_stop():
            raise LoadStopped


def load_decoder(folder: ModelFolder, config: EngineConfig, **options: Unpack[LoadOptions]) -> Decoder:
    """Build the decoder that ``folder`` describes and give it its weights. Blocks: for a thread.

    Needs the memory of the weights and of one linear more: each is packed once it has its values. No file stays open
    or mapped.

    Args:
        config: its dtype, max_model_len, load_format and quantization are used.
        options: as of `Load`.
    Raises:
        ModelLoadError: a file or tensor is missing, damaged or does not fit config.json; the message names it.
        ConfigError: ``config.max_model_len`` is more than the model allows.
        LoadStopped: ``should_stop`` returned True.
    """
    found, load = read_config(folder, config), Load(**options)
    if config.load_format == "dummy":
        return _with_noise(found, config.quantization, load)
    return _read(of_text(read_catalogue(folder.path)), found, config.quantization, load)


def read_config(folder: ModelFolder, config: EngineConfig) -> DecoderConfig:
    """The config of the decoder that `load_decoder` builds; where config.json states no dtype, the files' dtype.

    Raises:
        ModelLoadError, ConfigError: as `load_decoder`.
    """
    # config.json first: an error of it explains more than one of the files.
    found = read_decoder_config(folder, dtype=config.dtype, max_model_len=config.max_model_len)
    if config.dtype != "auto" or states_dtype(folder) or config.load_format == "dummy":
        return found
    stored = of_text(read_catalogue(folder.path))
    dtypes = [FILE_DTYPES.get(stored[name].format) for name in (EMBEDDING, HEAD) if name in stored]
    return msgspec.structs.replace(found, dtype=next(filter(None, dtypes), found.dtype))


def states_dtype(folder: ModelFolder) -> bool:
    """Whether config.json states the dtype of the weights."""
    stated = text_config(folder.config)
    return any(stated.get(key) for key in ("dtype", "torch_dtype"))


def load_weights(
    folder: Path, config: DecoderConfig, quantization: Quantization | None = None, **options: Unpack[LoadOptions]
) -> Decoder:
    """Load a decoder of a known config from any checkpoint of its shapes, in the dtype of ``config``.

    The folder needs no config.json. If it has one, that must describe the same decoder.

    Raises:
        ModelLoadError, LoadStopped: as `load_decoder`.
    """
    _check_config(folder, config)
    return _read(of_text(read_catalogue(folder)), config, quantization, Load(**options))


def check_weights(folder: Path, config: DecoderConfig) -> None:
    """Raise the errors of `load_weights` that can be found without the tensors' values."""
    _check_config(folder, config)
    stored = of_text(read_catalogue(folder))
    match(stored, checkpoint_tensors(config, stored), tied=config.tie_word_embeddings)


def _check_config(folder: Path, config: DecoderConfig) -> None:
    dtype = str(config.dtype).removeprefix("torch.")
    check_same_config(folder, config, partial(read_decoder_config, dtype=dtype, max_model_len=config.max_model_len))


def check_same_config(
    folder: Path, config: ModelConfig, read: Callable[[ModelFolder], ModelConfig], other: Container[str] = ()
) -> None:
    """Compare a model that runs with the folder's config.json, if it has one, or its GGUF file's config.

    Args:
        read: reads a folder's config, in the dtype of ``config``.
        other: fields that may differ.
    Raises:
        ModelLoadError: they differ, or there is no such folder.
    """
    if not folder.exists():
        raise ModelLoadError(f"there is no folder {folder}")
    if find_gguf(folder) is None and not (folder / "config.json").is_file():
        return
    model = ModelFolder.read(folder)
    source = model.source_of("config.json")
    try:
        found = read(model)
    except ConfigError as error:
        raise ModelLoadError(f"{source}: {error}") from error
    for field in config.__struct_fields__:
        theirs, ours = getattr(found, field), getattr(config, field)
        if theirs != ours and field not in other:
            values = f" {theirs!r} instead of {ours!r}" if not isinstance(ours, tuple) else ""
            raise ModelLoadError(f"{source} describes another model than the one that runs: {field}{values}")


def check_kept_alike(kept: Decoder, read: Decoder) -> None:
    """Check that the weights of one decoder can replace those of another of the same config.

    Raises:
        ModelLoadError: one is of a quantised checkpoint, and the other of none or of another format.
    """
    pairs = zip(kept.linears(), read.linears(), strict=True)
    if not all(ours.packed.is_alike(theirs.packed) for ours, theirs in pairs):
        raise ModelLoadError(
            "the checkpoint is of another format than the one that runs, in whose layout the weights are kept: give "
            "one that was quantised in the same way, or start an engine with this one"
        )


def _read(stored: dict[str, Stored], config: DecoderConfig, quantization: Quantization | None, load: Load) -> Decoder:
    tensors = checkpoint_tensors(config, stored)
    wanted = match(stored, tensors, tied=config.tie_word_embeddings)
    coded = coded_parameters(wanted, tensors, quantization)
    decoder = _allocate(config, load.device, quantization, coded)

    def fill(name: str, files: Files) -> int:
        tensor, device = tensors[name], load.device
        linear, values = decoder.linear_of(tensor.parameter), tensor.arrange(wanted[name].read(files))
        if linear is not None and tensor.parameter.endswith(".weight") and linear.weight.is_meta:
            # A dense tensor beside codes may be a view of the file.
            values = values.to(device) if isinstance(values, CodedWeight) else values.to(device, copy=True)
            linear.parts.append((tensor, values))
        else:
            assert isinstance(values, Tensor)
            tensor.of(decoder.get_parameter(tensor.parameter)).copy_(values)
        if name == EMBEDDING and HEAD in stored and stored[HEAD] not in wanted.values():
            _check_tied_head(stored[HEAD], files, decoder.embedding)
        return wanted[name].num_bytes

    load.begin(sum(found.num_bytes for found in wanted.values()))
    _fill(decoder, tensors, fill, load)
    if coded:
        logger.info("weights: %s", _describe(decoder, tensors, wanted))
    return decoder


def _with_noise(config: DecoderConfig, quantization: Quantization | None, load: Load) -> Decoder:
    decoder, tensors = _allocate(config, load.device, quantization), checkpoint_tensors(config)
    # Made on their device: 8 billion values take a CPU a minute, and a GPU some ms.
    generator = torch.Generator(load.device).manual_seed(DUMMY_SEED)

    def fill(name: str, _: Files) -> int:
        values = tensors[name].of(decoder.get_parameter(tensors[name].parameter))
        if len(tensors[name].shape) > 1:
            values.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
        else:
            values.fill_(1.0)
        return values.nbytes

    load.begin(decoder.weight_bytes)
    _fill(decoder, tensors, fill, load)
    return decoder


def _fill(
    decoder: Decoder, tensors: dict[str, CheckpointTensor], fill: Callable[[str, Files], int], load: Load
) -> None:
    """Fill and pack one linear after the other, with the norms beside it.

    Args:
        fill: gives a tensor its values; returns the bytes that were read.
    """
    names_of: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        names_of.setdefault(tensor.parameter.rpartition(".")[0], []).append(name)
    for names in names_of.values():
        with Files() as files:
            for name in names:
                load.stop_if_asked()
                load.add(fill(name, files))
        for linear in dict.fromkeys(decoder.linear_of(tensors[name].parameter) for name in names):
            if linear is not None:
                load.stop_if_asked()
                linear.pack(load.operations)
    decoder.use(load.operations)


def _describe(decoder: Decoder, tensors: dict[str, CheckpointTensor], wanted: dict[str, Stored]) -> str:
    """A line on how the weights are kept, by format, and in how many bytes, scales included."""
    uses: dict[tuple[str, str], list[int]] = {}
    for name, stored in wanted.items():
        tensor, linear, how = tensors[name], decoder.linear_of(tensors[name].parameter), "as they are"
        if linear is None or not tensor.parameter.endswith(".weight"):
            kept = tensor.of(decoder.get_parameter(tensor.parameter)).nbytes
        else:
            kept = linear.packed.nbytes * math.prod(tensor.shape) // math.prod(linear.packed.shape)
            if stored.format not in FILE_DTYPES and linear.packed.coding is None:
                how = "dequantised"
        so_far = uses.get((stored.format, how), [0, 0, 0])
        uses[stored.format, how] = [sum(pair) for pair in zip(so_far, (1, stored.num_bytes, kept), strict=True)]
    return "; ".join(
        f"{count} tensors of {kind} {how}: {of_files:,} bytes in the files, {kept:,} kept"
        for (kind, how), (count, of_files, kept) in uses.items()
    )


def coded_parameters(
    wanted: dict[str, Stored], tensors: dict[str, CheckpointTensor], quantization: Quantization | None
) -> set[str]:
    """Names of the decoder's parameters that come as codes, at least in part.

    Raises:
        ConfigError: there are some, and ``quantization`` is set.
    """
    coded = {tensors[name].parameter for name, found in wanted.items() if found.format not in FILE_DTYPES}
    if coded and quantization is not None:
        raise ConfigError(
            f"quantization={quantization} is of checkpoints that are not quantised; this one is, and is kept as it is: "
            "leave it out, or load the model's checkpoint in bfloat16"
        )
    return coded


def match(stored: dict[str, Stored], tensors: dict[str, CheckpointTensor], *, tied: bool) -> dict[str, Stored]:
    """The stored tensor for each tensor that the decoder needs.

    Raises:
        ModelLoadError: a tensor is missing, unexpected, of the wrong shape, or of a dtype that is not supported.
    """
    names = {name: name for name in tensors}
    if tied and EMBEDDING not in stored and HEAD in stored:
        names[EMBEDDING] = HEAD  # some tools save the head alone of the two
    expected = {*names.values(), *([HEAD] if tied else [])}
    missing = [name for name in names.values() if name not in stored]
    # Ignoring a bias or norm would make it another model.
    extra = [name for name in stored if name not in expected and not HARMLESS.search(name)]
    unexpected = [name for name in extra if not is_zero_bias(stored[name])]
    check_no_other(lacks=missing, has_unexpected=unexpected)
    wanted = {target: stored[name] for target, name in names.items()}
    for target, found in wanted.items():
        where, shape = f"tensor {found.name} in {found.path}", tensors[target].shape
        if isinstance(found, FileTensor) and found.format not in FILE_DTYPES:
            raise ModelLoadError(
                f"{where} is {found.format}; supported: {', '.join(FILE_DTYPES)}, and what a quantization_config of "
                "config.json describes, which this is not"
            )
        if found.shape != shape:
            raise ModelLoadError(f"{where} has shape {list(found.shape)}; config.json makes it {list(shape)}")
    return wanted


def check_no_other(**names_of: Iterable[str]) -> None:
    """Raise the error of the first problem that some tensors have.

    Args:
        names_of: names of tensors by problem: ``lacks``, ``has_unexpected``, ``has_another_shape_for``.
    Raises:
        ModelLoadError: there are some.
    """
    for problem, names in names_of.items():
        if found := list(names):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            hint = "; config.json may need tie_word_embeddings" if found == [HEAD] else ""
            what = problem.replace("_", " ")
            raise ModelLoadError(f"the checkpoint {what} tensor {found[0]}{more}, by what config.json says{hint}")


def is_zero_bias(stored: Stored) -> bool:
    """Whether it is a bias of zeros; GPTQ tools wrote one for each matrix, also for models without biases."""
    if not stored.name.endswith(".bias") or len(stored.shape) != 1:
        return False
    with Files() as files:
        values = stored.read(files)
        return isinstance(values, Tensor) and not values.any()


def _allocate(
    config: DecoderConfig, device: torch.device, quantization: Quantization | None, coded: Container[str] = ()
) -> Decoder:
    # 20 bytes for each position and number of a head, while the tables of rotations are made.
    rope_bytes = config.max_model_len * config.head_dim * 20 * len({*config.ropes} - {None})
    if device.type == "cpu" and rope_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2:
        raise ConfigError(
            f"the rotations of max_model_len={config.max_model_len} positions take {rope_bytes} bytes, more than half "
            "of this machine's memory: set max_model_len to less (absent, it is config.json's max_position_embeddings)"
        )
    try:
        decoder = Decoder(config, quantization)
        decoder.allocate(device, coded)
        return decoder
    except RuntimeError as error:
        raise ModelLoadError(f"no memory for the weights that config.json describes: {error}") from error


def _check_tied_head(stored: Stored, files: Files, embedding: Linear) -> None:
    """A head beside a tied embedding is the same matrix saved twice; if not, config.json is wrong."""
    head, kept = stored.read(files), embedding.parts[0][1] if embedding.parts else embedding.weight
    head, kept = (values.dense() if isinstance(values, CodedWeight) else values for values in (head, kept))
    if head.shape == kept.shape and torch.equal(head.to(kept), kept):
        return
    raise ModelLoadError(
        f"tensor {stored.name} in {stored.path} is not the embedding, though config.json says tie_word_embeddings; "
        "set that to false"
    )
