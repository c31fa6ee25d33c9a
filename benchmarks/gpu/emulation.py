"""The GPU's executor on a machine without a GPU: what runs there is what runs here, but for the kernels themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aioengine.executor import torch_executor
from aioengine.kernels.operations import plain_torch as reference

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from doubles.fake_accelerator import FakeAccelerator
from doubles.fake_graph import as_launches


def late_accelerator() -> FakeAccelerator:
    accelerator = FakeAccelerator()
    accelerator.operations = as_launches(reference)
    return accelerator


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """Let engines that start meanwhile find a GPU: one that is late, and computes by the oracles, on the host."""
    find_accelerator = torch_executor._find_accelerator
    torch_executor._find_accelerator = lambda config, folder: late_accelerator()
    try:
        yield
    finally:
        torch_executor._find_accelerator = find_accelerator
