"""Checkpoints to load."""

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import cached_checkpoints


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints.make_checkpoint` without its folder; the same arguments give the same folder, for all tests."""
    return cached_checkpoints(tmp_path_factory.mktemp("checkpoints"))
