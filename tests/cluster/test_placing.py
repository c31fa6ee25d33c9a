"""What waits for a replica."""

from __future__ import annotations

from typing import Any, cast

from aioengine.cluster.placing import Placing
from aioengine.cluster.replica import Replica
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.scheduler.sequence import Sequence


class Gone(dict[int, Replica]):
    """No replicas, and how often they are looked at."""

    num_looks = 0

    def values(self) -> Any:
        self.num_looks += 1
        return super().values()


class Waiting:
    """What is looked at of a sequence."""

    children: tuple[Sequence, ...] = ()
    breaks = None
    has_run = False
    arrived_at = 0.0


async def test_a_crowd_that_comes_while_none_serves_costs_each_the_same() -> None:
    replicas = Gone()
    options, config = ReplicaOptions(replicas=2), EngineConfig()
    placing = Placing(replicas, options, lambda: 0.0, lambda *_: None, config=config, offset=0)
    for _ in range(1000):
        placing.add(cast(Sequence, Waiting()))
    assert len(placing.limbo) == 1000
    assert replicas.num_looks < 10, "for each all are looked at again"
