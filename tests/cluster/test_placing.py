"""What waits for a replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from aioengine.cluster.balancer import Candidate
from aioengine.cluster.placing import Placing
from aioengine.cluster.replica import Replica
from aioengine.config import EngineConfig, ReplicaOptions
from aioengine.core.listener import UNLIMITED
from aioengine.core.protocol import InFlightSequence
from aioengine.scheduler.sequence import Sequence

CONFIG = EngineConfig()


class Gone(dict[int, Replica]):
    """No replicas, and how often they are looked at."""

    num_looks = 0

    def values(self) -> Any:
        self.num_looks += 1
        return super().values()


class Waiting:
    """What is looked at of a sequence."""

    children: tuple[Sequence, ...] = ()
    has_run = False
    block_hashes = ()

    def __init__(self, priority: int = 0, arrived_at: float = 0.0) -> None:
        self.arrived_at = arrived_at
        self.request = SimpleNamespace(priority=priority, session=None)
        self.listener: Any = None
        self.output_ids: list[int] = []


async def test_a_crowd_that_comes_while_none_serves_costs_each_the_same() -> None:
    replicas = Gone()
    placing = Placing(replicas, ReplicaOptions(replicas=2), lambda: 0.0, lambda *_: None, config=CONFIG, offset=0)
    for _ in range(1000):
        placing.add(cast(Sequence, Waiting()))
    assert len(placing.pending) == 1000
    assert replicas.num_looks < 10, "for each all are looked at again"


@pytest.mark.parametrize(("scheduler", "order"), [("priority", [1, 4, 0, 2, 3]), ("fcfs", [0, 1, 2, 3, 4])])
async def test_what_waits_goes_by_its_priority_then_by_its_age(scheduler: str, order: list[int]) -> None:
    replicas: dict[int, Replica] = {}
    config = EngineConfig(scheduler=scheduler)
    waiting = [Waiting(priority, arrived_at) for arrived_at, priority in enumerate((0, -1, 0, 5, -1))]
    placing = Placing(replicas, ReplicaOptions(replicas=2), lambda: 0.0, lambda *_: None, config=config, offset=0)
    for sequence in waiting[1:]:
        placing.add(cast(Sequence, sequence))
    placing.add_again([cast(Sequence, waiting[0])])  # whose replica has died, and which is the oldest
    sent: list[int] = []
    core = SimpleNamespace(
        num_unstarted=0, capacity=10, heard_at=0.0, add=lambda sequence, *_, **__: sent.append(waiting.index(sequence))
    )
    replica = SimpleNamespace(core=core, rank=0, is_serving=True, is_lent=False, num_sent=0)
    replica.candidate = lambda: Candidate(0, 0, 0, 10, 10, 8, 0)
    replicas[0] = cast(Replica, replica)
    placing.dispatch()
    assert sent == order
    assert not placing.pending


@pytest.mark.parametrize("change", [{"is_serving": False}, {"is_lent": True}])
async def test_an_isolated_sequence_that_is_moved_away_is_not_sent_back(change: dict[str, bool]) -> None:
    replicas: dict[int, Replica] = {}
    placing = Placing(replicas, ReplicaOptions(replicas=2), lambda: 0.0, lambda *_: None, config=CONFIG, offset=0)
    sent: list[int] = []
    for rank in range(3):
        core = SimpleNamespace(
            heard_at=0.0, death=None, take_back=list, add=lambda *_, rank=rank, **__: sent.append(rank)
        )
        replica = SimpleNamespace(core=core, rank=rank, is_serving=True, is_lent=False, num_sent=0)
        replica.candidate = lambda rank=rank: Candidate(rank, rank, 0, 10, 10, 8, 0)
        replicas[rank] = cast(Replica, replica)
    sequence = Waiting()
    sequence.listener = SimpleNamespace(num_allowed=UNLIMITED)
    for _ in range(2):
        placing.recovery.on_death([InFlightSequence(cast(Sequence, sequence), True)], "it was killed")
    placing.add(cast(Sequence, sequence))
    assert sent == [0]
    vars(replicas[0]).update(change)
    placing.add_again([cast(Sequence, sequence)])
    assert sent == [0, 1]
