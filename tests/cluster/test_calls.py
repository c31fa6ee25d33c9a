"""Control calls, and changes of the replicas, while replicas die, come and end; on a virtual clock."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from cluster.simulated import SimulatedCore
from cluster.test_simulated import Simulation, simulated

from aioengine import EngineClosed, EngineDead, EngineOverloaded
from aioengine.cluster.broadcast import MAX_TRIES
from aioengine.core import control as c

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.virtual_clock(seeds=3)]

CALLS: list[c.AnyControl] = [
    c.Pause("wait"),
    c.Sleep(1),
    c.WakeUp(),
    c.UpdateWeights("/newer"),
    c.StartProfile(),
    c.SaveShardedState("/saved", 1),
    c.CollectiveRpc("name"),
]


class Calls:
    """What the replicas of a simulation are asked, in order, beside their sequences.

    Attributes:
        num_deadly: so many further calls kill the replica that is asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.num_deadly = 0
        add = SimulatedCore.add

        async def call(core: SimulatedCore, control: Any) -> Any:
            self.asked.append(control)
            if self.num_deadly > 0:
                self.num_deadly -= 1
                core.die(EngineDead("killed"))
                raise EngineDead("killed")
            return []

        def note_add(core: SimulatedCore, *args: Any, **given: Any) -> None:
            self.asked.append("sequence")
            add(core, *args, **given)

        monkeypatch.setattr(SimulatedCore, "call", call)
        monkeypatch.setattr(SimulatedCore, "add", note_add)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def kill_all(simulation: Simulation) -> None:
    for core in simulation.launcher.cores.values():
        core.die(EngineDead("killed"))


async def until_serving(simulation: Simulation) -> None:
    await simulation.core.when(lambda: all(each.is_serving for each in simulation.core.replicas.values()))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
async def test_a_call_waits_for_a_replica(calls: Calls, call: c.AnyControl) -> None:
    async with simulated(1, 2) as simulation:
        kill_all(simulation)
        await simulation.core.call(call)
        asked = type(call)
        assert any(isinstance(each, asked) for each in calls.asked)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
async def test_a_call_that_is_cancelled_while_it_waits_has_done_nothing(calls: Calls, call: c.AnyControl) -> None:
    async with simulated(1, 2) as simulation:
        kill_all(simulation)
        with anyio.move_on_after(0.01) as scope:
            await simulation.core.call(call)
        assert scope.cancelled_caught
        await until_serving(simulation)
        assert calls.asked == []


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_a_call_that_all_die_over_is_made_again(calls: Calls, num_replicas: int) -> None:
    async with simulated(1, num_replicas) as simulation:
        calls.num_deadly = num_replicas
        await simulation.core.call(c.Pause("wait"))
        await until_serving(simulation)
        assert len(calls.asked) >= num_replicas + 1
        kill_all(simulation)
        calls.asked.clear()
        await until_serving(simulation)
        assert calls.asked == [c.Pause("wait")] * num_replicas


async def test_a_call_that_kills_all_that_come_is_given_up_and_may_be_made_again(calls: Calls) -> None:
    async with simulated(1, 1) as simulation:
        calls.num_deadly = MAX_TRIES
        with pytest.raises(EngineOverloaded, match=r"Pause: all replicas ended .* call it again"):
            await simulation.core.call(c.Pause("wait"))
        assert len(calls.asked) == MAX_TRIES
        await until_serving(simulation)
        assert len(calls.asked) == MAX_TRIES, "it is no pause of one that starts"
        await simulation.core.call(c.Pause("wait"))


async def test_a_function_that_all_die_over_is_called_once(calls: Calls) -> None:
    async with simulated(1, 1) as simulation:
        calls.num_deadly = 1
        with pytest.raises(EngineOverloaded, match="CollectiveRpc"):
            await simulation.core.call(c.CollectiveRpc("name"))
        await until_serving(simulation)
        assert len(calls.asked) == 1


@pytest.mark.parametrize("call", [c.Sleep(1), c.Pause("abort")])
async def test_what_is_asked_after_a_call_that_aborts_is_sent_behind_it(calls: Calls, call: c.AnyControl) -> None:
    async with simulated(1, 3) as simulation:
        hold = simulation.core.placing.hold

        def hold_and_ask() -> None:
            hold()
            for _ in range(4):  # as clients do before the call is on its way to all
                simulation.ask()

        simulation.core.placing.hold = hold_and_ask  # type: ignore[method-assign]
        await simulation.core.call(call)
        await simulation.end()
        assert calls.asked == [call] * 3 + ["sequence"] * 4


async def test_what_comes_while_a_call_that_aborts_waits_is_not_aborted(calls: Calls) -> None:
    async with simulated(1, 1) as simulation:
        kill_all(simulation)
        await simulation.core.call(c.Sleep(1, "abort"))
        assert calls.asked == [c.Sleep(1, "keep")]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
async def test_closing_ends_a_call_that_waits(calls: Calls, call: c.AnyControl) -> None:
    """Also one whose replicas have just ended."""
    errors: list[Exception] = []
    async with anyio.create_task_group() as tasks, simulated(1, 2) as simulation:
        calls.num_deadly = 2

        async def run() -> None:
            try:
                await simulation.core.call(call)
            except Exception as error:
                errors.append(error)

        tasks.start_soon(run)
        await simulation.core.when(lambda: not any(each.is_serving for each in simulation.core.replicas.values()))
    assert [type(error) for error in errors] == [EngineClosed]


@pytest.mark.parametrize("change", ["scale", "restart"])
async def test_closing_ends_what_changes_the_replicas(change: str) -> None:
    errors: list[Exception] = []

    async with anyio.create_task_group() as tasks, simulated(1, 2) as simulation:

        async def run() -> None:
            try:
                await (simulation.backend.scale(4) if change == "scale" else simulation.backend.restart())
            except Exception as error:
                errors.append(error)

        tasks.start_soon(run)
        tasks.start_soon(run)  # waits for its turn
        await anyio.sleep(0.02)
    assert [type(error) for error in errors] == [EngineClosed] * 2
