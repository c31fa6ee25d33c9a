"""One replica, over a core that does nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from aioengine.cluster.replica import Replica, stall_of
from aioengine.config import ReplicaOptions
from aioengine.core.health import Health
from aioengine.core.listener import Conditions
from aioengine.core.observers import UserCode
from aioengine.core.protocol import ClusterHooks, CoreHooks
from aioengine.errors import EngineDead
from aioengine.outputs.metrics import StepRecord


class Backend:
    """A backend that is there at once."""

    where = shared_address = server_key = ""

    def __init__(self) -> None:
        self.core = SimpleNamespace(death=None, heard_at=0.0)

    async def find_model(self) -> None: ...
    async def open(self, _: Any = None) -> None: ...
    async def aclose(self) -> None: ...
    def kill(self) -> None: ...


async def opened(now: float, on_record: Any = None) -> tuple[Replica, Backend, ClusterHooks]:
    """A replica that has been opened, at ``now`` by its clock; its backend, and what that was given."""
    nothing: dict[str, Any] = dict.fromkeys(("check", "on_state", "on_death"), lambda *_: None)
    shared = {"clock": lambda: now, "conditions": Conditions(), "options": ReplicaOptions(), "user_code": UserCode()}
    members = cast(Any, SimpleNamespace(on_record=on_record, **shared, **nothing))
    hooks = CoreHooks(cast(Any, None), cast(Any, None), lambda: None)
    given: list[ClusterHooks] = []
    backend = Backend()

    def make(_: int, hooks: CoreHooks) -> Any:
        assert hooks.cluster is not None
        given.append(hooks.cluster)
        return backend

    replica = Replica(0, make, members, hooks)
    await replica.find_model()
    await replica.open()
    return replica, backend, given[0]


async def test_a_record_that_comes_with_the_end_is_not_counted_again() -> None:
    records: list[StepRecord] = []
    _, backend, hooks = await opened(0.0, lambda _, record: records.append(record))
    record = cast(StepRecord, object())
    hooks.on_record(record)
    assert records == [record]
    backend.core.death = EngineDead("it is gone")
    hooks.on_record(record)
    assert records == [record]


async def test_the_first_ones_are_not_silent_for_having_waited_for_others_to_start() -> None:
    replica, backend, _ = await opened(100.0)
    replica.begin_serving()
    assert backend.core.heard_at == 100.0


@pytest.mark.parametrize(
    ("health", "reason"),
    [
        ({}, ""),
        ({"beat_age_s": 2.1}, "it has not beaten for 2.1 s"),
        ({"step_age_s": 2.1}, "its device has been at one step for 2.1 s"),
        ({"idle_age_s": 2.1}, "sequences could run there, and it has launched no step for 2.1 s"),
        ({"call": "save_sharded_state", "call_age_s": 19.0}, ""),
        ({"call": "sleep", "call_age_s": 21.0}, "its device has been at sleep for 21.0 s"),
        ({"status": "DEAD", "beat_age_s": 99.0}, ""),
    ],
)
def test_a_step_is_late_sooner_than_a_call(health: dict[str, Any], reason: str) -> None:
    assert stall_of(Health(**{"status": "ALIVE", **health}), 2.0) == reason


@pytest.mark.virtual_clock(seeds=1)
async def test_any_error_at_a_start_is_this_replica_s_alone() -> None:
    replica, backend, hooks = await opened(0.0)
    replica.begin_serving()

    async def no_space() -> None:
        raise OSError(28, "No space left on device")

    async def dies() -> None:
        backend.core.death = EngineDead("it was killed")
        hooks.on_death([])

    backend.core.run, backend.core.death, backend.core.health = dies, None, lambda: Health(status="ALIVE")
    backend.find_model = no_space
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replica.run)
        await anyio.sleep(3.0)
        assert replica.is_coming
        assert replica.num_restarts == 2, "by its back-off"
        assert replica.reason == "OSError: [Errno 28] No space left on device"
        tasks.cancel_scope.cancel()
