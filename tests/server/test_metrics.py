"""What `GET /metrics` says: read as Prometheus reads it, against the queries of vLLM's dashboards."""

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server.conftest import record_of
from waiting import until

from aioengine import Engine
from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import EngineDead
from aioengine.server.metrics import OPENMETRICS, SERIES, TEXT, Exposition, HttpMetrics, describe_series, encode
from aioengine.testing import FakeExecutor

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models/{id}", "/health", "/metrics")

# What vLLM's Grafana dashboards ask for (the ones in its examples, of 0.10 and of today), with the labels that they
# use. Left out are caches that are not here (multi-modal, external, speculative).
DASHBOARD_SERIES = {
    "vllm:e2e_request_latency_seconds_bucket": {"le", "model_name"},
    "vllm:e2e_request_latency_seconds_count": {"model_name"},
    "vllm:e2e_request_latency_seconds_sum": {"model_name"},
    "vllm:generation_tokens_total": {"model_name"},
    "vllm:gpu_cache_usage_perc": {"model_name"},
    "vllm:inter_token_latency_seconds_bucket": {"le", "model_name"},
    "vllm:inter_token_latency_seconds_count": {"model_name"},
    "vllm:inter_token_latency_seconds_sum": {"model_name"},
    "vllm:iteration_tokens_total_bucket": {"le", "model_name"},
    "vllm:iteration_tokens_total_count": {"model_name"},
    "vllm:iteration_tokens_total_sum": {"model_name"},
    "vllm:kv_cache_usage_perc": {"model_name"},
    "vllm:num_preemptions_total": {"model_name"},
    "vllm:num_requests_running": {"model_name"},
    "vllm:num_requests_waiting": {"model_name"},
    "vllm:num_requests_waiting_by_reason": {"model_name", "reason"},
    "vllm:prefix_cache_hits_total": {"model_name"},
    "vllm:prefix_cache_queries_total": {"model_name"},
    "vllm:prompt_tokens_by_source_total": {"model_name", "source"},
    "vllm:prompt_tokens_total": {"model_name"},
    "vllm:request_decode_time_seconds_sum": {"model_name"},
    "vllm:request_generation_tokens_bucket": {"le", "model_name"},
    "vllm:request_generation_tokens_count": {"model_name"},
    "vllm:request_generation_tokens_sum": {"model_name"},
    "vllm:request_max_num_generation_tokens_sum": {"model_name"},
    "vllm:request_prefill_time_seconds_sum": {"model_name"},
    "vllm:request_prompt_tokens_bucket": {"le", "model_name"},
    "vllm:request_prompt_tokens_count": {"model_name"},
    "vllm:request_prompt_tokens_sum": {"model_name"},
    "vllm:request_queue_time_seconds_sum": {"model_name"},
    "vllm:request_success_total": {"model_name", "finished_reason"},
    "vllm:request_time_per_output_token_seconds_bucket": {"le", "model_name"},
    "vllm:request_time_per_output_token_seconds_count": {"model_name"},
    "vllm:time_per_output_token_seconds_bucket": {"le", "model_name"},
    "vllm:time_per_output_token_seconds_count": {"model_name"},
    "vllm:time_per_output_token_seconds_sum": {"model_name"},
    "vllm:time_to_first_token_seconds_bucket": {"le", "model_name"},
    "vllm:time_to_first_token_seconds_count": {"model_name"},
    "vllm:time_to_first_token_seconds_sum": {"model_name"},
    "http_requests_total": {"handler", "status"},
    "http_request_duration_seconds_count": {"handler"},
    "http_request_duration_seconds_sum": {"handler"},
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
    "process_open_fds": set(),
}

# vLLM's bounds. A service level is asked for by the bound's text: le="0.25".
TTFT_BOUNDS = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
TPOT_BOUNDS = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"


def served(http_metrics: HttpMetrics, **fields: Any) -> None:
    http_metrics.began()
    http_metrics.ended(record_of(**fields))


def parsed(body: bytes) -> dict[str, Metric]:
    return {family.name: family for family in parse_text(body.decode())}


def samples(exposition: Exposition) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    body = encode(exposition.families(), TEXT)
    found = {}
    for family in parse_text(body.decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def value(exposition: Exposition, name: str, **labels: str) -> float:
    """Of the one sample that has these labels, whatever others it has."""
    (found,) = [
        number
        for (said, has), number in samples(exposition).items()
        if said == name and labels.items() <= dict(has).items()
    ]
    return found


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(seed=1, executor=FakeExecutor(vocab_size=500)) as engine:
        yield engine


@pytest.fixture
def http_metrics() -> HttpMetrics:
    return HttpMetrics(ROUTES)


@pytest.fixture
def exposition(engine: Engine, http_metrics: HttpMetrics) -> Exposition:
    return Exposition(engine, http_metrics, "vllm:", "fox")


@pytest.fixture
async def worked(engine: Engine, exposition: Exposition, http_metrics: HttpMetrics) -> Exposition:
    """With something in every series."""
    await work(engine, exposition, http_metrics)
    return exposition


async def work(engine: Engine, exposition: Exposition, http_metrics: HttpMetrics) -> None:
    exposition.watch()
    for _ in range(2):
        output = await engine.generate(list(range(1, 40)), max_tokens=8, ignore_eos=True)
        counts: dict[str, Any] = {"n": 1, "max_tokens": 8, "prompt_tokens": 39, "completion_tokens": 8}
        served(http_metrics, **counts, finish_reasons=("length",), metrics=output.metrics)


async def test_every_series_of_the_mapping_is_there(worked: Exposition) -> None:
    families = parsed((await worked.render(None))[0])
    for series, (name, kind, documentation, _) in zip(SERIES, describe_series(), strict=True):
        family = families[series.full_name("vllm:")]
        assert family.type == kind
        assert family.documentation == documentation
        assert family.samples, f"{name} says nothing"
    assert len(families) == len(SERIES)


async def test_the_process_is_what_prometheus_own_collector_says_it_is(exposition: Exposition) -> None:
    with tempfile.TemporaryFile():
        with_file = await process_samples(exposition)
    without = await process_samples(exposition)
    for family in prometheus_client.ProcessCollector(registry=None).collect():
        (sample,) = family.samples
        assert without[sample.name] == pytest.approx(sample.value, rel=0.5), sample.name
    assert with_file["process_open_fds"] == without["process_open_fds"] + 1
    assert without["process_start_time_seconds"] < time.time()


async def process_samples(exposition: Exposition) -> dict[str, float]:
    families = parsed((await exposition.render(None))[0]).values()
    found = [sample for family in families for sample in family.samples if sample.name.startswith("process_")]
    return {sample.name: sample.value for sample in found if not sample.labels}


async def test_who_waits_is_told_apart_by_what_for() -> None:
    executor = FakeExecutor(vocab_size=500)
    async with Engine(seed=1, executor=executor, max_num_seqs=1) as engine:
        exposition = Exposition(engine, HttpMetrics(ROUTES), "vllm:", "fox")

        def waiting() -> tuple[float, ...]:
            name = "vllm:num_requests_waiting"
            by_reason = (value(exposition, f"{name}_by_reason", reason=reason) for reason in ("capacity", "deferred"))
            return value(exposition, name), *by_reason

        assert waiting() == (0, 0, 0)
        async with engine.stream([1, 2, 3], max_tokens=50, ignore_eos=True, max_unread_tokens=1):
            await until(lambda: waiting() == (1, 0, 1))  # nobody reads it
            executor.is_manual = True
            streams = [engine.stream([4, 5, number], max_tokens=50, ignore_eos=True) for number in range(3)]
            async with streams[0], streams[1], streams[2]:
                await until(lambda: waiting() == (3, 2, 1))
            executor.is_manual = False
            executor.complete()


async def test_vllms_dashboards_find_what_they_ask_for(worked: Exposition) -> None:
    labels: dict[str, set[str]] = {}
    for name, has in samples(worked):
        labels.setdefault(name, set()).update(label for label, _ in has)
    missing = {name: asked for name, asked in DASHBOARD_SERIES.items() if not asked <= labels.get(name, set())}
    assert missing == {}
    of_vllm = [has for name, has in samples(worked) if name.startswith("vllm:")]
    assert all({("model_name", "fox"), ("engine", "0")} <= has for has in of_vllm)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("vllm:time_to_first_token_seconds", TTFT_BOUNDS),
        ("vllm:request_time_per_output_token_seconds", TPOT_BOUNDS),
        ("vllm:inter_token_latency_seconds", TPOT_BOUNDS),
    ],
)
async def test_service_levels_of_vllms_dashboards_are_bounds_here(
    name: str, bounds: str, exposition: Exposition
) -> None:
    family = parsed((await exposition.render(None))[0])[name]
    assert {*bounds.split(), "+Inf"} <= {sample.labels.get("le") for sample in family.samples}


async def test_numbers_are_the_engines(worked: Exposition) -> None:
    assert value(worked, "vllm:generation_tokens_total") == 16
    assert value(worked, "vllm:prompt_tokens_total") == 78
    assert value(worked, "vllm:request_success_total", finished_reason="length") == 2
    assert value(worked, "vllm:e2e_request_latency_seconds_count") == 2
    assert value(worked, "vllm:time_to_first_token_seconds_bucket", le="+Inf") == 2
    assert value(worked, "vllm:prefix_cache_hits_total") == 32, "two blocks of the second prompt"
    assert value(worked, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert value(worked, "vllm:prompt_tokens_by_source_total", source="local_compute") == 78 - 32
    assert value(worked, "vllm:prompt_tokens_cached_total") == 32
    assert value(worked, "vllm:request_prefill_kv_computed_tokens_sum") == 78 - 32
    assert value(worked, "vllm:request_time_per_output_token_seconds_count") == 2
    assert value(worked, "vllm:request_params_n_sum") == 2
    assert value(worked, "vllm:request_params_max_tokens_sum") == 16
    assert value(worked, "vllm:request_max_num_generation_tokens_sum") == 16
    assert value(worked, "vllm:num_requests_running") == 0
    assert value(worked, "aioengine:engine_up") == 1
    assert value(worked, "vllm:engine_sleep_state", sleep_state="awake") == 1
    assert value(worked, "vllm:cache_config_info", block_size="16", num_gpu_blocks="64", cache_dtype="float32") == 1


async def test_prometheus_reads_what_its_own_encoder_would_write(worked: Exposition) -> None:
    body, content_type = await worked.render(None)
    assert content_type == TEXT

    class Parsed:
        def collect(self) -> list[Metric]:
            return list(parse_text(body.decode()))

    assert sorted(generate_latest(Parsed()).decode().splitlines()) == sorted(body.decode().splitlines())


async def test_openmetrics_says_the_same(worked: Exposition) -> None:
    body, content_type = await worked.render("application/openmetrics-text; version=1.0.0")
    assert content_type == OPENMETRICS
    assert body.endswith(b"\n# EOF\n")
    assert body.count(b"# EOF") == 1
    families = {family.name: family for family in parse_openmetrics(body.decode())}
    assert len(families) == len(SERIES)
    in_text = {key: number for key, number in samples(worked).items() if "step_age" not in key[0]}
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
        if "step_age" not in sample.name and not sample.name.startswith("process_")
    }
    assert found == in_text


PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, TEXT),
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain", TEXT),
        (PROMETHEUS_3, OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text; q=0.5, text/plain; q=0.9", TEXT),
        ("application/openmetrics-text; q=0", TEXT),
        ("application/openmetrics-text; version=rubbish; escaping=rubbish", OPENMETRICS),
        ("application/openmetrics-text; q=rubbish", TEXT),
        ("application/openmetrics-text; q=nan", TEXT),
        (";;,,;q=", TEXT),
    ],
)
async def test_the_client_chooses_the_format_and_rubbish_gets_text(
    accept: str | None, content_type: str, exposition: Exposition
) -> None:
    assert (await exposition.render(accept))[1] == content_type


async def test_another_prefix_and_a_model_of_any_name(engine: Engine, http_metrics: HttpMetrics) -> None:
    name = 'a "b"\\c\nd{e}= le="0.0005",é'
    exposition = Exposition(engine, http_metrics, "llm_", name)
    assert value(exposition, "llm_num_requests_running") == 0
    assert value(exposition, "llm_inter_token_latency_seconds_bucket", le="0.001", model_name=name) == 0
    assert ("llm_num_requests_running", frozenset({("model_name", name), ("engine", "0")})) in samples(exposition)
    assert not any(said.startswith("vllm:") for said, _ in samples(exposition))


async def test_nothing_goes_into_the_registry_of_the_host(exposition: Exposition) -> None:
    await exposition.render(None)
    assert not any(
        family.name.startswith(("vllm:", "aioengine:", "http_")) for family in prometheus_client.REGISTRY.collect()
    )


# Whatever the engine's state


async def test_an_engine_that_was_not_started_leaves_http_alone(http_metrics: HttpMetrics) -> None:
    exposition = Exposition(Engine(seed=1, executor=FakeExecutor()), http_metrics, "vllm:", "fox")
    served(http_metrics, status=503, outcome="shed")
    assert value(exposition, "aioengine:engine_up") == 0
    assert value(exposition, "aioengine:http_requests_total", status="503", path="/v1/completions", method="POST") == 1
    assert "vllm:num_requests_running" not in parsed((await exposition.render(None))[0])


async def test_an_engine_that_starts_later_is_seen_and_one_that_closes_is_down(http_metrics: HttpMetrics) -> None:
    engine = Engine(seed=1, executor=FakeExecutor(vocab_size=500))
    exposition = Exposition(engine, http_metrics, "vllm:", "fox")
    exposition.watch()
    await exposition.render(None)
    async with engine:
        await work(engine, exposition, http_metrics)
        assert value(exposition, "aioengine:engine_up") == 1
        assert value(exposition, "vllm:generation_tokens_total") == 16
        assert value(exposition, "vllm:prompt_tokens_cached_total") == 32
    assert value(exposition, "aioengine:engine_up") == 0
    assert "vllm:generation_tokens" not in parsed((await exposition.render(None))[0])
    exposition.close()


async def test_a_dead_engine_is_down(http_metrics: HttpMetrics) -> None:
    executor = FakeExecutor(vocab_size=500, is_manual=True)
    async with Engine(seed=1, executor=executor) as engine:
        exposition = Exposition(engine, http_metrics, "vllm:", "fox")
        assert value(exposition, "aioengine:engine_up") == 1
        request = asyncio.gather(engine.generate([1, 2, 3], max_tokens=5), return_exceptions=True)
        await until(lambda: executor.unfinished)
        executor.unfinished[0].lose(DeviceLost("on fire"))
        (error,) = await request
        assert isinstance(error, EngineDead)
        assert value(exposition, "aioengine:engine_up") == 0
        served(http_metrics)
        assert value(exposition, "aioengine:http_requests_total", status="200") == 1


async def test_a_sleeping_engine_is_not_awake(engine: Engine, exposition: Exposition) -> None:
    await engine.sleep(0)
    await engine.wake_up()
    await engine.sleep(1)
    assert value(exposition, "vllm:engine_sleep_state", sleep_state="awake") == 0
    await engine.wake_up()
    assert value(exposition, "vllm:engine_sleep_state", sleep_state="awake") == 1


async def test_closing_takes_the_observer_away(engine: Engine, exposition: Exposition) -> None:
    exposition.watch()
    exposition.watch()
    exposition.close()
    exposition.close()
    exposition.watch()
    await engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True)
    assert value(exposition, "vllm:request_prefill_kv_computed_tokens_count") == 0


# HTTP


async def test_http_requests_are_counted_by_method_route_and_status(
    exposition: Exposition, http_metrics: HttpMetrics
) -> None:
    served(http_metrics)
    served(http_metrics)
    served(http_metrics, status=400)
    served(http_metrics, method="GET", route="/health", path="/health")
    http_metrics.began()
    labels = {"method": "POST", "path": "/v1/completions"}
    assert value(exposition, "aioengine:http_requests_total", **labels, status="200") == 2
    assert value(exposition, "aioengine:http_requests_total", **labels, status="400") == 1
    assert value(exposition, "aioengine:http_requests_total", method="GET", path="/health", status="200") == 1
    assert value(exposition, "aioengine:http_request_duration_seconds_sum", path="/v1/completions") == 0.75
    assert value(exposition, "aioengine:http_request_duration_seconds_bucket", path="/v1/completions", le="0.2") == 0
    assert value(exposition, "aioengine:http_requests_in_progress") == 1
    handler = {"handler": "/v1/completions", "method": "POST"}
    assert value(exposition, "http_requests_total", **handler, status="2xx") == 2
    assert value(exposition, "http_requests_total", **handler, status="4xx") == 1
    assert value(exposition, "http_request_duration_seconds_count", handler="/v1/completions") == 3
    assert not any(dict(has).get("handler") == "/health" for _, has in samples(exposition)), "probes are left out"


async def test_how_requests_ended_is_counted(exposition: Exposition, http_metrics: HttpMetrics) -> None:
    served(http_metrics, outcome="shed", status=503)
    served(http_metrics, outcome="client_gone", status=0)
    served(http_metrics, outcome="client_gone")
    served(http_metrics, outcome="cut")
    assert value(exposition, "aioengine:http_requests_shed_total") == 1
    assert value(exposition, "aioengine:http_clients_gone_total") == 2
    assert value(exposition, "aioengine:http_clients_cut_total") == 1
    assert value(exposition, "aioengine:http_requests_total", status="none") == 1
    assert value(exposition, "aioengine:http_requests_in_progress") == 0


async def test_clients_cannot_make_up_series(exposition: Exposition, http_metrics: HttpMetrics) -> None:
    for place in range(1000):
        served(http_metrics, method=f"M{place}", route=f"/{place}", path=f"/{place}", status=1000 + place)
    assert value(exposition, "aioengine:http_requests_total", method="other", path="other", status="none") == 1000
    assert len((await exposition.render(None))[0]) < 70_000


async def test_choices_of_a_request_have_a_longest_one(exposition: Exposition, http_metrics: HttpMetrics) -> None:
    served(http_metrics, n=3, completion_tokens=30, max_choice_tokens=12)
    served(http_metrics, n=3, completion_tokens=30)  # not known
    served(http_metrics, num_prompts=2, completion_tokens=30)  # not known
    assert value(exposition, "vllm:request_max_num_generation_tokens_count") == 1
    assert value(exposition, "vllm:request_max_num_generation_tokens_sum") == 12
    assert value(exposition, "vllm:request_params_n_sum") == 7


async def test_routes_that_come_later_are_written_too(exposition: Exposition, http_metrics: HttpMetrics) -> None:
    served(http_metrics)
    await exposition.render(None)
    served(http_metrics, route="/v1/models/{id}", method="GET")
    assert value(exposition, "aioengine:http_requests_total", path="/v1/models/{id}") == 1
    assert value(exposition, "aioengine:http_request_duration_seconds_count", path="/v1/models/{id}") == 1
    assert value(exposition, "aioengine:http_request_duration_seconds_count", path="/v1/completions") == 1


def test_every_series_is_in_the_table_of_the_docs_as_it_is() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert [line for line in page.read_text().splitlines() if line.startswith("| `")] == [
        f"| `{name}` | {kind} | {documentation} | {note} |" for name, kind, documentation, note in describe_series()
    ]


def test_the_mapping_can_be_printed() -> None:
    rows = describe_series("vllm:")
    names = [name for name, *_ in rows]
    assert len(set(names)) == len(names) == len(SERIES)
    assert all(re.fullmatch(r"(vllm:|aioengine:|http_|process_)[a-z0-9_]+", name) for name in names)
    assert all(documentation.endswith(".") for _, _, documentation, _ in rows)
