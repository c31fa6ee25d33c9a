"""What is left when a process is ended at any stage of its life: nothing. Real processes; see the folder life_scripts.

The tables are process × stage × signal. The child's half runs in this process, the parent's in a script.
"""

import os
import re
import signal
import time
from pathlib import Path

import anyio
import psutil
import pytest
from nightly import few, nightly
from transport.life_scripts.life import STAGES, Life
from transport.life_scripts.watching import DEADLINE_S, Lines, Script, ends_of, health_is, is_dead, until_stopped

from aioengine.transport.addresses import PrivateFolder

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
