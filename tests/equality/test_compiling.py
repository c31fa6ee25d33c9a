"""An engine whose native kernels are not there yet: what its requests get before, while and after they come."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkpoints import make_checkpoint
from equality.conftest import Oracle
from nightly import nightly
from waiting import turns

from aioengine import Engine, EngineDead, RequestOutput
from aioengine.kernels.native.library import library_path, read_part
from aioengine.kernels.native.parts import COMMON
from aioengine.kernels.native.team import Program
from aioengine.models.folder import DEMO_MODEL
from doubles.held_compiler import HeldCompiler

PROMPTS = [list(range(300, 300 + length)) for length in (5, 33, 64, 17)]
NUM_TOKENS = 48

MakeCompiler = Callable[..., HeldCompiler]


@pytest.fixture
def make_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCompiler]:
    made = []

    def make(*args: Any, **fields: Any) -> HeldCompiler:
        made.append(HeldCompiler(tmp_path, monkeypatch, *args, **fields))
        return made[-1]

    yield make
    for each in made:
        each.go_on()


@cache
def tokens_of(model: Path, prompt: tuple[int, ...]) -> list[int]:
    """transformers' own, greedily."""
    return oracle_of(model).generate(list(prompt), NUM_TOKENS).token_ids


@cache
def oracle_of(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("old") / "model", "qwen3", seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("new") / "model", "qwen3", seed=2)


@pytest.fixture
def num_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels of each program that was replayed."""
    replayed, replay = [], Program.replay

    def counted(self: Program) -> None:
        replayed.append(len(self._kernels))
        replay(self)

    monkeypatch.setattr(Program, "replay", counted)
    return replayed


@asynccontextmanager
async def starting(dtype: str = "float32", model: Path = DEMO_MODEL, **fields: Any) -> AsyncIterator[Engine]:
    defaults = {"kv_cache_memory_bytes": 2**24, "max_model_len": 256, "num_threads": 2, "enable_prefix_caching": False}
    async with Engine(str(model), dtype=dtype, show_progress=False, **{**defaults, **fields}) as engine:
        yield engine


async def generate(engine: Engine, prompt: list[int], **params: Any) -> RequestOutput:
    asked = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    return await engine.generate(prompt, **asked)


async def layouts(engine: Engine) -> set[str]:
    """Of the weights: "rows" are plain torch's."""
    ((found),) = await engine.apply_model(lambda decoder: {linear.packed.layout for linear in decoder.linears()})
    return found


async def assert_right(engine: Engine, model: Path = DEMO_MODEL, prompts: list[list[int]] = PROMPTS) -> None:
    """Its tokens are those of transformers with that model."""
    outputs = await asyncio.gather(*(generate(engine, prompt) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == tokens_of(model, tuple(prompt))


# While it is compiled


async def test_streams_go_on_rightly_when_native_kernels_take_over(
    make_compiler: MakeCompiler, num_replays: list[int]
) -> None:
    compiler = make_compiler()
    async with starting() as engine, asyncio.TaskGroup() as group:
        begun = [group.create_task(generate(engine, prompt)) for prompt in PROMPTS[:2]]
        async with engine.stream(PROMPTS[2], temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True) as stream:
            async for delta in stream:
                if len(delta.token_ids) and stream.result.outputs[0].token_ids[19:]:
                    break
            assert await layouts(engine) == {"rows"}
            assert not num_replays
            compiler.go_on()
            late = group.create_task(generate(engine, PROMPTS[3]))
            outputs = [await begun[0], await begun[1], await stream.finish(), await late]
        assert await layouts(engine) == {"panels"}
        assert num_replays, "no step was a program"
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.outputs[0].token_ids == tokens_of(DEMO_MODEL, tuple(prompt))
        await assert_right(engine)


# When it cannot be


@pytest.mark.nightly
@pytest.mark.parametrize("outcome", ["raises", *nightly("is killed", "brings nothing")])
async def test_a_compiler_that_fails_is_told_of_once_and_costs_nothing_but_time(
    make_compiler: MakeCompiler, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = make_compiler(outcome)
    async with starting() as engine, asyncio.TaskGroup() as group:
        begun = group.create_task(assert_right(engine, DEMO_MODEL, PROMPTS[:2]))
        await turns(3)
        compiler.go_on()
        await begun
        await assert_right(engine, DEMO_MODEL, PROMPTS[2:])
        assert await layouts(engine) == {"rows"}
    (message,) = [record.message for record in caplog.records if "native" in record.message]
    assert message.startswith("no native kernels, so that steps are slow")
    assert ("numba knows no such processor" in message) == (outcome == "raises")


async def test_where_nothing_can_be_kept_kernels_are_compiled_for_the_engine_alone(
    make_compiler: MakeCompiler, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    compiler = make_compiler(cache_home=tmp_path / "file")
    for is_waited_for in (False, True):
        async with starting() as engine:
            await generate(engine, PROMPTS[0], max_tokens=4)
            if is_waited_for:
                compiler.go_on()
                await assert_right(engine)
                assert await layouts(engine) == {"panels"}


@pytest.mark.parametrize("damage", ["cut short", "garbage", "empty"])
async def test_files_that_are_not_whole_are_made_again(make_compiler: MakeCompiler, damage: str) -> None:
    compiler = make_compiler()
    for part in (COMMON, "float32"):
        whole = (compiler.kept / library_path(part).name).read_bytes()
        broken = {"cut short": whole[:-1000], "garbage": whole[:500] + os.urandom(len(whole)), "empty": b""}[damage]
        library_path(part).parent.mkdir(exist_ok=True)
        library_path(part).write_bytes(broken)
    async with starting() as engine:
        assert await layouts(engine) == {"rows"}
        compiler.go_on()
        await assert_right(engine)
        assert await layouts(engine) == {"panels"}
    for part in (COMMON, "float32"):
        assert await asyncio.to_thread(read_part, part)


# What else an engine does meanwhile


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["asleep", *nightly("before", "after")])
async def test_weights_are_replaced_and_sleep_around_the_change(
    make_compiler: MakeCompiler, old: Path, new: Path, when: str
) -> None:
    compiler = make_compiler()
    async with starting(model=old) as engine:
        await assert_right(engine, old)
        if when == "after":
            compiler.go_on()
            await generate(engine, PROMPTS[0], max_tokens=2)
        await engine.update_weights(str(new))
        if when == "before":
            await assert_right(engine, new)
            compiler.go_on()
        await assert_right(engine, new)
        for level in (1, 2):
            await engine.sleep(level)
            if when == "asleep" and level == 1:
                compiler.go_on()
            await engine.wake_up()
            await assert_right(engine, new)
        assert await layouts(engine) == {"panels"}


# The compiler itself


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "aioengine"


def compilers() -> list[psutil.Process]:
    """The processes that compile, children of this one or of an engine's."""
    return [
        child for child in psutil.Process().children(recursive=True) if "compile_parts" in " ".join(child.cmdline())
    ]


@pytest.mark.nightly
@pytest.mark.usefixtures("no_stray_process", "quiet_log")
async def test_no_compiler_outlives_the_engines_own_process(empty_cache: Path) -> None:
    async with starting(process=True) as engine:
        await assert_right(engine)
        (child,) = compilers()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()
    async with starting(process=True) as engine:
        (child,) = compilers()
        child.parent().kill()
        with pytest.raises(EngineDead):
            await generate(engine, PROMPTS[0])
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()
    async with starting() as engine:
        await assert_right(engine)
