"""`Engine.profile`: what comes out, that it is there however the block ends, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from aioengine import Engine
from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import EngineClosed, InvalidRequest

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
