"""The Dockerfile and the systemd unit run commands that there are, with flags that they take."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aioengine.cli.commands import cli

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UNIT = (DEPLOY / "aioengine.service").read_text()


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The parameters of a command; a flag that it does not have is an error."""
    return cli.commands[arguments[0]].make_context(arguments[0], arguments[1:]).params


def test_the_image_compiles_kernels_and_serves() -> None:
    (compile_line,) = re.findall(r"^RUN aioengine (compile .*)$", DOCKERFILE, re.MULTILINE)
    entry, default = (
        json.loads(re.findall(rf"^{word} (.*)$", DOCKERFILE, re.MULTILINE)[0]) for word in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["aioengine"]
    assert parsed(shlex.split(compile_line))["dtypes"] == ("bfloat16",)
    assert parsed(default)["host"] == "0.0.0.0"


def test_the_image_has_the_files_that_a_build_of_the_package_needs() -> None:
    copied = shlex.split(" ".join(re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)))
    assert all((DEPLOY.parent / name).exists() for name in copied)
    assert set(copied) == {"pyproject.toml", "README.md", "LICENSE", "src"}


def test_the_unit_starts_a_server_and_waits_longer_than_that_drains() -> None:
    (line,) = re.findall(r"^ExecStart=\S+/aioengine (.*) \$AIOENGINE_FLAGS$", UNIT, re.MULTILINE)
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(stop_s) > parsed(shlex.split(line))["drain_timeout_s"]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    (tmp_path / "aioengine").write_text("#!/bin/sh\n")
    (tmp_path / "aioengine").chmod(0o755)
    unit = tmp_path / "aioengine.service"
    unit.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={tmp_path}/aioengine", UNIT))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
