"""The queue: by order, whoever leaves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import int32
from aioengine.scheduler.policy import WaitingQueue
from aioengine.scheduler.sequence import Request, Sequence, make_choices


def make_sequence(order: int) -> Sequence:
    request = Request(
        request_id=str(order), prompt_token_ids=int32([1]), params=SamplingParams(), seed=0, max_total_tokens=2
    )
    sequence = make_choices(request)
    sequence.order = order
    sequence.precedence = 0, 0, order
    return sequence


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().order for _ in range(len(queue))]


def test_those_who_leave_behind_the_head_leave_no_trace() -> None:
    queue = WaitingQueue()
    head = make_sequence(0)
    queue.add(head)
    for order in range(1, 10_000):
        sequence = make_sequence(order)
        queue.add(sequence)
        queue.discard(sequence)
        assert len(queue._heap) <= 2 * len(queue) + 17
    assert queue.peek() is head
    assert drain(queue) == [0]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 15)), max_size=200))
def test_it_agrees_with_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    queue, model = WaitingQueue(), set[int]()
    sequences = [make_sequence(order) for order in range(16)]
    for operation, order in operations:
        if operation == "add" and order not in model:
            queue.add(sequences[order])
            model.add(order)
        elif operation == "discard":
            queue.discard(sequences[order])
            model.discard(order)
        elif operation == "pop" and model:
            assert queue.pop().order == min(model)
            model.remove(min(model))
        assert len(queue) == len(model)
        assert {sequence.order for sequence in queue} == model
        head = queue.peek()
        assert (None if head is None else head.order) == min(model, default=None)
    assert drain(queue) == sorted(model)
