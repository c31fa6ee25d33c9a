"""What a trace of torch's profiler says of a GPU: how busy it was, and how long it waited between steps."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
WAITS = re.compile(
    r"cu(da)?(Stream|Device|Ctx)Synchronize|cu(da)?Memcpy(DtoH|HtoD|DtoD)?(_v2)?"
    r"|cu(da)?(Mem)?(Malloc|Alloc|Free|HostAlloc|MallocHost|FreeHost)(_v2)?"
)
"""Calls that a decode step must not make: they wait for the device, or allocate on it. An event's wait is planned."""
STEP = re.compile(r"step (\d+) \((\d+) rows?, (\d+) tokens?\)")

Interval = tuple[float, float]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did on the device: from its first event's begin to its last one's end, in µs; and its waits."""

    number: int
    rows: int
    tokens: int
    begin: float
    end: float
    waits: tuple[str, ...] = ()


class Trace:
    """A trace's events, in µs.

    Attributes:
        busy: when something ran on the device: intervals in order, that do not touch.
        steps: in order; those that ran nothing on the device are left out.
    """

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        complete = [event for event in events if event.get("ph") == "X"]
        on_device = [event for event in complete if event.get("cat") in ON_DEVICE]
        self.busy = merge((event["ts"], event["ts"] + event["dur"]) for event in on_device)
        self.steps = _steps(complete, on_device)

    @classmethod
    def load(cls, path: Path) -> Trace:
        return cls(json.loads(path.read_text())["traceEvents"])

    def busy_share(self) -> float:
        """Of the time from the first event on the device to the last; 0 where there is none."""
        if not self.busy:
            return 0.0
        return sum(end - begin for begin, end in self.busy) / (self.busy[-1][1] - self.busy[0][0])

    def decode_gaps_us(self) -> list[float]:
        """Between consecutive steps of one token a row: how long nothing ran on the device."""
        gaps = []
        for one, next_one in itertools.pairwise(self.steps):
            if next_one.number == one.number + 1 and one.tokens == one.rows and next_one.tokens == next_one.rows:
                gaps.append(self._idle_between(one.end, next_one.begin))
        return gaps

    def _idle_between(self, begin: float, end: float) -> float:
        place = max(0, bisect.bisect_right(self.busy, (begin, float("inf"))) - 1)
        used = 0.0
        for first, last in self.busy[place:]:
            if first >= end:
                break
            used += max(0.0, min(last, end) - max(first, begin))
        return max(0.0, end - begin - used)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _steps(complete: list[dict[str, Any]], on_device: list[dict[str, Any]]) -> list[Step]:
    """What was launched while the host was in a step's annotation is that step's: by the launch's correlation."""
    of_launch: dict[int, list[dict[str, Any]]] = {}
    for event in on_device:
        of_launch.setdefault(event.get("args", {}).get("correlation", -1), []).append(event)
    launches = sorted((event for event in complete if event.get("cat") in LAUNCHES), key=lambda event: event["ts"])
    times = [event["ts"] for event in launches]
    steps = []
    for event in complete:
        named = STEP.match(event["name"]) if event.get("cat") == "user_annotation" else None
        if named is None:
            continue
        begin, end = (bisect.bisect_left(times, at) for at in (event["ts"], event["ts"] + event["dur"]))
        # Other threads launch things of their own meanwhile.
        mine = [launch for launch in launches[begin:end] if launch.get("tid") == event.get("tid")]
        ran = [each for launch in mine for each in of_launch.get(launch.get("args", {}).get("correlation", -2), [])]
        if ran:
            steps.append(
                Step(
                    number=int(named[1]),
                    rows=int(named[2]),
                    tokens=int(named[3]),
                    begin=min(each["ts"] for each in ran),
                    end=max(each["ts"] + each["dur"] for each in ran),
                    waits=tuple(launch["name"] for launch in mine if WAITS.fullmatch(launch["name"])),
                )
            )
    return sorted(steps, key=lambda step: step.number)
