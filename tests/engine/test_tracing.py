"""The spans of generations: whose children they are, also in another process, and what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from contract.ways import Opener
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from waiting import until

from aioengine import Engine, EngineOverloaded, InvalidRequest, StepFailed
from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import EngineClosed
from aioengine.server import create_app
from doubles.fake_executor import FakeExecutor

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
PROMPT = [5, 6, 7]

Spans = InMemorySpanExporter


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """What has been recorded; by a provider of the test's own, since the process's can be set only once."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name, tracer_provider=None: provider.get_tracer(name))
    yield exporter
    provider.shutdown()


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else trace.format_span_id(span.parent.span_id)


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return trace.format_span_id(span.context.span_id)


async def test_it_tells_what_was_asked_and_what_came(spans: Spans) -> None:
    async with Engine(executor=FakeExecutor(vocab_size=2048)) as engine:
        await engine.generate(PROMPT, request_id="mine", n=2, seed=1, temperature=0.5, max_tokens=4, ignore_eos=True)
    (span,) = spans.get_finished_spans()
    assert (span.name, span.parent, span.status.status_code) == ("text_completion demo", None, StatusCode.UNSET)
    told: dict[str, Any] = dict(span.attributes or {})
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "aioengine",
        "gen_ai.request.model": "demo",
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cached_tokens": 0,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    assert {name: told.get(name) for name in expected} == expected
    assert told["gen_ai.latency.e2e"] >= told["gen_ai.latency.time_to_first_token"] >= 0


async def test_it_is_inside_the_current_span_or_the_one_that_is_given(spans: Spans) -> None:
    async with Engine(executor=FakeExecutor(vocab_size=2048)) as engine:
        with trace.get_tracer("test").start_as_current_span("mine"):
            async with engine.stream([{"role": "user", "content": "Hi"}], max_tokens=2) as stream:
                await stream.finish()
            await engine.generate(PROMPT, max_tokens=2, trace_headers={"Traceparent": TRACEPARENT})
    chat, given, mine = spans.get_finished_spans()
    assert (chat.name, parent_of(chat)) == ("chat demo", id_of(mine))
    assert parent_of(given) == PARENT_ID
    assert given.context is not None
    assert trace.format_trace_id(given.context.trace_id) == TRACE_ID


async def test_what_is_not_sampled_has_no_span(spans: Spans) -> None:
    async with Engine(executor=FakeExecutor()) as engine:
        await engine.generate(PROMPT, max_tokens=2, trace_headers={"traceparent": TRACEPARENT[:-2] + "00"})
    assert not spans.get_finished_spans()


async def test_each_end_is_an_end(spans: Spans) -> None:
    executor = FakeExecutor(is_manual=True)
    async with Engine(executor=executor, max_waiting=1, max_num_seqs=1) as engine:
        async with engine.stream(PROMPT, request_id="left", max_tokens=20):
            pass
        executor.is_manual = False
        executor.make_step_fail(executor.stats.num_steps, RuntimeError("the step broke"))
        for step in executor.unfinished:
            step.complete()
        with pytest.raises(StepFailed):
            await engine.generate(PROMPT, request_id="failed", max_tokens=2)
        await engine.pause()
        waiting = engine.stream(PROMPT, request_id="waiting")
        async with waiting:
            with pytest.raises(EngineOverloaded):
                await engine.generate(PROMPT, request_id="refused", on_full="raise")
        await engine.resume()
    by_id = {str((span.attributes or {})["gen_ai.request.id"]): span for span in spans.get_finished_spans()}
    ends = {
        name: (span.status.status_code.name, (span.attributes or {}).get("error.type")) for name, span in by_id.items()
    }
    assert ends == {
        "left": ("UNSET", None),
        "failed": ("ERROR", "StepFailed"),
        "refused": ("ERROR", "EngineOverloaded"),
        "waiting": ("UNSET", None),
    }


async def test_an_engine_elsewhere_has_its_part_inside(spans: Spans) -> None:
    opener = Opener("served")
    try:
        engine = await opener.open()
        await engine.generate(PROMPT, seed=1, n=2, max_tokens=3)
        async with engine.stream(PROMPT, seed=2, max_tokens=400):
            pass
        await engine.generate(PROMPT, seed=3, max_tokens=1, trace_headers={"tracestate": "a=b"})
        await until(lambda: len(spans.get_finished_spans()) == 6)
    finally:
        await opener.aclose()
    found = spans.get_finished_spans()
    callers = [span for span in found if span.name == "text_completion demo"]
    parts = {parent_of(span): span for span in found if span.name == "engine demo"}
    assert len(callers) == len(parts) == 3
    whole = dict(parts[id_of(callers[0])].attributes or {})
    assert dict(callers[0].attributes or {})["gen_ai.usage.output_tokens"] == 6
    assert not [name for span in parts.values() for name in span.attributes or {} if "usage" in name]
    assert whole["gen_ai.response.finish_reasons"] == ("length", "length")
    left = dict(parts[id_of(callers[1])].attributes or {})
    assert left["gen_ai.response.finish_reasons"] == ("abort",)


async def test_the_callers_tracestate_reaches_all_spans(spans: Spans) -> None:
    long = ",".join(f"vendor{number}={'x' * 200}" for number in range(5))
    opener = Opener("served")
    try:
        engine = await opener.open()
        for tracestate in ("a=b,c=d", long):
            headers = {"traceparent": TRACEPARENT, "tracestate": tracestate}
            await engine.generate(PROMPT, seed=1, max_tokens=1, trace_headers=headers)
        await until(lambda: len(spans.get_finished_spans()) == 4)
    finally:
        await opener.aclose()
    by_name: dict[str, list[str]] = {"text_completion demo": [], "engine demo": []}
    for span in spans.get_finished_spans():
        assert span.context is not None
        by_name[span.name].append(span.context.trace_state.to_header())
    assert list(by_name.values()) == [["a=b,c=d", long]] * 2


@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
async def test_headers_that_are_no_headers_fail_no_request(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where OpenTelemetry is not loaded nothing reads them on the way."""
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    opener = Opener("served")
    try:
        engine = await opener.open()
        headers = {"traceparent": TRACEPARENT, name: "\ud800"}
        assert (await engine.generate(PROMPT, seed=1, max_tokens=1, trace_headers=headers)).finished
    finally:
        await opener.aclose()


async def test_over_http_it_is_inside_the_requests_span(spans: Spans) -> None:
    async with Engine(executor=FakeExecutor(vocab_size=2048)) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": "Hi", "max_tokens": 2}
            await client.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT})
            await client.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT[:-2] + "00"})
    generation, request = spans.get_finished_spans()
    assert (request.name, parent_of(request)) == ("POST /v1/completions", PARENT_ID)
    assert (generation.name, parent_of(generation)) == ("text_completion demo", id_of(request))


@pytest.mark.parametrize("headers", [{"traceparent": 7}, "traceparent", {"a": None}])
async def test_headers_are_texts(headers: Any) -> None:
    async with Engine(executor=FakeExecutor()) as engine:
        with pytest.raises(InvalidRequest) as caught:
            engine.stream(PROMPT, trace_headers=headers)
        assert caught.value.param == "trace_headers"


def test_a_program_that_does_not_use_opentelemetry_does_not_load_it() -> None:
    program = (
        "import asyncio, sys\nfrom aioengine import Engine\nfrom aioengine.testing import FakeExecutor\n"
        "async def main():\n"
        "    async with Engine(executor=FakeExecutor()) as engine: await engine.generate([1, 2], max_tokens=1)\n"
        "asyncio.run(main())\nprint('opentelemetry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


# Profiles


IDS = [5, 6, 7]


def named(path: Path, category: str) -> list[str]:
    """The names of a trace's events that are of one category."""
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == category]


def steps(path: Path) -> list[str]:
    return named(path, "user_annotation")


async def test_the_demo_models_steps_and_their_operations_are_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with Engine(num_threads=1, kv_cache_memory_bytes=2**24, max_model_len=256) as engine:
        async with engine.profile(path, max_steps=4), anyio.create_task_group() as tasks:
            for seed in range(2):
                tasks.start_soon(lambda seed=seed: engine.generate("Once", seed=seed, max_tokens=8, ignore_eos=True))
        assert len(steps(path)) == 4
        assert all(name.startswith("step ") and name.endswith("tokens)") for name in steps(path))
        assert {"embed_4", "linear_bfloat16_bfloat16", "draw"} <= set(named(path, "cpu_op"))
        assert len((await engine.generate(IDS, max_tokens=3, ignore_eos=True)).outputs[0].token_ids) == 3
    assert os.listdir(tmp_path) == [path.name]


async def test_the_steps_of_the_block_are_in_the_trace_and_no_others(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with serve() as served:
        await served.engine.generate(IDS, max_tokens=2)
        async with served.engine.profile(str(path)):
            await served.engine.generate(IDS, max_tokens=3)
        await served.engine.generate(IDS, max_tokens=2)
        plans = served.executor.plans[2:5]
        assert steps(path) == [f"step {plan.step} (1 rows, {plan.num_tokens.sum()} tokens)" for plan in plans]


@pytest.mark.virtual_clock
async def test_requests_that_ran_before_go_on_and_are_in_the_trace(serve: Any, depth: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with serve(depth=depth) as served, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: served.engine.generate(IDS, max_tokens=30))
        await served.until(lambda: len(served.executor.plans) >= 3)
        async with served.engine.profile(path, max_steps=5):
            await served.until(lambda: len(served.executor.plans) >= 20)
        assert len(steps(path)) == 5


async def test_the_trace_is_there_when_the_block_raises(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with serve() as served:
        with pytest.raises(ZeroDivisionError):
            async with served.engine.profile(path):
                await generate_and_fail(served.engine)
        assert len(steps(path)) == 3
        async with served.engine.profile(path):
            pass
        assert steps(path) == []


async def generate_and_fail(engine: Engine) -> None:
    await engine.generate(IDS, max_tokens=3)
    raise ZeroDivisionError


async def test_a_place_that_cannot_be_written_to_is_an_error_and_the_engine_goes_on(serve: Any, tmp_path: Path) -> None:
    async with serve() as served:
        with pytest.raises(FileNotFoundError, match="missing"):
            async with served.engine.profile(tmp_path / "missing" / "trace.json"):
                await served.engine.generate(IDS, max_tokens=3)
        await served.engine.generate(IDS, max_tokens=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_steps", value) for value in (0, -1, True, 1.0, "1", None, -(10**100))]
    + [("path", value) for value in ("", ".", "/", 5, None, b"trace.json", ["trace.json"])],
    ids=repr,
)
async def test_a_path_names_a_file_and_max_steps_is_a_positive_int(serve: Any, name: str, value: Any) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest, match=rf"{name}=.*(file|at least 1)") as refused:
            served.engine.profile(**{"path": "trace.json", name: value})
        assert refused.value.param == name


async def test_there_is_one_profile_at_a_time(serve: Any, tmp_path: Path) -> None:
    async with serve() as served:
        async with served.engine.profile(tmp_path / "first.json"):
            with pytest.raises(InvalidRequest, match="already"):
                async with served.engine.profile(tmp_path / "second.json"):
                    pytest.fail("it must not begin")
            await served.engine.generate(IDS, max_tokens=3)
        assert os.listdir(tmp_path) == ["first.json"]
        assert len(steps(tmp_path / "first.json")) == 3


async def test_an_engine_that_is_not_running_has_nothing_to_record(serve: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineClosed):
        Engine().profile(tmp_path / "trace.json")
    async with serve() as served:
        late = served.engine.profile(tmp_path / "trace.json")
    with pytest.raises(EngineClosed):
        served.engine.profile(tmp_path / "trace.json")
    with pytest.raises(EngineClosed) as refused:
        async with late:
            pytest.fail("it must not begin")
    assert isinstance(refused.value.__cause__, DeviceLost)


async def test_closing_the_engine_in_the_block_loses_the_trace(serve: Any, tmp_path: Path) -> None:
    async with serve() as served:
        with pytest.raises(EngineClosed, match="there is no trace"):
            async with served.engine.profile(tmp_path / "trace.json"):
                await served.engine.aclose()
        assert os.listdir(tmp_path) == []


async def test_an_error_in_the_block_is_the_news_when_the_trace_is_lost_too(serve: Any, tmp_path: Path) -> None:
    async with serve() as served:
        with pytest.raises(ZeroDivisionError):
            async with served.engine.profile(tmp_path / "trace.json"):
                await close_and_fail(served.engine)


async def close_and_fail(engine: Engine) -> None:
    await engine.aclose()
    raise ZeroDivisionError
