"""Any value in any field of a request from another process fails its own request alone, or fits its column."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from nightly import seeds
from transport import wire_samples
from transport.siege import VOCAB_SIZE, joined, request

from aioengine.executor.batch import Batch
from aioengine.executor.step_words import ExtraWords, FixedWords, num_fixed_words
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import StepPlan
from aioengine.scheduler.sequence import Request
from aioengine.transport import wire
from aioengine.transport.wire import Envelope

pytestmark = pytest.mark.parametrize("scheme", ["ipc"])

NUMBERS = [s * n + d for n in (0, 1, 2**7, 2**15, 2**31, 2**32, 2**53, 2**63) for s in (1, -1) for d in (-1, 0, 1)]
NUMBERS = [number for number in NUMBERS if -(2**63) <= number < 2**64] + [2**64 - 1, VOCAB_SIZE - 1, VOCAB_SIZE]
FLOATS = [0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "\0", "stop", "length", "raw", "processed", "x" * 5000, "é" * 70_000, "[0]"]


def anything(rng: random.Random, depth: int = 0) -> Any:
    """What msgpack can say, mostly numbers at the edges of columns."""
    match rng.randrange(9 if depth < 2 else 5):
        case 0 | 1 | 2:
            return rng.choice(NUMBERS)
        case 3:
            return rng.choice(FLOATS)
        case 4:
            return rng.choice([*TEXTS, None, True, b"\1\2\3\4"])
        case 5 | 6 | 7:
            return [anything(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 9]))]
        case _:
            return {rng.choice([*NUMBERS, *TEXTS]): anything(rng, depth + 1) for _ in range(rng.choice([0, 1, 3]))}


class Encoding:
    """What a device's own columns make of each plan, before the fake device runs it."""

    def __init__(self, max_num_seqs: int) -> None:
        self._batch = Batch(max_num_seqs=max_num_seqs, vocab_size=VOCAB_SIZE, max_tokens=4096, tile=8)
        self._fixed = FixedWords.of(np.zeros(num_fixed_words(max_num_seqs), np.int32), max_num_seqs)
        self.failed: list[Exception] = []

    def take(self, plan: StepPlan) -> None:
        self._batch.apply(plan, self._fixed, ExtraWords())
        self.failed += self._batch._failed.values()


EDGES = [-(2**63), -(2**31) - 1, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
OF_MESSAGE, OF_REQUEST = wire.AddRequest.__struct_fields__[1:], Request.__struct_fields__
OF_PARAMS = [name for name in SamplingParams.__struct_fields__ if name not in OF_REQUEST]
EVERY_NAME = [*OF_MESSAGE, *OF_REQUEST, *OF_PARAMS]


async def are_borne(address: str, requests: list[dict[str, Any]]) -> None:
    """Each of these requests, named fields of the message, its request and its parameters, harms no other one."""
    async with joined(address, max_num_seqs=16) as (siege, peer):
        encoding, launch = Encoding(16), siege.executor.launch
        siege.executor.launch = lambda plan: [encoding.take(plan), launch(plan)][1]  # type: ignore[method-assign]
        decoder = msgspec.msgpack.Decoder(Envelope[wire.FromFrontEnd])
        numbers = range(1000, 1000 + 2 * len(requests), 2)
        for number, fields in zip(numbers, requests, strict=True):
            params = {"ignore_eos": True, "max_tokens": 5}
            params |= {name: value for name, value in fields.items() if name in OF_PARAMS}
            in_request = {name: value for name, value in fields.items() if name in OF_REQUEST}
            plain = request(number, **{"params": params, **in_request})
            values = [fields.get(name, getattr(plain, name)) for name in plain.__struct_fields__]
            frame = msgspec.msgpack.encode([peer.writer.number, [2, *values]])
            peer.say_raw([frame])
            try:
                decoder.decode(frame)
            except Exception:  # it is no message, and the next one has its number
                continue
            peer.writer.number += 1
        await siege.is_unharmed()
        peer.say(wire.Finish(list(range(1000, numbers[-1] + 100)), "abort"))
        await peer.is_served(1)
        assert siege.num_sessions == 1
        assert encoding.failed == [], "a check lets through what fits no column"


async def test_a_number_may_be_at_any_edge_of_a_column(address: str) -> None:
    listed = [{name: [value]} for name in EVERY_NAME for value in EDGES]
    await are_borne(address, [{name: value} for name in EVERY_NAME for value in EDGES] + listed)


@pytest.mark.parametrize("seed", seeds(60))
async def test_fields_may_have_any_values(address: str, seed: int) -> None:
    rng = random.Random(seed)
    await are_borne(
        address, [{rng.choice(EVERY_NAME): anything(rng) for _ in range(rng.choice([1, 2]))} for _ in range(150)]
    )


async def test_what_a_front_end_says_of_an_end_is_not_sent_back(address: str) -> None:
    """Many such texts would be more than a message holds."""
    async with joined(address) as (siege, peer):
        for number in range(40):
            peer.say(request(number, max_tokens=900))
        await peer.read_until(lambda: len(peer.tokens) == 40)
        peer.say(wire.Finish(list(range(40)), "stop", "x" * 1_000_000))
        await peer.read_until(lambda: len(peer.ended) == 40)
        assert {end.stop_reason for body in peer.news for end in getattr(body, "ended", ())} == {None}
        await siege.is_unharmed()


async def test_one_whose_news_are_no_message_is_cut_off_alone(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined(address) as (siege, peer):
        monkeypatch.setattr(wire, "MAX_BYTES", 4096)
        siege.session.outputs.failed.extend(wire.Failed(number, wire_samples.FAULT) for number in range(200))
        siege.session.mark()
        assert "what its sequences bring is no message" in (await peer.hears_the_end()).message
        await siege.is_unharmed()
