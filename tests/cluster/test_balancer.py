"""`Balancer`: what holds whatever comes, and which replica it chooses."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioengine.cluster.balancer import (
    HOME_SLACK,
    MAX_AFFINITY_BLOCKS,
    TOKENS_PER_REQUEST,
    BalancePolicy,
    Balancer,
    Candidate,
)

unhurried = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BLOCK_SIZE = 16
POLICIES: list[BalancePolicy] = ["prefix", "load", "round_robin"]
BLOCKS_PER_REQUEST = TOKENS_PER_REQUEST // BLOCK_SIZE


def idle(rank: int, **numbers: int) -> Candidate:
    numbers = {"running": 0, "waiting": 0, "free_blocks": 1000, "num_blocks": 1000, "num_sent": 0} | numbers
    return Candidate(rank=rank, **{"max_num_seqs": 16, **numbers})


def prompt(name: str, num_blocks: int) -> list[bytes]:
    """Hashes of a prompt: those of one name are beginnings of each other."""
    return [f"{name}:{block}".encode() for block in range(num_blocks)]


class Replicas:
    """Idle replicas that report nothing: only ``num_sent`` tells what they were sent."""

    def __init__(self, count: int) -> None:
        self.sent = Counter(dict.fromkeys(range(count), 0))

    def send(self, balancer: Balancer, *of_request: Any) -> int:
        candidates = [idle(rank, num_sent=self.sent[rank], max_num_seqs=10_000) for rank in sorted(self.sent)]
        rank = balancer.choose(candidates, *of_request)
        self.sent[rank] += 1
        return rank


@st.composite
def candidates_of(draw: st.DrawFn) -> list[Candidate]:
    ranks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
    few = st.integers(0, 40)
    return [
        Candidate(rank, draw(few), draw(few), draw(few), draw(st.sampled_from([0, 40])), draw(st.integers(1, 20)), sent)
        for rank in ranks
        for sent in [draw(few)]
    ]


prompts = st.builds(prompt, st.sampled_from("abcde"), st.integers(0, 60))
sessions = st.sampled_from(["", "s", "t", "u", "v"])
calls = st.tuples(candidates_of(), prompts, sessions)


@unhurried
@given(st.sampled_from(POLICIES), st.integers(0, 5), st.lists(calls | st.integers(0, 9), max_size=20))
def test_it_chooses_one_of_the_candidates_and_remembers_a_bounded_amount(
    policy: BalancePolicy, offset: int, steps: list[Any]
) -> None:
    balancer = Balancer(policy, offset=offset, max_hashes=50, max_sessions=3)
    for step in steps:
        if isinstance(step, int):
            balancer.forget(step)
            assert step not in balancer._caches
            assert not any(bits >> step & 1 for bits in balancer._holders.values())
            assert step not in balancer._sessions.values()
        else:
            candidates, hashes, session = step
            chosen = balancer.choose(candidates, hashes, session)
            (candidate,) = (each for each in candidates if each.rank == chosen)
            cache = balancer._caches.get(chosen)
            assert cache is None or cache.num_blocks <= candidate.num_blocks
        assert balancer.num_sessions <= 3
        caches = balancer._caches
        assert balancer.num_hashes == sum(len(cache.widths) for cache in caches.values()) <= 50
        held = {(block_hash, rank) for rank, cache in caches.items() for block_hash in cache.widths}
        assert held == {
            (block_hash, rank)
            for block_hash, bits in balancer._holders.items()
            for rank in range(10)
            if bits >> rank & 1
        }
        assert all(cache.num_blocks == sum(cache.widths.values()) for cache in caches.values())


@unhurried
@given(candidates_of(), st.lists(st.tuples(prompts, sessions), max_size=10))
def test_the_same_requests_go_to_the_same(candidates: list[Candidate], requests: list[tuple[list[bytes], str]]) -> None:
    one, other = Balancer(offset=3), Balancer(offset=3)
    assert [one.choose(candidates, *each) for each in requests] == [
        other.choose(candidates, *each) for each in requests
    ]


@pytest.mark.parametrize("policy", POLICIES)
@unhurried
@given(count=st.integers(1, 9), num_requests=st.integers(0, 60), offset=st.integers(0, 9))
def test_requests_that_are_alike_are_spread_evenly(
    policy: BalancePolicy, count: int, num_requests: int, offset: int
) -> None:
    replicas, balancer = Replicas(count), Balancer(policy, offset=offset)
    for _ in range(num_requests):
        replicas.send(balancer)
    assert max(replicas.sent.values()) - min(replicas.sent.values()) <= 1


@unhurried
@given(
    st.integers(2, 9),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 15)), max_size=30),
    st.sampled_from(["prefix", "load"]),
)
def test_a_session_stays_while_its_replica_serves(count: int, loads: list[tuple[int, int]], policy: str) -> None:
    balancer = Balancer(cast("BalancePolicy", policy))
    home = balancer.choose([idle(rank) for rank in range(count)], session="s")
    for busy, running in loads:
        candidates = [idle(rank, running=running if rank == busy else 0) for rank in range(count)]
        assert balancer.choose(candidates, session="s") == home
    balancer.forget(home)
    others = [idle(rank) for rank in range(count) if rank != home]
    assert balancer.choose(others, session="s") != home


def test_a_session_leaves_a_replica_where_a_whole_batch_waits_unless_it_is_so_everywhere() -> None:
    balancer = Balancer()
    home = balancer.choose([idle(0), idle(1)], session="s")
    full = [idle(rank, running=16, waiting=16) for rank in (0, 1)]
    assert balancer.choose(full, session="s") == home
    candidates = [each if each.rank == home else idle(each.rank) for each in full]
    assert balancer.choose(candidates, session="s") == 1 - home


def test_front_ends_agree_on_the_home_of_a_session_whichever_others_serve() -> None:
    front_ends = [Balancer(offset=offset) for offset in range(4)]
    replicas = [idle(rank) for rank in range(20)]
    moved = 0
    for number in range(200):
        (home,) = {each.choose(replicas, session=f"session {number}") for each in front_ends}
        left = [each for each in replicas if each.rank != 7]
        moved += Balancer().choose(left, session=f"session {number}") != home
    assert 0 < moved < 40, "those at replica 7 alone find another home"


def test_a_home_that_is_busier_than_the_slack_is_passed_over() -> None:
    home = Balancer().choose([idle(0), idle(1)], session="s")
    for running, wanted in ((int(HOME_SLACK), home), (int(HOME_SLACK) + 1, 1 - home)):
        candidates = [idle(rank, running=running if rank == home else 0) for rank in (0, 1)]
        assert Balancer().choose(candidates, session="s") == wanted


def test_a_prefix_is_followed_until_its_replica_is_busier_than_it_saves() -> None:
    balancer = Balancer(block_size=BLOCK_SIZE)
    assert balancer.choose([idle(5)], prompt("a", 3 * BLOCKS_PER_REQUEST)) == 5
    longer = prompt("a", 3 * BLOCKS_PER_REQUEST + 2)
    assert balancer._cached_blocks(longer) == {5: 3 * BLOCKS_PER_REQUEST}
    assert balancer.choose([idle(4), idle(5, running=2)], longer) == 5
    assert balancer.choose([idle(4), idle(5, running=4)], longer) == 4
    assert balancer.choose([idle(4), idle(5, waiting=1)], prompt("b", 9)) == 4


def test_a_burst_of_one_prefix_spreads() -> None:
    replicas, balancer = Replicas(4), Balancer()
    for number in range(80):
        replicas.send(balancer, prompt("shared", 20) + prompt(f"own {number}", 2))
    assert min(replicas.sent.values()) > 10


@unhurried
@given(st.integers(1, MAX_AFFINITY_BLOCKS + 50), st.data())
def test_what_begins_with_a_prompt_that_was_sent_is_found_at_four_fifths_of_its_length(
    num_blocks: int, data: st.DataObject
) -> None:
    balancer = Balancer()
    balancer.choose([idle(0, num_blocks=10_000)], prompt("a", num_blocks))
    common = data.draw(st.integers(1, num_blocks))
    found = balancer._cached_blocks((prompt("a", common) + prompt("b", 3))[:MAX_AFFINITY_BLOCKS]).get(0, 0)
    assert 0.8 * min(common, MAX_AFFINITY_BLOCKS) <= found <= common
    assert balancer.num_hashes < 50


def test_a_replica_whose_memory_is_short_is_avoided() -> None:
    candidates = [idle(0, free_blocks=50), idle(1, running=8)]
    assert Balancer().choose(candidates) == 1
    assert Balancer().choose([idle(0, free_blocks=300), idle(1, running=1)]) == 0


def test_front_ends_begin_far_apart() -> None:
    firsts = sorted(Balancer("load", offset=offset).choose([idle(rank) for rank in range(64)]) for offset in range(8))
    assert min(after - before for before, after in itertools.pairwise(firsts)) >= 3


def test_a_replica_that_has_none_of_a_prompt_is_not_better_for_having_had_it() -> None:
    balancer = Balancer()
    assert balancer.choose([idle(3)], prompt("a", 40)) == 3
    balancer.forget(3)
    assert balancer.num_hashes == 0
    assert balancer.choose([idle(2), idle(3, running=1)], prompt("a", 40)) == 2


def test_one_that_waits_is_as_much_load_as_four_that_run() -> None:
    for num_running, expected in ((7, 0), (9, 1)):
        candidates = [idle(0, running=num_running), idle(1, waiting=2)]
        assert Balancer("load").choose(candidates) == expected


def test_what_is_remembered_of_many_prompts_is_bounded_and_of_the_newest() -> None:
    balancer = Balancer(max_hashes=50)
    candidates = [idle(rank) for rank in range(4)]
    for number in range(100):
        balancer.choose(candidates, prompt(f"p{number}", 20))
    assert 25 <= balancer.num_hashes == sum(len(cache.widths) for cache in balancer._caches.values()) <= 50
    assert len(balancer._holders) <= 50
    assert prompt("p99", 20)[-1] in balancer._holders
