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


async def test_a_record_that_comes_with_the_end_is_not_counted_again() -> None:
    records: list[StepRecord] = []
    members = cast(Any, SimpleNamespace(on_record=lambda _, record: records.append(record), on_state=lambda _: None))
    hooks = CoreHooks(cast(Any, None), cast(Any, None), lambda: None)
    given: list[ClusterHooks] = []

    class Backend:
        core = SimpleNamespace(death=None)

        async def find_model(self) -> None: ...
        async def open(self, _: Any) -> None: ...

    def make(_: int, hooks: CoreHooks) -> Any:
        assert hooks.cluster is not None
        given.append(hooks.cluster)
        return Backend()

    shared = Shared(Conditions(), UserCode())
    replica = Replica(0, make, ReplicaOptions(), hooks, shared, members, lambda: 0.0)
    await replica.find_model()
    await replica.open()
    record = cast(StepRecord, object())
    given[0].on_record(record)
    assert records == [record]
    Backend.core.death = EngineDead("it is gone")
    given[0].on_record(record)
    assert records == [record]
