"""How the kernels of attention are best launched on this GPU: measured at the start, over a cache of its own.

What the candidates compile to stays on the disk, by Triton, so that later starts only measure. A start never fails by
it: what cannot be measured is launched by default, and a debug message says why.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from aioengine.executor.accelerator import Accelerator, Work
from aioengine.kernels.attention.launch_choices import (
    ATTENTION_KERNELS,
    DECODE,
    DECODE_IN_SPLITS,
    PREFILL,
    TUNED,
    AttentionShape,
    LaunchChoice,
    candidates,
    trying,
)
from aioengine.kernels.attention.splits import choose_num_splits
from aioengine.kernels.operations import PagedKV
from aioengine.models.model import ModelConfig

logger = logging.getLogger("aioengine")

DEADLINE_S = 20.0
"""Of measuring, which is compiling for the most part. What is compiled stays so, and a later start comes further."""

MAX_CACHE_BYTES = 2**28
FREE_SHARE = 4
"""Of what is free a fourth at most."""

ROWS_AND_LENGTH = {DECODE: (64, 1024), DECODE_IN_SPLITS: (1, 4096), PREFILL: (1, 2048)}
"""Of what is measured, at the most: rows, and tokens of each."""


def tune_attention(
    accelerator: Accelerator,
    model: ModelConfig,
    cache_dtype: torch.dtype,
    block_size: int,
    *,
    deadline_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Choose how attention of this shape is launched on this GPU, for as long as the process lives.

    Nothing is done where the operations have nothing to choose, and where the process has chosen before.

    Args:
        deadline_s: of measuring in all; the candidate that is being measured then is measured to its end.
    """
    if not accelerator.operations.is_tunable:
        return
    began = clock()
    try:
        shape = AttentionShape(
            head_dim=model.head_dim,
            group=model.num_heads // model.num_kv_heads,
            num_kv_heads=model.num_kv_heads,
            element_size=model.dtype.itemsize,
            cache_element_size=cache_dtype.itemsize,
            block_size=block_size,
        )
        rehearsal = None
        for kernel in ATTENTION_KERNELS:
            found = candidates(kernel, shape, accelerator.capability)
            key = kernel, accelerator.device.index, shape
            if key not in TUNED and len(found) > 1:
                rehearsal = rehearsal or Rehearsal(accelerator, model, cache_dtype, block_size)
                TUNED[key] = _fastest(rehearsal, kernel, found, began + deadline_s, clock)
        if rehearsal is not None:
            del rehearsal
            accelerator.release()
            logger.info("launches of attention were measured in %.1f s", clock() - began)
    except Exception as error:
        logger.debug("launches of attention could not be measured: %s", error, exc_info=True)


def _fastest(
    rehearsal: Rehearsal, kernel: str, found: tuple[LaunchChoice, ...], ends_at_s: float, clock: Callable[[], float]
) -> LaunchChoice:
    """The fastest of the candidates that could be measured in time, else the first."""
    seconds = dict.fromkeys(found, math.inf)
    for choice in found:
        if clock() >= ends_at_s:
            break
        try:
            seconds[choice] = rehearsal.seconds_of(kernel, choice)
        except Exception as error:  # whatever a compiler makes of it: too little shared memory, a bug of its own
            logger.debug("%s: %s cannot be measured: %s", kernel, choice, error)
    return min(found, key=seconds.__getitem__)


class Rehearsal:
    """Attention over a cache that no row has, as steps ask for it.

    The cache has `MAX_CACHE_BYTES`, or less where less is free; contexts are shorter then, or rows fewer.
    """

    def __init__(self, accelerator: Accelerator, model: ModelConfig, cache_dtype: torch.dtype, block_size: int) -> None:
        self._accelerator = accelerator
        self._model = model
        num_bytes = min(MAX_CACHE_BYTES, accelerator.memory().free // FREE_SHARE)
        block = block_size, model.num_kv_heads, model.head_dim
        self._num_blocks = num_bytes // (2 * math.prod(block) * cache_dtype.itemsize)
        if not self._num_blocks:
            raise RuntimeError(f"{num_bytes} bytes are too few for a block of keys and values")
        self._block_size = block_size
        self._caches = torch.empty(2, self._num_blocks, *block, dtype=cache_dtype, device=accelerator.device)
        # In a cache in use a row's blocks lie anywhere.
        blocks = torch.randperm(self._num_blocks, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        self._blocks = blocks.to(accelerator.device)
        accelerator.enqueue(self._fill)

    def _fill(self) -> None:
        # Bytes below 0x3C make small numbers in each of the dtypes, none of them infinite or NaN.
        self._caches.view(torch.uint8).random_(0x3C)

    def seconds_of(self, kernel: str, choice: LaunchChoice) -> float:
        """Of one launch of a kernel of `aioengine.kernels.attention.launch_choices`, in one layer.

        Raises:
            Exception: it cannot be launched by this choice.
        """
        launch = self._launch(kernel)

        def work() -> None:
            with trying(choice):
                launch()

        return self._accelerator.seconds_of(work)

    def _launch(self, kernel: str) -> Work:
        c, operations, device = self._model, self._accelerator.operations, self._accelerator.device
        tables, length = self._rows(*ROWS_AND_LENGTH[kernel])
        # Where some layers see all keys, it is them that take longest.
        window = None if None in c.windows else c.windows[0]
        kv = PagedKV(self._caches[0], self._caches[1], tables, c.head_dim**-0.5, window)
        num_tokens = length if kernel == PREFILL else len(tables)
        q = torch.zeros(num_tokens, c.num_heads, c.head_dim, dtype=c.dtype, device=device)
        out = torch.empty_like(q)
        if kernel == PREFILL:
            tile = operations.prefill_tile(c.num_heads, c.num_kv_heads, c.head_dim)
            tiles = [[0, first, min(tile, length - first), first] for first in range(0, length, tile)]
            lines = torch.tensor(tiles, dtype=torch.int32, device=device)
            return lambda: operations.attend_prefill(q, kv, lines, out)
        decodes = torch.tensor([[row, row, length] for row in range(len(tables))], dtype=torch.int32, device=device)
        splits = choose_num_splits(len(tables), c.num_kv_heads, length, self._accelerator.num_multiprocessors)
        num_splits = max(splits, 2) if kernel == DECODE_IN_SPLITS else 1
        return lambda: operations.attend_decode(q, kv, decodes, out, num_splits=num_splits, max_context=length)

    def _rows(self, most: int, longest: int) -> tuple[Tensor, int]:
        """Block tables of as many rows as there are blocks for, ``most`` at most, and how long each is."""
        length = min(longest, self._model.max_model_len, self._num_blocks * self._block_size)
        blocks_a_row = -(-length // self._block_size)
        num_rows = min(most, self._num_blocks // blocks_a_row)
        return self._blocks[: num_rows * blocks_a_row].view(num_rows, blocks_a_row), length
