"""Decode steps as graphs: which sizes there are, and the graphs that were captured.

A decode step of a small model is hundreds of launches, each some µs of Python and driver; as a graph it is one.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from aioengine.errors import InternalError
from aioengine.executor.accelerator import Accelerator, Graph, Work
from aioengine.sampler.sampler import Features

logger = logging.getLogger("aioengine")

MAX_GRAPHS = 256
"""Most graphs of all sizes and features; another one replaces the least recently used."""

GRAPH_BYTES = 2 * 2**20
"""About what a graph of a model of 36 layers takes of the driver's memory."""

MAX_SEEN = 4096

MAX_SIZE = 1024


class GraphKey(NamedTuple):
    """Attributes:
    size: rows, padding included.
    features: of the sampling.
    is_late: without the sampling, which is not in the graph.
    """

    size: int
    features: Features
    is_late: bool = False


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8, from 256 on of 16, from 512 on of 32: at most 12 % of a step of 64 rows is padding."""
    steps = (*range(8, 256, 8), *range(256, 512, 16), *range(512, MAX_SIZE + 1, 32))
    largest = min(max_num_seqs, MAX_SIZE)
    return (*(size for size in (1, 2, 4, *steps) if size < largest), largest)


class DecodeGraphs:
    """The graphs of one model, cache and sampler; all void when one of those moves in memory.

    Args:
        sizes: numbers of rows for which there may be a graph; none: graphs are off.
    """

    def __init__(self, accelerator: Accelerator, sizes: Iterable[int]) -> None:
        self._accelerator = accelerator
        self._graphs: dict[GraphKey, Graph] = {}
        self._seen: set[GraphKey] = set()
        self._refused: set[GraphKey] = set()
        self._is_broken = False
        self.sizes = tuple(sorted(sizes))
        largest = self.sizes[-1] if self.sizes else 0
        self.size_for = {rows: self.sizes[bisect.bisect_left(self.sizes, rows)] for rows in range(1, largest + 1)}

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: GraphKey, make_work: Callable[[GraphKey], Work], *, captures_first: bool = False) -> None:
        """Enqueue a step: its graph; or its work, which is captured when it comes a second time.

        Args:
            captures_first: capture it now.
        """
        for fitting in (key, *_more_than(key)):
            graph = self._graphs.pop(fitting, None)
            if graph is not None:
                self._graphs[fitting] = graph  # the last in order is the latest used
                graph.replay()
                return
        work = make_work(key)
        self._accelerator.enqueue(work)  # also the rehearsal that a capture needs
        if captures_first or key in self._seen:
            self._capture(key, work)
        elif len(self._seen) < MAX_SEEN:
            self._seen.add(key)

    def _capture(self, key: GraphKey, work: Work) -> None:
        if self._is_broken or key in self._refused:
            return
        if len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        try:
            self._graphs[key] = self._accelerator.capture(work)
        except InternalError as error:
            self._refused.add(key)
            logger.debug("steps like %s are no graph: %s", key, error)
        except Exception:  # the step itself has run; without graphs steps are slower, and right
            self._is_broken = True
            logger.exception("a step of %d rows could not be captured as a graph; no more will be", key.size)

    def clear(self) -> None:
        """Forget all: what they were captured over is not there any more."""
        self._graphs.clear()
        self._refused.clear()

    def clear_late(self) -> None:
        """Forget the forward passes, which leave their logits elsewhere from now on."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key.is_late}

    def clear_ruled(self) -> None:
        """Forget those with rules or bitmasks, whose memory has moved."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key.features.has_tables}


def _more_than(key: GraphKey) -> Iterator[GraphKey]:
    """Graphs that do what this one does, and a little for nothing: most steps fit in one of the start's."""
    features = key.features
    if features.is_greedy:
        yield key._replace(features=features._replace(is_greedy=False))
    if not features.has_filters:
        yield key._replace(features=features._replace(is_greedy=False, has_filters=True))
