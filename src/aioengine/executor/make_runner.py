"""Makes a runner for a device, with its KV cache."""

from __future__ import annotations

import logging
import threading
import time

import torch
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo, ExecutorStats
from aioengine.errors import ConfigError
from aioengine.executor.accelerator import Accelerator
from aioengine.executor.graphs import GRAPH_BYTES, default_sizes
from aioengine.executor.host import chunk_tokens
from aioengine.executor.memory import num_kv_blocks
from aioengine.executor.paged_attention import PagedAttention, layout_of
from aioengine.executor.runner import START_FEATURES, Runner
from aioengine.models.model import Model
from aioengine.processes.progress import OnProgress

logger = logging.getLogger("aioengine")

HOST_MAX_IN_FLIGHT = 1
"""On a CPU the loop and the device share the cores, and a queued step wastes a token after a stop that is seen late.
Still, 2 is 15 to 20 % faster for the bundled model; in the shape of Qwen3-0.6B it is 3 % faster with one stream, and
1 % slower with 16."""

DEVICE_MAX_IN_FLIGHT = 2
"""The next step is in the device's queue when a step ends."""

FP8_CAPABILITY = 89

_reserving = threading.Lock()


def make_runner(
    accelerator: Accelerator, decoder: Model, config: EngineConfig, stats: ExecutorStats, on_progress: OnProgress
) -> tuple[Runner, ExecutorInfo]:
    """Make a runner on a device, with a KV cache in the memory that the largest steps leave, and its graphs.

    Args:
        decoder: on the device, not bound.
        on_progress: called as graphs are captured.
    Raises:
        ConfigError: the KV cache is too small, there is no room for it, or the device cannot hold it in fp8 or int8.
    """
    model = decoder.config
    of_cache = cache_dtype(config, model.dtype, is_host=accelerator.is_host)
    if of_cache == torch.float8_e4m3fn and accelerator.capability < FP8_CAPABILITY:
        raise ConfigError(f"kv_cache_dtype='fp8' needs a GPU of capability 8.9 or newer; {accelerator.name} is older")
    layout = layout_of(model.caches, config.block_size, of_cache)
    num_blocks = [0] * len(layout.pools)

    def make_attention(block_tables: Tensor) -> PagedAttention:
        return PagedAttention(
            accelerator.operations,
            layout,
            num_blocks,
            block_size=config.block_size,
            dtype=of_cache,
            block_tables=block_tables,
            num_multiprocessors=accelerator.num_multiprocessors,
        )

    graph_sizes: tuple[int, ...] = ()
    if config.cuda_graphs != "off" and accelerator.can_capture and decoder.is_capturable:
        # A row of padding is computed like any other: free on a GPU with spare capacity, but not on a CPU.
        all_sizes = tuple(range(1, config.max_num_seqs + 1))
        graph_sizes = all_sizes if accelerator.is_host else default_sizes(config.max_num_seqs)
    max_in_flight = config.max_in_flight or (HOST_MAX_IN_FLIGHT if accelerator.is_host else DEVICE_MAX_IN_FLIGHT)
    runner = Runner(
        accelerator,
        decoder,
        make_attention,
        stats,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        max_in_flight=max_in_flight,
        num_groups=len(layout.groups),
        graph_sizes=graph_sizes,
    )
    peak_bytes = _peak_bytes(runner, accelerator, config)
    with _reserving:  # of two engines that start at once, the second sees the memory that the first takes
        num_blocks = num_kv_blocks(
            config,
            layout,
            max_model_len=model.max_model_len,
            memory=accelerator.memory(),
            peak_bytes=peak_bytes,
            max_in_flight=max_in_flight,
        )
        problem = make_cache(runner)
    if problem:
        raise ConfigError(
            f"{config.model or 'demo'}: there is no room for a KV cache of {sum(num_blocks):,} blocks: {problem}; "
            "give a smaller kv_cache_memory_bytes or max_model_len"
        )
    if not accelerator.is_host:
        started = time.monotonic()
        runner.warm_up(
            captures_all=config.cuda_graphs == "start",
            on_capture=lambda done, total: on_progress(done, total, "capturing CUDA graphs"),
        )
        logger.info("%d CUDA graphs captured, in %.1f s", len(runner.graphs), time.monotonic() - started)
    info = ExecutorInfo(
        num_blocks=num_blocks[0],
        block_size=config.block_size,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        max_in_flight=max_in_flight,
        max_mixed_prefill_tokens=chunk_tokens(decoder.weight_bytes, model.dtype) if accelerator.is_host else None,
        kv_cache_bytes=layout.count_bytes(num_blocks),
        weight_bytes=decoder.weight_bytes,
        device=accelerator.name,
        dtype=str(model.dtype).removeprefix("torch."),
        layout=layout,
        more_blocks=tuple(num_blocks[1:]),
    )
    return runner, info


def _peak_bytes(runner: Runner, accelerator: Accelerator, config: EngineConfig) -> int | None:
    """Bytes that the largest steps and all graphs take beside the weights; None on the host: not measured there."""
    if accelerator.is_host:
        return None
    peak_bytes = accelerator.peak_of(runner.profile_run, config.max_num_batched_tokens, config.max_num_seqs)
    sizes = runner.graphs.sizes
    if sizes:  # graphs have memory of their own
        peak_bytes += accelerator.peak_of(runner.profile_run, sizes[-1], sizes[-1])
        peak_bytes += GRAPH_BYTES * len(START_FEATURES) * len(sizes)
    return peak_bytes


def cache_dtype(config: EngineConfig, dtype: torch.dtype, *, is_host: bool) -> torch.dtype:
    """The dtype of the KV cache, for a model of ``dtype``.

    Raises:
        ConfigError: the device does not support a cache of ``config.kv_cache_dtype``.
    """
    if config.kv_cache_dtype == "auto":
        return dtype
    if config.kv_cache_dtype == "int8":
        if not is_host:
            raise ConfigError(
                "kv_cache_dtype='int8' needs a CPU; on a GPU use 'fp8' (capability 8.9 or newer) or 'auto'"
            )
        return torch.int8
    if is_host:
        raise ConfigError("kv_cache_dtype='fp8' needs a GPU; on a CPU use 'int8' or 'auto'")
    return torch.float8_e4m3fn


def make_cache(runner: Runner) -> str:
    """Make a runner's KV cache, or return why there is no room for it; empty if there is.

    A string, since the error's traceback holds the part of the cache that there was room for.
    """
    try:
        runner.make_cache()
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""
