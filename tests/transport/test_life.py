"""What is left when a process is ended at any stage of its life: nothing. Real processes; see the folder life_scripts.

The tables are process × stage × signal. The child's half runs in this process, the parent's in a script.
"""

import os
import re
import signal
import time
from contextlib import aclosing
from pathlib import Path

import anyio
import psutil
import pytest
from nightly import few, nightly
from transport.life_scripts.devices import HANG, VOCAB_SIZE, ToldExecutor
from transport.life_scripts.life import STAGES, Life
from transport.life_scripts.serving import Forwarder, served
from transport.life_scripts.watching import (
    DEADLINE_S,
    Lines,
    Script,
    ends_of,
    engine_command,
    health_is,
    is_dead,
    until_stopped,
)
from waiting import until

from aioengine import Engine
from aioengine.errors import AioEngineError, EngineDead
from aioengine.testing import FakeExecutor
from aioengine.transport.addresses import PrivateFolder
from aioengine.transport.server import EngineServer

pytestmark = pytest.mark.usefixtures("no_stray_process", "runtime", "quiet_log")

SIGNALS = {name: signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGKILL", "SIGSTOP")}


# The child

EACH_STAGE = few(["busy"], of=STAGES)
EACH_SIGNAL = few(["SIGTERM", "SIGKILL"], of=SIGNALS)

KILLED = r"EngineDead: .*engine 0 \(pid \d+\) was killed by SIGKILL.*"
TOLD_TO_END = r"EngineDead: the engine has ended: .*closed.*"
EXITED = r"EngineDead: .*engine 0 \(pid \d+\) exited with code 0.*"
CLOSED_HERE = "EngineClosed: .*"

WHAT_CALLERS_HEAR: dict[str, tuple[str, str, str, str | None]] = {  # by SIGTERM, SIGINT, SIGKILL, SIGSTOP
    # The start, where there are no requests yet
    "spawned": (
        r"EngineDead: engine 0 \(pid \d+\) was killed by SIGTERM.*",
        r"EngineDead: engine 0 \(pid \d+\) .*(SIGINT|KeyboardInterrupt).*",
        KILLED,
        r"EngineDead: engine 0 \(local\) did not say HELLO.*",
    ),
    "loading": (EXITED, EXITED, KILLED, r"EngineDead: engine 0 \(local\) was not ready within 3 s"),
    "ready": (EXITED, EXITED, KILLED, "EngineDead: no engine answers at .* within 3 s.*"),
    # Requests, and in "idle" one that comes later
    "idle": (TOLD_TO_END, TOLD_TO_END, KILLED, None),
    "busy": (TOLD_TO_END, TOLD_TO_END, KILLED, CLOSED_HERE),
    "asleep": (TOLD_TO_END, TOLD_TO_END, KILLED, CLOSED_HERE),
    "closing": (CLOSED_HERE,) * 4,
}


@pytest.mark.parametrize("number", EACH_SIGNAL)
@pytest.mark.parametrize("stage", EACH_STAGE)
async def test_an_engine_whose_process_gets(stage: str, number: str, runtime: Path) -> None:
    lines = Lines()
    life = Life(stage, says=lines.add, has_deadline=number == "SIGSTOP" and stage in ("spawned", "loading", "ready"))
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(life.run)
            await lines.hears(f"at {stage}")
            os.kill(life.child_pid, SIGNALS[number])
            if number == "SIGSTOP" and stage != "spawned":
                until_stopped(life.child_pid)
            elif number == "SIGKILL" or (stage in ("ready", "idle") and number != "SIGSTOP"):
                assert is_dead(life.child_pid)
            if number == "SIGSTOP" and stage in ("idle", "busy", "asleep"):
                assert life.engine is not None
                await health_is(life.engine, "STALLED", "has not beaten")
            began = time.monotonic()
            life.go_on(is_told=number != "SIGSTOP")
    took_s = time.monotonic() - began
    print(f"{stage} × {number}: {took_s * 1000:.0f} ms to the end")
    check_nothing_is_left(life.child_pid, runtime)
    heard = WHAT_CALLERS_HEAR[stage][list(SIGNALS).index(number)]
    if stage in ("spawned", "loading", "ready"):
        assert heard is not None
        assert re.fullmatch(f"start failed: {heard}", lines.said[-1]), lines.said
    else:
        assert lines.said[-1] == "closed"
        ends = ends_of(lines.said)
        assert len(ends) == {"idle": int(number != "SIGSTOP")}.get(stage, 2)
        for end in ends.values():
            assert heard is not None
            assert len(end) == 1
            assert re.fullmatch(heard, end[0]), end


def check_nothing_is_left(child_pid: int, runtime: Path) -> None:
    assert psutil.Process().children(recursive=True) == []  # zombies included
    assert is_dead(child_pid)
    assert os.listdir(runtime) == []


# The parent


MAY_LEAVE_A_FOLDER = {(stage, number) for stage in ("spawned", "loading", "ready") for number in ("SIGTERM", "SIGKILL")}
"""A parent that nothing could run in any more, before it had attached: the next engine of this user removes it."""


def family_at(stage: str) -> tuple[Script, int]:
    """A script whose engine has come to the stage, and the pid of its child."""
    script = Script("transport.life_scripts.family", stage)
    child_pid = int(script.hears(r"child (\d+)")[1])
    script.hears(f"at {stage}")
    return script, child_pid


@pytest.mark.parametrize("number", EACH_SIGNAL)
@pytest.mark.parametrize("stage", EACH_STAGE)
def test_a_script_with_an_engine_gets(stage: str, number: str, runtime: Path) -> None:
    script, child_pid = family_at(stage)
    script.process.send_signal(SIGNALS[number])
    if number == "SIGSTOP":
        until_stopped(script.process.pid)
        assert psutil.pid_exists(child_pid)
        script.process.send_signal(signal.SIGCONT)
        script.go_on()
    assert script.end() == (0 if number == "SIGSTOP" else -SIGNALS[number])
    assert is_dead(child_pid)
    ends = ends_of(script.said)
    if number == "SIGSTOP":  # as if nothing had been
        assert script.said[-1] == "closed"
        expected = "EngineClosed: .*" if stage == "closing" else "finished"
        assert len(ends) == {"idle": 1, "busy": 2, "asleep": 2, "closing": 2}.get(stage, 0)
    else:
        expected = "EngineClosed: .*"  # of SIGINT, by which all is closed in order
        assert len(ends) == (2 if number == "SIGINT" and stage in ("busy", "asleep") else len(ends))
    assert all(len(end) == 1 and re.fullmatch(expected, end[0]) for end in ends.values()), ends
    check_files((stage, number), runtime)


def check_files(cell: tuple[str, str], runtime: Path) -> None:
    if cell in MAY_LEAVE_A_FOLDER:
        left = os.listdir(runtime)
        assert len(left) == 1 if cell[0] == "ready" else len(left) <= 1
        with PrivateFolder() as private:
            assert os.listdir(runtime) == [os.path.basename(private.path)]
    assert os.listdir(runtime) == []


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ["busy", *nightly("ready", "loading", "closing")])
def test_a_script_is_killed_while_its_child_is_stopped(stage: str, runtime: Path) -> None:
    script, child_pid = family_at(stage)
    os.kill(child_pid, signal.SIGSTOP)
    until_stopped(child_pid)
    script.process.kill()
    assert script.end() == -signal.SIGKILL
    assert is_dead(child_pid)
    check_files((stage, "SIGKILL"), runtime)


# Engines that serve others


BEATS = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 0.2}

# An engine that serves others


@pytest.mark.parametrize("number", few(["SIGKILL"], of=SIGNALS))
async def test_an_engine_command_with_two_front_ends_gets(number: str, runtime: Path) -> None:
    address = f"ipc://{runtime}/engine.sock"
    ends: list[str] = []

    async def call(engine: Engine, num_tokens: int) -> None:
        try:
            output = await engine.generate([5, 6, 7], max_tokens=num_tokens, ignore_eos=True, seed=3)
            ends.append(f"{len(output.outputs[0].token_ids)} tokens")
        except AioEngineError as error:
            ends.append(f"{type(error).__name__}: {error}")

    async with (
        engine_command(address, **BEATS) as (script, _),
        aclosing(await Engine.connect(address)) as one,
        aclosing(await Engine.connect(address)) as other,
    ):
        await one.pause()  # what comes from now on is in flight until it is resumed
        async with anyio.create_task_group() as tasks:
            for engine in (one, other):
                tasks.start_soon(call, engine, 20)
                tasks.start_soon(call, engine, 20)
            await until(lambda: other.health().waiting == 4)
            script.process.send_signal(SIGNALS[number])
            if number == "SIGSTOP":
                for engine in (one, other):
                    await health_is(engine, "STALLED", "has not beaten")
                script.process.send_signal(signal.SIGCONT)
                for engine in (one, other):
                    await health_is(engine, "ALIVE", "")
                await other.resume()
        if number == "SIGSTOP":
            assert ends == ["20 tokens"] * 4
            script.process.terminate()
        code = await anyio.to_thread.run_sync(script.process.wait, DEADLINE_S)
        for engine in (one, other):
            await health_is(engine, "DEAD", "was cut" if number == "SIGKILL" else "the engine has ended")
    if number == "SIGKILL":
        assert code == -signal.SIGKILL
        assert ends == [f"EngineDead: the engine is gone: the connection to {address} was cut"] * 4
        assert "engine.sock" in os.listdir(runtime)  # nobody was there to remove it: the next one there does
        async with engine_command(address) as (script, _), aclosing(await Engine.connect(address)):
            script.process.terminate()
            assert await anyio.to_thread.run_sync(script.process.wait, DEADLINE_S) == 0
    else:
        assert code == (128 + signal.SIGINT if number == "SIGINT" else 0)
        told = "20 tokens" if number == "SIGSTOP" else "EngineDead: the engine has ended: .*closed.*"
        assert len(ends) == 4
        assert all(re.fullmatch(told, end) for end in ends), ends
    assert os.listdir(runtime) == []


def front_end_executor() -> FakeExecutor:
    return FakeExecutor(vocab_size=VOCAB_SIZE, num_blocks=4096, max_model_len=2048, step_time_s=0.001)


async def tokens_of(engine: Engine) -> list[int]:
    output = await engine.generate([5, 6, 7], max_tokens=100, ignore_eos=True, seed=3)
    return list(output.outputs[0].token_ids)


def num_sessions(server: EngineServer) -> int:
    return sum(not session.is_over for session in server.sessions.values())


async def until_running(server: EngineServer, number: int) -> None:
    await until(lambda: server.core.scheduler.num_running == number)


@pytest.mark.parametrize("number", ["SIGKILL", *nightly("SIGSTOP")])
async def test_a_front_end_with_requests_gets(number: str, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.transport.server.EngineServer.max_unread", 200)
    monkeypatch.setattr("aioengine.transport.server.BEHIND_MESSAGES", 100)
    async with (
        served(f"ipc://{runtime}/engine.sock", front_end_executor()) as server,
        aclosing(await Engine.connect(server.address)) as other,
    ):
        tokens = await tokens_of(other)
        script = Script("transport.life_scripts.caller", server.address)
        await anyio.to_thread.run_sync(script.hears, "at busy")
        await until_running(server, 2)
        async with anyio.create_task_group() as tasks:
            heard: list[list[int]] = []

            async def ask() -> None:
                heard.append(await tokens_of(other))

            tasks.start_soon(ask)
            script.process.send_signal(SIGNALS[number])
            began = time.monotonic()
            await until(lambda: num_sessions(server) == 1 and server.core.scheduler.num_running <= 1)
            if number == "SIGKILL":
                print(f"requests of a killed front end ended after {(time.monotonic() - began) * 1000:.1f} ms")
        assert heard == [tokens]
        assert await tokens_of(other) == tokens
        assert server.core.is_drained
        script.process.send_signal(signal.SIGCONT)
        await anyio.to_thread.run_sync(script.end)
        ends = ends_of(script.said)
        if number == "SIGSTOP":
            assert len(ends) == 2
            told = r"EngineDead: .*(let this front end go|was cut|were lost).*"
            assert all(len(end) == 1 and re.fullmatch(told, end[0]) for end in ends.values()), ends
        assert other.health().status == "ALIVE"
    assert os.listdir(runtime) == []


async def test_a_control_call_that_its_caller_cancels_stops_in_the_engine(runtime: Path) -> None:
    executor = ToldExecutor()
    executor.tell(HANG)
    async with (
        served(f"ipc://{runtime}/engine.sock", executor) as server,
        aclosing(await Engine.connect(server.address)) as engine,
    ):
        (session,) = server.sessions.values()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.execute_dummy_batch)
            await until(lambda: session.calls)
            tasks.cancel_scope.cancel()
        await until(lambda: not session.calls)


@pytest.mark.parametrize("what", [*nightly("it is cut"), "it goes silent"])
async def test_a_connection_by_tcp(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.transport.peers.TCP_HEARTBEAT_MS", 100)
    monkeypatch.setattr("aioengine.transport.peers.TCP_TIMEOUT_MS", 400)
    beats = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 0.3}
    async with (
        served("tcp://127.0.0.1:*", front_end_executor(), **beats) as server,
        aclosing(await Engine.connect(server.address)) as other,
        Forwarder() as way,
    ):
        far = await Engine.connect(way.to(server.address))
        with anyio.fail_after(DEADLINE_S):
            assert await tokens_of(far) == await tokens_of(other)
            async with aclosing(far), far.stream([1, 2], max_tokens=2000, ignore_eos=True) as stream:
                await anext(aiter(stream))
                began = time.monotonic()
                (way.cut if what == "it is cut" else way.be_silent)()
                said = "has not been heard of" if what == "it goes silent" else "was cut"
                with pytest.raises(EngineDead, match=said):
                    await stream.finish()
                print(f"{what}: known after {(time.monotonic() - began) * 1000:.0f} ms")
                assert far.health().status == "DEAD"
                assert said in far.health().reason
                await until_running(server, 0)
            assert len(await tokens_of(other)) == 100
        assert other.health().status == "ALIVE"
