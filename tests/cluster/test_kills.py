"""Replicas die under load in every way, and each request brings what it brings at an engine that lives."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest
from cluster.harness import (
    Cluster,
    Reader,
    cluster,
    outputs_of,
    reading,
    unaffected,
    undisturbed,
    until_read,
)
from cluster.mortal import Poison
from nightly import few, nightly

pytestmark = pytest.mark.usefixtures("faults", "quiet_log")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 7},
    "choices": {"n": 3, "seed": 8},
    "greedy choices": {"n": 3, "temperature": 0.0},
    "logprobs": {"logprobs": 2, "logprob_token_ids": [11, 12], "seed": 9},
    "logprobs of choices": {"logprobs": 1, "n": 3, "seed": 10},
    "prompt logprobs": {"prompt_logprobs": 1, "seed": 11},
    "prompt logprobs of choices": {"prompt_logprobs": 1, "n": 2, "seed": 12},
    "json": {"structured": SCHEMA, "seed": 13, "ignore_eos": False, "max_tokens": 80},
    "json of choices": {"structured": SCHEMA, "seed": 14, "n": 3, "ignore_eos": False, "max_tokens": 80},
    "rules": {"bad_words": [" the", "a b"], "min_tokens": 20, "stop_token_ids": list(range(10, 1000)), "seed": 15},
    "without text": {"detokenize": False, "seed": 16},
    "with a bound": {"max_unread_tokens": 3, "seed": 17},
    "choices with a bound": {"max_unread_tokens": 2, "n": 3, "seed": 18},
    "at an interval": {"stream_interval": 7, "seed": 19},
}
DEATHS = {name: signal.Signals[name] for name in ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGSTOP", "SIGUSR1", "SIGUSR2")}
"""SIGUSR1 loses the device, SIGUSR2 has it stand still: see `cluster.mortal`."""
FAST_DEATHS = [DEATHS[name] for name in ("SIGKILL", "SIGTERM", "SIGUSR1")]


def each_kind(rng: random.Random, *head: int) -> list[Reader]:
    prompt = [rng.randint(10, 1999) for _ in range(40)]
    return [Reader([*head, *prompt, number], **sampling) for number, sampling in enumerate(KINDS.values(), 10)]


@pytest.mark.parametrize("death", few(["SIGUSR2"], of=DEATHS))
async def test_a_replica_dies_under_load_and_each_kind_of_request_ends_as_if_it_lived(death: str) -> None:
    rng = random.Random(death)
    crowd = unaffected(rng, 16, max_tokens=150)
    readers = [*each_kind(rng), *crowd]
    expected = await undisturbed(readers)
    async with cluster(3, stall_timeout_s=1.0) as replicas:
        async with reading(replicas.engine, readers):
            await until_read(crowd, 5)
            replicas.kill(0, DEATHS[death])
            assert not all(reader.has_ended for reader in crowd), "too late to disturb anything"
        assert outputs_of(readers) == expected
        await replicas.until_restarted(1, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", few(["json of choices"], of=KINDS))
async def test_a_request_goes_on_behind_each_of_its_tokens(kind: str) -> None:
    """Its replica exits when a certain token is to be sampled, those before just handed out or on their way."""
    positions = [0, 1, 6]  # which the shortest JSON has
    readers = [Reader([Poison.ONCE, position, *range(100, 140)], **KINDS[kind]) for position in positions]
    await all_end_as_undisturbed_one_by_one(readers)


@pytest.mark.nightly
async def test_a_stop_string_is_cut_by_the_break() -> None:
    plain = [Reader([Poison.ONCE, position, 500, 600], seed=3, max_tokens=30) for position in (9, 10, 11)]
    readers = []
    for reader, found in zip(plain, await undisturbed(plain), strict=True):
        text = found["choices"][0][2]
        stop = text[len(text) // 3 : len(text) // 3 + 8]
        readers.append(Reader(reader.prompt, **{**reader.sampling, "stop": [stop]}))
    outputs = await all_end_as_undisturbed_one_by_one(readers)
    assert [each["choices"][0][3] for each in outputs] == ["stop"] * 3


def held(replicas: Cluster) -> list[int]:
    """By rank, the sequences that a replica has."""
    return [status.waiting + status.running for status in replicas.engine.replicas()]


async def all_end_as_undisturbed_one_by_one(readers: list[Reader]) -> list[dict[str, Any]]:
    expected = await undisturbed(readers)
    async with cluster(2) as replicas:
        for reader in readers:
            async with reading(replicas.engine, [reader]):
                pass
        await replicas.until_restarted(len(readers), 2)
    assert outputs_of(readers) == expected
    return expected


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["with a bound", *nightly("choices with a bound")])
async def test_a_stream_that_is_not_read_survives_unread(kind: str) -> None:
    reader, num_choices = Reader([*range(100, 140)], **KINDS[kind]), KINDS[kind].get("n", 1)
    expected = await undisturbed([reader])
    async with cluster(2) as replicas, reading(replicas.engine, [reader]):
        reader.may_read.clear()
        await until_read([reader], 1)
        for number in (1, 2, 3):  # it is not computed meanwhile, and not taken for the cause
            await replicas.until(lambda: sum(held(replicas)) == num_choices)
            replicas.kill(held(replicas).index(max(held(replicas))))
            await replicas.until_restarted(number, 2)
        assert reader.num_tokens <= 8 * num_choices, "it was not read"
        reader.may_read.set()
    assert outputs_of([reader]) == expected


@pytest.mark.nightly
async def test_all_replicas_are_killed_at_once_and_requests_wait_for_the_restart() -> None:
    rng = random.Random(5)
    crowd = unaffected(rng, 16, max_tokens=150)
    readers = [*each_kind(rng), *crowd]
    expected = await undisturbed(readers)
    async with cluster(3) as replicas, reading(replicas.engine, readers):
        await until_read(crowd, 5)
        for rank in replicas.ranks():
            replicas.kill(rank)
        late = unaffected(rng, 4)  # while none serves
        async with reading(replicas.engine, late):
            pass
    assert outputs_of(readers) == expected
    assert outputs_of(late) == await undisturbed(late)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
async def test_replicas_die_again_and_again(seed: int) -> None:
    rng = random.Random(seed)
    crowd = unaffected(rng, 30, max_tokens=200)
    readers = [*each_kind(rng), *crowd]
    expected = await undisturbed(readers)
    async with cluster(3, max_attempts=50) as replicas, reading(replicas.engine, readers):
        for number in range(1, 7):
            await until_read(crowd, 4 * number)
            await replicas.until_serving_at_least(1)
            replicas.kill(rng.choice(replicas.ranks()), rng.choice(FAST_DEATHS))
    assert outputs_of(readers) == expected
