"""What is asked of all replicas, and what one that starts anew is asked again: over cores that note it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from aioengine.cluster.broadcast import ClusterControl
from aioengine.cluster.replica import ReplicaCore
from aioengine.core import control as c
from aioengine.errors import EngineClosed, EngineDead, InvalidRequest


class Noting:
    """A core that notes what it is asked.

    Attributes:
        error: raised by each call.
        may_answer: calls wait for it.
    """

    def __init__(self) -> None:
        self.asked: list[c.Control] = []
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.death: EngineDead | None = None
        self.is_far = False

    async def call(self, control: c.Control) -> None:
        self.asked.append(control)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error

    def die(self, death: EngineDead) -> None:
        self.death = death


def given(*cores: Noting) -> Any:
    return lambda: cast(Sequence[ReplicaCore], cores)


async def restored(control: ClusterControl, *others: Noting) -> list[c.Control]:
    """What a replica is asked when it has started anew."""
    core = Noting()
    await control.restore(cast(ReplicaCore, core), given(*others))
    return core.asked


@pytest.mark.parametrize("tags", [("weights", "kv_cache"), ("kv_cache", "scheduling", "weights")])
async def test_what_was_woken_part_by_part_is_awake(tags: tuple[c.WakeTag, ...]) -> None:
    control, core = ClusterControl(), Noting()
    await control.call(c.Sleep(1), given(core))
    assert await restored(control) == [c.Sleep(1)]
    *first, last = tags
    await control.call(c.WakeUp(first), given(core))
    asleep = await restored(control)
    assert asleep[0] == c.Sleep(1)
    assert [set(each.tags) for each in asleep[1:] if isinstance(each, c.WakeUp)] == [set(first)]
    await control.call(c.WakeUp(last), given(core))
    assert await restored(control) == []


async def test_a_sleep_that_is_refused_is_none_of_one_that_starts() -> None:
    control, core = ClusterControl(), Noting()
    await control.call(c.Sleep(1), given(core))
    core.error = InvalidRequest("the weights came as tensors")
    with pytest.raises(InvalidRequest):
        await control.call(c.Sleep(2), given(core))
    assert await restored(control) == [c.Sleep(1)]


async def test_weights_that_came_as_tensors_are_had_from_one_of_the_same_place() -> None:
    control, (far, near) = ClusterControl(), (Noting(), Noting())
    control.note(c.CommitWeights("transfer"))
    far.is_far = True
    given_to = await restored(control, far, near)
    assert far.asked == []
    (save,), (update,) = near.asked, given_to
    assert isinstance(save, c.SaveShardedState)
    assert update == c.UpdateWeights(save.folder)
    assert not await asyncio.to_thread(Path(save.folder).exists)
    near.error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        await restored(control, near)


async def test_one_that_starts_while_all_pause_is_paused() -> None:
    control, core = ClusterControl(), Noting()
    core.may_answer.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(control.call(c.Pause("wait"), given(core)))
        await asyncio.sleep(0)
        assert await restored(control) == [c.Pause("wait")]
        core.may_answer.set()


async def test_a_pause_that_all_die_over_is_none_of_one_that_starts() -> None:
    control, core = ClusterControl(), Noting()
    core.error = EngineDead("killed")
    for cores in ([core], []):
        with pytest.raises(EngineDead):
            await control.call(c.Pause("wait"), given(*cores))
    assert await restored(control) == []


@pytest.mark.parametrize("gone", [EngineDead("killed"), EngineClosed("it was restarted")])
@pytest.mark.parametrize("call", [c.SupportedTasks(), c.SaveShardedState("/saved", 1), c.Pause("wait")])
async def test_what_one_that_ends_does_not_answer_the_next_one_does(call: c.Control, gone: Exception) -> None:
    control, ended, living = ClusterControl(), Noting(), Noting()
    ended.error = gone
    await control.call(cast(c.AnyControl, call), given(ended, living))
    assert (ended.asked, living.asked) == ([call], [call])


async def test_one_that_starts_while_weights_change_has_the_new_ones() -> None:
    control, core = ClusterControl(), Noting()
    core.may_answer.clear()
    newer = c.UpdateWeights("/newer")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(control.call(newer, given(core)))
        await asyncio.sleep(0)
        restoring = tasks.create_task(restored(control, core))
        await asyncio.sleep(0)
        assert not restoring.done()
        core.may_answer.set()
    assert restoring.result() == [newer]


async def test_one_that_does_not_take_what_others_take_dies() -> None:
    control, taking, refusing = ClusterControl(), Noting(), Noting()
    refusing.error = InvalidRequest("no")
    await control.call(c.UpdateWeights("/newer"), given(taking, refusing))
    assert taking.death is None
    assert "did not take the weights" in str(refusing.death)
