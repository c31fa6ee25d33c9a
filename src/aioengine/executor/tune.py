"""How the kernels of attention are best launched on this GPU: measured at the start over a cache of its own, and kept
in a file, so that the next start measures nothing.

A start never fails by it: what cannot be measured is launched by default, and a debug message says why.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from aioengine._version import __version__
from aioengine.executor.accelerator import Accelerator, Work
from aioengine.kernels.attention.choices import (
    ATTENTION_KERNELS,
    DECODE,
    DECODE_IN_SPLITS,
    PREFILL,
    TUNED,
    AttentionShape,
    Choice,
    candidates,
    trying,
)
from aioengine.kernels.attention.gpu_paged import choose_num_splits
from aioengine.kernels.attention.kv_cache import KVCacheShape
from aioengine.kernels.operations import Operations
from aioengine.models.families import DecoderConfig

logger = logging.getLogger("aioengine")

DEADLINE_S = 20.0
"""Of measuring, which is compiling for the most part. What is compiled stays so, and a later start comes further."""

MAX_CACHE_BYTES = 2**28
FREE_SHARE = 4
"""Of what is free a fourth at most."""

ROWS_AND_LENGTH = {DECODE: (64, 1024), DECODE_IN_SPLITS: (1, 4096), PREFILL: (1, 2048)}
"""Of what is measured, at the most: rows, and tokens of each."""


def cache_folder() -> Path | None:
    """Where a user's choices are kept, by the XDG Base Directory Specification; None: the user has no home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # "All paths must be absolute. [A relative one is] invalid, and [to be] ignored."
        base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "aioengine"


def choice_file(folder: Path, *, gpu: str, compiler: str, package: str) -> Path:
    """Where the choices for a GPU, a Triton and a version of this package lie: none of them says much of another."""
    plain = [re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") for name in (gpu, compiler, package)]
    return folder / f"{plain[0]}-triton-{plain[1]}-{plain[2]}.json"


def tune_attention(
    accelerator: Accelerator,
    operations: Operations,
    model: DecoderConfig,
    cache: KVCacheShape,
    folder: Path | None,
    *,
    deadline_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Choose how attention of this shape is launched on this GPU, for as long as the process lives.

    Nothing is done where the operations have nothing to choose, and where the process has chosen before.

    Args:
        folder: for the file of choices; None: none is kept. One that is damaged is replaced by the next choice.
        deadline_s: of measuring in all; the candidate that is being measured then is measured to its end.
    """
    compiler: str | None = getattr(operations, "COMPILER", None)
    if compiler is None:
        return
    path = None
    if folder is not None:
        path = choice_file(folder, gpu=accelerator.name, compiler=compiler, package=__version__)
    try:
        Tuning(accelerator, operations, model, cache, path, deadline_s, clock).run()
    except Exception as error:
        logger.debug("launch parameters of attention are the default ones: %s", error, exc_info=True)


@dataclass(slots=True)
class Tuning:
    """Choosing for one shape; the fields are the arguments of `tune_attention`."""

    accelerator: Accelerator
    operations: Operations
    model: DecoderConfig
    cache: KVCacheShape
    path: Path | None
    deadline_s: float
    clock: Callable[[], float]
    rehearsal: Rehearsal | None = None
    ends_at_s: float = 0.0

    def run(self) -> None:
        model = self.model
        shape = AttentionShape(
            head_dim=model.head_dim,
            group=model.num_heads // model.num_kv_heads,
            num_kv_heads=model.num_kv_heads,
            element_size=model.dtype.itemsize,
            cache_element_size=self.cache.dtype.itemsize,
            block_size=self.cache.block_size,
        )
        stored = {} if self.path is None else read_choices(self.path)
        began = self.clock()
        self.ends_at_s = began + self.deadline_s
        try:
            for kernel in ATTENTION_KERNELS:
                where = kernel, self.accelerator.device.index, shape
                if where not in TUNED:
                    name = msgspec.json.encode([kernel, *shape]).decode()
                    found = candidates(kernel, shape, self.accelerator.capability)
                    choice = stored.get(name)
                    # Those of another revision of the same version may have been others.
                    TUNED.setdefault(where, choice if choice in found else self._fastest(kernel, name, found))
        finally:
            if self.rehearsal is not None:
                self.rehearsal = None
                self.accelerator.release()
                logger.info("launches of attention were measured in %.1f s", self.clock() - began)

    def _fastest(self, kernel: str, name: str, found: tuple[Choice, ...]) -> Choice:
        """The fastest candidate; of those measured until the deadline; the first, the default, if none could be.

        It is kept for the next start if all of them were measured.
        """
        seconds: dict[Choice, float] = {}
        for choice in found if len(found) > 1 else ():
            if self.clock() >= self.ends_at_s:
                break
            try:
                measured = self._measure(kernel, choice)
            except Exception as error:  # whatever a compiler makes of it: too little shared memory, a bug of its own
                logger.debug("%s: %s cannot be measured: %s", name, choice, error)
                measured = math.inf
            seconds[choice] = measured if measured > 0 else math.inf  # NaN, too
        best = min(seconds, key=seconds.__getitem__, default=found[0])
        if math.isinf(seconds.get(best, math.inf)):
            return found[0]
        if len(seconds) == len(found) and self.path is not None:
            keep_choice(self.path, name, best)
        return best

    def _measure(self, kernel: str, choice: Choice) -> float:
        if self.rehearsal is None:
            self.rehearsal = Rehearsal(self.accelerator, self.operations, self.model, self.cache)
        work = self.rehearsal.work(kernel)

        def run() -> None:
            with trying(choice):
                work()

        return self.accelerator.seconds_of(run)


def read_choices(path: Path) -> dict[str, Choice]:
    """By kernel and shape, as JSON; none of a file that is not there or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Choice])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        logger.debug("the choices in %s are ignored: %s", path, error)
        return {}


def keep_choice(path: Path, name: str, choice: Choice) -> None:
    """Put a choice into the file, beside those that other processes have put there meanwhile.

    Of two that write at once the later may lose the other's choice, which is then measured again by the next start: no
    harm that a lock would be worth. A file that cannot be written is none.
    """
    content = msgspec.json.format(msgspec.json.encode({**read_choices(path), name: choice})) + b"\n"
    draft = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except OSError as error:
        logger.debug("the choice for %s is not kept: %s", name, error)
        if draft is not None:
            with contextlib.suppress(OSError):
                os.unlink(draft)


class Rehearsal:
    """Attention over a cache that no row has, as steps ask for it.

    The cache has `MAX_CACHE_BYTES`, or less where less is free; contexts are shorter then, or rows fewer.
    """

    def __init__(
        self, accelerator: Accelerator, operations: Operations, model: DecoderConfig, cache: KVCacheShape
    ) -> None:
        self._operations = operations
        self._model = model
        self._device = device = accelerator.device
        self._num_multiprocessors = accelerator.num_multiprocessors
        layer = replace(cache, num_layers=1)
        num_bytes = min(MAX_CACHE_BYTES, accelerator.memory().free // FREE_SHARE)
        self._num_blocks = num_bytes // layer.bytes_per_block
        if not self._num_blocks:
            raise RuntimeError(f"{num_bytes} bytes are too few for a block of keys and values")
        self._block_size = cache.block_size
        size = (2, self._num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim)
        self._caches = torch.empty(size, dtype=cache.dtype, device=device)
        # In a cache in use a row's blocks lie anywhere.
        blocks = torch.randperm(self._num_blocks, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        self._blocks = blocks.to(device)
        accelerator.enqueue(self._fill)

    def _fill(self) -> None:
        # Bytes below 0x3C make small numbers in each of the dtypes, none of them infinite or NaN.
        self._caches.view(torch.uint8).random_(0x3C)

    def work(self, kernel: str) -> Work:
        """One launch of a kernel of `aioengine.kernels.attention.choices`, in one layer."""
        c, operations = self._model, self._operations
        tables, length = self._rows(*ROWS_AND_LENGTH[kernel])
        attend: Callable[..., None] = operations.attend_decode
        # Where some layers see all keys, it is them that take longest.
        keywords: dict[str, Any] = {"scale": c.head_dim**-0.5, "window": None if None in c.windows else c.windows[0]}
        if kernel == PREFILL:
            tile = operations.prefill_tile(c.num_heads, c.num_kv_heads, c.head_dim)
            lines = [[0, first, min(tile, length - first), first] for first in range(0, length, tile)]
            num_tokens, attend = length, operations.attend_prefill
        else:
            lines = [[row, row, length] for row in range(len(tables))]
            splits = choose_num_splits(len(tables), c.num_kv_heads, length, self._num_multiprocessors)
            num_tokens, num_splits = len(tables), max(splits, 2) if kernel == DECODE_IN_SPLITS else 1
            keywords |= {"num_splits": num_splits, "max_context": length}
        q = torch.zeros(num_tokens, c.num_heads, c.head_dim, dtype=c.dtype, device=self._device)
        arguments = q, *self._caches, tables, torch.tensor(lines, dtype=torch.int32, device=self._device)
        out = torch.empty_like(q)
        return lambda: attend(*arguments, out, **keywords)

    def _rows(self, most: int, longest: int) -> tuple[Tensor, int]:
        """Block tables of as many rows as there are blocks for, ``most`` at most, and how long each is."""
        length = min(longest, self._model.max_model_len, self._num_blocks * self._block_size)
        blocks_a_row = -(-length // self._block_size)
        num_rows = min(most, self._num_blocks // blocks_a_row)
        return self._blocks[: num_rows * blocks_a_row].view(num_rows, blocks_a_row), length
