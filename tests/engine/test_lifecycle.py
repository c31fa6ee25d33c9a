"""Starting and closing: in any order, from any task, on any loop, and by nobody at all."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvloop
from waiting import until

from aioengine import (
    ConfigError,
    Engine,
    EngineClosed,
    EngineOverloaded,
    InternalError,
    InvalidRequest,
    ModelLoadError,
    RequestOutput,
    Stream,
)
from aioengine.frontend import runtime
from aioengine.models.folder import ModelFolder
from aioengine.text.tokenizer import Tokenizer
from doubles.fake_executor import FakeExecutor

PROMPT = list(range(100, 120))
BOTH_LOOPS = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


fake = functools.partial(FakeExecutor, vocab_size=2048)
"""With the demo's vocabulary, for tests that have no loop yet."""


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aioengine")]


class Gate:
    """Holds the resolving of the model folder, which is the first thing of a start, in its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.is_reached = threading.Event()
        resolve = ModelFolder.resolve

        def gated(*args: Any, **options: Any) -> ModelFolder:
            self.is_reached.set()
            assert self.open.wait(30)
            return resolve(*args, **options)

        monkeypatch.setattr(ModelFolder, "resolve", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


# Where there is no asyncio


def test_without_asyncio_it_is_said_that_it_is_needed() -> None:
    """As trio runs a coroutine: without a loop of asyncio's."""
    engine = Engine(executor=fake())
    for work in (Engine.start(executor=fake()), engine.__aenter__(), engine.generate(PROMPT)):
        with pytest.raises(RuntimeError, match="needs asyncio's event loop"):
            work.send(None)
    assert "new" in repr(engine)


# Both ends


@BOTH_LOOPS
async def test_an_engine_leaves_nothing_behind(make_executor: Any, depth: int) -> None:
    tasks = asyncio.all_tasks()
    for _ in range(2):  # the first one imports, which may leave a file open
        num_files = num_open_files()
        executor = make_executor(depth=depth)
        async with Engine(executor=executor) as engine:
            assert (await engine.generate("fox " * 50, max_tokens=3)).finished
            assert await engine.tokenize("fox " * 300)  # long enough for a thread
            assert engine_threads()
        assert executor.is_closed
        assert engine_threads() == []
        assert asyncio.all_tasks() == tasks
    assert num_open_files() == num_files


@pytest.mark.parametrize("name", ["start", "connect"])
def test_an_engine_that_is_made_makes_no_other_engine(name: str) -> None:
    engine = Engine("another-model")
    with pytest.raises(RuntimeError, match="to start one that is made write `async with engine:`"):
        getattr(engine, name)("a-model")


async def test_an_engine_starts_once_and_one_that_was_started_may_be_entered_once(make_executor: Any) -> None:
    engine = await Engine.start(executor=make_executor())
    await engine.__aenter__()
    with pytest.raises(EngineClosed, match="starts once"):
        async with engine:
            pass
    assert "open" in repr(engine)
    await engine.aclose()
    assert "closed" in repr(engine)
    for _ in range(2):
        with pytest.raises(EngineClosed, match="an engine starts once; make a new one"):
            await engine.__aenter__()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: one.__reduce_ex__(2)])
async def test_an_engine_and_its_streams_are_not_copied(make_executor: Any, copied: Callable[[object], object]) -> None:
    """A copy that is collected would close what the other one uses."""
    async with Engine(executor=make_executor()) as engine:
        async with engine.stream(PROMPT, max_tokens=3) as stream:
            for one in (engine, stream):
                with pytest.raises(TypeError, match=r"cannot be copied or pickled: share this one"):
                    copied(one)
        gc.collect()
        await engine.generate(PROMPT, max_tokens=2)


async def test_an_engine_that_does_not_run_says_so(make_executor: Any) -> None:
    engine = Engine(executor=make_executor())
    for call in (lambda: engine.stream(PROMPT), lambda: engine.info, engine.describe, engine.check_accepting):
        with pytest.raises(EngineClosed, match="not been started"):
            call()
    engine.abort("nobody")
    engine.abort_all()
    async with engine:
        assert "KV cache" in engine.describe()


async def test_a_closed_engine_is_garbage_with_all_that_it_held(make_executor: Any, depth: int) -> None:
    """Closed while steps are in flight, so that what it had launched is never finished."""

    async def use() -> list[weakref.ref[Any]]:
        executor = make_executor(depth=depth, is_manual=True)
        engine = await Engine.start(executor=executor)
        async with engine.stream(PROMPT) as stream:
            await until(lambda: len(executor.unfinished) == depth)
            await engine.aclose()
        return [weakref.ref(part) for part in (engine, executor, engine._runtime, engine._runtime.core, stream)]

    parts = await use()
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)


# Closing under way


@pytest.mark.virtual_clock
@pytest.mark.parametrize("is_given_up", [False, True])
@pytest.mark.parametrize("drain", [False, True])
async def test_closing_ends_what_was_accepted_as_it_was_asked_to_and_takes_nothing_new(
    serve: Any, tasks: Any, depth: int, drain: bool, is_given_up: bool
) -> None:
    """Cancelling aclose stops the wait and not the closing."""
    async with serve(depth=depth, max_model_len=512, config={"max_num_seqs": 2, "max_waiting": 3}) as served:
        gate = served.hold_tokenizing()
        unentered = served.engine.stream(PROMPT)
        started = [tasks.start(served.engine.generate("fox " * 300, max_tokens=20))]
        while not served.runtime.admission.num_preparing:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
        started += [tasks.start(served.engine.generate([i + 3] * 20, max_tokens=20)) for i in range(7)]
        for _ in range(3):
            await asyncio.sleep(0)
        closing = tasks.start(served.engine.aclose(drain=drain))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed):
            served.engine.stream(PROMPT)
        with pytest.raises(EngineClosed):
            async with unentered:
                raise AssertionError("entered")
        if is_given_up:
            closing.cancel()
        gate.set()
        for outcome in await tasks.end(*started):
            assert isinstance(outcome, RequestOutput if drain else EngineClosed), outcome
            assert not drain or len(outcome.outputs[0].token_ids) == 20
        await served.until(lambda: not served.runtime.is_open)
        assert served.executor.is_closed
        await tasks.end(closing)
        assert closing.cancelled() is is_given_up


@pytest.mark.virtual_clock
async def test_a_close_without_drain_cuts_a_drain_short(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        work = tasks.start(served.engine.generate(PROMPT, max_tokens=90))
        await asyncio.sleep(0.035)
        draining = tasks.start(served.engine.aclose(drain=True))
        await asyncio.sleep(0.02)
        assert not draining.done()
        await served.engine.aclose()
        await draining
        [outcome] = await tasks.end(work)
        assert isinstance(outcome, EngineClosed)


class SlowToClose(FakeExecutor):
    """Takes a while to close."""

    async def aclose(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        await super().aclose()


@pytest.mark.virtual_clock
async def test_an_engine_left_by_a_timeout_is_closed_after_its_block() -> None:
    """A cancelled anyio scope cancels each await in it again, those of the clean-up too."""
    executor = SlowToClose(vocab_size=2048, max_model_len=512)
    with anyio.move_on_after(1):
        async with Engine(executor=executor) as engine:
            await engine.generate("fox " * 300, max_tokens=2)
            await asyncio.sleep(10)
    assert executor.is_closed
    assert not engine._runtime.is_open
    assert engine_threads() == []


class StuckExecutor(FakeExecutor):
    """Its `aclose` hangs, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(vocab_size=2048)
        self.error = error

    async def aclose(self) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.sleep(10_000)


@pytest.mark.virtual_clock
async def test_a_device_that_cannot_be_closed_is_left_behind_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async with Engine(executor=StuckExecutor()) as engine:
        await engine.generate("fox " * 50, max_tokens=2)
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began == pytest.approx(runtime.CLOSE_DEADLINE_S)
    assert "closing took more than" in caplog.text


async def test_a_device_that_fails_to_close_is_heard_of_and_the_rest_is_closed() -> None:
    engine = await Engine.start(executor=StuckExecutor(OSError("no such device")))
    await engine.generate("fox " * 50, max_tokens=2)
    with pytest.raises(InternalError, match="no such device"):
        await engine.aclose()
    assert engine_threads() == []


# Starting


@pytest.mark.virtual_clock
async def test_closing_in_the_very_moment_of_the_start(make_executor: Any, tasks: Any) -> None:
    for num_turns in range(6):
        executor = make_executor()
        engine = Engine(executor=executor)
        starting = tasks.start(engine.__aenter__())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await tasks.start(engine.aclose())
        [outcome] = await tasks.end(starting)
        if outcome is engine:  # the close came before the start: there was nothing to close
            await engine.aclose()
        else:
            assert isinstance(outcome, EngineClosed), outcome
        assert executor.is_closed


@pytest.mark.virtual_clock
async def test_a_start_may_be_cancelled_at_any_moment(make_executor: Any, tasks: Any, depth: int) -> None:
    kinds = set()
    for num_turns in [*range(12), 40, 400]:
        executor = make_executor(depth=depth)
        starting = tasks.start(Engine.start(executor=executor))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        starting.cancel()
        [outcome] = await tasks.end(starting)
        kinds.add(type(outcome))
        if isinstance(outcome, Engine):
            await outcome.aclose()
        assert executor.is_closed or num_turns < 2, "it had begun to start"
        assert engine_threads() == []
    assert asyncio.CancelledError in kinds


@BOTH_LOOPS
async def test_a_request_that_is_made_while_the_engine_starts_is_served_when_it_has(
    make_executor: Any, tasks: Any, gate: Gate
) -> None:
    engine = Engine(executor=make_executor())
    with pytest.raises(EngineClosed, match="not been started"):
        await engine.generate(PROMPT)
    tasks.start(engine.__aenter__())
    await until(gate.is_reached.is_set)
    assert engine.health().status == "STARTING"

    async def read(stream: Stream) -> str:
        async with stream:
            return "".join([delta.text async for delta in stream])

    asked: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "seed": 7}
    prompt, messages = [*PROMPT], [{"role": "user", "content": "Hello"}]
    ids = tasks.start(engine.generate(prompt, **asked))
    chat = tasks.start(engine.generate(messages, **asked))
    stream = engine.stream("Hello", **asked)
    text = tasks.start(read(stream))
    with pytest.raises(InvalidRequest, match="priority"):
        engine.stream(PROMPT, priority="high")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="still starting"):
        _ = stream.params
    bad = tasks.start(engine.generate(PROMPT, temperature=-1))
    gone = tasks.start(engine.generate(PROMPT))
    one, other = (tasks.start(engine.generate(PROMPT, request_id=name)) for name in ("a", "b"))
    await asyncio.sleep(0)
    prompt.clear()  # what a request asks for is what it was when it was made
    messages[0]["content"] = "Bye"
    gone.cancel()
    engine.abort("a")
    await asyncio.sleep(0)
    assert gone.done()
    assert not ids.done()
    assert engine.health().status == "STARTING"
    gate.open.set()
    await until(lambda: all(task.done() for task in (ids, chat, text, bad, one, other)))
    assert engine.health().status == "ALIVE"
    assert ids.result().prompt_token_ids == PROMPT
    assert ids.result().outputs == (await engine.generate(PROMPT, **asked)).outputs
    assert "Hello" in chat.result().prompt
    assert (await engine.generate("Hello", **asked)).text == text.result()
    assert stream.params.max_tokens == 3
    assert isinstance(bad.exception(), InvalidRequest)
    assert (one.result().outputs[0].finish_reason, one.result().outputs[0].token_ids) == ("abort", [])
    assert other.result().outputs[0].finish_reason != "abort"
    await engine.wait_started()
    await engine.aclose()


@BOTH_LOOPS
async def test_impatient_requests_are_bounded_while_the_engine_starts(
    make_executor: Any, tasks: Any, gate: Gate
) -> None:
    engine = Engine(executor=make_executor(), max_waiting=2)
    tasks.start(engine.__aenter__())
    await until(gate.is_reached.is_set)
    waiting = [tasks.start(engine.generate(PROMPT, max_tokens=2, on_full="raise")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineOverloaded, match="wait for the engine to start"):
        await engine.generate(PROMPT, max_tokens=2, on_full="raise")
    patient = tasks.start(engine.generate(PROMPT, max_tokens=2))
    waiting[0].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gate.open.set()
    await until(lambda: waiting[1].done() and patient.done())
    assert waiting[1].result().finished
    assert patient.result().finished
    await engine.aclose()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("end", ["fails", "is cancelled", "closed", "drained"])
async def test_requests_that_wait_for_a_start_hear_why_it_never_came(
    make_executor: Any, tasks: Any, gate: Gate, tmp_path: Path, end: str
) -> None:
    executor = make_executor()
    engine = Engine(str(tmp_path / "absent") if end == "fails" else None, executor=executor)
    starting = tasks.start(engine.__aenter__())
    await until(gate.is_reached.is_set)
    for waiting in (engine.generate(PROMPT), engine.wait_started()):
        tasks.start(waiting)
    with pytest.raises(EngineClosed, match="starting"):
        _ = engine.info
    await asyncio.sleep(0)
    if end == "is cancelled":
        starting.cancel()
    elif end != "fails":
        tasks.start(engine.aclose(drain=end == "drained"))
        await until(lambda: engine.health().status == "DEAD")
        with pytest.raises(EngineClosed, match="closed"):
            engine.stream(PROMPT)
    gate.open.set()
    outcome, *heard = (await tasks.end())[:3]
    expected = {"fails": ModelLoadError, "is cancelled": asyncio.CancelledError}
    assert isinstance(outcome, expected.get(end, EngineClosed)), outcome
    if end == "fails":
        assert heard == [outcome, outcome]
    else:
        assert [type(error) for error in heard] == [EngineClosed, EngineClosed]
    assert executor.is_closed
    with pytest.raises(EngineClosed, match="closed"):
        await engine.generate(PROMPT)


async def test_a_start_cancelled_twice_leaves_the_closing_to_the_engine(
    make_executor: Any, tasks: Any, gate: Gate
) -> None:
    executor = make_executor()
    starting = tasks.start(Engine.start(executor=executor))
    await until(gate.is_reached.is_set)
    starting.cancel()
    await asyncio.sleep(0)
    starting.cancel()
    assert isinstance((await tasks.end(starting))[0], asyncio.CancelledError)
    assert engine_threads()
    tasks._tasks.remove(starting)
    del starting
    with warnings.catch_warnings(record=True) as warned:
        gc.collect()  # the engine is garbage before it is closed
    assert warned == []
    gate.open.set()
    await until(lambda: not engine_threads())
    assert executor.is_closed


@BOTH_LOOPS
async def test_a_model_that_is_not_there_is_an_error_and_nothing_is_left(make_executor: Any, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{}")
    (tmp_path / "bad" / "generation_config.json").write_text('{"temperature": -3}')
    for model in (str(tmp_path / "absent"), str(tmp_path), str(tmp_path / "bad")):
        executor = make_executor()
        with pytest.raises(ModelLoadError, match=str(tmp_path)):
            await Engine.start(model, executor=executor)
        assert executor.is_closed
        assert engine_threads() == []
        engine = Engine(model)
        with pytest.raises(ModelLoadError):
            await engine.__aenter__()
        assert "closed" in repr(engine)
        with pytest.raises(EngineClosed):
            engine.stream(PROMPT)
        await engine.aclose()


async def test_a_model_may_be_a_path(make_executor: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with Engine(tmp_path, executor=make_executor()) as engine:
        assert str(tmp_path) in repr(engine)
        assert (await engine.generate(PROMPT, max_tokens=2)).finished


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": "many"}, "max_num_seqs='many'"),
        ({"max_waiting": 0}, "max_waiting=0"),
        ({"block_size": 257}, "block_size=257"),
        ({"dtype": "float8"}, "dtype='float8': none of the choices; choose one of 'auto', 'bfloat16'"),
        ({"memory_utilization": float("nan")}, "memory_utilization=nan"),
        ({"max_num_batched_tokens": 10}, "max_num_batched_tokens=10 is less than max_num_seqs=256"),
        ({"max_num_seq": 5}, "did you mean 'max_num_seqs'"),
        ({"frobnicate": 5}, "unknown parameter 'frobnicate'"),
        ({"executer": 5}, "unknown parameter 'executer'"),
        ({"n_ctx": 5}, "did you mean 'max_model_len'"),
        ({"torch_dtype": "auto"}, "did you mean 'dtype'"),
        ({"device_map": "auto"}, "did you mean 'device'"),
        ({"max_tokens": 5}, "it is of a request: give it to generate"),
    ],
    ids=str,
)
def test_a_bad_config_names_the_field_before_anything_starts(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Engine(**config)
    assert message in str(error.value)


async def test_who_connects_hears_where_the_config_is_given() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs, block_size: the config is that engine's: give it where"):
        await Engine.connect("ipc:///tmp/none", max_num_seqs=3, block_size=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "given", "message"),
    [
        (
            "cluster+ipc:///nowhere/c",
            {"keys": "keys"},
            "^keys: a further front end .* from their owner: leave keys out",
        ),
        ("cluster+ipc:///nowhere/c", {"client": "hostb"}, "^client: .* leave client out"),
        ("cluster+ipc:///nowhere/c", {"keys": "keys", "client": "hostb"}, "leave keys and client out"),
        ("cluster+tcp://127.0.0.1:5570", {}, r"give cluster\+ipc:///path"),
        ("cluster+tcp://127.0.0.1:5570", {"keys": "keys"}, r"give cluster\+ipc:///path"),
    ],
)
async def test_a_further_front_end_connects_by_ipc_and_without_keys(
    address: str, given: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await Engine.connect(address, **given)  # type: ignore[arg-type]


async def test_a_model_that_is_no_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="model"):
        Engine(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model"):
        await Engine.start(b"demo")  # type: ignore[arg-type]


async def test_a_cache_too_small_for_one_sequence_is_refused(make_executor: Any) -> None:
    executor = make_executor(num_blocks=4, block_size=16, max_model_len=66)
    with pytest.raises(ConfigError, match=r"4 blocks of 16 tokens.*max_model_len=66"):
        await Engine.start(executor=executor)
    assert executor.is_closed
    async with Engine(executor=make_executor(num_blocks=4, block_size=16, max_model_len=65)) as engine:
        outputs = await asyncio.gather(*(engine.generate(PROMPT) for _ in range(3)))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [45] * 3


# Loops


LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.SelectorEventLoop, uvloop.new_event_loop]
on_each_loop = pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], main: Any) -> Any:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


@on_each_loop
def test_an_engine_belongs_to_its_loop(new_loop: Any) -> None:
    first, second = new_loop(), new_loop()
    engine = first.run_until_complete(Engine.start(executor=fake(is_manual=True)))

    async def use(work: Callable[[], Any]) -> Any:
        result = work()
        return await result if asyncio.iscoroutine(result) else result

    async def enter(stream: Any) -> None:
        async with stream:
            raise AssertionError("entered")

    async def start_one() -> Any:
        stream = engine.stream(PROMPT, request_id="it")
        await stream.__aenter__()
        return stream, engine.stream(PROMPT)

    entered, unentered = first.run_until_complete(start_one())
    for work in (
        lambda: engine.generate(PROMPT),
        lambda: engine.stream(PROMPT),
        lambda: engine.aclose(),
        lambda: engine.aclose(drain=True),
        lambda: engine.abort("it"),
        lambda: enter(unentered),
    ):
        with pytest.raises(RuntimeError, match="another event loop"):
            second.run_until_complete(use(work))
    assert engine.info.block_size, "what is constant can be read from anywhere"
    first.run_until_complete(entered.__aexit__(None, None, None))
    first.run_until_complete(engine.aclose())
    first.close()
    second.close()


# Nobody closes it


def collect(engines: list[Engine]) -> None:
    engines.clear()
    gc.collect()


@on_each_loop
def test_an_engine_that_is_garbage_stops_and_says_so(new_loop: Any) -> None:
    async def main() -> None:
        executor = fake()
        engine = await Engine.start(executor=executor)
        await engine.generate("fox " * 50, max_tokens=2)
        with pytest.warns(ResourceWarning, match="never closed"):
            del engine
        await until(lambda: not engine_threads() and executor.is_closed)

    run(new_loop, main())


@on_each_loop
def test_an_engine_that_is_used_is_not_garbage(new_loop: Any) -> None:
    async def main() -> None:
        executor = fake(is_manual=True)
        stream = (await Engine.start(executor=executor)).stream(PROMPT, max_tokens=1)
        async with stream:
            gc.collect()
            await until(lambda: executor.unfinished)
            executor.complete()
            assert (await stream.finish()).finished
        await stream._engine.aclose()

    run(new_loop, main())


@on_each_loop
def test_a_loop_that_ends_before_the_engine_closes_it_and_says_so(new_loop: Any) -> None:
    async def main() -> tuple[Engine, FakeExecutor, asyncio.Task[Any]]:
        executor = fake(is_manual=True)
        engine = await Engine.start(executor=executor)
        task = asyncio.get_running_loop().create_task(engine.generate("fox " * 50))
        await until(lambda: executor.plans)
        return engine, executor, task

    with pytest.warns(ResourceWarning, match="loop ended before the engine was closed") as caught:
        engine, executor, task = run(new_loop, main())
    assert len(caught) == 1
    assert task.cancelled() or isinstance(task.exception(), EngineClosed)
    assert executor.is_closed
    assert engine_threads() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del engine
        gc.collect()


@on_each_loop
def test_an_engine_dropped_as_its_loop_ends_says_so_once(new_loop: Any) -> None:
    executors = []

    async def main() -> None:
        executors.append(fake())
        engine = await Engine.start(executor=executors[0])
        await engine.generate("fox " * 50, max_tokens=2)

    with pytest.warns(ResourceWarning) as caught:
        run(new_loop, main())
    gc.collect()
    assert len(caught) == 1, [str(warning.message) for warning in caught]
    assert executors[0].is_closed
    for thread in threading.enumerate():
        if thread.name == "aioengine-load":  # it has told its outcome, and may be in its last instructions
            thread.join(20)
    assert engine_threads() == []


@on_each_loop
def test_a_loop_that_ends_while_the_engine_closes_waits_for_it(new_loop: Any) -> None:
    async def main() -> FakeExecutor:
        executor = SlowToClose(vocab_size=2048, max_model_len=512)
        engine = await Engine.start(executor=executor)
        await engine.generate("fox " * 50, max_tokens=2)
        closing = asyncio.get_running_loop().create_task(engine.aclose())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done()
        return executor

    assert run(new_loop, main()).is_closed
    assert engine_threads() == []


@pytest.mark.leaves_tasks
@on_each_loop
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_loop_closed_without_any_clean_up_leaves_no_thread_and_frees_the_device(
    new_loop: Any, is_busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = new_loop()

    async def start() -> tuple[Engine, weakref.ref[FakeExecutor]]:
        executor = fake(is_manual=True)
        engine = await Engine.start(executor=executor)
        if is_busy:
            for prompt in (PROMPT, "fox " * 50):
                asyncio.get_running_loop().create_task(engine.generate(prompt))
            await until(lambda: len(engine._runtime.core.scheduler.sequences()) == 2)
        return engine, weakref.ref(executor)

    engine, executor = loop.run_until_complete(start())
    loop.close()
    engines = [engine]
    del engine
    with pytest.warns(ResourceWarning, match="never closed"):
        collect(engines)
    gc.collect()
    assert executor() is None
    for thread in threading.enumerate():
        if thread.name.startswith("aioengine"):
            thread.join(5)
    assert engine_threads() == []
    # Asyncio complains of the tasks that the loop has left. That is the truth, and all of it.
    assert all("Task was destroyed but it is pending" in record.message for record in caplog.records)


async def test_endless_loading_is_given_up(make_executor: Any, monkeypatch: pytest.MonkeyPatch, tasks: Any) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(Tokenizer, "load", lambda folder: is_over.wait(60))
    monkeypatch.setattr(runtime, "LOAD_GRACE_S", 0.0)
    with pytest.raises(ModelLoadError, match=r"no progress for 0.05 s \(load_timeout_s\)"):
        await Engine.start(executor=make_executor(), load_timeout_s=0.05)
    starting = tasks.start(Engine.start(executor=make_executor()))
    await until(lambda: engine_threads().count("aioengine-load") == 2)
    starting.cancel()
    assert isinstance((await tasks.end(starting))[0], asyncio.CancelledError)
    assert set(engine_threads()) == {"aioengine-load"}
    is_over.set()
    await until(lambda: not engine_threads())
