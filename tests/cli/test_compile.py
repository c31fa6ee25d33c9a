"""`aioengine compile`: kernels ahead of the first start, and what can go wrong."""

from pathlib import Path

import pytest
from cli.conftest import CallMain

from aioengine.kernels.native.compilation import Compilation
from aioengine.kernels.native.library import library_path
from doubles.held_compiler import HeldCompiler


def test_kernels_compiled_ahead_are_there_for_the_first_start(
    call_main: CallMain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    HeldCompiler(tmp_path, monkeypatch).go_on()
    code, stdout, stderr = call_main("compile", "--dtype", "bfloat16")
    assert code == 0
    parts = ["common", "bfloat16", "bfloat16-int8", "coded"]
    assert stdout.splitlines() == [str(library_path(part)) for part in parts]
    assert "compiling common, about 6 s" in stderr
    assert all(library_path(part).is_file() for part in parts)
    caplog.clear()
    assert Compilation(parts).poll() is not None
    assert not caplog.records
    code, stdout, stderr = call_main("compile")
    assert (code, len(stdout.splitlines()), stderr) == (0, 8, "")


@pytest.mark.parametrize(
    ("arguments", "outcome", "code", "message"),
    [
        (["--dtype", "bf16"], "works", 2, "'bf16' is not one of"),
        (["--dtype", "bfloat16"], "raises", 1, "numba knows no such processor"),
        (["--dtype", "bfloat16"], "cannot write", 1, "the folder cannot be written to"),
    ],
)
def test_compiling_ahead_says_what_went_wrong(
    arguments: list[str],
    outcome: str,
    code: int,
    message: str,
    call_main: CallMain,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if outcome == "cannot write":
        (tmp_path / "file").touch()
        HeldCompiler(tmp_path, monkeypatch, cache_home=tmp_path / "file").go_on()
    else:
        HeldCompiler(tmp_path, monkeypatch, outcome).go_on()
    status, _, stderr = call_main("compile", *arguments)
    assert (status, message in stderr) == (code, True), stderr
