"""Where native kernels are kept, and that an engine starts without them where they cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aioengine.kernels.native.library import Compilation, find_library, library_path, read_part


@pytest.mark.parametrize("problem", ["no home", "a folder that cannot be", "a file in its place"])
def test_a_folder_that_cannot_be_used_is_a_warning(
    problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if problem == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # no user's
    else:
        folder = tmp_path / ("x" * 300 if problem == "a folder that cannot be" else "file")
        if problem == "a file in its place":
            folder.touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    assert find_library(["common"]) is None
    compilation = Compilation(["common"])
    child = compilation._child
    assert child is not None
    if problem == "no home":
        compilation.close()  # the child's user has one
        return
    child.wait()
    assert compilation.poll() is None
    assert "no native kernels, so that steps are slow" in caplog.text


def test_a_file_that_is_not_whole_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LLVM would end the process."""
    code = read_part("common")
    assert code is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = library_path("common")
    path.parent.mkdir()
    for broken in (b"", code, code[:5000]):
        path.write_bytes(broken)
        assert find_library(["common"]) is None
        compilation = Compilation(["common"])
        assert compilation._child is not None
        compilation.close()
