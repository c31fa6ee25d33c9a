"""`/metrics` of several servers as one: each one's numbers are summed, the engine's are counted once.

An own sum, and not prometheus_client's files of several processes: the engine's metrics are objects of this package,
which cost a step 20 µs; of steps all servers hear, so that a sum of all would count each token once a server; and a
server that is asked while it is stuck must not hold up the scrape. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from aioengine.metrics import Sample
from aioengine.server.metrics import AT_DOOR, OWN_PREFIX, MetricFamily

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's suffix and labels."""

OF_FIRST = ("process_start_time_seconds", "process_max_fds")
"""Numbers of processes that have no sum: those of the process that has started the others stand for all."""
WAITING = "num_requests_waiting"
WAITING_BY_REASON = "num_requests_waiting_by_reason"


class GroupNumbers:
    """The numbers of servers, the ended ones included: no counter ever goes back, whichever server dies.

    What a server had counted since it was last asked is lost with it; no scrape has shown that.
    """

    def __init__(self) -> None:
        self._last: dict[int, list[MetricFamily]] = {}
        self._ended: list[MetricFamily] = []
        self.num_restarts = 0

    def note(self, server: int, families: list[MetricFamily]) -> None:
        """What a server, by its index, has told now."""
        self._last[server] = families

    def end(self, server: int) -> None:
        """A server has ended: what it had counted stays, what it had at the moment is gone."""
        families = [each for each in self._last.pop(server, ()) if each.kind != "gauge" and not each.is_of_engine]
        self._ended = add_up([self._ended, families])

    def total(self, own: list[MetricFamily], *, num_servers: int, num_serving: int) -> list[MetricFamily]:
        """The families of all together.

        Args:
            own: of the process that asks: the engine's, and its own process's.
        """
        rest = [each for each in own if not each.is_of_engine]
        others = [[each for each in families if not each.is_of_engine] for families in self._last.values()]
        summed = add_up([rest, self._ended, *others])
        at_door = [each.samples[0].value for each in summed if each.name == OWN_PREFIX + AT_DOOR]
        engine = [_with_door(each, sum(at_door)) for each in own if each.is_of_engine]
        return [*engine, *summed, *self._of_group(num_servers, num_serving)]

    def _of_group(self, num_servers: int, num_serving: int) -> list[MetricFamily]:
        return [
            _one("api_servers", "gauge", "HTTP servers that are to serve.", num_servers),
            _one("api_servers_serving", "gauge", "HTTP servers that do.", num_serving),
            _one("api_server_restarts", "counter", "HTTP servers that were started again.", self.num_restarts),
        ]


def add_up(parts: Iterable[Iterable[MetricFamily]]) -> list[MetricFamily]:
    """The sum of families with equal names, label by label, in the order in which they first come."""
    found: dict[str, MetricFamily] = {}
    sums: dict[str, dict[Key, float]] = {}
    for families in parts:
        for family in families:
            if family.name in OF_FIRST and family.name in found:
                continue
            found.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.suffix, sample.labels)
                values[key] = values.get(key, 0) + sample.value
    return [
        family._replace(samples=[Sample(*key, value) for key, value in sums[name].items()])
        for name, family in found.items()
    ]


def _with_door(family: MetricFamily, num_at_door: float) -> MetricFamily:
    """The engine's numbers of waiting sequences, with those that wait at servers."""
    name = family.name.rpartition(":")[2]
    if not num_at_door or name not in (WAITING, WAITING_BY_REASON):
        return family
    samples = [
        Sample(each.suffix, each.labels, each.value + num_at_door)
        if name == WAITING or ("reason", "capacity") in each.labels
        else each
        for each in family.samples
    ]
    return family._replace(samples=samples)


def _one(name: str, kind: Literal["gauge", "counter"], documentation: str, value: float) -> MetricFamily:
    suffix = "_total" if kind == "counter" else ""
    return MetricFamily(f"{OWN_PREFIX}{name}", kind, documentation, [Sample(suffix, (), value)], ())
