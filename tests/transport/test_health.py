"""`Engine.health`: a hung device, a stopped process, a killed one and one that says why it ends are told apart.

In this process, in a child, and by TCP. A connection that is cut on the way, or silent, is in test_life; a child
that is stopped for good in test_life.
"""

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from nightly import nightly
from transport.life_scripts.devices import FIFO, GO, HANG, ToldExecutor
from transport.life_scripts.watching import engine_command, health_is
from waiting import until

from aioengine import Engine, ProcessOptions
from aioengine.errors import EngineClosed, ModelLoadError

pytestmark = pytest.mark.usefixtures("no_stray_process", "runtime", "quiet_log")

STALL_AFTER_S = 0.2
BEATS = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 0.4}


class Watched:
    """An engine, and the pid of its process."""

    def __init__(self, engine: Engine, pid: int, let_go_on: Callable[[], Any]) -> None:
        self.engine = engine
        self.pid = pid
        self.let_go_on = let_go_on

    async def tell(self, word: bytes) -> None:
        """Tell the device, which is at rest."""
        await self.engine.collective_rpc("tell the device", [word.decode()])

    async def ask(self, prompt: int = 5, num_tokens: int = 20) -> list[int]:
        output = await self.engine.generate([prompt, 6, 7], max_tokens=num_tokens, ignore_eos=True, seed=3)
        return list(output.outputs[0].token_ids)

    @contextlib.asynccontextmanager
    async def asking(self, num_requests: int = 1) -> AsyncIterator[list[list[int]]]:
        """Requests run in the block, and have ended behind it: their tokens."""
        answers: list[list[int]] = []

        async def ask() -> None:
            answers.append(await self.ask())

        async with anyio.create_task_group() as tasks:
            for _ in range(num_requests):
                tasks.start_soon(ask)
            yield answers


@contextlib.asynccontextmanager
async def in_process(**config: Any) -> AsyncIterator[Watched]:
    executor = ToldExecutor()
    async with Engine(executor=executor, stall_after_s=STALL_AFTER_S, **config) as engine:
        yield Watched(engine, 0, lambda: executor.tell(GO))


@contextlib.contextmanager
def fifo() -> Iterator[Callable[[], Any]]:
    fd = os.open(os.environ[FIFO], os.O_RDWR | os.O_NONBLOCK)
    yield lambda: os.write(fd, GO)
    os.close(fd)


@contextlib.asynccontextmanager
async def in_child(**config: Any) -> AsyncIterator[Watched]:
    options = ProcessOptions(executor="transport.life_scripts.devices:told", stop_timeout_s=0.3)
    with fifo() as let_go_on:
        async with Engine(process=options, stall_after_s=STALL_AFTER_S, **BEATS, **config) as engine:
            (child,) = psutil.Process().children()
            yield Watched(engine, child.pid, let_go_on)


@contextlib.asynccontextmanager
async def by_tcp(**config: Any) -> AsyncIterator[Watched]:
    fields = {"stall_after_s": STALL_AFTER_S, **BEATS, **config}
    async with engine_command("tcp://127.0.0.1:*", **fields) as (script, address):
        with fifo() as let_go_on:
            async with aclosing(await Engine.connect(address)) as engine:
                yield Watched(engine, script.process.pid, let_go_on)


everywhere = pytest.mark.parametrize("start", [in_process, in_child, *nightly(by_tcp)])


@everywhere
async def test_a_hung_device_is_stalled_until_it_goes_on(start: Any) -> None:
    async with start() as watched:
        tokens = await watched.ask()
        await watched.tell(HANG)
        async with watched.asking(2) as answers:
            await health_is(watched.engine, "STALLED", "the device has been at one step for")
            health = watched.engine.health()
            assert health.step_age_s > STALL_AFTER_S
            assert health.running + health.waiting == 2
            assert answers == []  # and nobody has heard an error
            watched.let_go_on()
        assert answers == [tokens, tokens]
        await health_is(watched.engine, "ALIVE", "")
        assert watched.engine.health().reason == ""


@pytest.mark.parametrize("start", [in_process, *nightly(in_child, by_tcp)])
async def test_a_device_that_hangs_at_a_control_call_is_stalled_until_it_goes_on(start: Any) -> None:
    async with start() as watched:
        await watched.tell(HANG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watched.engine.execute_dummy_batch)
            await health_is(watched.engine, "STALLED", "the device has been at execute_dummy_batch for")
            assert watched.engine.health().step_age_s == 0
            async with watched.asking() as answers:  # what comes behind the call is not to blame
                await until(lambda: watched.engine.health().running == 1)
                health = watched.engine.health()
                assert (health.status, health.call, health.step_age_s) == ("STALLED", "execute_dummy_batch", 0)
                assert health.call_age_s > STALL_AFTER_S
                watched.let_go_on()
        assert len(answers) == 1
        await health_is(watched.engine, "ALIVE", "")


async def test_a_stopped_child_is_stalled_until_it_is_continued() -> None:
    async with in_child() as watched:
        tokens = await watched.ask()
        await watched.tell(HANG)
        async with watched.asking() as answers:
            await health_is(watched.engine, "STALLED", "the device")
            os.kill(watched.pid, signal.SIGSTOP)
            await health_is(watched.engine, "STALLED", "has not beaten for")  # what is nearer to the cause
            assert watched.engine.health().beat_age_s > BEATS["heartbeat_timeout_s"]
            watched.let_go_on()
            os.kill(watched.pid, signal.SIGCONT)
        assert answers == [tokens]
        await health_is(watched.engine, "ALIVE", "")
        assert watched.engine.health().beat_age_s < BEATS["heartbeat_timeout_s"]


async def test_a_killed_child_is_dead_though_a_descendant_holds_its_connections() -> None:
    async with in_child() as watched:
        await watched.engine.collective_rpc("leave a descendant")
        os.kill(watched.pid, signal.SIGKILL)
        await health_is(watched.engine, "DEAD", "was killed by SIGKILL")


@pytest.mark.parametrize("start", [in_process, *nightly(in_child, by_tcp)])
async def test_beats_count_what_runs_and_what_waits(start: Any) -> None:
    async with start(max_num_seqs=2) as watched:
        await watched.tell(HANG)
        async with watched.asking(5):
            # Two may run; only one does if the device had taken its steps before the second one came.
            await until(lambda: (watched.engine.health().running, watched.engine.health().waiting) in [(2, 3), (1, 4)])
            before = watched.engine.health()
            await until(lambda: watched.engine.health().step_age_s > before.step_age_s > 0)
            assert watched.engine.health().step == before.step
            watched.let_go_on()
        await until(lambda: (watched.engine.health().running, watched.engine.health().waiting) == (0, 0))
        await until(lambda: watched.engine.health().step >= before.step + 40)  # 20 tokens, two by two and a half
        assert watched.engine.health().step_age_s == 0


async def test_health_never_raises_once_it_was_started(tmp_path: Path) -> None:
    engine = Engine(executor=ToldExecutor())
    with pytest.raises(EngineClosed):
        engine.health()
    async with engine:
        assert engine.health().status == "ALIVE"
    assert (engine.health().status, engine.health().reason) == ("DEAD", "it was closed")
    failed = Engine(tmp_path / "nothing", process=True)
    with pytest.raises(ModelLoadError):
        async with failed:
            pass
    assert failed.health().status == "DEAD"
    assert failed.health().reason == "it is closed"
    async with in_child() as watched:
        await watched.engine.aclose()
        assert (watched.engine.health().status, watched.engine.health().reason) == ("DEAD", "it was closed")
