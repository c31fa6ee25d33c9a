"""`benchmarks/serve.py`: its figures of a load that is known, and a small run of all of it."""

from __future__ import annotations

import asyncio
import importlib
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

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "serve.py"


@pytest.fixture(scope="module")
def serving() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield SimpleNamespace(**{name: importlib.import_module(f"serving.{name}") for name in ("figures", "load")})


def chunk(content: str | None = None, **more: Any) -> bytes:
    delta = {"role": "assistant"} if content is None else {"content": content}
    return b"data: " + msgspec.json.encode({"choices": [{"index": 0, "delta": delta, **more}]}) + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":6}}\n\n'
DONE = b"data: [DONE]\n\n"
ANSWER = b"".join(
    [chunk(), *(chunk(text) for text in (" a", "data: ", "\ndata: ")), b": ping\n\n", chunk("", finish_reason="stop")]
)


# Figures


def record_of(serving: Any, at: float, read_at: list[float], num_events: list[int], tokens: int = 0) -> Any:
    record = serving.load.Record(at, sent_at=at, kind="ok", answered_at=read_at[-1])
    record.counter.read_at.extend(read_at)
    record.counter.num_events.extend(num_events)
    record.counter.num_tokens = tokens or sum(num_events)
    return record


def test_figures_of_a_run_that_is_known(serving: Any) -> None:
    load, figures = serving.load, serving.figures
    run = load.Run(num_dropped=1, seconds=4.0, client_s=2.0, server_s=4.0)
    run.records = [
        record_of(serving, 0.5, [0.6, 1.1], [1, 1]),  # sent in the warm-up; a token of it is read later
        record_of(serving, 1.0, [1.1, 1.3], [1, 4], tokens=10),  # two tokens an event: 8 of them in 200 ms
        record_of(serving, 1.2, [1.7, 1.8], [1, 1]),
        load.Record(1.4, sent_at=1.42, kind="shed", answered_at=1.423),
        load.Record(1.6, sent_at=1.6, kind="error", error="timeout", answered_at=3.0),
        load.Record(1.7, sent_at=1.7),
    ]
    made = figures.figures_of(run, 1.0, 2.0, rate=6.0, slo=figures.Slo(ttft_ms=200.0, tpot_ms=30.0))
    assert (made.num_scheduled, made.num_ok, made.num_shed, made.num_dropped, made.num_unfinished) == (5, 2, 1, 1, 1)
    assert made.errors == {"timeout": 1}
    assert made.tokens_per_s == pytest.approx(10 + 2)
    assert made.tokens_per_event == pytest.approx(12 / 7)
    assert (made.requests_per_s, made.goodput_per_s) == (2.0, 1.0)
    assert made.ttft_ms.max == pytest.approx(500.0)
    assert made.tpot_ms.max == pytest.approx(100.0)
    # Whole gaps: divided by the tokens behind it, a freeze with a burst behind it would look like a steady stream.
    assert (made.itl_ms.max, made.stall_ms.max) == (pytest.approx(200.0), pytest.approx(200.0))
    # From when a request was to be sent, not from when it was.
    assert (made.shed_ms.p50, made.lateness_ms.max) == (pytest.approx(23.0), pytest.approx(20.0))
    assert (made.client_busy, made.server_busy) == (pytest.approx(0.5), pytest.approx(1.0))
    assert made.server_us == pytest.approx(4e6 / 14)
    assert [doubt.split(":")[0] for doubt in made.doubts] == ["the generator was late", "1 requests were not sent"]


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
    async with TestServer(app) as server:
        yield server


async def test_each_way_in_which_a_request_ends_has_its_name(serving: Any, server: TestServer) -> None:
    behaviours: dict[str, web.Response | bytes] = {
        "ok": ANSWER + USAGE + DONE,
        "shed": web.Response(status=503, headers={"Retry-After": "1"}),
        "error status 503": web.Response(status=503),
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
    run = await serving.load.generate(target, np.zeros(len(behaviours) + 2), max_open=len(behaviours))
    assert {f"{one.kind} {one.error}".strip() for one in run.records} == set(behaviours)
    assert run.num_dropped == 2
    ok = next(one for one in run.records if one.kind == "ok")
    assert ok.counter.num_tokens == 6
    assert ok.scheduled_at <= ok.sent_at < ok.answered_at


async def run_script(folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON that the script writes."""
    json_file = folder / "figures.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), *arguments, "--json", str(json_file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    figures: dict[str, Any] = msgspec.json.decode(json_file.read_bytes())
    return figures


@pytest.mark.nightly
async def test_our_own_server_is_measured(tmp_path: Path) -> None:
    levels = (await run_script(tmp_path, "--self", "--streams", "16", "--rounds", "1", "--stream-tokens", "32"))[
        "levels"
    ]
    assert set(levels) == {"bare, round 1", "engine, round 1"}
    assert all(one["num_ok"] == 16 and one["mean_output_tokens"] == 32 for one in levels.values())
    load = ("--duration", "0.3", "--warmup", "0.1", "--max-tokens", "2:5", "--ignore-eos", "--api-key", "secret")
    figures = await run_script(tmp_path, "--self", "--rate", "40", "80", *load)
    assert "secret" not in str(figures)
    for level in figures["levels"].values():
        assert level["num_ok"] == level["num_scheduled"] > 0
        assert 2.0 <= level["mean_output_tokens"] <= 5.0
