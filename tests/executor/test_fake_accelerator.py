"""The fake GPU is late in all ways in which a GPU may be."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from aioengine.errors import InternalError
from doubles.fake_accelerator import FakeAccelerator


@pytest.fixture
def device() -> FakeAccelerator:
    return FakeAccelerator()


def test_work_runs_in_order_when_somebody_waits_and_no_earlier(device: FakeAccelerator) -> None:
    ran: list[int] = []
    device.enqueue(partial(ran.append, 1))
    first = device.record()
    device.enqueue(partial(ran.append, 2))
    second = device.record()
    device.enqueue(partial(ran.append, 3))
    assert ran == []
    assert not first.is_done()
    first.wait()
    assert (ran, first.is_done(), second.is_done()) == ([1], True, False)
    second.wait()
    second.wait()
    first.wait()
    assert ran == [1, 2]
    assert 0 <= second.seconds_since(first) < 60
    device.synchronize()
    assert ran == [1, 2, 3]
    assert device.num_enqueued == 3


def test_a_copy_reads_its_source_when_it_is_waited_for_whatever_became_of_that(device: FakeAccelerator) -> None:
    source, target = torch.zeros(4, dtype=torch.int32), device.host_words(4)
    device.enqueue(partial(source.fill_, 1))
    copied = device.copy_out(source, target, 3)
    device.enqueue(partial(source.fill_, 2))
    device.record().wait()
    copied.wait()
    assert target.array.tolist() == [2, 2, 2, 0x7F7F7F7F], "the later work was not made to wait"
    copied = device.copy_out(source, target, 4)
    device.enqueue_after(copied)
    device.enqueue(partial(source.fill_, 3))
    device.record().wait()
    assert copied.is_done()
    assert target.array.tolist() == [2] * 4
    device.enqueue_after(copied)  # what is done holds nothing up
    device.synchronize()


def test_a_graph_does_again_what_was_captured_and_capturing_does_nothing(device: FakeAccelerator) -> None:
    ran: list[int] = []
    counter, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    def work() -> None:
        ran.append(1)
        counter[1:].add_(1)
        torch.add(counter, 10, out=out)

    graph = device.capture(work)
    device.synchronize()
    assert (counter.tolist(), out.tolist()) == ([0, 0], [0, 0])
    graph.replay()
    graph.replay()
    assert counter.tolist() == [0, 0]
    device.synchronize()
    assert (counter.tolist(), out.tolist()) == ([0, 2], [10, 12])
    assert ran == [1], "Python is no part of a graph"
    assert (device.num_enqueued, graph.num_replays, device.graphs) == (2, 2, [graph])


class Table:
    """Memory that grows, and work that reads it."""

    def __init__(self) -> None:
        self.words = torch.ones(2)
        self.out = torch.zeros(2)

    def grow(self) -> None:
        self.words = torch.full((4,), 7.0)

    def work(self) -> None:
        self.out.copy_(self.words[:2] * 2)


def test_a_graph_reads_the_memory_of_its_capture_which_is_as_the_work_before_has_left_it(
    device: FakeAccelerator,
) -> None:
    table = Table()
    device.enqueue(table.grow)
    graph = device.capture(table.work)
    before = table.words
    graph.replay()
    device.synchronize()
    assert table.out.tolist() == [14, 14]
    words = table.words
    assert words is not before
    device.enqueue(partial(words.fill_, 1))
    device.enqueue(table.grow)
    graph.replay()
    device.synchronize()
    assert table.out.tolist() == [2, 2], "the old memory is still in use"


@pytest.mark.parametrize("how", ["given back", "moved", "grown"])
def test_a_graph_over_memory_that_is_gone_loses_the_device(device: FakeAccelerator, how: str) -> None:
    table = Table()
    graph = device.capture(table.work)
    graph.replay()
    device.synchronize()
    assert table.out.tolist() == [2, 2]
    if how == "given back":
        table.words = table.words.clone()
    elif how == "moved":  # as the parameters of a model
        table.words.data = table.words.data.clone()
    else:
        table.words.resize_(2**20)
    graph.replay()
    with pytest.raises(InternalError, match="given back, or has moved"):
        device.synchronize()
    with pytest.raises(InternalError, match="given back, or has moved"):
        device.record().wait()


@pytest.mark.parametrize(
    "work",
    [
        lambda words: words[0].item(),
        lambda words: words[words > 0],
        lambda words: torch.equal(words, words),
        lambda words: words.nonzero(),
    ],
    ids=["item", "mask", "equal", "nonzero"],
)
def test_work_that_waits_for_the_device_cannot_be_captured(
    device: FakeAccelerator, work: Callable[[torch.Tensor], object]
) -> None:
    words = torch.ones(2)

    def change_and_wait() -> None:
        words.fill_(3)
        work(words)

    device.capture(change_and_wait)
    with pytest.raises(InternalError, match="waits for what the device computes"):
        device.synchronize()
    assert words.tolist() == [1, 1], "what a capture wrote is undone, if it fails, too"
