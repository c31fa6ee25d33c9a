"""The load generator: what it counts and computes, and a small run of all of it."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import math
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "serve.py"


@pytest.fixture(scope="module", autouse=True)
def on_the_path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield


@pytest.fixture
def serving(on_the_path: None) -> SimpleNamespace:
    names = ("bare", "capacity", "events", "figures", "load", "own", "shown")
    return SimpleNamespace(**{name: importlib.import_module(f"serving.{name}") for name in names})


# Counting events


def chunk(content: str | None = None, **more: Any) -> bytes:
    delta = {"role": "assistant"} if content is None else {"content": content}
    return b"data: " + msgspec.json.encode({"choices": [{"index": 0, "delta": delta, **more}]}) + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":6}}\n\n'
DONE = b"data: [DONE]\n\n"
ANSWER = b"".join(
    [chunk(), *(chunk(text) for text in (" a", "data: ", "\ndata: ")), b": ping\n\n", chunk("", finish_reason="stop")]
)


def count(counter: Any, *reads: bytes) -> Any:
    for at, data in enumerate(reads):
        counter.feed(data, float(at))
    counter.finish()
    return counter


@given(cuts=st.lists(st.integers(0, len(ANSWER + USAGE + DONE)), max_size=20))
def test_events_are_counted_however_the_answer_is_cut(cuts: list[int]) -> None:
    answer = ANSWER + USAGE + DONE
    places = [0, *sorted(cuts), len(answer)]
    reads = [answer[begin:end] for begin, end in itertools.pairwise(places)]
    counter = count(importlib.import_module("serving.events").EventCounter(), *reads)
    assert sum(counter.num_events) == 3
    assert (counter.num_tokens, counter.num_prompt_tokens) == (6, 5)
    assert counter.is_done
    assert counter.error is None
    assert list(counter.read_at) == sorted(counter.read_at)


def test_a_long_answer_is_counted_without_being_kept(serving: SimpleNamespace) -> None:
    reads = [chunk(), *(chunk(f" {n}") for n in range(5000)), chunk("", finish_reason="length"), USAGE, DONE]
    counter = count(serving.events.EventCounter(), *reads)
    assert (sum(counter.num_events), len(counter.read_at)) == (5000, 5000)
    assert counter.read_at[0] == 1.0  # the first event is the role's
    assert counter.is_done
    assert len(counter._carry) <= serving.events.TAIL_BYTES


def test_without_usage_tokens_are_events(serving: SimpleNamespace) -> None:
    assert count(serving.events.EventCounter(), ANSWER, DONE).num_tokens == 3


def test_lines_may_end_as_in_http(serving: SimpleNamespace) -> None:
    answer = (ANSWER + USAGE + DONE).replace(b"\n", b"\r\n")
    counter = count(serving.events.EventCounter(), answer)
    assert (sum(counter.num_events), counter.num_tokens, counter.is_done) == (3, 6, True)


def test_completions_have_their_text_elsewhere(serving: SimpleNamespace) -> None:
    events = [b'data: {"choices":[{"text":"%s"}]}\n\n' % text for text in (b"", b" a", b" b", b"")]
    assert sum(count(serving.events.EventCounter(), *events, DONE).num_events) == 2


def test_an_error_event_and_a_cut_answer_are_seen(serving: SimpleNamespace) -> None:
    broken = count(serving.events.EventCounter(), chunk(" a") + b'data: {"error":{"message":"no"}}\n\n')
    assert (broken.error, broken.is_done, sum(broken.num_events)) == ("{'message': 'no'}", False, 1)
    assert not count(serving.events.EventCounter(), ANSWER).is_done


# Arrivals and figures


def test_arrivals_are_the_same_for_a_seed_and_as_many_as_asked(serving: SimpleNamespace) -> None:
    phases = [serving.load.Phase(100.0, 50.0), serving.load.Phase(1000.0, 10.0), serving.load.Phase(math.inf, 1.0, 7)]
    times = serving.load.arrival_times(phases, seed=3)
    assert (times == serving.load.arrival_times(phases, seed=3)).all()
    assert len(times) != len(serving.load.arrival_times(phases, seed=4))
    slow, fast = times[times < 50.0], times[(times >= 50.0) & (times < 60.0)]
    assert len(slow) == pytest.approx(5_000, rel=0.05)
    assert len(fast) == pytest.approx(10_000, rel=0.05)
    gaps = np.diff(slow)
    assert (gaps >= 0.0).all()
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as with an exponential distribution
    assert times[times >= 60.0].tolist() == [60.0] * 7


def test_requests_are_the_same_for_a_seed_and_within_their_range(serving: SimpleNamespace) -> None:
    target = serving.load.Target(url="http://x/v1/", model="m", prompt_tokens=5, max_tokens=(3, 9), ignore_eos=True)
    bodies = [next(made) for made in (target.bodies(1), target.bodies(1), target.bodies(2))]
    assert bodies[0] == bodies[1] != bodies[2]
    many = target.bodies(1)
    asked = [msgspec.json.decode(next(many)) for _ in range(100)]
    assert {one["max_tokens"] for one in asked} == set(range(3, 10))
    assert all(len(one["messages"][0]["content"].split()) == 5 for one in asked)
    assert target.path == "http://x/v1/chat/completions"


def test_percentiles_are_samples(serving: SimpleNamespace) -> None:
    summary = serving.figures.summary_of([0.003, *[0.001] * 9])
    assert (summary.p50, summary.p90, summary.p99, summary.max) == (1.0, 1.0, 3.0, 3.0)
    assert summary.mean == pytest.approx(1.2)
    assert serving.figures.summary_of([]) is None


def record_of(
    serving: SimpleNamespace,
    at: float,
    read_at: list[float],
    num_events: list[int],
    *,
    tokens: int = 0,
    late_s: float = 0.0,
) -> Any:
    record = serving.load.Record(at, sent_at=at + late_s, kind="ok", answered_at=read_at[-1])
    record.counter.read_at.extend(read_at)
    record.counter.num_events.extend(num_events)
    record.counter.num_tokens = tokens or sum(num_events)
    return record


def test_figures_of_a_run_that_is_known(serving: SimpleNamespace) -> None:
    load, figures = serving.load, serving.figures
    run = load.Run(dropped_at=[1.5, 9.0])
    run.records = [
        record_of(serving, 0.5, [0.6, 1.1], [1, 1]),  # sent in the warm-up; a token of it is read later
        record_of(serving, 1.0, [1.1, 1.3], [1, 4], tokens=10),  # two tokens an event: 8 of them in 200 ms
        record_of(serving, 1.2, [1.7, 1.8], [1, 1]),
        load.Record(1.4, sent_at=1.42, kind="shed", answered_at=1.423),
        load.Record(1.6, sent_at=1.6, kind="error", error="timeout", answered_at=3.0),
        load.Record(1.7, sent_at=1.7),
    ]
    run.cpu, run.num_open = (
        load.CpuSamples(at=[0.0, 4.0], client=[0.0, 2.0], server=[0.0, 4.0], cores=[0.0, 8.0]),
        [1, 1],
    )
    made = figures.figures_of(run, 1.0, 2.0, rate=6.0, slo=figures.Slo(ttft_ms=200.0, tpot_ms=30.0))
    assert (made.num_scheduled, made.num_ok, made.num_shed, made.num_dropped, made.num_unfinished) == (6, 2, 1, 1, 1)
    assert made.errors == {"timeout": 1}
    assert made.shed_share == pytest.approx(1 / 6)
    assert made.tokens_per_s == pytest.approx(1 + 10 + 2)
    assert made.tokens_per_event == pytest.approx(12 / 7)
    assert (made.requests_per_s, made.goodput_per_s) == (2.0, 1.0)
    assert made.ttft_ms.p99 == pytest.approx(500.0)
    assert (made.tpot_ms.p50, made.tpot_ms.max) == (pytest.approx(200.0 / 9), pytest.approx(100.0))
    assert (made.itl_ms.p50, made.itl_ms.max) == (pytest.approx(100.0), pytest.approx(200.0))
    assert made.shed_ms.p50 == pytest.approx(23.0)
    assert made.lateness_ms.max == pytest.approx(20.0)
    assert (made.client_busy, made.server_busy) == (pytest.approx(0.5), pytest.approx(1.0))
    assert made.server_us == pytest.approx(1e6 / 13)
    assert [doubt.split(":")[0] for doubt in made.doubts] == ["the generator was late", "1 requests were not sent"]


def test_a_freeze_with_a_burst_behind_it_is_a_stall_and_no_goodput(serving: SimpleNamespace) -> None:
    figures, run = serving.figures, serving.load.Run()
    steady = [0.1 + 0.01 * place for place in range(501)]
    run.records = [
        record_of(serving, 0.0, steady, [1] * 501),
        record_of(serving, 0.0, [0.1, 0.11, 5.11], [1, 1, 499]),  # as many tokens in as long, nearly all at its end
    ]
    made = figures.figures_of(run, 0.0, 1.0, rate=2.0, slo=figures.Slo(tpot_ms=20.0, stall_ms=1000.0))
    assert made.tpot_ms.max == pytest.approx(5010.0 / 500)  # the mean sees nothing
    assert (made.itl_ms.p50, made.itl_ms.max) == (pytest.approx(10.0), pytest.approx(5000.0))
    assert made.itl_ms.mean == pytest.approx((5000.0 + 5010.0) / 502)  # each gap once
    assert (made.stall_ms.p50, made.stall_ms.max) == (pytest.approx(10.0), pytest.approx(5000.0))
    assert (made.requests_per_s, made.goodput_per_s) == (2.0, 1.0)
    (piece,) = figures.bins_of(run, 6.0, seconds=6.0, slo=figures.Slo())
    assert piece.itl_ms == made.itl_ms


def test_an_answer_of_one_token_has_no_time_between_tokens(serving: SimpleNamespace) -> None:
    record = record_of(serving, 0.0, [0.1], [1])
    assert (record.tpot_s, record.longest_gap_s) == (None, 0.0)
    assert serving.figures.keeps(record, serving.figures.Slo())


def test_latencies_count_from_when_a_request_was_to_be_sent(serving: SimpleNamespace) -> None:
    run = serving.load.Run()
    run.records = [
        record_of(serving, 1.0, [1.75, 1.85], [1, 1], late_s=0.5),
        serving.load.Record(1.0, sent_at=1.5, kind="shed", answered_at=1.51),
    ]
    figures = serving.figures
    made = figures.figures_of(run, 1.0, 2.0, rate=2.0, slo=figures.Slo(ttft_ms=600.0))
    assert made.ttft_ms.p50 == pytest.approx(750.0)
    assert made.e2el_ms.p50 == pytest.approx(850.0)
    assert made.shed_ms.p50 == pytest.approx(510.0)
    assert made.lateness_ms.p50 == pytest.approx(500.0)
    assert made.goodput_per_s == 0.0
    assert made.doubts == ["the generator was late: p99 500.0 ms"]


def test_a_run_of_nothing_has_figures(serving: SimpleNamespace) -> None:
    made = serving.figures.figures_of(serving.load.Run(), 0.0, 1.0, rate=1.0, slo=serving.figures.Slo())
    assert (made.num_scheduled, made.ttft_ms, made.server_us, made.doubts) == (0, None, None, [])
    serving.shown.print_levels({"1/s": made}, "nothing")


@pytest.mark.parametrize(("slow_until", "recovered_s"), [(4.0, 1.0), (6.0, 3.0), (20.0, None)])
def test_recovery_is_when_it_is_as_before(
    serving: SimpleNamespace, slow_until: float, recovered_s: float | None
) -> None:
    run = serving.load.Run()
    for place in range(100):
        at = place / 10 + 0.01
        ttft_s = 0.5 if 2.0 <= at < slow_until else 0.01
        run.records.append(record_of(serving, at, [at + ttft_s], [1]))
    bins = serving.figures.bins_of(run, 10.0, seconds=1.0, slo=serving.figures.Slo())
    assert len(bins) == 10
    assert serving.figures.recovered_after(bins, 2.0, 4.0) == recovered_s


def test_a_server_that_sheds_has_not_recovered(serving: SimpleNamespace) -> None:
    run = serving.load.Run()
    run.records = [record_of(serving, at + 0.5, [at + 0.51], [1]) for at in range(8)]
    run.records.append(serving.load.Record(4.6, sent_at=4.6, kind="shed", answered_at=4.61))
    bins = serving.figures.bins_of(run, 8.0, seconds=1.0, slo=serving.figures.Slo())
    assert serving.figures.recovered_after(bins, 3.0, 4.0) == 2.0


# The sustainable rate


def attempt_at(serving: SimpleNamespace, rate: float, capacity: float, **changes: Any) -> Any:
    fault = "shed" if rate > capacity else ""
    values = {"ttft_p99_ms": 1.0, "growth": 1.0, "slowdown": 1.0, "is_disturbed": False, "client_busy": 0.5, **changes}
    return serving.capacity.Attempt(rate=rate, fault=fault, **values)


@given(capacity=st.floats(40.0, 10_000.0))
def test_a_search_ends_within_six_percent_below_the_rate_that_is_sustained(capacity: float) -> None:
    serving = SimpleNamespace(capacity=importlib.import_module("serving.capacity"))
    search = serving.capacity.Search(first=256.0)
    while not search.is_over:
        search.attempts.append(attempt_at(serving, search.next_rate, capacity))
    assert capacity / 1.06 <= search.rate <= capacity
    assert len(search.attempts) <= 12
    assert (search.bound, search.doubts) == ("", [])


def test_a_search_says_when_the_rate_may_be_another(serving: SimpleNamespace) -> None:
    def doubt_of(*attempts: Any) -> str:
        search = serving.capacity.Search(first=256.0, attempts=list(attempts))
        (doubt,) = search.doubts
        return f"{search.bound}{search.rate:g}: {doubt}"

    sustained, failed = attempt_at(serving, 256.0, 260.0), attempt_at(serving, 512.0, 260.0)
    early = "at least 256: the search ended early: the server sustains at least so much"
    assert doubt_of(sustained) == early
    assert doubt_of(sustained, failed) == f"{early}, and less than 512/s"
    assert doubt_of(failed).startswith("below 512: no rate was sustained")
    assert doubt_of().startswith("below 256: no rate was sustained")
    beyond = attempt_at(serving, 270.0, 260.0, client_busy=0.97)
    assert doubt_of(sustained, failed, beyond) == (
        "at least 256: the generator used 97% of its core: the server sustains at least so much"
    )
    beyond = attempt_at(serving, 270.0, 260.0, is_disturbed=True)
    assert doubt_of(sustained, failed, beyond) == (
        "at least 256: others used the cores when 270/s failed: the server sustains at least so much"
    )


def run_at_rate(serving: SimpleNamespace, e2el_s: list[float], ttft_s: float = 0.01) -> Any:
    records = [
        record_of(serving, at, [at + ttft_s, at + ttft_s + rest], [1, 1])
        for at, rest in zip(np.linspace(0.0, 1.49, len(e2el_s)).tolist(), e2el_s, strict=True)
    ]
    return serving.load.Run(records=records)


def test_a_rate_is_sustained_if_all_are_served_soon_to_the_end(serving: SimpleNamespace) -> None:
    def fault_of(run: Any) -> str:
        return str(serving.capacity.attempt_of(run, 100.0, 1.5, light_s=0.1, is_disturbed=False).fault)

    assert fault_of(run_at_rate(serving, [0.1] * 90)) == ""
    assert fault_of(serving.load.Run()) == ""  # nobody came, and nobody was turned away
    assert fault_of(run_at_rate(serving, [0.1] * 30 + [0.15] * 30 + [0.23] * 30)) == "E2EL × 2.2 at its end"
    assert fault_of(run_at_rate(serving, [0.21] * 90)) == "E2EL × 2.2 of a light load's"
    assert fault_of(run_at_rate(serving, [0.1] * 90, ttft_s=0.15)) == "TTFT p99 150 ms"
    sheds = run_at_rate(serving, [0.1] * 3)
    sheds.records.append(serving.load.Record(1.0, sent_at=1.0, kind="shed", answered_at=1.01))
    assert fault_of(sheds) == "25.0% shed"
    cut = run_at_rate(serving, [0.1] * 3)
    cut.records.append(serving.load.Record(1.0, sent_at=1.0))
    assert fault_of(cut) == "1 broken or unfinished"


def test_a_server_that_outran_the_generator_carries_at_least_so_much(
    serving: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    def rounds(client_busy: float, server_busy: float) -> list[Any]:
        values = {"tokens_per_event": 1.0, "server_us": 12.0, "client_us": 15.0, "others_busy": 0.0}
        busy = {"client_busy": client_busy, "server_busy": server_busy}
        return [serving.own.Round(seconds=1.0, tokens_per_s=60_000.0, **values, **busy)]

    sustained = {"bare": rounds(0.99, 0.85), "engine": rounds(0.5, 1.0)}
    assert serving.own.doubt_of(sustained["engine"]) is None
    serving.shown.print_own(serving.own.OwnFigures(about={}, setting=serving.own.Setting(), sustained=sustained))
    printed = capsys.readouterr().out
    assert "bare: the generator used 99% of its core, and the server 85%: it carries at least so much" in printed
    bare, engine = (next(line for line in printed.splitlines() if f"│ {kind}" in line) for kind in ("  bare", "engine"))
    assert ("at least 60,000" in bare, "at least" in engine) == (True, False)


# Over sockets

BEHAVIOURS: web.AppKey[list[web.Response | bytes]] = web.AppKey("behaviours")
BREAKS = chunk(" b")


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    """Answers each request with the next one of its behaviours: a response, or what it streams."""

    async def complete(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer key"
        behaviour = request.app[BEHAVIOURS].pop(0)
        if isinstance(behaviour, web.Response):
            return behaviour
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(behaviour)
        if behaviour is BREAKS:
            assert request.transport is not None
            request.transport.abort()
        return response

    app = web.Application()
    app[BEHAVIOURS] = []
    app.router.add_post("/v1/completions", complete)
    server = TestServer(app)
    async with server:
        yield server


async def test_each_way_in_which_a_request_ends_has_its_name(serving: SimpleNamespace, server: TestServer) -> None:
    behaviours: dict[str, web.Response | bytes] = {
        "ok": ANSWER + USAGE + DONE,
        "shed": web.Response(status=503, headers={"Retry-After": "1"}),
        "error status 503": web.Response(status=503),
        "error status 400": web.Response(status=400),
        "error an answer in application/json": web.json_response({}),
        "error no [DONE]": ANSWER,
        "error no text": DONE,
        "error error event": chunk(" a") + b'data: {"error": 1}\n\n',
        "error ClientPayloadError": BREAKS,
    }
    server.app[BEHAVIOURS].extend(behaviours.values())
    target = serving.load.Target(
        url=str(server.make_url("/v1")), model="m", endpoint="completions", api_key="key", prompt_tokens=3
    )
    run = await serving.load.generate(target, np.zeros(len(behaviours)), max_open=len(behaviours))
    assert {f"{one.kind} {one.error}".strip() for one in run.records} == set(behaviours)
    assert not run.dropped_at
    ok = next(one for one in run.records if one.kind == "ok")
    assert ok.counter.num_tokens == 6
    assert 0.0 <= ok.lateness_s < ok.answered_at


async def test_more_than_may_be_open_is_dropped_and_nobody_there_is_an_error(serving: SimpleNamespace) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        target = serving.load.Target(url=f"http://127.0.0.1:{nobody.getsockname()[1]}/v1", model="m")
        run = await serving.load.generate(target, np.zeros(5), max_open=3)
    assert [one.error for one in run.records] == ["ClientConnectorError"] * 3
    assert run.dropped_at == [0.0, 0.0]


async def run_script(folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON that the script writes."""
    json_file, plot_file = folder / "figures.json", folder / "figures.png"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), *arguments, "--json", str(json_file), "--plot", str(plot_file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert plot_file.read_bytes().startswith(b"\x89PNG")
    figures: dict[str, Any] = msgspec.json.decode(json_file.read_bytes())
    return figures


@pytest.mark.parametrize(("endpoint", "rates"), [("chat", ["40", "80"]), ("completions", ["inf"])])
async def test_a_server_is_measured_by_its_url(
    serving: SimpleNamespace, tmp_path: Path, endpoint: str, rates: list[str]
) -> None:
    async with serving.own.open_server("bare", serving.own.Setting()) as server:
        figures = await run_script(
            tmp_path,
            *("--url", server.target.url, "--server-pid", str(server.pid), "--endpoint", endpoint, "--rate", *rates),
            *("--num-requests", "20", "--duration", "0.3", "--warmup", "0.1", "--max-tokens", "2:5"),
            *("--api-key", "secret"),
        )
    assert "secret" not in str(figures)
    assert len(figures["levels"]) == len(rates)
    for level in figures["levels"]:
        assert level["num_ok"] == level["num_scheduled"] > 0
        assert 2.0 <= level["mean_output_tokens"] <= 5.0
    assert bool(figures["over_time"]) == (len(rates) == 1)


async def test_a_small_run_of_everything(tmp_path: Path) -> None:
    figures = await run_script(tmp_path, "--self", "--quick")
    for kind in ("bare", "engine"):
        rounds = figures["sustained"][kind]
        assert rounds
        assert all(one["tokens_per_s"] > 0 and one["tokens_per_event"] >= 1 for one in rounds)
    phases = figures["overload"]["phases"]
    capacity = figures["overload"]["capacity_per_s"]
    assert [round(phase["rate"] / capacity, 3) for phase in phases.values()] == [0.8, 1.0, 2.0, 0.8]
    assert list(phases) == ["before", "full", "overload", "after"]
    assert 1 <= len(figures["overload"]["attempts"]) <= 3
    # How many are shed depends on who else is on the machine: but each is answered, or shed.
    assert all(phase["num_ok"] + phase["num_shed"] == phase["num_scheduled"] for phase in phases.values())
    assert sum(phase["num_ok"] for phase in phases.values()) > 0
