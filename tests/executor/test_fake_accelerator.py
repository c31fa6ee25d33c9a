"""The fake GPU is late in all ways in which a GPU may be."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

from aioengine.errors import InternalError
from aioengine.testing import FakeAccelerator


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
    assert target.array.tolist() == [2, 2, 2, 0x7F7F7F7F], "nobody let the later work wait"
    copied = device.copy_out(source, target, 4)
    device.enqueue_after(copied)
    device.enqueue(partial(source.fill_, 3))
    device.record().wait()
    assert copied.is_done()
    assert target.array.tolist() == [2] * 4
    device.enqueue_after(copied)  # what is done holds nobody up
    device.synchronize()


def test_words_are_the_devices_until_the_copys_end(device: FakeAccelerator) -> None:
    target = device.host_words(2)
    assert len(target) == 2
    assert target.array.tolist() == [0x7F7F7F7F] * 2, "what nobody wrote is no token"
    copied = device.copy_out(torch.ones(2, dtype=torch.int32), target, 2)
    with pytest.raises(InternalError, match="under way"):
        target.array  # noqa: B018 - looking is what is refused
    copied.wait()
    target.array[0] = 5
    assert target.tensor.tolist() == [5, 1]
    later = device.record()
    target.lend(later)
    with pytest.raises(InternalError, match="under way"):
        target.array  # noqa: B018
    device.synchronize()
    assert target.array.tolist() == [5, 1]


def test_a_graph_does_again_what_was_captured_and_capturing_does_nothing(device: FakeAccelerator) -> None:
    ran: list[int] = []
    graph = device.capture(partial(ran.append, 1))
    device.synchronize()
    assert ran == []
    graph.replay()
    graph.replay()
    assert ran == []
    device.synchronize()
    assert ran == [1, 1]
    assert (device.num_enqueued, graph.num_replays, device.graphs) == (2, 2, [graph])


def test_while_it_is_held_nobody_gets_on(device: FakeAccelerator) -> None:
    ran: list[int] = []
    device.enqueue(partial(ran.append, 1))
    event = device.record()
    device.hold()
    assert device.is_held
    waiting = threading.Thread(target=event.wait)
    waiting.start()
    device.enqueue(partial(ran.append, 2))  # what launches is not held up
    copied = device.copy_out(torch.ones(1, dtype=torch.int32), device.host_words(1), 1)
    waiting.join(0.05)
    assert waiting.is_alive()
    assert ran == []
    device.go_on()
    waiting.join(5)
    assert ran == [1]
    assert not device.is_held
    assert not copied.is_done()
    copied.wait()
    assert ran == [1, 2]


def test_work_may_run_ahead_of_the_copies(device: FakeAccelerator) -> None:
    source, targets = torch.zeros(1, dtype=torch.int32), [device.host_words(1) for _ in range(2)]
    device.hold()
    late = device.copy_out(source, targets[0], 1)
    waited_for = device.copy_out(source, targets[1], 1)
    device.enqueue_after(waited_for)
    device.enqueue(partial(source.fill_, 1))
    device.run_ahead()
    assert (late.is_done(), waited_for.is_done(), device.is_held) == (False, True, True)
    device.go_on()
    late.wait()
    assert [int(target.array[0]) for target in targets] == [1, 0]


@pytest.mark.parametrize("is_held", [True, False])
def test_a_lost_device_says_so_to_all_who_ask_and_keeps_what_is_done(device: FakeAccelerator, is_held: bool) -> None:
    before = device.record()
    before.wait()
    event = device.record()
    target = device.host_words(1)
    copied = device.copy_out(torch.ones(1, dtype=torch.int32), target, 1)
    if is_held:
        device.hold()
    device.lose(OSError("gone"))
    asks: list[Callable[[], object]] = [
        event.wait, event.is_done, copied.wait, copied.is_done, device.synchronize, device.release,
        lambda: target.array, lambda: device.peak_of(lambda: None),
    ]  # fmt: skip
    for ask in asks:
        with pytest.raises(OSError, match="gone"):
            ask()
    before.wait()
    assert before.is_done()
    assert device.num_releases == 0


def test_work_that_fails_loses_the_device(device: FakeAccelerator) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError("a kernel")

    before = device.record()
    device.enqueue(fail)
    device.enqueue(partial(ran.append, 1))
    before.wait()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a kernel"):
            device.synchronize()
    assert ran == []


def test_memory_is_what_it_was_told_and_giving_back_waits(device: FakeAccelerator) -> None:
    device = FakeAccelerator(total_bytes=100, free_bytes=60)
    assert device.memory() == (100, 60, 0)
    ran: list[int] = []
    assert device.peak_of(partial(ran.append, 1)) == 0
    assert ran == [1]
    device.enqueue(partial(ran.append, 2))
    device.release()
    assert ran == [1, 2]
    assert device.num_releases == 1


def test_work_runs_without_gradients(device: FakeAccelerator) -> None:
    made: list[torch.Tensor] = []
    device.enqueue(lambda: made.append(torch.zeros(1)))
    device.synchronize()
    assert made[0].is_inference()
