"""The GPU's executor on a machine without a GPU: what runs there is what runs here, but for the kernels themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aioengine.executor import torch_executor
from aioengine.executor.make_runner import Gpu
from aioengine.kernels.torch import operations as reference
from aioengine.testing import FakeAccelerator
from aioengine.testing.fake_graph import as_launches


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """Let engines that start meanwhile find a GPU: one that is late, and computes by the oracles, on the host."""
    find_gpu = torch_executor._find_gpu
    torch_executor._find_gpu = lambda device: Gpu(FakeAccelerator(), as_launches(reference))
    try:
        yield
    finally:
        torch_executor._find_gpu = find_gpu
