"""One replica, over a core that does nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from aioengine.cluster.replica import Replica, Shared
from aioengine.config import ReplicaOptions
from aioengine.core.listener import Conditions
from aioengine.core.observers import UserCode
from aioengine.core.protocol import ClusterHooks, CoreHooks
from aioengine.errors import EngineDead
from aioengine.metrics import StepRecord


class Backend:
    """A backend that is there at once."""

    where = shared_address = shared_key = ""

    def __init__(self) -> None:
        self.core = SimpleNamespace(death=None, heard_at=0.0)

    async def find_model(self) -> None: ...
    async def open(self, _: Any) -> None: ...


async def opened(now: float, on_record: Any = None) -> tuple[Replica, Backend, ClusterHooks]:
    """A replica that has been opened, at ``now`` by its clock; its backend, and what that was given."""
    members = cast(Any, SimpleNamespace(on_record=on_record, on_state=lambda _: None))
    hooks = CoreHooks(cast(Any, None), cast(Any, None), lambda: None)
    given: list[ClusterHooks] = []
    backend = Backend()

    def make(_: int, hooks: CoreHooks) -> Any:
        assert hooks.cluster is not None
        given.append(hooks.cluster)
        return backend

    replica = Replica(0, make, ReplicaOptions(), hooks, Shared(Conditions(), UserCode()), members, lambda: now)
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
