"""The executor over a device that is always late: the contracts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from executor.contract import ExecutorContract, Opened
from executor.control_contract import ControlContract, Controlled
from executor.late_device import let_steps_fail, start_late

from doubles.fake_accelerator import FakeAccelerator

Checkpoint = Callable[..., Path]


class TestContract(ExecutorContract):
    """Without graphs before a step is run a second time, as with them."""

    @pytest.fixture(autouse=True)
    def _folder(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint("llama2", num_hidden_layers=1, vocab_size=97)

    async def start(self, max_in_flight: int) -> Opened:
        executor = await start_late(self.folder, FakeAccelerator(), max_in_flight=max_in_flight)
        return Opened(executor, let_steps_fail(executor).add)


@pytest.mark.nightly
class TestControlContract(ControlContract):
    @pytest.fixture(autouse=True)
    def _checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    async def start(self, tmp_path: Path, max_in_flight: int) -> Controlled:
        executor = await start_late(self.checkpoint("llama2"), FakeAccelerator(), max_in_flight=max_in_flight)
        shapes = {"model.embed_tokens.weight": (384, 64), "model.norm.weight": (64,)}
        return Controlled(executor, self.checkpoint("llama2", seed=1), shapes)
