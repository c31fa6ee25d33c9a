"""The policies: who is next, and between whom service is shared. Time is counted in steps, service in tokens."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import nightly
from scheduler.harness import Core

from aioengine.errors import ConfigError
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler import policy
from aioengine.scheduler.plan import int32
from aioengine.scheduler.policy import (
    OUTPUT_COST,
    PROMPT_COST,
    ByPriority,
    Fair,
    Incoming,
    Policy,
    TenantQueues,
    WaitingQueue,
    make_policy,
)
from aioengine.scheduler.sequence import Reason, Request, Sequence, make_choices


class ShortestFirst(Policy):
    """By the length of the prompt."""

    def key(self, request: Incoming) -> tuple[float, float]:
        return 0, request.num_prompt_tokens


class TwiceForGold(Fair):
    def weight(self, tenant: str) -> float:
        return 2.0 if tenant == "gold" else 1.0


class Broken(Policy):
    def __init__(self) -> None:
        raise RuntimeError("no")


def cost(sequence: Sequence) -> float:
    """What `Fair` charges for it, without a cached prefix."""
    return PROMPT_COST * len(sequence.prompt) * sequence.has_run + OUTPUT_COST * len(sequence.output_ids)


def counts_of(core: Core) -> dict[str, float]:
    assert isinstance(core.scheduler.waiting, TenantQueues)
    return core.scheduler.waiting.served


class Load:
    """Requests of tenants that come in while the core steps; prompts are of their own, so that none is cached."""

    def __init__(self, policy: Policy, *, num_rows: int = 4, num_blocks: int = 64, seed: int = 0) -> None:
        self.core = Core(
            max_num_seqs=num_rows, num_blocks=num_blocks, policy=policy, caching=False, max_num_batched_tokens=512
        )
        self.random = random.Random(seed)

    def offer(self, tenant: str, count: int = 1, *, length: int | None = None, **options: Any) -> list[Sequence]:
        """``count`` requests at once, of prompts and outputs of random lengths but for ``length``."""
        return [
            self.core.add(
                [self.random.randrange(500) for _ in range(length or self.random.randint(2, 12))],
                tenant=tenant,
                max_tokens=length or self.random.randint(2, 12),
                ignore_eos=True,
                **options,
            )
            for _ in range(count)
        ]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step()

    def served(self) -> Counter[str]:
        served: Counter[str] = Counter()
        for sequence in self.core.sequences:
            served[sequence.request.tenant] += round(cost(sequence))
        return served

    @property
    def counts(self) -> dict[str, float]:
        """What each tenant was charged, and raised to."""
        return counts_of(self.core)

    def num_waiting(self, tenant: str) -> int:
        return sum(sequence.request.tenant == tenant for sequence in self.core.scheduler.waiting)


def most_at_once(load: Load) -> float:
    """The bound on how far two tenants that both wait come apart: what the rows may be charged after they are taken."""
    return 2 * len(load.core.scheduler.table.occupants) * (12 * PROMPT_COST + 12 * OUTPUT_COST)


def share_under(policy: Policy, *, num_steps: int = 120) -> tuple[Counter[str], Load]:
    """What two tenants get while both have something waiting, one of which offers ten times as much as the other."""
    load = Load(policy)
    for _ in range(num_steps):
        load.offer("loud", 10)
        load.offer("quiet", 1)
        load.step()
    return load.served(), load


def test_ten_times_the_load_gets_no_more_service() -> None:
    served, load = share_under(Fair())
    assert min(load.num_waiting("loud"), load.num_waiting("quiet")) > 0, "both are backlogged"
    assert abs(served["loud"] - served["quiet"]) <= most_at_once(load)
    assert 0.9 < served["loud"] / served["quiet"] < 1.1


@pytest.mark.parametrize("policy", [*nightly(Policy), ByPriority])
def test_by_age_it_gets_ten_times_the_service(policy: type[Policy]) -> None:
    served, _ = share_under(policy())
    assert served["loud"] > 5 * served["quiet"]


def test_weights_share_in_proportion() -> None:
    load = Load(TwiceForGold())
    load.offer("gold", 200)
    load.offer("iron", 200)
    load.step(150)
    served = load.served()
    assert 1.8 < served["gold"] / served["iron"] < 2.2


def test_one_with_a_thousand_requests_delays_another_by_a_row() -> None:
    load = Load(Fair())
    load.offer("loud", 1000)
    load.step(50)
    (late,) = load.offer("quiet")
    for _ in range(12):  # the longest that a row is held
        load.step()
    assert late.has_run


@pytest.mark.parametrize("rests", [*nightly(1), 100])
def test_idle_time_saves_up_no_credit(rests: int) -> None:
    """However long a tenant asked for nothing, it gets half from then on, and no more."""
    load = Load(Fair())
    load.offer("early", 1, length=4)
    load.offer("busy", 400)
    load.step(rests)
    before = load.served()
    load.offer("early", 200)
    load.step(100)
    gained = load.served() - before
    assert abs(gained["busy"] - gained["early"]) <= most_at_once(load)


def test_one_that_comes_while_nothing_waits_begins_where_the_last_one_is() -> None:
    load = Load(Fair())
    for _ in range(50):
        load.offer("busy")
        load.core.run()
    load.offer("new")
    assert load.counts["new"] == load.counts["busy"] > 100


@pytest.mark.parametrize("num_tenants", [2, 7])
def test_no_row_is_idle_while_anything_waits_and_all_is_served(num_tenants: int) -> None:
    load = Load(Fair(), num_blocks=256)
    for tenant in range(num_tenants):
        load.offer(str(tenant), 3 + 20 * (tenant == 0))
    while load.core.scheduler.sequences():
        load.core.launch_all()
        assert load.core.scheduler.num_running == 4 or not load.core.scheduler.waiting
        load.core.land()
    assert all(sequence.finish_reason == "length" for sequence in load.core.sequences)


def test_a_waiting_prefix_is_charged_once_and_a_preempted_one_not_again() -> None:
    load = Load(Fair(), num_blocks=14, seed=3)
    sequences = load.offer("a", 6, length=12) + load.offer("b", 6, length=12)
    load.core.run()
    assert load.core.scheduler.stats().preemptions > 0
    for tenant in "ab":
        total = sum(cost(sequence) for sequence in sequences if sequence.request.tenant == tenant)
        raised = load.counts[tenant] - total
        assert 0 <= raised <= most_at_once(load)


def test_cached_prefixes_cost_nothing() -> None:
    core = Core(policy=Fair())
    prompt = range(100, 117)
    for tenant in ("first", "second"):
        counts_of(core).clear()
        core.add(prompt, tenant=tenant, max_tokens=1)
        core.run()
        assert counts_of(core)[tenant] == (17 if tenant == "first" else 1) * PROMPT_COST + OUTPUT_COST


def test_memory_is_taken_from_the_tenant_that_has_had_most() -> None:
    load = Load(Fair(), num_blocks=12)
    (greedy,) = load.offer("greedy", length=20)
    (modest,) = load.offer("modest", length=20)
    load.counts["greedy"] = 10_000.0
    load.core.run()
    assert (greedy.num_preemptions > 0, modest.num_preemptions) == (True, 0)


def test_choices_are_charged_for_their_outputs_and_one_prompt() -> None:
    core = Core(policy=Fair())
    core.add(range(100, 116), tenant="many", max_tokens=3, n=4, ignore_eos=True)
    core.run()
    assert counts_of(core)["many"] == 16 * PROMPT_COST + 12 * OUTPUT_COST


def test_within_a_tenant_priority_decides_and_between_them_it_does_not() -> None:
    load = Load(Fair(), num_rows=1)
    load.offer("a", length=2)
    load.step()
    low, high = load.offer("a", length=2, priority=5)[0], load.offer("a", length=2, priority=-5)[0]
    (other,) = load.offer("b", length=2, priority=9)
    order = []
    while load.core.scheduler.sequences():
        order += [sequence for sequence in load.core.scheduler.take_started() if sequence in (low, high, other)]
        load.step()
    order += [sequence for sequence in load.core.scheduler.take_started() if sequence in (low, high, other)]
    assert order.index(high) < order.index(low)
    assert order.index(other) < order.index(low)


def test_a_sequence_that_leaves_its_queue_and_comes_back_is_found() -> None:
    load = Load(Fair(), num_rows=1)
    load.offer("a", 3)
    (held,) = load.offer("b", reason=Reason.PAUSED)
    load.step(3)
    for _ in range(100):
        load.core.scheduler.unblock_sequence(held, Reason.PAUSED)
        load.core.scheduler.block_sequence(held, Reason.PAUSED)
    assert len(load.core.scheduler.waiting._heap) <= 2 * 2 + 17  # type: ignore[union-attr]
    load.core.scheduler.unblock_sequence(held, Reason.PAUSED)
    load.core.run()
    assert held.has_ended


def test_tenants_that_are_made_up_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_REMEMBERED", 20)
    load = Load(Fair())
    for number in range(200):
        load.offer(str(number), length=2)
        load.step()
    load.core.run()
    assert len(load.counts) <= 60
    assert all(sequence.has_ended for sequence in load.core.sequences)


def test_a_class_of_ones_own_decides_by_its_key() -> None:
    load = Load(make_policy(f"{__name__}:ShortestFirst"), num_rows=1)
    lengths = [9, 3, 7, 5]
    for length in lengths:
        load.offer("", length=length)
    load.core.run()
    ended = [sequence for output in load.core.outputs for sequence in output.sequences if sequence.has_ended]
    assert [len(sequence.prompt) for sequence in dict.fromkeys(ended)] == sorted(lengths)


def test_first_come_is_by_age_alone() -> None:
    core = Core(max_num_seqs=1, policy=make_policy("fcfs"))
    first = core.add([1, 2], priority=5)
    core.launch()
    second, third = core.add([3, 4], priority=5), core.add([5, 6], priority=-5)
    core.land()
    core.launch()
    assert first.num_preemptions == 0
    assert second.precedence < third.precedence


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere:Policy", "nowhere"),
        ("aioengine.scheduler.policy:Nothing", "Nothing"),
        ("aioengine.scheduler.policy:make_policy", "subclass"),
        (f"{__name__}:Broken", "RuntimeError: no"),
    ],
)
def test_what_is_no_policy_is_refused_by_its_path(path: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        make_policy(path)
    assert path in str(caught.value)


# The queue


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
