"""The pages as a site, with a reference made of the public docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning_and_has_the_public_docstrings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference" / "index.html").read_text()
    for name in ("Engine.generate", "Stream", "LLM.chat", "SamplingParams", "EngineOverloaded"):
        assert name in reference
