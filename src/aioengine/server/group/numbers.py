"""`/metrics` of several servers as one: each one's numbers are summed, the engine's are counted once.

All servers hear of all steps, so that a sum of everything would count each token once a server: the engine's numbers
are those of the process above. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from aioengine.outputs.metrics import Sample
from aioengine.server.metrics import AT_DOOR, OWN_PREFIX, MetricFamily, ServerNumbers

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's suffix and labels."""

OF_FIRST = ("process_start_time_seconds", "process_max_fds")
"""Numbers of processes that have no sum: those of the process that has started the others stand for all."""
WAITING = "num_requests_waiting"
WAITING_BY_REASON = "num_requests_waiting_by_reason"


class GroupNumbers:
    """The numbers of servers, the ended ones included: no counter ever goes back, whichever server dies.

    What a server had counted since it last sent its numbers is lost with it.
    """

    def __init__(self) -> None:
        self._last: dict[int, ServerNumbers] = {}
        self._ended: list[MetricFamily] = []
        self.num_restarts = 0

    def note(self, server: int, numbers: ServerNumbers) -> None:
        """Keep the present numbers of a server, by its index."""
        self._last[server] = numbers

    def end(self, server: int) -> None:
        """A server has ended: its counters stay, its gauges are gone."""
        if (last := self._last.pop(server, None)) is not None:
            self._ended = add_up([self._ended, [each for each in last.families if each.kind != "gauge"]])

    def total(self, own: list[MetricFamily], *, num_servers: int, num_serving: int) -> ServerNumbers:
        """The numbers of all together.

        Args:
            own: of the process that asks: the engine's, and its own process's.
        """
        rest = [each for each in own if not each.is_of_engine]
        summed = add_up([rest, self._ended, *(each.families for each in self._last.values())])
        at_door = [each.samples[0].value for each in summed if each.name == OWN_PREFIX + AT_DOOR]
        engine = [_with_door(each, sum(at_door)) for each in own if each.is_of_engine]
        of_group = [
            _one("api_servers", "gauge", "HTTP servers that are to serve.", num_servers),
            _one("api_servers_serving", "gauge", "HTTP servers that do.", num_serving),
            _one("api_server_restarts", "counter", "HTTP servers that were started again.", self.num_restarts),
        ]
        return ServerNumbers([*engine, *summed, *of_group], sum(each.num_open for each in self._last.values()))


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
