"""`aioengine info`: as a table and as JSON, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import CallMain, run

from aioengine.config import EngineConfig
from aioengine.executor.model_info import ModelInfo, read_model_info
from aioengine.models.folder import DEMO_MODEL


def test_the_table_has_the_figures(call_main: CallMain) -> None:
    status, out, err = call_main("info", "--memory", "1GiB", "--device", "cpu", "--quantization", "int8")
    assert (status, err) == (0, "")
    said = read_model_info(EngineConfig(device="cpu", quantization="int8"), memory_bytes=2**30)
    for figure in (
        *(said.architecture, said.path, said.why, f"{said.num_parameters:,}", "int8 of bfloat16"),
        *(f"{said.weight_bytes:,} bytes", f"{said.num_kv_blocks:,} blocks", "of 1 GiB on a CPU"),
        f"{said.kv_groups[0].bytes_per_token:,} bytes a token",
    ):
        assert figure in out


def test_json_is_all_that_there_is(call_main: CallMain) -> None:
    status, out, _ = call_main("info", str(DEMO_MODEL), "--json", "--memory", "3000 MB", "--device", "cuda")
    said = json.loads(out)
    assert status == 0
    assert list(said) == list(ModelInfo.__struct_fields__)
    assert (said["memory_bytes"], said["device"]) == (3 * 10**9, "cuda")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["org/model"], 1, "`hf download org/model` brings it there"),
        (["--memory", "much"], 2, "'much': it is no size: give bytes as a number, or with a unit, such as 4GiB"),
        (["--device", "cuda"], 2, "say how much memory"),
        (["--scheduler", "fcfs"], 2, "No such option"),
    ],
)
def test_what_is_wrong_is_said(call_main: CallMain, arguments: list[str], status: int, message: str) -> None:
    ended, out, err = call_main("info", *arguments)
    assert (ended, out) == (status, "")
    assert message in err


def test_a_config_alone_is_enough(call_main: CallMain, tmp_path: Path) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, _ = call_main("info", str(tmp_path), "--memory", "1GiB")
    assert status == 0
    assert "no weights are here" in out
    assert "tokens in all" in out
    quantised = {**config, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    status, out, _ = call_main("info", str(tmp_path), "--memory", "1GiB")
    assert status == 0
    assert "unknown without the files" in out
    assert "tokens in all" not in out
    status, _, err = call_main("info", str(tmp_path), "--memory", "1KB")
    assert status == 1
    assert "bytes or more" in err


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        ("0", "the weights take"),
        ("1KB", "the weights take"),
        ("7.4MB", "a sequence of max_model_len=1024 tokens needs"),
        ("10MB", "set max_model_len to 592 at most, or grant more"),
        ("20MB", ""),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_memory_in_which_no_engine_would_start_ends_with_1_and_the_reason(
    call_main: CallMain, memory: str, reason: str, form: tuple[str, ...]
) -> None:
    status, out, err = call_main("info", "--memory", memory, "--device", "cpu", *form)
    assert status == bool(reason)
    assert out
    assert reason in err
    assert bool(err) == bool(reason)


@pytest.mark.nightly  # the process imports all of transformers' modelling code
def test_a_model_that_cannot_run_ends_with_its_reason_alone(tmp_path: Path) -> None:
    """What transformers and the libraries beneath it say at the end of a process is not in its output."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"})
    )
    ended = run("info", str(tmp_path))
    reason = (
        "t5 has an encoder and a decoder; only decoders run here. It goes by transformers' code, since "
        "T5ForConditionalGeneration has no native path"
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"aioengine: {tmp_path / 'config.json'}: {reason}\n"
