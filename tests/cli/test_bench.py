"""Benchmarks: times under a clock that is known, the command with tiny numbers, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest
from cli.conftest import Terminal, run
from click.testing import CliRunner
from nightly import nightly

from aioengine import Engine, StepFailed
from aioengine.cli import bench as bench_module
from aioengine.cli.bench import (
    Job,
    Range,
    Reads,
    Repeat,
    Report,
    Workload,
    bench,
    figures_of,
    make_jobs,
    other_cpu_s,
    send,
    show_report,
)
from aioengine.testing import FakeExecutor

STEP_TIME_S = 0.02
EIGHT = Range(8, 8)
ENVIRONMENT = {
    "model": "a model", "dtype": "float32", "device": "cpu", "num_threads": None, "num_cores": 2, "machine": "x",
    "python": "3", "torch": "2", "aioengine": "1", "time": "now",
}  # fmt: skip
TINY = ("--input-len", "8", "--kv-cache-memory-bytes", "20000000")


# Measuring


@pytest.mark.virtual_clock
async def test_times_are_those_of_steps_and_the_next_request_is_sent_when_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(bench_module, "time", SimpleNamespace(perf_counter=loop.time))
    async with Engine(executor=FakeExecutor(vocab_size=2048, step_time_s=STEP_TIME_S)) as engine:
        requests, duration_s, _ = await send(engine, [([number, 2, 3], 5) for number in range(6)], concurrency=2)
    sent_at = [request.sent_at - requests[0].sent_at for request in requests]
    assert sent_at == pytest.approx([0, 0, *[5 * STEP_TIME_S] * 2, *[10 * STEP_TIME_S] * 2])
    assert duration_s == pytest.approx(15 * STEP_TIME_S)
    for request in requests:
        assert (request.num_input_tokens, sum(request.sizes)) == (3, 5)
        assert request.ttft_s == pytest.approx(STEP_TIME_S)
        assert request.itl_s == pytest.approx([STEP_TIME_S] * 4)
        assert request.e2e_s == pytest.approx(5 * STEP_TIME_S)


@pytest.mark.virtual_clock
async def test_the_engines_error_comes_out_as_itself() -> None:
    executor = FakeExecutor(vocab_size=2048)
    executor.make_step_fail(2, RuntimeError("out of luck"))
    async with Engine(executor=executor) as engine:
        with pytest.raises(StepFailed):
            await send(engine, [([1], 5), ([2], 5)], concurrency=2)


def jobs(input_len: Range, output_len: Range, seed: int, count: int = 50, batch: int = 0) -> list[Job]:
    engine: Any = SimpleNamespace(info=SimpleNamespace(vocab_size=2048, max_model_len=100))
    return make_jobs(engine, workload(input_len, output_len, seed), count, batch)


def test_the_same_seed_makes_the_same_jobs_and_each_batch_has_lengths_alike_and_tokens_of_its_own() -> None:
    first, second = (jobs(Range(2, 9), Range(1, 5), seed=3, batch=batch) for batch in (0, 1))
    assert first == jobs(Range(2, 9), Range(1, 5), seed=3)
    assert first != jobs(Range(2, 9), Range(1, 5), seed=4)
    shapes = [[(len(prompt), num_output) for prompt, num_output in batch] for batch in (first, second)]
    assert shapes[0] == shapes[1]
    assert {length for length, _ in shapes[0]} == set(range(2, 10))
    assert {length for _, length in shapes[0]} == set(range(1, 6))
    assert all(one != other for (one, _), (other, _) in zip(first, second, strict=True) if len(one) > 2)


def workload(input_len: Range = EIGHT, output_len: Range = EIGHT, seed: int = 0) -> Workload:
    return Workload(input_len=input_len, output_len=output_len, temperature=0.0, seed=seed, repeats=1)


def request(num_input_tokens: int, *read_at: float) -> Reads:
    """One that was sent at 0, with a token a read."""
    return Reads(0.0, array("d", read_at), array("L", [1] * len(read_at)), num_input_tokens)


def test_tokens_that_are_read_at_once_share_the_time_since_the_last_read() -> None:
    reads = Reads(1.0, array("d", [1.5, 2.5, 2.75]), array("L", [3, 2, 1]))
    assert (reads.ttft_s, reads.e2e_s) == (0.5, 1.75)
    assert reads.gaps_s.tolist() == [1.0, 0.25]
    assert reads.itl_s.tolist() == [0.5, 0.5, 0.25]


def test_a_summary_is_over_the_samples_of_all_repeats() -> None:
    first, second, third = (request(10, ttft_s, ttft_s + 0.1, ttft_s + 0.4) for ttft_s in (1.0, 2.0, 3.0))
    level = figures_of(2, [Repeat([first, second], 2.4, 1.2), Repeat([third], 3.6, 0.0)])
    assert (level.num_requests, level.num_input_tokens, level.num_output_tokens) == (3, 30, 9)
    rates = (level.requests_per_s, level.output_tokens_per_s, level.total_tokens_per_s)
    assert rates == pytest.approx((0.5, 1.5, 6.5))
    assert level.ttft_ms is not None
    assert level.itl_ms is not None
    assert level.ttft_ms.mean == level.ttft_ms.p50 == pytest.approx(2000)
    assert level.ttft_ms.p90 == pytest.approx(2800)
    assert level.itl_ms.p50 == pytest.approx(200)
    assert level.repeats == pytest.approx([2.5, 3 / 3.6])
    assert level.other_cores == pytest.approx(0.2)


def test_the_cpu_time_of_others_is_that_of_our_cores_without_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1})
    monkeypatch.setattr("os.times", lambda: (1.0, 1.0, 0.0, 0.0, 99.0))
    ticks = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text(
        f"cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 7 7 7 7 7 7 7 7 0 0\ncpu1 {5 * ticks} 0 {ticks} 8 8 0 0 0 0 0\nintr 1\n"
    )
    assert other_cpu_s(stat) == pytest.approx(4.0)
    assert other_cpu_s(tmp_path / "none") is None


# The command


@pytest.mark.nightly
def test_latency_is_a_table_on_stderr_and_json_on_stdout() -> None:
    done = run(
        "bench", "latency", *TINY, "--concurrency", "4,1,8", "--num-requests", "4", "--output-len", "3",
        "--repeats", "2", "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "in flight" in done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    assert [level.concurrency for level in report.levels] == [1, 4]
    for level in report.levels:
        assert (level.num_requests, level.num_input_tokens, level.num_output_tokens) == (8, 64, 24)
        assert level.ttft_ms is not None
        assert level.itl_ms is not None
        assert level.e2e_ms is not None
        assert 0 < level.ttft_ms.p50 <= level.ttft_ms.p90 <= level.ttft_ms.p99
        assert level.e2e_ms.p50 > level.ttft_ms.p50
        assert len(level.repeats) == 2
    assert report.environment["model"] == "the bundled model"
    assert (report.environment["device"], report.environment["dtype"]) == ("cpu", "bfloat16")


@pytest.mark.nightly
def test_throughput_is_a_table_on_stdout_and_json_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run(
        "bench", "throughput", *TINY, "--num-prompts", "6", "--output-len", "1:4", "--repeats", "2", "--seed", "5",
        "--json", str(file), "--num-threads", "1", "--dtype", "float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Throughput" in done.stdout
    assert "output tok/s" in done.stdout
    report = msgspec.json.decode(file.read_text(), type=Report)
    lengths = [num_output for _, num_output in jobs(Range(8, 8), Range(1, 4), seed=5, count=6)]
    (level,) = report.levels
    assert (report.benchmark, level.concurrency) == ("throughput", 6)
    assert level.num_output_tokens == 2 * sum(lengths)
    assert level.num_input_tokens == 2 * 48
    slowest, fastest = sorted(level.repeats)
    assert slowest <= level.output_tokens_per_s <= fastest
    assert (report.environment["dtype"], report.environment["num_threads"]) == ("float32", 1)


@pytest.mark.parametrize("benchmark", ["latency", *nightly("throughput")])
def test_one_token_each_has_no_time_between_tokens(capsys: pytest.CaptureFixture[str], benchmark: str) -> None:
    level = figures_of(1, [Repeat([request(8, 0.5)], 0.5)])
    assert level.itl_ms is None
    report = Report(benchmark, ENVIRONMENT, workload(output_len=Range(1, 1)), [level])
    show_report(report, to_stderr=True)
    shown = capsys.readouterr().err
    assert "500.0 │       - │" in shown
    assert "8 random tokens in, 1 tokens out, greedy, seed 0" in shown
    assert "a model in float32 on cpu" in shown
    assert "other programs" not in shown
    disturbed = msgspec.structs.replace(report, levels=[msgspec.structs.replace(level, other_cores=0.6)])
    show_report(disturbed, to_stderr=True)
    assert "other programs used 0.6 of 2 cores meanwhile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("latency", "--concurrency", "1,x"), "numbers with commas"),
        (("latency", "--concurrency", "0,1"), "at least 1"),
        (("latency", "--input-len", "9:3"), "the lower end first"),
        (("throughput", "--output-len", "0"), "at least 1"),
        (("throughput", "--output-len", "few"), "a range like 32:128"),
        (("throughput", "--repeats", "0"), "'--repeats'"),
        (("throughput", "--json", "no/such/folder/x.json"), "No such file"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_a_bad_argument_is_refused_before_anything_starts(args: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(bench, args)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())


@pytest.mark.virtual_clock(seeds=1)
async def test_what_does_not_fit_the_model_is_said_with_the_flags_that_change_it() -> None:
    async with Engine(executor=FakeExecutor(vocab_size=2048, max_model_len=100)) as engine:
        assert len(make_jobs(engine, workload(Range(60, 60), Range(10, 40)), 3, 0)) == 3
        with pytest.raises(
            click.UsageError, match=r"61 tokens in and 40 out are more than the 100 .* lower --input-len"
        ):
            make_jobs(engine, workload(Range(60, 61), Range(10, 40)), 3, 0)


@pytest.mark.nightly
def test_ctrl_c_ends_a_benchmark_quietly(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("bench", "latency", *TINY, "--concurrency", "2", "--num-requests", "5000")
    terminal.wait_for("2 in flight")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.ends() == 130, terminal.shown
    for word in ("Traceback", "Warning", "requests in flight"):
        assert word not in terminal.shown
