"""Child processes: started, watched, ended. Real ones; see the folder children for what they do."""

import asyncio
import contextlib
import gc
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import psutil
import pytest
from blockbuster import BlockBuster
from transport.life_scripts.watching import DEADLINE_S, Ear, is_dead, until_stopped
from waiting import until

from aioengine.errors import ConfigError, EngineClosed
from aioengine.transport.process import Child, ChildSpec
from aioengine.transport.supervisor import Supervisor

both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def no_stray_process() -> Iterator[list[int]]:
    """Whatever a failing test leaves is killed; pids of descendants that may have lost their parents go in the list."""
    orphans: list[int] = []
    yield orphans
    for process in psutil.Process().children(recursive=True):
        process.kill()
    for pid in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("signal.pause" in word or "children." in word for word in psutil.Process(pid).cmdline()):
                psutil.Process(pid).kill()


@pytest.fixture(autouse=True)
def spawning_may_block(no_blocking_call_on_a_loop: BlockBuster) -> None:
    """`subprocess.Popen` waits for the exec, some 0.5 ms."""
    no_blocking_call_on_a_loop.functions["os.read"].can_block_in("aioengine/transport/process.py", "_spawn")


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No process, zombies included, and no file descriptor."""
    num_fds = psutil.Process().num_fds()
    yield
    assert psutil.Process().children(recursive=True) == []
    assert psutil.Process().num_fds() == num_fds


def actor(act: str, *args: str, name: str = "engine 0") -> ChildSpec:
    return ChildSpec(name=name, module="children.actor", args=(act, *args), env={"PYTHONPATH": HERE})


async def descendants(ear: Ear, orphans: list[int], *also: str) -> list[int]:
    """The pids that engine 0 tells, which are orphans should the test fail."""
    pids = [int(pid) for pid in (await ear.hears(r"engine 0: pids (.*)", *also))[0][1].split()]
    orphans.extend(pids)
    return pids


async def failure_of(supervisor: Supervisor) -> Child:
    with anyio.fail_after(DEADLINE_S):
        return await supervisor.wait_failure()


# Start


@both_loops
async def test_children_start_side_by_side_and_end_on_the_way_out(ear: Ear) -> None:
    with nothing_left():
        async with Supervisor([actor("serve", name=f"engine {index}") for index in range(3)]) as supervisor:
            assert [child.returncode for child in supervisor.children] == [None] * 3  # all run, and none is ready yet
            await ear.hears("engine 0: ready", "engine 1: ready", "engine 2: ready")
            (late,) = supervisor.start([actor("serve", name="engine 3")])
            await ear.hears("engine 3: ready")
            assert len({child.pid for child in supervisor.children}) == 4
        assert [child.returncode for child in supervisor.children] == [-signal.SIGTERM] * 4
        assert await late.wait() == -signal.SIGTERM
        assert supervisor.failure is None


@both_loops
async def test_a_cancelled_start_leaves_nothing(ear: Ear) -> None:
    with nothing_left():
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with Supervisor([actor("serve"), actor("ignore")]):
                await anyio.sleep_forever()
        with anyio.CancelScope() as scope:
            async with Supervisor([actor("serve"), actor("ignore", name="engine 1")], terminate_s=0.05):
                await ear.hears("engine 1: ready")
                scope.cancel()
                await anyio.sleep_forever()


async def test_a_child_that_cannot_be_started_is_named_and_those_before_it_are_ended() -> None:
    with nothing_left(), pytest.raises(ConfigError, match="engine 1 could not be started"):
        async with Supervisor([actor("serve"), actor("serve", "\0", name="engine 1")]):
            pytest.fail("it cannot start")


async def test_without_children_it_closes_also_where_no_file_descriptor_is_left() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    supervisor = Supervisor()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            os.pipe()
        await supervisor.aclose()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_closed_supervisor_starts_nothing() -> None:
    async with Supervisor() as supervisor:
        pass
    with pytest.raises(EngineClosed):
        supervisor.start([actor("serve")])


async def test_an_error_in_the_body_ends_the_children_and_comes_out(ear: Ear) -> None:
    async def fail() -> None:
        async with Supervisor([actor("serve")]):
            await ear.hears("engine 0: ready")
            raise ZeroDivisionError

    with nothing_left(), pytest.raises(ZeroDivisionError):
        await fail()


def test_devices_are_given_explicitly(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(devices: tuple[int | str, ...] | None) -> str | None:
        spec = ChildSpec(name="a", module="m", visible_devices=devices)
        return spec.environment("family").get("CUDA_VISIBLE_DEVICES")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [seen(None), seen(()), seen((2, 3)), seen(("GPU-1",))] == [None, "", "2,3", "GPU-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert [seen(None), seen(()), seen((2, 3))] == ["7", "", "2,3"]
    with pytest.raises(ConfigError, match="visible_devices"):
        ChildSpec(name="a", module="m", env={"CUDA_VISIBLE_DEVICES": "1"})


async def test_a_child_sees_its_devices(ear: Ear) -> None:
    spec = actor("devices")
    async with Supervisor(
        [ChildSpec(name="a", module=spec.module, args=spec.args, env=spec.env, visible_devices=(5,))]
    ):
        await ear.hears("a: devices '5'")


def test_the_parent_imports_no_torch() -> None:
    code = "import sys, aioengine.transport.supervisor; print([m for m in sys.modules if m.startswith('torch')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# Exits


@both_loops
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_child_is_known_within_100_ms_and_named(ear: Ear, number: signal.Signals) -> None:
    took_ms = []
    with nothing_left():
        for _ in range(3):
            async with Supervisor([actor("serve"), actor("serve", name="engine 1")]) as supervisor:
                await ear.hears("engine 0: ready", "engine 1: ready")
                ear.forget()
                began = time.monotonic()
                os.kill(supervisor.children[1].pid, number)
                dead = await failure_of(supervisor)
                took_ms.append((time.monotonic() - began) * 1000)
                assert dead is supervisor.failure is supervisor.children[1]
                assert dead.returncode == -number
                how = f"engine 1 (pid {dead.pid}) was killed by {number.name}; its last words: "
                words = "Fatal Python error: Segmentation fault" if number == signal.SIGSEGV else "ready"
                assert dead.describe_exit() == how + words
    print(f"{number.name} known after {min(took_ms):.1f} to {max(took_ms):.1f} ms")
    assert min(took_ms) < 100  # the best of three: the machine may be busy


async def test_a_child_that_exits_is_known_within_100_ms(ear: Ear) -> None:
    took_ms = []
    for _ in range(3):
        async with Supervisor([actor("exit", "0")]) as supervisor:
            dead = await failure_of(supervisor)
            known = time.monotonic()
            took_ms.append((known - float(dead.last_words[-1].split()[1])) * 1000)
            assert dead.returncode == 0
            assert re.match(r"engine 0 \(pid \d+\) exited with code 0; its last words: at ", dead.describe_exit())
    print(f"exit known {min(took_ms):.1f} to {max(took_ms):.1f} ms after the call of sys.exit")
    assert min(took_ms) < 100


@both_loops
async def test_a_traceback_is_told_by_its_last_line(ear: Ear) -> None:
    with nothing_left():
        async with Supervisor([actor("fail")]) as supervisor:
            dead = await failure_of(supervisor)
            told = f"engine 0 (pid {dead.pid}) exited with code 3; its last words: ValueError: no such model"
            assert dead.describe_exit() == told
            assert dead.last_words[0] == "Traceback (most recent call last):"
            assert (logging.ERROR, told) in [(record.levelno, record.getMessage()) for record in ear.records]


async def test_the_first_failure_stays_the_first(ear: Ear) -> None:
    async with Supervisor([actor("serve", name=f"engine {index}") for index in range(3)]) as supervisor:
        await ear.hears("engine 0: ready", "engine 1: ready", "engine 2: ready")
        for index in (2, 0):
            os.kill(supervisor.children[index].pid, signal.SIGKILL)
            await supervisor.children[index].wait()
        assert await supervisor.wait_failure() is supervisor.children[2]


async def test_callbacks_are_called_once_also_late_ones_and_though_others_raise(ear: Ear) -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(repr(context["exception"])))
    called: list[Child] = []

    def raise_error(_: Child) -> None:
        raise KeyError("in a callback")

    async with Supervisor([actor("serve")]) as supervisor:
        (child,) = supervisor.children
        child.add_exit_callback(raise_error)
        child.add_exit_callback(called.append)
        os.kill(child.pid, signal.SIGKILL)
        await supervisor.wait_failure()
        child.add_exit_callback(called.append)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert called == [child, child]
    assert reported == ["KeyError('in a callback')"]


async def test_an_expected_exit_is_no_failure(ear: Ear) -> None:
    async with Supervisor([actor("serve")]) as supervisor:
        supervisor.expect_exits()
        os.kill(supervisor.children[0].pid, signal.SIGKILL)
        await supervisor.children[0].wait()
    assert supervisor.failure is None
    with pytest.raises(EngineClosed):
        await supervisor.wait_failure()


@both_loops
async def test_words_that_are_still_in_the_pipe_are_read(ear: Ear) -> None:
    for _ in range(5):
        async with Supervisor([actor("die")]) as supervisor:
            dead = await failure_of(supervisor)
            assert dead.last_words[-1] == "RuntimeError: these are my last words"


@both_loops
async def test_an_exit_is_known_though_a_descendant_holds_the_pipes(ear: Ear, no_stray_process: list[int]) -> None:
    with nothing_left():
        async with Supervisor([actor("leave")]) as supervisor:
            dead = await failure_of(supervisor)
            assert dead.returncode == 0
            left = await descendants(ear, no_stray_process)
        assert all(map(is_dead, left))


async def test_what_a_child_logs_is_logged_here_at_its_level(ear: Ear) -> None:
    async with Supervisor([actor("log")]):
        await ear.hears("engine 0: ready", "engine 0: to stdout")
    heard = [(record.levelno, record.getMessage()) for record in ear.records]
    heard.remove((logging.INFO, "engine 0: to stdout"))  # another pipe: before or after the rest
    assert heard == [
        (logging.WARNING, "engine 0: hot"),
        (logging.ERROR, "engine 0: aioengine.x: several"),
        (logging.ERROR, "engine 0: aioengine.x: lines"),
        (logging.WARNING, "engine 0: some_body__else: strange"),
        (logging.INFO, "engine 0: ready"),
    ]


@both_loops
async def test_a_flood_holds_neither_the_loop_nor_another_child(ear: Ear) -> None:
    with nothing_left():
        async with Supervisor([actor("flood"), actor("serve", name="engine 1")]) as supervisor:
            await ear.hears("engine 0: ready", "engine 1: ready")
            loop, gaps_s = asyncio.get_running_loop(), []
            for _ in range(300):
                began = loop.time()
                await asyncio.sleep(0)
                gaps_s.append(loop.time() - began)
                ear.forget()
            os.kill(supervisor.children[1].pid, signal.SIGKILL)
            assert await failure_of(supervisor) is supervisor.children[1]
    gaps_s.sort()
    print(f"turns of the loop beside a flood: median {gaps_s[150] * 1e3:.2f} ms, longest {gaps_s[-1] * 1e3:.2f} ms")
    assert gaps_s[150] < 0.05


# The way out


@both_loops
@pytest.mark.parametrize("act", ["ignore", "busy", "flood", "stop"])
async def test_a_child_ends_on_sigterm_or_is_killed_after_the_deadline(ear: Ear, act: str) -> None:
    with nothing_left():
        terminate_s = 0.05 if act == "ignore" else DEADLINE_S
        async with Supervisor([actor(act)], terminate_s=terminate_s) as supervisor:
            await ear.hears("engine 0: ready")
            if act == "ignore":
                os.kill(supervisor.children[0].pid, signal.SIGSTOP)
        # The others end by SIGTERM: for a stopped one it takes SIGCONT, too.
        by = signal.SIGKILL if act == "ignore" else signal.SIGTERM
        assert supervisor.children[0].returncode == -by
        assert any("did not end in 0.05 s: killed" in text for text in ear.said) == (act == "ignore")


@both_loops
async def test_all_descendants_are_killed_on_the_way_out(ear: Ear, no_stray_process: list[int]) -> None:
    with nothing_left():
        async with Supervisor([actor("descendants", "nameless")]):
            pids = await descendants(ear, no_stray_process, "engine 0: ready")
            assert len(pids) == 4
            assert all(map(psutil.pid_exists, pids))
        assert all(map(is_dead, pids))


async def test_descendants_of_a_killed_child_are_killed_too(ear: Ear, no_stray_process: list[int]) -> None:
    with nothing_left():
        async with Supervisor([actor("descendants")]) as supervisor:
            pids = await descendants(ear, no_stray_process, "engine 0: ready")
            os.kill(supervisor.children[0].pid, signal.SIGKILL)
            await supervisor.wait_failure()
        assert all(map(is_dead, pids))


async def test_strangers_are_left_alone(ear: Ear) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])  # noqa: ASYNC220
    try:
        async with Supervisor([actor("serve")]):
            async with Supervisor([actor("serve", name="another's")]):
                await ear.hears("engine 0: ready", "another's: ready")
            assert stranger.poll() is None
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_an_exit_during_the_way_out_is_no_failure(ear: Ear) -> None:
    with nothing_left():
        async with Supervisor([actor("serve"), actor("ignore", name="engine 1")], terminate_s=DEADLINE_S) as supervisor:
            await ear.hears("engine 0: ready", "engine 1: ready")
            supervisor.children[0].add_exit_callback(lambda _: os.kill(supervisor.children[1].pid, signal.SIGKILL))
        assert supervisor.failure is None
        assert not any("did not end" in text for text in ear.said)


@both_loops
async def test_a_way_out_that_is_torn_off_kills_at_once(ear: Ear) -> None:
    with nothing_left():
        supervisor = Supervisor([actor("ignore")], terminate_s=1000)
        await supervisor.__aenter__()
        await ear.hears("engine 0: ready")
        closing = asyncio.get_running_loop().create_task(supervisor.aclose())
        for _ in range(20):
            await asyncio.sleep(0)
        closing.cancel()
        with anyio.fail_after(DEADLINE_S):
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert await supervisor.children[0].wait() == -signal.SIGKILL
            await until(lambda: not supervisor_threads())


async def test_closing_twice_waits_for_the_first(ear: Ear) -> None:
    async with Supervisor([actor("serve")]) as supervisor, anyio.create_task_group() as tasks:
        await ear.hears("engine 0: ready")
        for _ in range(2):
            tasks.start_soon(supervisor.aclose)
    assert supervisor.children[0].returncode == -signal.SIGTERM


def supervisor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aioengine-supervisor")]


# Abandoned


class Owner:
    """Of a supervisor that it does not close."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    def __del__(self) -> None:
        self.supervisor.abandon()


@both_loops
@pytest.mark.parametrize("where", ["on the loop", "in a thread", "in a finalizer"])
async def test_an_abandoned_supervisor_kills_everything(ear: Ear, no_stray_process: list[int], where: str) -> None:
    with nothing_left():
        supervisor = Supervisor()
        (child,) = supervisor.start([actor("descendants")])
        pids = await descendants(ear, no_stray_process, "engine 0: ready")
        with anyio.fail_after(DEADLINE_S):
            if where == "on the loop":
                supervisor.abandon()
                supervisor.abandon()
            elif where == "in a thread":
                await asyncio.to_thread(supervisor.abandon)
            else:
                owner = [Owner(supervisor)]
                owner.append(owner)  # type: ignore[arg-type]
                del owner
                gc.collect()
            assert await child.wait() == -signal.SIGKILL
            await until(lambda: not supervisor_threads())
        assert supervisor.failure is None
        assert all(map(is_dead, pids))
        await supervisor.aclose()
        await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_supervisor_whose_loop_is_gone_can_be_abandoned(
    is_closed: bool, ear: Ear, no_stray_process: list[int]
) -> None:
    with nothing_left():
        loop = asyncio.new_event_loop()

        async def start() -> tuple[Supervisor, list[int]]:
            supervisor = Supervisor()
            supervisor.start([actor("descendants")])
            return supervisor, await descendants(ear, no_stray_process, "engine 0: ready")

        supervisor, pids = loop.run_until_complete(start())
        if is_closed:
            loop.close()
        supervisor.abandon()
        assert supervisor.children[0].returncode == -signal.SIGKILL
        assert all(map(is_dead, pids))
        if not is_closed:  # should it run again it hears of the exit
            assert loop.run_until_complete(supervisor.children[0].wait()) == -signal.SIGKILL
            loop.close()


# The parent dies


def _run_parent(stage: str, module: str, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "children.parent", stage, module, *args],
        env={**os.environ, "PYTHONPATH": HERE},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("stage", "child"),
    [
        ("at once", ["children.actor", "silent"]),
        ("importing", ["children.importing", "{fifo}"]),
        ("importing, stopped", ["children.importing", "stop"]),
        ("serving", ["children.actor", "serve"]),
        ("serving, deaf to SIGTERM", ["children.actor", "ignore"]),
        ("serving, stopped", ["children.actor", "stop"]),
        ("serving, busy in C", ["children.actor", "busy"]),
        ("serving, with a child of its own", ["children.parent", "serving", "children.actor", "serve"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_children_die_with_a_parent_that_is_killed(
    stage: str, child: list[str], tmp_path: Path, no_stray_process: list[int]
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with _run_parent(stage, *(word.format(fifo=fifo) for word in child)) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()[1:]]
        no_stray_process.extend(pids)
        assert parent.stdout.readline() == "ready\n"
        assert len(pids) == 1 + ("child of its own" in stage)
        if "stopped" in stage:
            until_stopped(pids[0])
        parent.kill()
        assert parent.wait() == -signal.SIGKILL
        assert all(map(is_dead, pids))


def test_no_zombie_is_left_in_a_process_to_whom_orphans_come(no_stray_process: list[int]) -> None:
    with _run_parent("way out", "children.actor", "descendants", "nameless") as parent:
        output, _ = parent.communicate(timeout=DEADLINE_S)
    pids, ready, left = output.splitlines()
    no_stray_process.extend(int(pid) for pid in pids.split()[1:])
    assert (ready, left, parent.returncode) == ("ready", "left", 0)
    assert all(is_dead(int(pid)) for pid in pids.split()[1:])
