"""`LLMEngine`: requests are added, steps bring what is new, and nothing is lost, told twice or left behind."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from blocking.conftest import ENDLESS, on_ctrl_c, press_ctrl_c

from aioengine import (
    LLM,
    AioEngineError,
    ConfigError,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineDead,
    InvalidRequest,
    LLMEngine,
    PromptTooLong,
    RequestOutput,
    SamplingParams,
    StepFailed,
)
from aioengine.blocking.loop_thread import _BlockingCall
from aioengine.core.executor_protocol import DeviceLost

IDS = [5, 6, 7]
CHAT = [{"role": "user", "content": "Hello"}]

Open = Callable[..., LLMEngine]


def params(seed: int = 0, max_tokens: int = 5, **options: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, **options)


def add(engine: LLMEngine, count: int, max_tokens: int = 5) -> None:
    """Add requests "0", "1", … with those seeds."""
    for number in range(count):
        engine.add_request(str(number), IDS, params(number, max_tokens))


def run_to_end(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step until all have ended: each one's outputs, in order."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        news = engine.step()
        assert news, "a step came back with nothing"
        assert len({output.request_id for output in news}) == len(news)
        for output in news:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def outcomes(engine: LLMEngine) -> tuple[list[str], list[AioEngineError]]:
    """Step until all have ended: the ids of those that did, and what was raised."""
    ended: list[str] = []
    errors: list[AioEngineError] = []
    while engine.has_unfinished_requests():
        try:
            ended += [output.request_id for output in engine.step() if output.finished]
        except AioEngineError as error:
            errors.append(error)
    return ended, errors


# What steps bring


def test_an_output_has_all_so_far_and_the_finished_one_comes_once(open_engine: Open) -> None:
    engine = open_engine()
    assert engine.add_request("a", "Once upon a time", params(max_tokens=6, n=3)) == "a"
    engine.add_request("b", IDS, params(max_tokens=3))
    assert engine.get_num_unfinished_requests() == 2
    for outputs in run_to_end(engine).values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for before, after in itertools.pairwise(outputs):
            for old, new in zip(before.outputs, after.outputs, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
            assert after.outputs != before.outputs
    assert engine.step() == []


# More than the engine takes


def test_more_requests_than_the_engine_takes_all_end_as_they_were_given(open_engine: Open) -> None:
    engine = open_engine(max_num_seqs=2, max_waiting=2)
    ids = list(IDS)
    for number in range(50):
        engine.add_request(str(number), ids, params(number))
    ids.append(9)
    assert engine.get_num_unfinished_requests() == 50
    outputs = [run[-1] for run in run_to_end(engine).values()]
    assert [(output.prompt_token_ids, len(output.outputs[0].token_ids)) for output in outputs] == [(IDS, 5)] * 50
    assert not engine.has_unfinished_requests()


def test_those_that_wait_outside_come_by_priority_then_age(open_engine: Open, device: Any) -> None:
    engine = open_engine(device, max_num_seqs=1, max_waiting=1)
    engine.sleep(0, mode="keep")
    for seed, priority in enumerate([0, 0, 5, 5, 1, 1]):
        engine.add_request(str(seed), IDS, params(seed), priority=priority)
    engine.wake_up()
    run_to_end(engine)
    assert device.seeds() == [0, 1, 4, 5, 2, 3]


def test_a_text_that_waits_outside_and_is_too_long_fails_in_a_step(open_engine: Open) -> None:
    engine = open_engine(max_num_seqs=1, max_waiting=1)
    engine.sleep(0, mode="keep")
    add(engine, 3)
    engine.add_request("long", "dog " * 300, params())
    engine.wake_up()
    ended, (error,) = outcomes(engine)
    assert sorted(ended) == ["0", "1", "2"]
    assert isinstance(error, PromptTooLong)
    assert error.__notes__ == ["request_id='long'"]


# What is refused


def test_an_id_names_one_unfinished_request(open_engine: Open) -> None:
    engine = open_engine(max_num_seqs=1, max_waiting=1)
    add(engine, 4)
    for number in range(4):  # running, waiting, and outside
        with pytest.raises(InvalidRequest, match="unfinished request") as caught:
            engine.add_request(str(number), IDS, params())
        assert caught.value.param == "request_id"
    assert engine.get_num_unfinished_requests() == 4
    run_to_end(engine)
    engine.add_request("0", IDS, params())
    assert set(run_to_end(engine)) == {"0"}


@pytest.mark.parametrize(
    ("param", "bad"),
    [
        ("request_id", {"request_id": 7}),
        ("request_id", {"request_id": ""}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": "dog " * 300}),
        ("params", {"params": {"max_tokens": 3}}),
        ("n", {"params": SamplingParams(n=1000)}),
        ("priority", {"priority": "high"}),
        ("cache_salt", {"cache_salt": ""}),
    ],
)
def test_a_bad_value_is_refused_when_it_is_added(open_engine: Open, param: str, bad: dict[str, Any]) -> None:
    engine = open_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.add_request(**{"request_id": "a", "prompt": IDS, **bad})
    assert caught.value.param == param
    assert not engine.has_unfinished_requests()
    engine.add_request("a", IDS, params())
    assert set(run_to_end(engine)) == {"a"}


# Abort


def test_of_an_aborted_request_nothing_comes_any_more(open_engine: Open, patient_device: Any) -> None:
    engine = open_engine(patient_device, max_num_seqs=2, max_waiting=2)
    for number in range(8):
        engine.add_request(str(number), IDS, params(max_tokens=50 if number in (2, 4, 5, 6) else ENDLESS))
    engine.step()
    engine.abort_request("0")
    engine.abort_request(["1", "3", "7", "unknown"])
    engine.abort_request("0")
    assert engine.get_num_unfinished_requests() == 4
    engine.add_request("0", IDS, params(max_tokens=2))
    outputs = run_to_end(engine)
    assert set(outputs) == {"0", "2", "4", "5", "6"}
    assert [len(output.outputs[0].token_ids) for output in outputs["0"]][-1] == 2
    assert engine.stats().running == engine.stats().waiting == 0


# Failures


def test_a_failed_request_raises_once_and_the_others_go_on(open_engine: Open, device: Any) -> None:
    device.make_row_fail(2, 0, ValueError("broken row"))
    engine = open_engine(device)
    engine.add_request("bad", IDS, params(0))
    engine.add_request("good", IDS, params(1))
    ended, (error,) = outcomes(engine)
    assert ended == ["good"]
    assert isinstance(error, StepFailed)
    assert error.__notes__ == ["request_id='bad'"]
    engine.add_request("bad", IDS, params())
    assert run_to_end(engine)["bad"][-1].finished


@pytest.mark.usefixtures("quiet_log")
def test_a_dead_engine_is_heard_once(open_engine: Open, device: Any) -> None:
    engine = open_engine(device, max_num_seqs=2, max_waiting=2)
    engine.sleep(0, mode="keep")
    device.make_step_fail(4, DeviceLost("unplugged"))
    add(engine, 8, 20)
    engine.wake_up()
    with pytest.raises(EngineDead):
        run_to_end(engine)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    for ask in (engine.check_health, lambda: engine.add_request("a", IDS)):
        with pytest.raises(EngineDead):
            ask()


# Ctrl-C


@pytest.mark.parametrize("every", [7, 1], ids=["now and then", "while the one before is dealt with"])
def test_ctrl_c_in_a_step_loses_nothing(open_engine: Open, device: Any, every: int) -> None:
    engine = open_engine(device, max_num_seqs=3, max_waiting=3)

    def interrupt_sometimes() -> None:
        if device.num_sampled % every == 0:
            press_ctrl_c()

    def raise_in_a_wait(number: int, frame: Any) -> None:
        """As Ctrl-C does by itself, but where it would hit this test's own code."""
        while frame is not None:
            if frame.f_code is _BlockingCall.wait.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    engine.sleep(0, mode="keep")
    add(engine, 10, 9)
    ended: dict[str, int] = {}
    num_interrupts = 0
    with on_ctrl_c(raise_in_a_wait):
        device.on_sample = interrupt_sometimes
        try:
            engine.wake_up()
        except KeyboardInterrupt:
            num_interrupts += 1
        while engine.has_unfinished_requests():
            try:
                for output in engine.step():
                    if output.finished:
                        assert output.request_id not in ended
                        ended[output.request_id] = len(output.outputs[0].token_ids)
            except KeyboardInterrupt:
                num_interrupts += 1
    assert ended == {str(number): 9 for number in range(10)}
    assert num_interrupts
    assert engine.stats().running == engine.stats().waiting == 0


def test_what_ctrl_c_meets_on_its_way_comes_in_the_next_step(
    open_engine: Open, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(device)
    wait = _BlockingCall.wait
    is_armed = False

    def wait_and_be_interrupted(call: Any, *args: Any) -> None:
        nonlocal is_armed
        wait(call, *args)
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    monkeypatch.setattr(_BlockingCall, "wait", wait_and_be_interrupted)
    device.make_row_fail(0, 0, ValueError("broken row"))
    engine.sleep(0, mode="keep")
    for request_id in ("bad", "good"):
        engine.add_request(request_id, IDS, params(max_tokens=1))
    engine.wake_up()
    outcomes: list[str] = []
    while engine.has_unfinished_requests():
        is_armed = True
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        try:
            outcomes += [output.request_id for output in engine.step()]
        except StepFailed as error:
            outcomes += error.__notes__
    assert sorted(outcomes) == ["good", "request_id='bad'"]


# Several threads


def test_several_threads_add_and_step(open_engine: Open) -> None:
    engine = open_engine(max_num_seqs=4, max_waiting=4)
    ended: list[str] = []
    has_begun = threading.Event()

    def add(first: int) -> None:
        for number in range(first, first + 25):
            engine.add_request(str(number), IDS, params(number, 1 + number % 7))
            has_begun.set()

    def step() -> None:
        has_begun.wait()
        while len(ended) < 100:
            ended.extend(output.request_id for output in engine.step() if output.finished)

    with ThreadPoolExecutor(8) as pool:
        for done in [*pool.map(add, range(0, 100, 25)), *[pool.submit(step) for _ in range(3)]]:
            if done is not None:
                done.result()
    assert sorted(map(int, ended)) == list(range(100))
    assert not engine.has_unfinished_requests()


def test_a_step_that_waits_hears_that_another_thread_has_aborted(open_engine: Open, device: Any) -> None:
    device.is_manual = True
    engine = open_engine(device)
    engine.add_request("a", IDS, params())
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(engine.step) for _ in range(2)]
        while len(engine._host._calls) < 2:
            pass
        engine.abort_request("a")
        assert [step.result() for step in steps] == [[], []]


# Sleep


def test_a_step_says_that_the_engine_sleeps_instead_of_waiting_for_ever(open_engine: Open) -> None:
    engine = open_engine()
    assert not engine.is_sleeping()
    engine.sleep(0, mode="keep")
    assert engine.is_sleeping()
    engine.add_request("a", IDS, params(max_tokens=20))
    engine.add_request("b", IDS, params())
    with pytest.raises(RuntimeError, match="wake_up"):
        run_to_end(engine)
    assert engine.get_num_unfinished_requests() == 2
    engine.wake_up()
    assert not engine.is_sleeping()
    assert {name: len(outputs[-1].outputs[0].token_ids) for name, outputs in run_to_end(engine).items()} == {
        "a": 20,
        "b": 5,
    }


def test_requests_that_sleep_aborts_end_with_what_they_have(open_engine: Open, patient_device: Any) -> None:
    engine = open_engine(patient_device)
    engine.add_request("a", IDS, params(max_tokens=ENDLESS))
    engine.step()
    engine.sleep(0)
    outputs = run_to_end(engine)["a"]
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].outputs[0].token_ids
    engine.wake_up(["scheduling"])
    engine.add_request("a", IDS, params())
    assert run_to_end(engine)["a"][-1].outputs[0].finish_reason == "length"


# The rest of the interface


def test_numbers_health_tasks_and_a_prefix_cache_that_can_be_reset(open_engine: Open) -> None:
    engine = open_engine()
    prompt = list(range(100, 140))
    cached = []
    for reset in (False, False, True):
        if reset:
            assert engine.reset_prefix_cache() is True
        engine.add_request("a", prompt, params())
        cached.append(run_to_end(engine)["a"][-1].num_cached_tokens)
    assert cached == [0, 32, 0]
    assert engine.stats().generation_tokens == 15
    assert "generation_tokens" in {metric.name.removeprefix("vllm:") for metric in engine.get_metrics()}
    assert engine.check_health().status == "ALIVE"
    assert engine.get_supported_tasks() == ("generate",)
    assert engine.engine_config == EngineConfig()


def test_a_profile_has_the_steps_between_start_and_stop_and_goes_to_the_current_folder_unless_told_otherwise(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = open_engine()
    for arguments in ((), (tmp_path / "trace.json",)):
        engine.start_profile(max_steps=3)
        engine.add_request("a", IDS, params())
        run_to_end(engine)
        path = engine.stop_profile(*arguments)
        assert (path.absolute().parent, path.suffix) == (tmp_path, ".json")
        assert len(json.loads(path.read_text())["traceEvents"]) == 3


def test_what_is_asked_of_the_whole_engine_is_passed_on(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answering(name: str, answer: Any) -> Callable[..., Any]:
        async def method(self: Engine, *args: Any, **kwargs: Any) -> Any:
            asked.append((name, args, kwargs))
            return answer

        return method

    answers = {"collective_rpc": [1], "apply_model": [2], "update_weights": None, "save_sharded_state": ["a"]}
    for name, answer in answers.items():
        monkeypatch.setattr(Engine, name, answering(name, answer))
    engine = open_engine()
    assert engine.collective_rpc("f", args=(1,), kwargs={"b": 2}) == [1]
    assert engine.apply_model(len) == [2]
    engine.update_weights("folder")
    engine.update_weights(tensors={"w": 1})
    assert engine.save_sharded_state("folder", max_shard_bytes=7) == ["a"]
    assert asked == [
        ("collective_rpc", ("f", (1,), {"b": 2}), {}),
        ("apply_model", (len,), {}),
        ("update_weights", ("folder",), {}),
        ("update_weights", (), {"tensors": {"w": 1}}),
        ("save_sharded_state", ("folder",), {"max_shard_bytes": 7}),
    ]

    async def hang(self: Engine, *args: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Engine, "collective_rpc", hang)
    with pytest.raises(TimeoutError):
        engine.collective_rpc("f", timeout=0.0)


# Making one


@dataclasses.dataclass(slots=True)
class Args:
    max_num_seqs: int = 7
    revision: str | None = None
    quantization: str | None = None


@pytest.mark.parametrize(
    "args",
    [{"max_num_seqs": 7}, Args(), argparse.Namespace(max_num_seqs=7, lora=None), EngineConfig(max_num_seqs=7)],
    ids=lambda args: type(args).__name__,
)
def test_engine_args_may_be_any_object_with_the_fields(args: Any, device: Any, device_type: Any) -> None:
    with LLMEngine.from_engine_args(args, executor=device) as engine:
        assert engine.engine_config == EngineConfig(max_num_seqs=7)
    with LLMEngine.from_engine_args(args, max_num_seqs=8, executor=device_type()) as engine:
        assert engine.engine_config.max_num_seqs == 8, "keywords win"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_seq": 7}, "did you mean 'max_num_seqs'"),
        ({"enforce_eagre": True}, "'enforce_eagre'"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        (7, "engine_args=7"),
        (Args, "engine_args="),
    ],
)
def test_engine_args_that_are_no_such_thing_are_refused(args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine.from_engine_args(args)


@pytest.mark.parametrize("kind", [LLM, LLMEngine])
def test_one_may_be_connected_to_an_engine_elsewhere(kind: Any, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def connect(address: str, **options: Any) -> Engine:
        asked.append((address, options))
        return await Engine.start(executor=device)

    monkeypatch.setattr(Engine, "connect", connect)
    with kind.connect("ipc:///engine.sock", timeout_s=3.0) as connected:
        assert connected.check_health().status == "ALIVE"
        assert not getattr(connected, "has_unfinished_requests", bool)()
    assert asked == [("ipc:///engine.sock", {"timeout_s": 3.0})]


def test_a_closed_engine_says_so(open_engine: Open, device: Any) -> None:
    engine = open_engine(device)
    engine.add_request("a", IDS, params())
    engine.close()
    engine.shutdown()
    assert device.is_closed
    assert not engine.has_unfinished_requests()
    for ask in (engine.step, engine.stats, engine.is_sleeping, lambda: engine.add_request("a", IDS)):
        with pytest.raises(EngineClosed):
            ask()
    assert repr(engine) == "<LLMEngine 'demo' closed>"


# As vLLM's has it


class Logger:
    """What a program's own logger looks like, with all that it has heard."""

    def __init__(self, config: Any, engine_index: int = 0) -> None:
        self.config = config
        self.heard: list[Any] = []

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.heard.append((scheduler_stats, iteration_stats))

    def log_engine_initialized(self) -> None:
        self.heard.append("initialized")

    def log(self) -> None:
        self.heard.append("log")


def test_stat_loggers_hear_of_each_step_and_each_end(device: Any) -> None:
    made: list[Logger] = []

    def make(config: Any, index: int) -> Logger:
        made.append(Logger(config, index))
        return made[-1]

    engine = LLMEngine.from_engine_args({"max_num_seqs": 4}, stat_loggers=[make], executor=device, max_waiting=9)
    with engine:
        add(engine, 3)
        run_to_end(engine)
        add(engine, 1)
        run_to_end(engine)
        engine.do_log_stats()
    (logger,) = made
    assert logger.config is engine.engine_config
    first, *steps, last = logger.heard
    assert (first, last) == ("initialized", "log")
    iterations = [iteration for _, iteration in steps]
    assert sum(iteration.num_generation_tokens for iteration in iterations) == 20
    assert sum(len(iteration.time_to_first_tokens_iter) for iteration in iterations) == 4
    assert sum(len(iteration.inter_token_latencies_iter) for iteration in iterations) == 16
    ends = [end for iteration in iterations for end in iteration.finished_requests]
    assert [(end.finish_reason, end.num_generation_tokens) for end in ends] == [("length", 5)] * 4
    assert max(scheduler.num_running_reqs for scheduler, _ in steps) >= 1
    assert all(0 <= scheduler.kv_cache_usage <= 1 for scheduler, _ in steps)


@pytest.mark.parametrize("loggers", [[7], [lambda config, index: None], [object()]])
def test_what_is_no_stat_logger_is_refused_and_nothing_is_left(loggers: Any, device: Any) -> None:
    with pytest.raises(ConfigError, match="stat_loggers"):
        LLMEngine(executor=device, stat_loggers=loggers)


def test_log_stats_is_the_interval(device: Any) -> None:
    with LLMEngine(executor=device, log_stats=False) as engine:
        assert (engine.engine_config.log_stats_interval_s, engine.log_stats) == (0.0, False)
        assert engine.tokenizer is engine.get_tokenizer()


def test_times_count_from_the_arrival_that_is_told(open_engine: Open) -> None:
    engine = open_engine()
    arrived_at = time.time() - 50
    engine.add_request("late", IDS, params(), arrived_at, trace_headers={"traceparent": "x"}, priority=1)
    engine.add_request("ahead", IDS, params(), time.time() + 500, lora_request=None, tokenization_kwargs=None)
    outputs = run_to_end(engine)
    late, ahead = outputs["late"][-1].metrics, outputs["ahead"][-1].metrics
    assert late is not None
    assert late.arrival_time == arrived_at
    assert 50 <= (late.queue_time_s or 0.0) <= (late.e2e_latency_s or 0.0) < 100
    assert ahead is not None
    assert 0 <= (ahead.e2e_latency_s or 0.0) < 50


@pytest.mark.parametrize(
    ("param", "bad"),
    [
        ("arrival_time", {"arrival_time": "now"}),
        ("arrival_time", {"arrival_time": float("nan")}),
        ("arrival_time", {"arrival_time": True}),
        ("lora_request", {"lora_request": "adapter"}),
        ("params", {"temperature": 0.5}),
        ("trace_headers", {"trace_headers": 7}),
    ],
)
def test_arguments_that_mean_something_else_are_named(open_engine: Open, param: str, bad: dict[str, Any]) -> None:
    engine = open_engine()
    with pytest.raises(InvalidRequest, match=param) as caught:
        engine.add_request("bad", IDS, params(), **bad)
    assert caught.value.param == param
    assert not engine.has_unfinished_requests()
