"""``python -m benchmarks.gpu``: runs to its end without a GPU, says what each row is, and reads traces rightly."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300
"""Many times what it takes where nothing else runs."""
COMMAND = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def gpu() -> Any:
    """Modules of the benchmark, by name."""
    sys.path.insert(0, str(REPOSITORY))
    try:
        names = ("kernel_cases", "report", "rows", "sizes", "trace")
        modules = {name: importlib.import_module(f"benchmarks.gpu.{name}") for name in names}
    finally:
        sys.path.remove(str(REPOSITORY))
    return type("Gpu", (), modules)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


# The command on a CPU


@pytest.mark.nightly
def test_it_runs_to_its_end_and_says_that_nothing_was_measured_on_a_gpu(tmp_path: Path, gpu: Any) -> None:
    ended = run(*COMMAND, "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = (tmp_path / "RESULTS.md").read_text().splitlines()
    for row in gpu.rows.ROWS:
        (line,) = (line for line in lines if line.startswith(f"| {row.workload} | {row.aim} |"))
        assert "| not measured: needs a GPU; " in line
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failed"] == {}
    assert set(results["results"]) == {row.key for row in gpu.rows.ROWS}
    assert {row["reason"] for row in results["results"].values()} == {"", "needs a GPU"}
    assert all((row["value"] is None) == (row["reason"] != "") for row in results["results"].values())
    assert results["results"]["greedy equality"]["value"] == 0


def test_every_operation_is_among_the_kernels(tmp_path: Path) -> None:
    from aioengine.kernels.operations import Operations

    ended = run(*COMMAND, "--parts", "kernels", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-4000:]
    kernels = json.loads((tmp_path / "results.json").read_text())["kernels"]
    operations = {name for name in vars(Operations) if not name.startswith("_")}
    assert {kernel["name"] for kernel in kernels} == operations - {"prefill_tile"}
    assert {kernel["reason"] for kernel in kernels} == {""}


@pytest.mark.nightly
def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing(tmp_path: Path) -> None:
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [*COMMAND, "--out", str(out)],
        cwd=REPOSITORY,
        env={**ENVIRONMENT, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stderr is not None
    with process.stderr:
        seen = ""
        while "decode, batch 1:" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        os.killpg(process.pid, signal.SIGINT)
        shown = process.stderr.read()  # to its end: the child has ended, too
    assert process.wait(TIMEOUT_S) == 130
    assert "interrupted; what was measured until then is in" in shown
    assert "Traceback" not in shown
    assert list(temporary.iterdir()) == []
    results = json.loads((out / "results.json").read_text())
    assert results["results"]["decode, batch 1"]["value"] > 0
    assert results["failed"]["large"] == "interrupted"


@pytest.mark.nightly
def test_what_cannot_be_written_or_measured_is_refused_at_once(tmp_path: Path, gpu: Any) -> None:
    file, measured = tmp_path / "file", tmp_path / "measured"
    file.write_text("kept")
    measured.mkdir()
    gpu.report.save(results_of(gpu), measured)
    for arguments, says in (
        ((*COMMAND, "--out", str(file)), str(file)),
        ((*COMMAND, "--out", str(measured)), "a GPU's results lie there"),
        ((*COMMAND, "--timeout", "-1"), "a positive number is needed, not"),
    ):
        ended = run(*arguments)
        assert ended.returncode == 2
        assert says in ended.stderr
    assert file.read_text() == "kept"
    assert gpu.report.load(measured) == results_of(gpu)


# The report


def results_of(gpu: Any, *results: Any, **fields: Any) -> Any:
    about = gpu.report.About(
        device="cuda", is_tiny=False, gpu="a GPU", driver="1", versions={"torch": "2"}, commit="abc", date="2026-01-01"
    )
    return gpu.report.Results(about=about, results={result.row: result for result in results}, **fields)


@pytest.mark.parametrize(
    ("commit", "is_same"), [("abc", True), ("unknown", False), ("abc, and changes that are not committed", False)]
)
def test_results_of_a_commit_that_says_nothing_stand_alone(gpu: Any, commit: str, is_same: bool) -> None:
    about = msgspec.structs.replace(results_of(gpu).about, commit=commit)
    assert about.is_same_setup(msgspec.structs.replace(about, date="2026-02-02")) is is_same


def test_what_a_gpu_measured_is_judged_by_its_aim(gpu: Any) -> None:
    decode = {"device": "cuda", "value": 5.0, "unit": "ms a step", "bound": 4.4, "bound_of": "bandwidth"}
    results = results_of(
        gpu,
        gpu.rows.Result(row="decode, batch 1", ratio=0.88, **decode),
        gpu.rows.Result(row="decode, batch 64", ratio=0.88, **decode),
        gpu.rows.Result(row="loop lag", device="cuda", reason="TimeoutError"),
        gpu.rows.Result(row="memory after aclose", device="cuda", value=0, unit="bytes"),
        failed={"peer": "the process ended with -9"},
    )
    text = gpu.report.markdown(results).splitlines()
    lines = {row.key: next(line for line in text if f"| {row.workload} |" in line) for row in gpu.rows.ROWS}
    assert "| measured | 5 ms a step | 4.4, bandwidth | 0.88 | **missed** |" in lines["decode, batch 1"]
    assert "| measured | 5 ms a step | 4.4, bandwidth | 0.88 | met |" in lines["decode, batch 64"]
    assert "| not measured: TimeoutError |" in lines["loop lag"]
    assert "| measured | 0 bytes |  |  | met |" in lines["memory after aclose"]
    assert "| not measured: the process ended with -9 |" in lines["256 requests, against transformers"]
    assert "| not measured: not run |" in lines["greedy equality"]


def test_the_work_of_a_step_is_that_of_the_published_shape(gpu: Any) -> None:
    """Llama-3.1-8B has 8.03e9 weights, 0.53e9 of them in the embedding, and 128 KiB of KV a token in bf16."""
    model = gpu.sizes.FULL.large
    assert model.num_matrix_weights == pytest.approx(8.03e9 - 0.525e9, rel=1e-3)
    assert model.kv_bytes(2) == 128 * 1024
    assert model.decode_bytes(2, 100, 2) == 2 * model.num_matrix_weights + 200 * 128 * 1024
    # Chunk by chunk a prompt is as much work as decoding it, but for the vocabulary.
    steps = sum(model.decode_flops(1, context + 0.5) for context in range(64))
    assert model.prefill_flops(64) == pytest.approx(steps - 63 * 2 * model.hidden * model.vocab)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the benchmark itself does this")
@pytest.mark.parametrize("place", range(10))
def test_the_kernels_take_what_the_benchmark_calls_them_with(gpu: Any, place: int) -> None:
    """Without a GPU the command calls the oracles; launchers check more."""
    pytest.importorskip("triton")
    from aioengine.kernels import triton_operations

    assert len(gpu.kernel_cases.CASES) == 10
    inputs = gpu.kernel_cases.Inputs(gpu.sizes.TINY_KERNELS, "cpu", triton_operations)
    cases = list(gpu.kernel_cases.CASES[place](inputs))
    for case in cases:
        case.call(getattr(triton_operations, case.operation))
    assert cases


# Traces


def event(category: str, name: str, begin: float, end: float, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": tid, "args": arguments}


def launch(at: float, correlation: int, name: str = "cudaGraphLaunch", tid: int = 1) -> dict[str, Any]:
    return event("cuda_runtime", name, at, at + 1, tid, correlation=correlation)


def kernel(begin: float, end: float, correlation: int, category: str = "kernel") -> dict[str, Any]:
    return event(category, "k", begin, end, 9, correlation=correlation)


def step(number: int, begin: float, end: float, rows: int = 4, tokens: int = 4) -> dict[str, Any]:
    return event("user_annotation", f"step {number} ({rows} rows, {tokens} tokens)", begin, end, 1)


def test_a_gap_is_when_nothing_runs_between_two_decode_steps(gpu: Any) -> None:
    trace = gpu.trace.Trace(
        [
            {"ph": "M", "name": "process_name"},
            # 40 µs after it, of which another stream's copy takes 10.
            *(step(1, 0, 10), launch(1, 1), kernel(100, 150, 1), kernel(150, 200, 1)),
            *(launch(5, 7, tid=2), kernel(205, 215, 7, "gpu_memcpy")),
            # Launched while the one before runs; it overlaps its copy.
            *(step(2, 20, 30), launch(21, 2), kernel(240, 300, 2), launch(22, 3, "cudaMemcpyAsync")),
            kernel(300, 310, 3, "gpu_memcpy"),
            *(step(3, 50, 60), launch(51, 4), kernel(305, 400, 4)),
            # A prefill, and a step whose predecessor was not recorded: no gaps between decode steps.
            *(step(4, 70, 80, tokens=100), launch(71, 5, "cudaStreamSynchronize"), launch(72, 6), kernel(500, 600, 6)),
            *(step(9, 90, 95), launch(91, 8), kernel(900, 1000, 8)),
        ]
    )
    assert [each.number for each in trace.steps] == [1, 2, 3, 4, 9]
    assert trace.decode_gaps_us() == [30, 0]
    assert [each.waits for each in trace.steps] == [(), (), (), ("cudaStreamSynchronize",), ()]
    assert trace.busy_share() == pytest.approx((100 + 10 + 160 + 100 + 100) / 900)
    without_gpu = gpu.trace.Trace([step(1, 0, 10), step(2, 20, 30)])
    assert (without_gpu.busy, without_gpu.decode_gaps_us(), without_gpu.busy_share()) == ([], [], 0.0)


def test_asynchronous_calls_and_event_waits_are_no_synchronisations(gpu: Any) -> None:
    for name in ("cudaMemcpyAsync", "cudaEventSynchronize", "cudaStreamWaitEvent", "cudaMallocAsync", "cuLaunchKernel"):
        assert gpu.trace.WAITS.fullmatch(name) is None
    for name in ("cudaMemcpy", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cuCtxSynchronize", "cudaMalloc"):
        assert gpu.trace.WAITS.fullmatch(name) is not None
