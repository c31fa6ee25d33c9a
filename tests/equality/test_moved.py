"""Requests whose sequences go on in another engine, wherever that is: they bring what they bring undisturbed.

Two engines of the bundled model in float32, reached over sockets. Each token is handed out once.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from nightly import few, seeds
from transport.relay import ADDED, SCORED, STARTED, Relay, relaying
from waiting import Tasks, turns, until

from aioengine import Choice, Engine, EngineConfig, LogitsProcessor, Regex, RequestOutput
from aioengine.outputs import TokenLogprobs

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The red fox sat down by the river and"
CHAT = [{"role": "user", "content": "Say something."}, {"role": "assistant", "content": "<think>\n"}]
SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "owl"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
LOGPROB_TOLERANCE = 1e-4
IN_FLIGHT = 2
CONFIG = EngineConfig(
    max_num_seqs=16,
    kv_cache_memory_bytes=2**24,
    max_model_len=256,
    block_size=8,
    num_threads=1,
    max_in_flight=IN_FLIGHT,
    device="cpu",
    dtype="float32",
    reasoning_format="think",
    logits_processors=("equality.test_moved:unless_last",),
    log_stats_interval_s=0.0,
)

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy choices": {"temperature": 0.0, "n": 3},
    "seeded": {"seed": 7},
    "filters": {"seed": 8, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "choices": {"seed": 9, "n": 3},
    "logprobs": {"seed": 10, "logprobs": 3, "logprob_token_ids": (5, 300)},
    "processed logprobs": {"seed": 11, "logprobs": 2, "logprobs_mode": "processed", "repetition_penalty": 1.2},
    "logprobs of prompt and choices": {"seed": 12, "n": 2, "prompt_logprobs": 2, "logprobs": 0},
    "json": {"seed": 13, "structured": SHAPE},
    "json with logprobs": {"seed": 14, "structured": SHAPE, "logprobs": 1},
    "regex": {"seed": 15, "structured": Regex("(fox|owl){1,4} [0-9]{2,6}"), "n": 2},
    "forced": {"seed": 16, "structured": Choice(["a red fox and a green owl in the wood", "nothing at all"])},
    "bad words": {"seed": 17, "temperature": 0.3, "bad_words": ["the", "and", ","]},
    "penalties": {"seed": 18, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "least tokens": {"seed": 19, "min_tokens": 15, "stop_token_ids": list(range(300, 1300)), "ignore_eos": False},
    "only some tokens": {"seed": 20, "allowed_token_ids": list(range(400, 440)), "logit_bias": {410: 1.5}},
    "named processor": {"seed": 21, "extra_args": {"unless_last": 100}},
    "named processor of choices": {"seed": 25, "n": 3, "extra_args": {"unless_last": 100}},
    "thinking": {"seed": 22, "max_thinking_tokens": 5, "structured": SHAPE},
    "free thinking": {"seed": 23, "max_thinking_tokens": 7},
    "no text": {"seed": 24, "detokenize": False},
}
OF_CHECK = ("greedy choices", "filters", "logprobs of prompt and choices", "json", "named processor", "free thinking")


def unless_last(width: int) -> LogitsProcessor:
    """No token comes that is near the last one, by choice: what comes depends on what came."""

    def process(logits: Any, rows: Any) -> None:
        for index, row in enumerate(rows):
            last = [*row.prompt_token_ids, *row.output_token_ids][-1] + 50 * row.choice
            logits[index, max(last - width, 0) : last + width] = float("-inf")

    return process


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 17, "max_in_flight": 1},
    "preempted": {"max_num_batched_tokens": 40, "kv_cache_memory_bytes": 2**20},
    "no prefixes": {"enable_prefix_caching": False, "block_size": 16},
}
"""Of both engines. In 1 MiB there is room for the longest sequence and little more."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=few(["plain"], of=SETTINGS))
async def relayed(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Engine, Relay]]:
    config = msgspec.structs.replace(CONFIG, **SETTINGS[request.param])
    async with relaying(config) as both:
        yield both
    if request.param == "preempted":
        assert any(served.server.core.stats().preemptions for served in both[1].served)


async def ask(engine: Engine, case: str, **changes: Any) -> RequestOutput:
    params: dict[str, Any] = {"max_tokens": 24, "ignore_eos": "structured" not in CASES[case], **CASES[case], **changes}
    if "thinking" in case:
        return await engine.generate(CHAT, chat_template_kwargs={"continue_final_message": True}, **params)
    return await engine.generate(PROMPT, **params)


def assert_same(output: RequestOutput, whole: RequestOutput) -> None:
    """All that is told is the same, but for log-probabilities, which are as near as a computation anew brings them."""
    assert len(output.outputs) == len(whole.outputs)
    for one, other in zip(output.outputs, whole.outputs, strict=True):
        for name in ("token_ids", "text", "reasoning", "finish_reason", "stop_reason"):
            assert getattr(one, name) == getattr(other, name), name
        assert_near(one.logprobs, other.logprobs)
    assert_near(output.prompt_logprobs, whole.prompt_logprobs)


def assert_near(found: list[TokenLogprobs | None] | None, due: list[TokenLogprobs | None] | None) -> None:
    """The chosen token of each line, and the likeliest ones by their ranks: two that are alike may change places."""
    assert (found is None) == (due is None)
    for one, other in zip(found or [], due or [], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert next(iter(one)) == next(iter(other))
            lines = [sorted(entry.logprob for entry in line.values()) for line in (one, other)]
            assert lines[0] == pytest.approx(lines[1], abs=LOGPROB_TOLERANCE)


def num_tokens_of(output: RequestOutput) -> int:
    """That an engine has sampled: greedy choices are one."""
    ids = [completion.token_ids for completion in output.outputs]
    return sum(map(len, ids[:1] if output.outputs[1:] and ids[0] == ids[-1] else ids))


async def check(relayed: tuple[Engine, Relay], case: str, whole: RequestOutput, *cuts: int, **changes: Any) -> None:
    engine, relay = relayed
    relay.reset(*cuts)
    output = await ask(engine, case, **changes)
    assert_same(output, whole)
    assert relay.num_tokens == num_tokens_of(whole)
    if any(0 < cut < relay.num_tokens for cut in cuts):
        assert relay.num_moved


@pytest.mark.parametrize(("case", "seed"), few([(case, 0) for case in OF_CHECK], of=product(CASES, range(3))))
async def test_a_request_that_goes_on_elsewhere(relayed: tuple[Engine, Relay], case: str, seed: int) -> None:
    engine, relay = relayed
    rng = random.Random(f"{case} {seed}")
    changes = {"seed": rng.randrange(2**40), "max_tokens": rng.randint(20, 48)}
    relay.reset()
    whole = await ask(engine, case, **changes)
    num_tokens = num_tokens_of(whole)
    moments = [ADDED, STARTED, SCORED, *range(1, num_tokens + 1)]
    for cut in {SCORED, num_tokens, *rng.sample(moments, min(5, len(moments)))}:
        await check(relayed, case, whole, cut, **changes)
    for _ in range(3):
        await check(relayed, case, whole, *rng.sample(moments, min(rng.randint(2, 6), len(moments))), **changes)


@pytest.mark.parametrize("seed", seeds(8))
async def test_a_stop_string_whose_tokens_two_engines_have_sampled(relayed: tuple[Engine, Relay], seed: int) -> None:
    engine, relay = relayed
    rng = random.Random(seed)
    relay.reset()
    unstopped = await ask(engine, "seeded", seed=seed)
    begin = rng.randrange(len(unstopped.text) // 2)
    stop = unstopped.text[begin : begin + rng.randint(4, 9)]
    for includes in (False, True):
        changes = {"seed": seed, "stop": stop, "include_stop_str_in_output": includes}
        relay.reset()
        whole = await ask(engine, "seeded", **changes)
        assert whole.outputs[0].stop_reason == stop
        for cut in range(1, relay.num_tokens + 1):
            await check(relayed, "seeded", whole, cut, **changes)
        await check(relayed, "seeded", whole, *range(1, relay.num_tokens), **changes)


@pytest.mark.parametrize("seed", seeds(10))
async def test_a_stream_whose_reader_is_behind(relayed: tuple[Engine, Relay], seed: int) -> None:
    """What is unread stays so; neither engine computes more than may lie unread, and those in flight."""
    engine, relay = relayed
    rng = random.Random(seed)
    num_choices = rng.choice([1, 2])
    params: dict[str, Any] = {"seed": seed, "max_tokens": 30, "ignore_eos": True, "n": num_choices}
    relay.reset()
    whole = await engine.generate(PROMPT, **params)
    num_read = [0] * num_choices
    relay.reset(*rng.sample(range(1, 20), 2))
    async with engine.stream(PROMPT, max_unread_tokens=3, **params) as stream:

        def num_unread() -> list[int]:
            counts = zip(stream.result.outputs, num_read, strict=True)
            return [len(completion.token_ids) - count for completion, count in counts]

        async for delta in stream:
            num_read[delta.index] += len(delta.token_ids)
            if rng.random() < 0.3:
                await until(lambda: all(map(is_stalled, num_unread(), num_read)))
                relay.cut()
                await turns(50)
            assert max(num_unread()) <= 3 + IN_FLIGHT
    assert num_read == [30] * num_choices
    assert_same(stream.result, whole)


def is_stalled(num_unread: int, num_read: int) -> bool:
    return num_unread >= 3 or num_read + num_unread == 30


@pytest.mark.parametrize("seed", seeds(20))
async def test_many_in_company(relayed: tuple[Engine, Relay], seed: int) -> None:
    """All of them go on elsewhere again and again, wherever each has come to; some are aborted meanwhile."""
    engine, relay = relayed
    rng = random.Random(seed)
    cases = rng.choices(list(CASES), k=8)
    changes = [{"seed": rng.randrange(2**40), "max_tokens": rng.randint(15, 50)} for _ in cases]
    relay.reset()
    wholes = [await ask(engine, case, **change) for case, change in zip(cases, changes, strict=True)]
    relay.reset(*rng.sample(range(1, 100), 6))
    async with Tasks() as tasks:
        for _ in range(3):
            tasks.start(leave(engine, rng.randrange(1000), after=rng.randint(0, 9)))
        asked = [tasks.start(ask(engine, case, **change)) for case, change in zip(cases, changes, strict=True)]
        outputs = await tasks.end(*asked)
    for output, whole in zip(outputs, wholes, strict=True):
        assert_same(output, whole)


async def leave(engine: Engine, seed: int, *, after: int) -> None:
    async with engine.stream(PROMPT, seed=seed, n=2, max_tokens=100) as stream:
        async for _ in stream:
            after -= 1
            if after < 0:
                return


@pytest.mark.parametrize("seed", seeds(5))
async def test_engines_that_die_one_after_the_other(seed: int) -> None:
    """What they have handed out was all there was of them."""
    rng = random.Random(seed)
    async with relaying(CONFIG, num_links=9) as (engine, relay):
        for case in rng.choices(list(CASES), k=2):
            relay.reset()
            whole = await ask(engine, case)
            relay.reset(*rng.sample(range(1, 20), 4), dies=True)
            assert_same(await ask(engine, case), whole)
