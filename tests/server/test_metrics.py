"""What `GET /metrics` says: read as Prometheus reads it, against the queries of vLLM's dashboards."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server.conftest import record_of
from waiting import until

from aioengine import Engine
from aioengine.server import create_app
from aioengine.server.metrics import (
    OPENMETRICS,
    REPLICA_METRICS,
    TEXT,
    HttpMetrics,
    MetricFamily,
    content_type_for,
    encode,
    read_families,
    read_process,
)
from doubles.fake_executor import FakeExecutor

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by name and labels."""

# What vLLM's Grafana dashboards ask for (the ones in its examples, of 0.10 and of today). Left out are caches that are
# not here (multi-modal, external, speculative).
HISTOGRAMS = (
    "e2e_request_latency_seconds", "inter_token_latency_seconds", "iteration_tokens_total",
    "request_decode_time_seconds", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_prefill_time_seconds", "request_prompt_tokens", "request_queue_time_seconds",
    "request_time_per_output_token_seconds", "time_per_output_token_seconds", "time_to_first_token_seconds",
)  # fmt: skip
DASHBOARD_SERIES = {
    *(f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")),
    "vllm:generation_tokens_total", "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_by_source_total", "vllm:prompt_tokens_total", "vllm:request_success_total",
    "http_requests_total", "http_request_duration_seconds_count", "http_request_duration_seconds_sum",
}  # fmt: skip

# vLLM's bounds. A service level is asked for by the bound's text: le="0.25".
TTFT_BOUNDS = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
TPOT_BOUNDS = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"


class Scrape:
    """An engine's ``/metrics``, without a server."""

    def __init__(self, engine: Engine, model_name: str = "fox") -> None:
        self.engine = engine
        self.http = HttpMetrics()
        self.model_name = model_name

    def families(self) -> list[MetricFamily]:
        return read_families(self.engine, self.http, self.model_name)

    async def render(self, accept: str = "") -> str:
        process = await asyncio.to_thread(read_process)
        return encode([*self.families(), *process], content_type_for(accept)).decode()

    async def parsed(self) -> dict[str, Metric]:
        return {family.name: family for family in parse_text(await self.render())}

    def samples(self) -> Samples:
        return samples_of(parse_text(encode(self.families(), TEXT).decode()))

    def value(self, name: str, **labels: str) -> float:
        """Of the one sample that has these labels, whatever others it has."""
        (found,) = [
            number
            for (said, has), number in self.samples().items()
            if said == name and labels.items() <= dict(has).items()
        ]
        return found

    def served(self, **fields: Any) -> None:
        """A request was, with these fields of its record."""
        self.http.began()
        self.http.ended(record_of(**fields))

    async def work(self) -> None:
        """Something for every series."""
        for _ in range(2):
            output = await self.engine.generate(list(range(1, 40)), max_tokens=8, ignore_eos=True)
            counts: dict[str, Any] = {"n": 1, "max_tokens": 8, "max_choice_tokens": 8}
            self.served(**counts, finish_reasons=("length",), metrics=output.metrics)


def samples_of(families: Iterable[Metric]) -> Samples:
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(seed=1, executor=FakeExecutor(vocab_size=500)) as engine:
        yield engine


@pytest.fixture
def scrape(engine: Engine) -> Scrape:
    return Scrape(engine)


@pytest.fixture
async def worked(scrape: Scrape) -> Scrape:
    await scrape.work()
    return scrape


async def test_every_series_says_something_and_stands_in_the_table_of_the_docs(worked: Scrape) -> None:
    families = (await worked.parsed()).values()
    assert all(family.samples for family in families)
    rows = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
    for name, kind, documentation, _ in REPLICA_METRICS:  # which an engine without replicas has not
        rows.append(f"| `aioengine:{name}{'_total' if kind == 'counter' else ''}` | {kind} | {documentation} |")
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert rows == [line for line in page.read_text().splitlines() if line.startswith("| `")]


async def test_who_waits_is_told_apart_by_what_for() -> None:
    executor = FakeExecutor(vocab_size=500)
    async with Engine(seed=1, executor=executor, max_num_seqs=1) as engine:
        scrape = Scrape(engine)

        def waiting() -> tuple[float, ...]:
            name = "vllm:num_requests_waiting"
            by_reason = (scrape.value(f"{name}_by_reason", reason=reason) for reason in ("capacity", "deferred"))
            return scrape.value(name), *by_reason

        assert waiting() == (0, 0, 0)
        async with engine.stream([1, 2, 3], max_tokens=50, ignore_eos=True, max_unread_tokens=1):
            await until(lambda: waiting() == (1, 0, 1))  # it is not read
            executor.is_manual = True
            streams = [engine.stream([4, 5, number], max_tokens=50, ignore_eos=True) for number in range(3)]
            async with streams[0], streams[1], streams[2]:
                await until(lambda: waiting() == (3, 2, 1))
            executor.is_manual = False
            executor.complete()


async def test_vllms_dashboards_find_what_they_ask_for(worked: Scrape) -> None:
    assert {name for name, _ in worked.samples()} >= DASHBOARD_SERIES
    of_vllm = [has for name, has in worked.samples() if name.startswith("vllm:")]
    assert all({("model_name", "fox"), ("engine", "0")} <= has for has in of_vllm)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("vllm:time_to_first_token_seconds", TTFT_BOUNDS),
        ("vllm:request_time_per_output_token_seconds", TPOT_BOUNDS),
        ("vllm:inter_token_latency_seconds", TPOT_BOUNDS),
    ],
)
async def test_service_levels_of_vllms_dashboards_are_bounds_here(name: str, bounds: str, scrape: Scrape) -> None:
    family = (await scrape.parsed())[name]
    assert {*bounds.split(), "+Inf"} <= {sample.labels.get("le") for sample in family.samples}


async def test_numbers_are_the_engines(worked: Scrape) -> None:
    assert worked.value("vllm:generation_tokens_total") == 16
    assert worked.value("vllm:prompt_tokens_total") == 78
    assert worked.value("vllm:request_success_total", finished_reason="length") == 2
    assert worked.value("vllm:e2e_request_latency_seconds_count") == 2
    assert worked.value("vllm:time_to_first_token_seconds_bucket", le="+Inf") == 2
    assert worked.value("vllm:prefix_cache_hits_total") == 32, "two blocks of the second prompt"
    assert worked.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert worked.value("vllm:prompt_tokens_by_source_total", source="local_compute") == 78 - 32
    assert worked.value("vllm:prompt_tokens_cached_total") == 32
    assert worked.value("vllm:request_prefill_kv_computed_tokens_sum") == 78 - 32
    assert worked.value("vllm:request_time_per_output_token_seconds_count") == 2
    assert worked.value("vllm:request_params_n_sum") == 2
    assert worked.value("vllm:request_params_max_tokens_sum") == 16
    assert worked.value("vllm:request_max_num_generation_tokens_sum") == 16
    assert worked.value("vllm:num_requests_running") == 0
    assert worked.value("aioengine:engine_up") == 1
    assert worked.value("vllm:engine_sleep_state", sleep_state="awake") == 1
    assert worked.value("vllm:cache_config_info", block_size="16", num_gpu_blocks="64", cache_dtype="float32") == 1
    with tempfile.TemporaryFile():
        files = (await worked.parsed())["process_open_fds"].samples[0].value
    assert (await worked.parsed())["process_open_fds"].samples[0].value == files - 1


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", ";;,,;q="])
def test_clients_that_do_not_take_openmetrics_get_prometheus_text(accept: str) -> None:
    assert content_type_for(accept) == TEXT


PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize("accept", [PROMETHEUS_3, "Application/OpenMetrics-Text; version=1.0.0"])
async def test_openmetrics_says_the_same(worked: Scrape, accept: str) -> None:
    body = await worked.render(accept)
    assert content_type_for(accept) == OPENMETRICS
    assert body.endswith("\n# EOF\n")
    assert body.count("# EOF") == 1

    def steady(samples: Samples) -> Samples:
        return {
            key: value for key, value in samples.items() if not key[0].startswith(("process_", "aioengine:engine_"))
        }

    assert steady(samples_of(parse_openmetrics(body))) == steady(worked.samples())


async def test_a_model_may_have_any_name(engine: Engine) -> None:
    name = 'a "b"\\c\nd{e}= le="0.0005",é'
    scrape = Scrape(engine, name)
    assert scrape.value("vllm:inter_token_latency_seconds_bucket", le="0.001", model_name=name) == 0
    assert ("vllm:num_requests_running", frozenset({("model_name", name), ("engine", "0")})) in scrape.samples()


# Whatever the engine's state


async def test_an_engine_that_starts_later_is_seen_and_one_that_closes_is_down() -> None:
    scrape = Scrape(Engine(seed=1, executor=FakeExecutor(vocab_size=500)))
    scrape.served(status=503, outcome="shed")
    assert scrape.value("aioengine:engine_up") == 0
    assert scrape.value("aioengine:http_requests_total", status="503", path="/v1/completions", method="POST") == 1
    assert "vllm:num_requests_running" not in await scrape.parsed()
    async with scrape.engine:
        await scrape.work()
        assert scrape.value("aioengine:engine_up") == 1
        assert scrape.value("vllm:generation_tokens_total") == 16
        assert scrape.value("vllm:prompt_tokens_cached_total") == 32
    assert scrape.value("aioengine:engine_up") == 0
    assert "vllm:generation_tokens" not in await scrape.parsed()


async def test_a_sleeping_engine_is_not_awake(scrape: Scrape) -> None:
    await scrape.engine.sleep(0)
    await scrape.engine.wake_up()
    await scrape.engine.sleep(1)
    assert scrape.value("vllm:engine_sleep_state", sleep_state="awake") == 0
    await scrape.engine.wake_up()
    assert scrape.value("vllm:engine_sleep_state", sleep_state="awake") == 1


# HTTP


async def test_http_requests_are_counted_by_method_route_and_status(scrape: Scrape) -> None:
    scrape.served()
    scrape.served()
    scrape.served(status=400)
    scrape.served(method="GET", route="/health", path="/health")
    scrape.http.began()
    labels = {"method": "POST", "path": "/v1/completions"}
    assert scrape.value("aioengine:http_requests_total", **labels, status="200") == 2
    assert scrape.value("aioengine:http_requests_total", **labels, status="400") == 1
    assert scrape.value("aioengine:http_requests_total", method="GET", path="/health", status="200") == 1
    assert scrape.value("aioengine:http_request_duration_seconds_sum", path="/v1/completions") == 0.75
    assert scrape.value("aioengine:http_request_duration_seconds_bucket", path="/v1/completions", le="0.2") == 0
    assert scrape.value("aioengine:http_requests_in_progress") == 1
    handler = {"handler": "/v1/completions", "method": "POST"}
    assert scrape.value("http_requests_total", **handler, status="2xx") == 2
    assert scrape.value("http_requests_total", **handler, status="4xx") == 1
    assert scrape.value("http_request_duration_seconds_count", handler="/v1/completions") == 3
    assert not any(dict(has).get("handler") == "/health" for _, has in scrape.samples()), "probes are left out"


async def test_how_requests_ended_is_counted(scrape: Scrape) -> None:
    scrape.served(outcome="shed", status=503)
    scrape.served(outcome="client_gone", status=0)
    scrape.served(outcome="client_gone")
    scrape.served(outcome="cut", n=3, completion_tokens=30, max_choice_tokens=12)
    assert scrape.value("aioengine:http_requests_shed_total") == 1
    assert scrape.value("aioengine:http_clients_gone_total") == 2
    assert scrape.value("aioengine:http_clients_cut_total") == 1
    assert scrape.value("vllm:request_max_num_generation_tokens_count") == 1
    assert scrape.value("vllm:request_max_num_generation_tokens_sum") == 12
    assert scrape.value("vllm:request_params_n_sum") == 3
    assert scrape.value("aioengine:http_requests_total", status="none") == 1
    assert scrape.value("aioengine:http_requests_in_progress") == 0


async def test_clients_cannot_make_up_series(engine: Engine) -> None:
    app = create_app(engine)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        for place in range(20):
            await http.request(f"M{place}", f"/{place}")
        answer = await http.get("/metrics")
        assert answer.headers["content-type"] == TEXT
        lines = answer.text.splitlines()
    assert 'aioengine:http_requests_total{method="other",path="other",status="404"} 20.0' in lines
