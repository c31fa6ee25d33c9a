"""`/metrics` of several servers: what is summed, what is counted once, and that no counter goes back."""

from __future__ import annotations

import pytest
from transport.wire_samples import RECORD

from aioengine.outputs.metrics import OF_REQUESTS, EngineMetrics, RequestMetrics, Sample
from aioengine.server.metrics import GroupNumbers, MetricFamily, ServerNumbers, add_up


def counter(name: str, value: float, *, is_of_engine: bool = False, **labels: str) -> MetricFamily:
    samples = [Sample("_total", tuple(labels.items()), value)]
    return MetricFamily(name, "counter", f"What {name} says.", samples, (), is_of_engine)


def gauge(name: str, value: float, *, is_of_engine: bool = False, **labels: str) -> MetricFamily:
    return MetricFamily(name, "gauge", name, [Sample("", tuple(labels.items()), value)], (), is_of_engine)


def values(families: list[MetricFamily]) -> dict[str, float]:
    return {
        ":".join([family.name, *(value for _, value in sample.labels)]): sample.value
        for family in families
        for sample in family.samples
    }


def total(numbers: GroupNumbers, *own: MetricFamily) -> dict[str, float]:
    found = values(numbers.total(list(own), num_servers=2, num_serving=2).families)
    return {name: value for name, value in found.items() if not name.startswith("aioengine:api_server")}


def test_equal_labels_are_summed_and_others_stand_side_by_side() -> None:
    summed = add_up(
        [
            [counter("http", 3, path="/a"), gauge("open", 2)],
            [counter("http", 4, path="/a"), counter("http", 5, path="/b")],
            [counter("late", 1)],
        ]
    )
    assert values(summed) == {"http:/a": 7, "http:/b": 5, "open": 2, "late": 1}
    assert summed[0].documentation == "What http says."


def test_the_engine_s_numbers_are_those_of_one_and_servers_numbers_are_summed() -> None:
    numbers = GroupNumbers()
    for server, requests in enumerate([2, 3]):
        numbers.note(server, ServerNumbers([counter("requests", requests)], num_open=server + 1))
    own = counter("tokens", 100, is_of_engine=True), counter("requests", 0)
    assert total(numbers, *own) == {"tokens": 100, "requests": 5}
    assert numbers.total([], num_servers=2, num_serving=2).num_open == 3


def test_a_server_s_end_takes_its_gauges_and_leaves_its_counters() -> None:
    numbers = GroupNumbers()
    numbers.note(0, ServerNumbers([counter("requests", 7), gauge("open", 2)], 0))
    numbers.note(1, ServerNumbers([counter("requests", 1), gauge("open", 1)], 0))
    assert total(numbers) == {"requests": 8, "open": 3}
    numbers.end(0)
    assert total(numbers) == {"requests": 8, "open": 1}
    numbers.note(
        0, ServerNumbers([counter("requests", 2), gauge("open", 0)], 0)
    )  # started again, it counts from nothing
    assert total(numbers) == {"requests": 10, "open": 1}
    numbers.end(0)
    numbers.end(0)  # before it told anything
    numbers.end(1)
    assert total(numbers) == {"requests": 10}


def test_what_waits_at_servers_waits_in_all() -> None:
    waiting = gauge("vllm:num_requests_waiting", 4, is_of_engine=True)
    by_reason = [
        gauge("x:num_requests_waiting_by_reason", value, is_of_engine=True, reason=reason)
        for reason, value in (("capacity", 3), ("deferred", 1))
    ]
    numbers = GroupNumbers()
    for server in range(2):
        numbers.note(server, ServerNumbers([gauge("aioengine:num_requests_waiting_for_admission", 5)], 0))
    found = numbers.total([waiting, *by_reason], num_servers=2, num_serving=1).families
    said = [(family.name, sample.value) for family in found for sample in family.samples]
    assert said == [
        ("vllm:num_requests_waiting", 14),
        ("x:num_requests_waiting_by_reason", 13),
        ("x:num_requests_waiting_by_reason", 1),
        ("aioengine:num_requests_waiting_for_admission", 10),
        ("aioengine:api_servers", 2),
        ("aioengine:api_servers_serving", 1),
        ("aioengine:api_server_restarts", 0),
    ]


def test_of_processes_some_numbers_have_no_sum() -> None:
    numbers = GroupNumbers()
    numbers.note(0, ServerNumbers([gauge("process_start_time_seconds", 50), gauge("process_open_fds", 5)], 0))
    own = gauge("process_start_time_seconds", 40), gauge("process_open_fds", 7)
    assert total(numbers, *own) == {"process_start_time_seconds": 40, "process_open_fds": 12}


def samples(metrics: EngineMetrics) -> dict[str, list[Sample]]:
    return {metric.name: list(metric.samples()) for metric in metrics.collect()}


@pytest.mark.parametrize("of", ["steps", "requests"])
def test_which_metrics_are_of_requests_is_as_they_are_fed(of: str) -> None:
    metrics = EngineMetrics()
    before = samples(metrics)
    if of == "steps":
        metrics.on_step(RECORD)
        metrics.set_load(1, 2, 1, 3, 4)
    else:
        told = RequestMetrics(
            arrival_time=1.0,
            queue_time_s=0.1,
            prefill_time_s=0.1,
            decode_time_s=0.1,
            inference_time_s=0.2,
            time_to_first_token_s=0.2,
            mean_inter_token_latency_s=0.1,
            e2e_latency_s=0.3,
            num_prompt_tokens=4,
            num_generation_tokens=3,
            num_cached_tokens=2,
        )
        metrics.on_request(told, ("stop",))
        metrics.num_requests_waiting_for_admission.value = 1
    changed = {name for name, found in samples(metrics).items() if found != before[name]}
    assert changed <= OF_REQUESTS if of == "requests" else not changed & OF_REQUESTS
    assert of == "steps" or changed == OF_REQUESTS
