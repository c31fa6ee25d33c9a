"""``python -m benchmarks.gpu``: runs to its end without a GPU, says what each row is, and reads traces rightly."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300
"""Many times what it takes where nothing else runs."""


@pytest.fixture(scope="module")
def gpu() -> Any:
    """Modules of the benchmark, by name."""
    sys.path.insert(0, str(REPOSITORY))
    try:
        names = ("__main__", "command", "kernel_cases", "report", "rows", "sizes", "trace")
        modules = {name: importlib.import_module(f"benchmarks.gpu.{name}") for name in names}
    finally:
        sys.path.remove(str(REPOSITORY))
    return type("Gpu", (), modules)


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments, "--out", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    ended = run(folder, "--device", "cpu", "--tiny")
    assert ended.returncode == 0, "\n".join(find_faults(folder)) or ended.stderr[-4000:]
    return folder


def find_faults(folder: Path) -> list[str]:
    """What did not run."""
    if not (folder / "results.json").exists():
        return []
    results = json.loads((folder / "results.json").read_text())
    rows = {row["row"]: row["reason"] for row in results["results"].values()}
    kernels = {f"{kernel['name']}, {kernel['size']}": kernel["reason"] for kernel in results["kernels"]}
    faults = {**results["failed"], **rows, **kernels}
    return [f"{name}: {fault}" for name, fault in faults.items() if fault not in ("", "needs a GPU")]


# The command on a CPU


def test_every_row_of_the_table_is_there_and_says_that_it_is_not_measured(out: Path, gpu: Any) -> None:
    lines = (out / "RESULTS.md").read_text().splitlines()
    for row in gpu.rows.ROWS:
        (line,) = (line for line in lines if line.startswith(f"| {row.workload} | {row.aim} |"))
        assert "| not measured: needs a GPU; " in line
    assert not any("| measured |" in line for line in lines)


def test_each_row_really_ran(out: Path, gpu: Any) -> None:
    results = json.loads((out / "results.json").read_text())
    assert set(results["results"]) == {row.key for row in gpu.rows.ROWS}
    assert {row["reason"] for row in results["results"].values()} == {"", "needs a GPU"}
    assert all((row["value"] is None) == (row["reason"] != "") for row in results["results"].values())
    assert results["failed"] == {}
    assert results["results"]["greedy equality"]["value"] == 0


def test_every_operation_is_among_the_kernels(out: Path) -> None:
    from aioengine.kernels.operations import Operations

    kernels = json.loads((out / "results.json").read_text())["kernels"]
    operations = {name for name in vars(Operations) if not name.startswith("_")}
    assert {kernel["name"] for kernel in kernels} == operations - {"prefill_tile"}
    assert {kernel["reason"] for kernel in kernels} == {""}
    assert len({(kernel["name"], kernel["size"]) for kernel in kernels}) == len(kernels)


def test_a_gpus_results_are_not_replaced_by_a_cpus(tmp_path: Path, gpu: Any) -> None:
    gpu.report.save(results_of(gpu), tmp_path)
    ended = run(tmp_path, "--device", "cpu", "--tiny")
    assert ended.returncode == 2
    assert "a GPU's results lie there" in ended.stderr
    assert gpu.report.load(tmp_path) == results_of(gpu)


def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing(tmp_path: Path) -> None:
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--out", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary)},
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


def test_a_part_that_takes_too_long_leaves_no_folder(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = results_of(gpu, gpu.rows.Result(row="sleep", device="cpu"), gpu.rows.Result(row="loop lag", device="cpu"))
    args = argparse.Namespace(device="cpu", tiny=True, timeout=0.5)
    gpu.__main__.run_parts(["large"], args, results)
    assert "-9 at the time limit" in results.failed["large"]
    # What an earlier run left of that part is gone, and the other's is there.
    assert set(results.results) == {"loop lag"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    ["--out {file}/below", "--out {file}", "waiting --json {folder}/none/file", "waiting --json {folder}"],
)
def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    ended = start(command.format(file=file, folder=tmp_path))
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert str(tmp_path) in ended.stderr
    assert (file.read_text(), list(tmp_path.iterdir())) == ("kept", [file])


@pytest.mark.parametrize(
    "command", ["--timeout -1", "host_cost --steps 0", "waiting --repeats 0", "waiting --seconds nan"]
)
def test_numbers_must_be_positive(command: str) -> None:
    ended = start(command)
    assert ended.returncode == 2
    assert "a positive number is needed, not" in ended.stderr


def start(command: str) -> subprocess.CompletedProcess[str]:
    """Arguments of the benchmark, or of another command of its folder."""
    first, *rest = command.split()
    arguments = ["benchmarks.gpu", "--device", "cpu", "--tiny", first, *rest]
    if not first.startswith("-"):
        arguments = [f"benchmarks.gpu.{first}", *rest]
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S
    )


# The report


@pytest.mark.parametrize(
    ("commit", "is_same"), [("abc", True), ("unknown", False), ("abc, and changes that are not committed", False)]
)
def test_results_of_a_commit_that_says_nothing_stand_alone(gpu: Any, commit: str, is_same: bool) -> None:
    about = msgspec.structs.replace(results_of(gpu).about, commit=commit)
    assert about.is_same_setup(msgspec.structs.replace(about, date="2026-02-02")) is is_same


def results_of(gpu: Any, *results: Any, **fields: Any) -> Any:
    about = gpu.report.About(
        device="cuda", is_tiny=False, gpu="a GPU", driver="1", versions={"torch": "2"}, commit="abc", date="2026-01-01"
    )
    return gpu.report.Results(about=about, results={result.row: result for result in results}, **fields)


def lines_of(gpu: Any, results: Any) -> dict[str, str]:
    """The table's lines, by row."""
    lines = gpu.report.markdown(results).splitlines()
    return {row.key: next(line for line in lines if f"| {row.workload} |" in line) for row in gpu.rows.ROWS}


def test_what_a_gpu_measured_is_judged_by_its_aim(gpu: Any) -> None:
    decode = {"device": "cuda", "value": 5.0, "unit": "ms a step", "bound": 4.4, "bound_of": "bandwidth"}
    lines = lines_of(
        gpu,
        results_of(
            gpu,
            gpu.rows.Result(row="decode, batch 1", ratio=0.88, **decode),
            gpu.rows.Result(row="decode, batch 64", ratio=0.88, **decode),
            gpu.rows.Result(row="gap between decode steps", device="cuda", value=50.0, unit="µs"),
            gpu.rows.Result(row="loop lag", device="cuda", reason="TimeoutError"),
            gpu.rows.Result(row="memory after aclose", device="cuda", value=0, unit="bytes"),
            gpu.rows.Result(row="sleep", device="cuda", value=1.5, unit="s"),
            failed={"peer": "the process ended with -9"},
        ),
    )
    assert "| measured | 5 ms a step | 4.4, bandwidth | 0.88 | **missed** |" in lines["decode, batch 1"]
    assert "| measured | 5 ms a step | 4.4, bandwidth | 0.88 | met |" in lines["decode, batch 64"]
    assert "| measured | 50 µs |  |  | **missed** |" in lines["gap between decode steps"]
    assert "| not measured: TimeoutError |" in lines["loop lag"]
    assert "| measured | 0 bytes |  |  | met |" in lines["memory after aclose"]
    assert "| measured | 1.5 s |  |  |  |" in lines["sleep"]
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


# Kernels


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


def launch(at: float, correlation: int, name: str = "cudaGraphLaunch", tid: int = 1) -> dict[str, Any]:
    arguments = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": at, "dur": 1, "tid": tid, "args": arguments}


def kernel(begin: float, end: float, correlation: int, category: str = "kernel") -> dict[str, Any]:
    arguments = {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": "k", "ts": begin, "dur": end - begin, "tid": 9, "args": arguments}


def step(number: int, begin: float, end: float, rows: int = 4, tokens: int = 4) -> dict[str, Any]:
    name = f"step {number} ({rows} rows, {tokens} tokens)"
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin, "tid": 1}


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


def test_a_trace_without_a_gpu_has_nothing(gpu: Any) -> None:
    trace = gpu.trace.Trace([step(1, 0, 10), step(2, 20, 30)])
    assert (trace.busy, trace.steps, trace.decode_gaps_us(), trace.busy_share()) == ([], [], [], 0.0)


def test_asynchronous_calls_and_event_waits_are_no_synchronisations(gpu: Any) -> None:
    for name in ("cudaMemcpyAsync", "cudaEventSynchronize", "cudaStreamWaitEvent", "cudaMallocAsync", "cuLaunchKernel"):
        assert gpu.trace.WAITS.fullmatch(name) is None
    for name in (
        "cudaMemcpy",
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cuCtxSynchronize",
        "cudaMalloc",
        "cudaFree",
    ):
        assert gpu.trace.WAITS.fullmatch(name) is not None
