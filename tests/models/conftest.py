"""Checkpoints to load."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint as checkpoint
from models.reference import edit_json


@pytest.fixture
def copied(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint of one's own, to be damaged; of a family, or of a folder that is there."""

    def copy(source: str | Path = "llama2", config: dict[str, Any] | None = None, **overrides: Any) -> Path:
        folder = checkpoint(source, **overrides) if isinstance(source, str) else source
        copy = Path(shutil.copytree(folder, tmp_path / "model"))
        edit_json(copy / "config.json", **(config or {}))
        return copy

    return copy
