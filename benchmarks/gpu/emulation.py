"""The GPU's executor on a machine without a GPU: what runs there is what runs here, but for the kernels themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aioengine.executor import torch_executor
from aioengine.executor.make_runner import Processor
from aioengine.kernels.torch import operations as reference

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from doubles.fake_accelerator import FakeAccelerator
from doubles.fake_graph import as_launches


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """Let engines that start meanwhile find a GPU: one that is late, and computes by the oracles, on the host."""
    find_processor = torch_executor._find_processor
    torch_executor._find_processor = lambda config, folder: Processor(FakeAccelerator(), as_launches(reference))
    try:
        yield
    finally:
        torch_executor._find_processor = find_processor
