"""`aioengine check`: a table of a device's kernels, and what its exit code says."""

from collections.abc import Iterator
from typing import Any

import pytest
from cli.conftest import CallMain

from aioengine.kernels import kernel_check
from aioengine.kernels.kernel_check import Checked


def test_the_kernels_of_this_processor_are_right(call_main: CallMain) -> None:
    code, stdout, _ = call_main("check", "--device", "cpu", "--dtype", "float32", "--operation", "append_tokens")
    assert code == 0
    assert stdout.count("append_tokens") == 2
    assert "all 2 cases are right" in stdout
    for column in ("kernel, µs", "plain torch, µs", "bytes, µs", "error"):
        assert column in stdout


def test_a_kernel_that_is_wrong_is_named(call_main: CallMain, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_two(work: Any) -> Iterator[Checked]:
        yield Checked(operation="draw", size="[7, 1003]", error=0.0)
        yield Checked(operation="rms_norm", problem="it did not end within 60 s")

    monkeypatch.setattr(kernel_check, "run_checks", check_two)
    code, stdout, _ = call_main("check", "--device", "cpu", "--dtype", "float32")
    assert code == 1
    assert "it did not end within 60 s" in stdout
    assert "failed: rms_norm" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--operation", "norm"], "norm: there are pack"), (["--device", "cuda:9"], "needs an NVIDIA GPU")],
)
def test_what_is_not_there_is_refused(call_main: CallMain, arguments: list[str], message: str) -> None:
    code, _, stderr = call_main("check", *arguments)
    assert code == 2
    assert message in stderr
