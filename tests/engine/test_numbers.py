"""What an engine counts and times: held against virtual time exactly, and against a plain count."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

import pytest
from engine.oracle import Witness, tokens_of

from aioengine import EngineOverloaded, InvalidRequest, StepFailed

STEP_TIME_S = 0.01
PROMPT = list(range(10, 22))


def steps(count: float) -> Any:
    """So many steps' time."""
    return pytest.approx(count * STEP_TIME_S)


# A request's times


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize(("budget", "num_prefill_steps"), [(2048, 1), (6, 2), (5, 3)])
async def test_a_request_alone_takes_its_prefill_and_a_step_for_each_further_token(
    serve: Any, depth: int, budget: int, num_prefill_steps: int
) -> None:
    config = {"max_num_batched_tokens": budget, "max_num_seqs": 4}
    async with serve(depth=depth, config=config) as served:
        before = time.time()
        output = await served.engine.generate(PROMPT, max_tokens=9)
        metrics = output.metrics

        assert before <= metrics.arrival_time <= time.time()
        assert metrics.queue_time_s == 0.0
        assert metrics.prefill_time_s == steps(num_prefill_steps)
        assert metrics.time_to_first_token_s == steps(num_prefill_steps)
        assert metrics.decode_time_s == steps(8)
        assert metrics.inference_time_s == steps(num_prefill_steps + 8)
        assert metrics.e2e_latency_s == steps(num_prefill_steps + 8)
        assert metrics.mean_inter_token_latency_s == steps(1)
        assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (12, 9)
        assert (metrics.num_cached_tokens, metrics.num_preemptions) == (0, 0)


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize(("chunk", "num_prefill_steps"), [(None, 1), (6, 2), (3, 4)])
async def test_beside_a_running_request_a_prompt_takes_a_step_for_each_chunk(
    serve: Any, depth: int, chunk: int | None, num_prefill_steps: int
) -> None:
    async with serve(depth=depth, config={"max_mixed_prefill_tokens": chunk}) as served:
        async with served.engine.stream(PROMPT, max_tokens=40, ignore_eos=True) as running:
            await anext(running)
            beside = await served.engine.generate(list(range(40, 52)), max_tokens=1)
            tokens = [token async for delta in running for token in delta.token_ids]
        queued = depth - 1  # the steps that were launched before it came
        assert beside.metrics.prefill_time_s == steps(queued + num_prefill_steps)
        assert len(tokens) == 39
        assert running.result.metrics.mean_inter_token_latency_s == steps(1)


@pytest.mark.virtual_clock(seeds=1)
async def test_a_request_of_one_token_has_no_time_between_tokens(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        metrics = (await served.engine.generate(PROMPT, max_tokens=1)).metrics
        assert metrics.decode_time_s == 0.0
        assert metrics.mean_inter_token_latency_s is None
        assert metrics.e2e_latency_s == metrics.time_to_first_token_s == steps(1)


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("max_waiting", [1, 10], ids=["some at the admission", "all in the queue"])
async def test_the_queue_time_is_the_wait_for_others(serve: Any, tasks: Any, depth: int, max_waiting: int) -> None:
    config = {"max_num_seqs": 1, "max_waiting": max_waiting}
    async with serve(depth=depth, config=config) as served:
        started = []
        for seed in range(4):
            started.append(tasks.start(served.engine.generate(PROMPT, seed=seed, max_tokens=5)))
            await served.turn()
        outputs = await tasks.end(*started)
        # Each came a millisecond after the one before it, and each takes five steps.
        for number, output in enumerate(outputs):
            assert output.metrics.queue_time_s == pytest.approx(number * (5 * STEP_TIME_S - 0.001))
            assert output.metrics.inference_time_s == steps(5)
            assert output.metrics.e2e_latency_s == pytest.approx(
                output.metrics.queue_time_s + output.metrics.inference_time_s
            )


@pytest.mark.virtual_clock(seeds=1)
async def test_choices_are_timed_from_the_first_token_of_all_to_the_last_of_any(serve: Any, depth: int) -> None:
    """Two rows: two choices run, then the other two."""
    async with serve(depth=1, config={"max_num_seqs": 2, "max_num_batched_tokens": 64}) as served:
        metrics = (await served.engine.generate(PROMPT, n=4, max_tokens=5)).metrics
        assert metrics.time_to_first_token_s == steps(1)
        assert metrics.decode_time_s == steps(4 + 4)
        assert metrics.e2e_latency_s == steps(9)
        assert metrics.num_generation_tokens == 20
        # Two had their tokens 4 steps after their first one, and two after 8.
        assert metrics.mean_inter_token_latency_s == steps((2 * 4 + 2 * 8) / 16)


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("stage", ["waiting", "running"])
async def test_an_aborted_request_has_the_times_that_it_had(serve: Any, tasks: Any, depth: int, stage: str) -> None:
    witness = Witness()
    async with serve(depth=depth, config={"max_num_seqs": 1}) as served:
        served.engine.add_observer(witness)
        first = tasks.start(served.engine.generate(PROMPT, max_tokens=30, request_id="first"))
        await served.turn()
        second = tasks.start(served.engine.generate(PROMPT, max_tokens=30, request_id="second"))
        await asyncio.sleep(0.054)
        served.engine.abort("first" if stage == "running" else "second")
        metrics = (await (first if stage == "running" else second)).metrics
        if stage == "waiting":
            assert metrics.e2e_latency_s == pytest.approx(0.054)
            assert metrics.queue_time_s is metrics.time_to_first_token_s is None
            assert metrics.num_generation_tokens == 0
        else:
            assert metrics.e2e_latency_s == pytest.approx(0.055)
            assert metrics.time_to_first_token_s == steps(1)
            assert metrics.num_generation_tokens == 5
        assert witness.metrics == [metrics]
        assert witness.reasons == [("abort",)]
        await tasks.end()


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.virtual_clock(seeds=1)
async def test_a_failed_request_has_the_times_that_it_had(serve: Any, depth: int) -> None:
    witness = Witness()
    async with serve(depth=depth) as served:
        served.engine.add_observer(witness)
        served.executor.make_step_fail(3, ArithmeticError("upside down"))
        async with served.engine.stream(PROMPT, max_tokens=30, n=2) as stream:
            with pytest.raises(StepFailed):
                await stream.finish()
            metrics = stream.result.metrics
        assert metrics.time_to_first_token_s == steps(1)
        assert metrics.e2e_latency_s == steps(4)
        assert witness.metrics == [metrics]
        assert served.engine.stats().finished == {"stop": 0, "length": 0, "abort": 0, "error": 2}


# The engine's


@pytest.mark.virtual_clock(seeds=1)
async def test_stats_say_what_is_going_on_now(serve: Any, tasks: Any, depth: int) -> None:
    config = {"max_num_seqs": 2, "max_waiting": 2, "enable_prefix_caching": False}
    async with serve(depth=depth, block_size=4, num_blocks=20, max_model_len=64, config=config) as served:
        served.engine.add_observer(witness := Witness())
        for seed in range(5):
            tasks.start(served.engine.generate(PROMPT, seed=seed, max_tokens=20))
            await served.turn()
        await asyncio.sleep(0.05)
        stats = served.engine.stats()
        assert (stats.running, stats.waiting) == (2, 3), "two in the queue, and one at the door"
        assert (witness.steps[-1].running, witness.steps[-1].waiting) == (2, 3)
        assert stats.kv_cache_usage >= 2 * 3 / 20
        served.engine.abort_all()
        stats = served.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0.0), "now, and not at the last step"
        await tasks.end()
        gauges = [metric for metric in served.engine.metrics.collect() if metric.kind == "gauge"]
        assert {metric.name: [sample.value for sample in metric.samples()] for metric in gauges} == {
            "num_requests_running": [0],
            "num_requests_waiting": [0],
            "num_requests_waiting_by_reason": [0, 0],
            "num_requests_waiting_for_admission": [0],
            "kv_cache_usage_perc": [0.0],
            "kv_cache_cached_perc": [0.0],
            "kv_cache_touched_perc": [witness.steps[-1].touched_blocks / 20],
        }


@pytest.mark.virtual_clock(seeds=1)
async def test_steps_are_timed_and_the_loop_has_no_lag_in_virtual_time(serve: Any, depth: int) -> None:
    witness = Witness()
    async with serve(depth=depth) as served:
        served.engine.add_observer(witness)
        await served.engine.generate(PROMPT, max_tokens=20)
        stats = served.engine.stats()
        for distribution in (stats.step_time_s, stats.device_time_s, stats.loop_lag_s):
            assert distribution.count == len(served.executor.plans) == 20
        assert stats.device_time_s.mean == steps(1)
        assert [record.loop_lag_s for record in witness.steps] == [0.0] * 20
        assert stats.loop_lag_s.mean == 0.0
        # A step is launched as many steps before it ends as are in flight, but for the first few.
        assert [record.step_time_s for record in witness.steps] == [steps(min(i + 1, depth)) for i in range(20)]
        assert [record.step for record in witness.steps] == list(range(20))


async def test_the_loops_lag_is_seen_on_a_real_loop(serve: Any, tasks: Any) -> None:
    async with serve(is_manual=True) as served:
        task = tasks.start(served.engine.generate(PROMPT, max_tokens=1))
        await served.until(lambda: served.executor.unfinished)
        served.executor.complete()
        held_until = time.monotonic() + 0.02
        while time.monotonic() < held_until:  # holds the loop
            pass
        await task
        assert 0.02 <= served.engine.stats().loop_lag_s.mean < 10


@pytest.mark.virtual_clock
async def test_the_counters_agree_with_a_plain_count(serve: Any, tasks: Any, depth: int) -> None:
    rng = random.Random(f"{asyncio.get_running_loop().seed} {depth}")
    witness = Witness()
    config = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_waiting": 6}
    sizes = {"num_blocks": 18, "block_size": 4, "max_model_len": 64}
    async with serve(depth=depth, config=config, **sizes) as served:
        served.engine.add_observer(witness)

        async def one(seed: int) -> Any:
            await asyncio.sleep(rng.random())
            return await served.engine.generate(
                rng.choices(range(3, 9), k=rng.randrange(1, 20)),
                seed=seed,
                n=rng.randrange(1, 4),
                temperature=rng.choice([0.0, 1.0]),
                max_tokens=rng.randrange(1, 25),
                priority=rng.randrange(2),
                stop_token_ids=rng.choices(range(3, 2048), k=100),
            )

        outputs = await asyncio.gather(*(one(seed) for seed in range(25)))
        await served.rest()
        stats = served.engine.stats()

        completions = [completion for output in outputs for completion in output.outputs]
        for reason in ("stop", "length"):
            count = sum(completion.finish_reason == reason for completion in completions)
            assert count
            assert stats.finished[reason] == count
        # Greedy choices are generated once.
        generated = [ids for output in outputs for ids in distinct(tokens_of(output))]
        assert stats.generation_tokens == sum(map(len, generated))
        assert stats.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
        assert stats.preemptions == sum(output.metrics.num_preemptions for output in outputs) > 0
        assert stats.inter_token_latency_s.count == sum(len(ids) - 1 for ids in generated)

        by_arrival = {output.metrics.arrival_time: output.metrics for output in outputs}
        assert {metrics.arrival_time: metrics for metrics in witness.metrics} == by_arrival
        assert len(witness.metrics) == 25
        for name in ("time_to_first_token_s", "e2e_latency_s", "queue_time_s", "prefill_time_s", "decode_time_s"):
            values = [getattr(output.metrics, name) for output in outputs]
            distribution = getattr(stats, name)
            assert distribution.count == 25
            assert distribution.mean == pytest.approx(sum(values) / 25)
        latencies = sum(float(record.inter_token_latencies_s.sum()) for record in witness.steps)
        assert stats.inter_token_latency_s.mean == pytest.approx(latencies / stats.inter_token_latency_s.count)

        assert len(witness.steps) == len(served.executor.plans)
        assert sum(record.num_tokens for record in witness.steps) == served.executor.stats.num_computed_tokens
        assert witness.steps[-1].running == witness.steps[-1].waiting == 0
        assert all(record.num_tokens <= 16 for record in witness.steps)
        assert all(record.running <= 3 for record in witness.steps)
        assert stats.prefix_cache_hit_rate == pytest.approx(
            witness.steps[-1].prefix_cache_hits / witness.steps[-1].prefix_cache_queries
        )


def distinct(choices: list[list[int]]) -> list[list[int]]:
    """Without the repetitions of greedy choices: of sampled ones no two are alike in more than their first tokens."""
    return choices[:1] if all(ids == choices[0] for ids in choices) else choices


@pytest.mark.virtual_clock(seeds=1)
async def test_who_was_refused_is_not_counted(serve: Any, tasks: Any) -> None:
    witness = Witness()
    async with serve(config={"max_num_seqs": 1, "max_waiting": 1}) as served:
        served.engine.add_observer(witness)
        for _ in range(2):
            tasks.start(served.engine.generate(PROMPT, max_tokens=5))
            await served.turn()
        with pytest.raises(EngineOverloaded):
            await served.engine.generate(PROMPT, on_full="raise")
        with pytest.raises(InvalidRequest):
            await served.engine.generate([], max_tokens=5)
        given_up = tasks.start(served.engine.generate(PROMPT, max_tokens=5))
        await served.turn()
        given_up.cancel()
        await tasks.end()
        assert witness.reasons == [("length",)] * 2
        assert served.engine.stats().finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}


@pytest.mark.virtual_clock(seeds=1)
async def test_a_steps_record_does_not_count_who_was_ended_while_it_ran(serve: Any, tasks: Any) -> None:
    witness = Witness()
    async with serve() as served:
        served.engine.add_observer(witness)
        for number in range(2):
            tasks.start(served.engine.generate(PROMPT, max_tokens=8, request_id=f"{number}"))
        await asyncio.sleep(0.035)
        served.engine.abort("0")
        await tasks.end()
        assert [record.running for record in witness.steps] == [2, 2, 2, 1, 1, 1, 1, 0]


# Observers


class Broken(Witness):
    """Fails at whatever it is told, after it has noted it."""

    def on_step(self, record: Any) -> None:
        super().on_step(record)
        raise ArithmeticError("cannot add up steps")

    def on_request(self, metrics: Any, finish_reasons: Any) -> None:
        super().on_request(metrics, finish_reasons)
        raise ArithmeticError("cannot add up requests")


@pytest.mark.virtual_clock(seeds=1)
async def test_what_observers_raise_is_logged_alone(serve: Any, depth: int, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(depth=depth) as served:
        broken, witness = Broken(), Witness()
        served.engine.add_observer(broken)
        served.engine.add_observer(witness)
        output = await served.engine.generate(PROMPT, max_tokens=5)
        assert output.finished
        for observer in (broken, witness):
            assert len(observer.steps) == 5
            assert observer.reasons == [("length",)]
        assert caplog.text.count("Error: cannot add up steps") == 5
        assert caplog.text.count("Error: cannot add up requests") == 1
        assert {record.levelname for record in caplog.records if record.exc_info} == {"ERROR"}
        assert served.engine.stats().generation_tokens == 5


@pytest.mark.virtual_clock(seeds=1)
async def test_observers_that_come_and_go_while_they_are_told_do_not_hide_anything_from_the_others(
    serve: Any, depth: int
) -> None:
    class Once(Witness):
        def on_step(self, record: Any) -> None:
            super().on_step(record)
            remove_once()

        def on_request(self, metrics: Any, finish_reasons: Any) -> None:
            raise AssertionError("it has gone")

    class Inviting(Witness):
        def on_step(self, record: Any) -> None:
            super().on_step(record)
            if len(self.steps) == 2:
                served.engine.add_observer(invited)

    async with serve(depth=depth) as served:
        once, inviting, last, invited = Once(), Inviting(), Witness(), Witness()
        remove_once = served.engine.add_observer(once)
        served.engine.add_observer(inviting)
        served.engine.add_observer(last)
        await served.engine.generate(PROMPT, max_tokens=6)
        assert [len(observer.steps) for observer in (once, inviting, last, invited)] == [1, 6, 6, 4]
        assert last.reasons == invited.reasons == [("length",)]


# The log line


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize(("interval_s", "prompt_rates"), [(0.5, ["24.0", "0.0", "0.0"]), (0.0, [])])
async def test_a_line_about_the_load_comes_at_each_interval(
    serve: Any, depth: int, caplog: pytest.LogCaptureFixture, interval_s: float, prompt_rates: list[str]
) -> None:
    """160 steps are 1.6 seconds: fifty of a token each for a line, of which the first one has the prompt, too."""
    caplog.set_level(logging.INFO, "aioengine")
    async with serve(depth=depth, config={"log_stats_interval_s": interval_s}) as served:
        await served.engine.generate(PROMPT, max_tokens=160)
    lines = [record.message for record in caplog.records if "tokens/s" in record.message]
    for line, prompt_rate in zip(lines, prompt_rates, strict=True):
        assert line.startswith(f"in 0.5 s: prompt {prompt_rate} tokens/s, generation 100.0 tokens/s; running 1, ")
        assert "waiting 0" in line
        assert "preemptions 0" in line
