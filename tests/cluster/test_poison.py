"""Requests that kill the replicas which compute them: failed after three, and no other request with them."""

from __future__ import annotations

import random
import re

import pytest
from cluster.harness import Reader, cluster, outputs_of, reading, unaffected, undisturbed, until_read
from cluster.mortal import Poison
from nightly import few

pytestmark = pytest.mark.usefixtures("faults", "quiet_log")

KILLERS = {poison.name: poison for poison in Poison if poison not in (Poison.CREEPING, Poison.ONCE)}
LAST_WORDS = {
    Poison.EXIT: "exited with code 7",
    Poison.SEGFAULT: "SIGSEGV",
    Poison.LOSE: "illegal memory access",
    Poison.STALL: "device has been at one step",
    Poison.LATE: "exited with code 9",
}


def deadline_of(poison: Poison) -> dict[str, float]:
    """Short where it is waited for; else a busy machine is not to look as if a replica stood still."""
    return {"stall_timeout_s": 2.0} if poison == Poison.STALL else {}


def poisoned(poison: Poison) -> Reader:
    return Reader([poison, 3, *range(100, 120)], max_tokens=20)


@pytest.mark.parametrize("name", few(["EXIT"], of=KILLERS))
async def test_a_poison_alone_kills_three_and_fails_with_what_they_died_of(name: str) -> None:
    poison = KILLERS[name]
    reader = poisoned(poison)
    async with cluster(3, **deadline_of(poison)) as replicas:
        async with reading(replicas.engine, [reader]):
            pass
        await replicas.until_serving(3)
        assert replicas.num_restarts() == 3
        assert type(reader.error).__name__ == "StepFailed"
        assert len(re.findall(LAST_WORDS[poison], str(reader.error))) == 3, reader.error
        late = unaffected(random.Random(1), 4)  # it serves on
        async with reading(replicas.engine, late):
            pass
    assert outputs_of(late) == await undisturbed(late)


@pytest.mark.nightly
@pytest.mark.parametrize("name", KILLERS)
async def test_a_poison_among_fifty_fails_and_they_do_not(name: str) -> None:
    crowd = unaffected(random.Random(name), 50, max_tokens=120)
    expected = await undisturbed(crowd)
    killer = poisoned(KILLERS[name])
    async with cluster(3, **deadline_of(KILLERS[name])) as replicas, reading(replicas.engine, crowd):
        await until_read(crowd, 3)
        async with reading(replicas.engine, [killer]):
            pass
    assert type(killer.error).__name__ == "StepFailed"
    assert outputs_of(crowd) == expected


@pytest.mark.nightly
async def test_several_poisons_at_once_fail_each() -> None:
    crowd = unaffected(random.Random(2), 20, max_tokens=120)
    expected = await undisturbed(crowd)
    killers = [poisoned(Poison.LATE), poisoned(Poison.EXIT), poisoned(Poison.LOSE)]
    async with cluster(3, max_attempts=50) as replicas, reading(replicas.engine, [*crowd, *killers]):
        pass
    assert [type(killer.error).__name__ for killer in killers] == ["StepFailed"] * 3
    assert outputs_of(crowd) == expected


@pytest.mark.nightly
async def test_a_poison_that_gets_on_between_its_deaths_is_bounded_by_attempts() -> None:
    reader = Reader([Poison.CREEPING, 40, 100, 101], max_tokens=400)
    async with cluster(2, max_attempts=3) as replicas, reading(replicas.engine, [reader]):
        pass
    assert "max_attempts" in str(reader.error)
    assert 0 < reader.num_tokens < 400


@pytest.mark.nightly
async def test_one_that_died_with_its_replica_once_is_no_poison() -> None:
    reader = Reader([Poison.ONCE, 3, 100, 101])
    async with cluster(2) as replicas, reading(replicas.engine, [reader]):
        pass
    assert outputs_of([reader]) == await undisturbed([reader])


@pytest.mark.nightly
async def test_a_poison_fails_alone_where_there_is_one_replica() -> None:
    reader = poisoned(Poison.EXIT)
    async with cluster(1) as replicas:
        async with reading(replicas.engine, [reader]):
            pass
        assert type(reader.error).__name__ == "StepFailed"
        await replicas.until_serving(1)
