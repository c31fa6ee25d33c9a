"""A runner for a device, and room for its KV cache: the CPU's and a GPU's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo, ExecutorStats
from aioengine.errors import ConfigError
from aioengine.executor.accelerator import Accelerator
from aioengine.executor.gpu_runner import START_FEATURES, GpuRunner
from aioengine.executor.graphs import GRAPH_BYTES, default_sizes
from aioengine.executor.input_batch import InputBatch
from aioengine.executor.memory import available_memory, num_gpu_kv_blocks, num_kv_blocks
from aioengine.executor.runner import Runner
from aioengine.executor.tune import cache_folder, tune_attention
from aioengine.kernels.attention.gpu_paged import GpuPagedAttention
from aioengine.kernels.attention.kv_cache import KVCache, KVCacheShape
from aioengine.kernels.attention.torch_paged import TorchPagedAttention
from aioengine.kernels.operations import Operations
from aioengine.models.decoder import Decoder

logger = logging.getLogger("aioengine")

CPU_MAX_IN_FLIGHT = 1
"""On a CPU the loop and the device share the cores, so that a queued step gains little and costs a wasted token."""

GPU_MAX_IN_FLIGHT = 2
"""The next step lies in the GPU's queue when one ends."""

FP8_CAPABILITY = 89


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, and what computes on it."""

    accelerator: Accelerator
    operations: Operations


def make_cpu_runner(decoder: Decoder, config: EngineConfig, stats: ExecutorStats) -> tuple[Runner, ExecutorInfo]:
    """A runner on the CPU, and what is to be known of it.

    Raises:
        ConfigError: the KV cache is too small, or asks for more than a CPU can do.
    """
    if config.kv_cache_dtype != "auto":
        raise ConfigError(f"kv_cache_dtype={config.kv_cache_dtype!r} needs a GPU; on a CPU it is 'auto'")
    model = decoder.config
    shape = _cache_shape(decoder, config.block_size, model.dtype)
    num_blocks = num_kv_blocks(
        config,
        max_model_len=model.max_model_len,
        bytes_per_block=shape.bytes_per_block,
        available_bytes=available_memory(),
    )
    batch = InputBatch(
        max_num_seqs=config.max_num_seqs, max_model_len=model.max_model_len, block_size=config.block_size
    )

    def make_attention() -> TorchPagedAttention:
        return TorchPagedAttention(KVCache.allocate(shape, num_blocks))

    runner = Runner(decoder, batch, stats, make_attention)
    return runner, _info(decoder, config, num_blocks, shape, "cpu", CPU_MAX_IN_FLIGHT)


def make_gpu_runner(
    gpu: Gpu, decoder: Decoder, config: EngineConfig, stats: ExecutorStats, on_capture: Callable[[int, int], None]
) -> tuple[GpuRunner, ExecutorInfo]:
    """A runner on a GPU, with a KV cache in the memory that the largest steps leave, and its graphs.

    Args:
        decoder: on the GPU, not bound.
        on_capture: called with (graphs captured, graphs to capture).
    Raises:
        ConfigError: the KV cache is too small, or the GPU cannot hold it in fp8.
    """
    accelerator, model = gpu.accelerator, decoder.config
    shape = _cache_shape(decoder, config.block_size, _cache_dtype(config, accelerator, model.dtype))
    if config.tune_kernels:
        tune_attention(accelerator, gpu.operations, model, shape, cache_folder())
    num_blocks = 0

    def make_attention(block_tables: Tensor) -> GpuPagedAttention:
        return GpuPagedAttention(
            gpu.operations,
            shape,
            num_blocks,
            block_tables=block_tables,
            eps=model.rms_norm_eps,
            num_multiprocessors=accelerator.num_multiprocessors,
        )

    sizes = () if config.cuda_graphs == "off" else default_sizes(config.max_num_seqs)
    runner = GpuRunner(
        accelerator,
        gpu.operations,
        decoder,
        make_attention,
        stats,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        max_in_flight=config.max_in_flight or GPU_MAX_IN_FLIGHT,
        graph_sizes=sizes,
    )
    peak_bytes = accelerator.peak_of(runner.profile_run, config.max_num_batched_tokens, config.max_num_seqs)
    if sizes:  # graphs have memory of their own
        peak_bytes += accelerator.peak_of(runner.profile_run, sizes[-1], sizes[-1])
        peak_bytes += GRAPH_BYTES * len(START_FEATURES) * len(sizes)
    num_blocks = num_gpu_kv_blocks(
        config,
        max_model_len=model.max_model_len,
        bytes_per_block=shape.bytes_per_block,
        memory=accelerator.memory(),
        peak_bytes=peak_bytes,
    )
    runner.make_cache()
    started = time.monotonic()
    runner.warm_up(captures_all=config.cuda_graphs == "start", on_capture=on_capture)
    logger.info("%d CUDA graphs captured, in %.1f s", len(runner.graphs), time.monotonic() - started)
    return runner, _info(decoder, config, num_blocks, shape, accelerator.name, GPU_MAX_IN_FLIGHT)


def _cache_shape(decoder: Decoder, block_size: int, dtype: torch.dtype) -> KVCacheShape:
    model = decoder.config
    return KVCacheShape(
        num_layers=model.num_layers,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def _cache_dtype(config: EngineConfig, accelerator: Accelerator, dtype: torch.dtype) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return dtype
    if accelerator.capability < FP8_CAPABILITY:
        raise ConfigError(f"kv_cache_dtype='fp8' needs a GPU of capability 8.9 or newer; {accelerator.name} is older")
    return torch.float8_e4m3fn


def _info(
    decoder: Decoder, config: EngineConfig, num_blocks: int, shape: KVCacheShape, device: str, max_in_flight: int
) -> ExecutorInfo:
    model = decoder.config
    return ExecutorInfo(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        max_in_flight=config.max_in_flight or max_in_flight,
        kv_cache_bytes=num_blocks * shape.bytes_per_block,
        weight_bytes=decoder.weight_bytes,
        device=device,
        dtype=str(model.dtype).removeprefix("torch."),
    )
