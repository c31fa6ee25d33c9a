"""Requests bring the same, whatever way the engine is had: every parameter travels, and so does all that comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from contract.fakes import VOCAB_SIZE
from contract.ways import BOTH_LOOPS, REMOTE, Opener, has_load, ids_of, reasons_of, same_output, told
from waiting import until

from aioengine import Engine, EngineDead, SamplingParams
from aioengine.errors import InternalError

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 140))
TEXT = "Once upon a time there was a fox"
CHAT = [{"role": "user", "content": "Who lives here?"}]
EOS, PAD = 2, 0

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "one token": {"max_tokens": 1},
    "n": {"n": 3},
    "greedy n": {"n": 3, "temperature": 0.0},
    "n with logprobs": {"n": 2, "logprobs": 2, "prompt_logprobs": 1},
    "logprobs": {"logprobs": 4},
    "no likeliest ones": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "no likeliest ones of the prompt": {"prompt_logprobs": 0},
    "logprob_token_ids": {"logprob_token_ids": [7, 300, 7, 1999]},
    "logprob_token_ids beside logprobs": {"logprobs": 2, "logprob_token_ids": [5]},
    "logprobs without text": {"logprobs": 1, "detokenize": False},
    "detokenize": {"detokenize": False},
    "allowed_token_ids": {"allowed_token_ids": [50, 60, 70]},
    "bad_words": {"allowed_token_ids": list(range(60, 64)), "bad_words": ["the", " a"]},
    "an end by EOS": {"allowed_token_ids": [EOS, 70, 71]},
    "EOS ignored": {"allowed_token_ids": [EOS, 70, 71], "ignore_eos": True},
    "min_tokens before EOS": {"allowed_token_ids": [EOS, 70], "min_tokens": 5},
    "stop token": {"allowed_token_ids": [70, 71, 72], "stop_token_ids": [71]},
    "stop token in the text": {
        "allowed_token_ids": [70, 71, 72],
        "stop_token_ids": [71],
        "include_stop_str_in_output": True,
    },
    "min_tokens before a stop token": {"allowed_token_ids": [70, 71], "stop_token_ids": [71], "min_tokens": 4},
    "special tokens": {"allowed_token_ids": [1, 70, 71], "skip_special_tokens": False},
    "special tokens joined": {
        "allowed_token_ids": [1, 70],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    },
    "special tokens left out": {"allowed_token_ids": [1, 70]},
}


@pytest.mark.parametrize("case", CASES)
async def test_a_request_brings_what_it_brings_in_process(engine: Engine, reference: Engine, case: str) -> None:
    sampling = {"seed": 11, "max_tokens": 24, **CASES[case]}
    assert (await same_output(engine, reference, PROMPT, **sampling)).finished


@BOTH_LOOPS
@pytest.mark.parametrize("prompt", [TEXT, PROMPT, CHAT], ids=["text", "ids", "chat"])
async def test_a_prompt_of_any_kind_brings_what_it_brings_in_process(
    engine: Engine, reference: Engine, prompt: Any
) -> None:
    output = await same_output(engine, reference, prompt, seed=12, max_tokens=9)
    assert output.prompt_token_ids
    assert (output.prompt is None) is (prompt is PROMPT)


TRAVELLING: dict[str, Any] = {
    "temperature": 0.37,
    "top_p": 0.61,
    "top_k": 17,
    "min_p": 0.03,
    "seed": 16,
    "max_tokens": 3,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop": ["never said"],
    "stop_token_ids": [9, 8],
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.125,
    "logit_bias": {20: 1.5, 21: -100.0, 22: 500.0},
    "allowed_token_ids": [20, 21, 22, 30],
    "bad_words": ["wolf", "the moon"],
    "logprobs": 3,
    "logprobs_mode": "processed",
    "logprob_token_ids": [44],
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
}
NOT_TRAVELLING = {
    "logits_processors",
    "extra_args",
    "detokenize",
    "structured",
    "max_thinking_tokens",
    "truncate_prompt_tokens",
}
"""One cannot; the others are compared by what comes of them, in tests of their own."""


async def test_every_parameter_comes_to_the_device_as_it_does_in_process(engine: Engine, reference: Engine) -> None:
    assert {*TRAVELLING, *NOT_TRAVELLING} == set(SamplingParams.__struct_fields__), "a new one: let it travel, too"
    heard = []
    for each in (engine, reference):
        output = await each.generate(TEXT, **TRAVELLING)
        [sampling] = await each.collective_rpc("contract.sampling", [16])
        heard.append((sampling, told(output)))
    assert heard[0] == heard[1]
    assert heard[0][0]["top_k"] == 17
    assert heard[0][0]["repetition_penalty"] == 1.125


async def test_defaults_of_the_model_hold_for_what_is_not_given(engine: Engine, reference: Engine) -> None:
    for each in (engine, reference):
        await each.generate(TEXT, seed=17, max_tokens=1)
    [here], [there] = [await each.collective_rpc("contract.sampling", [17]) for each in (engine, reference)]
    assert here == there
    assert here["temperature"] == 0.7


async def test_greedy_choices_are_all_alike_and_computed_once(engine: Engine) -> None:
    [before] = await engine.collective_rpc("contract.num_computed")
    output = await engine.generate(
        PROMPT, seed=18, n=4, temperature=0.0, max_tokens=10, cache_salt="greedy choices are computed once"
    )
    [after] = await engine.collective_rpc("contract.num_computed")
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert ids_of(output) == [ids_of(output)[0]] * 4
    assert after - before == len(PROMPT) + 10 - 1


async def test_a_long_prompt_is_computed_in_pieces_and_brings_the_same(engine: Engine, reference: Engine) -> None:
    prompt = [5 + place * place % (VOCAB_SIZE - 5) for place in range(500)]
    output = await same_output(engine, reference, prompt, seed=19, prompt_logprobs=2, max_tokens=12)
    assert reasons_of(output) == ["length"]


@BOTH_LOOPS
async def test_many_requests_at_once_each_bring_their_own(engine: Engine, reference: Engine) -> None:
    async def ask(each: Engine, seed: int) -> Any:
        prompt = PROMPT[: 1 + seed % 40]
        return told(await each.generate(prompt, seed=seed, n=1 + seed % 3, max_tokens=1 + seed % 30, logprobs=seed % 2))

    here, there = [await asyncio.gather(*(ask(each, seed) for seed in range(60))) for each in (engine, reference)]
    assert here == there


async def test_a_cache_salt_keeps_prefixes_apart_and_what_was_cached_is_told(engine: Engine) -> None:
    prompt = list(range(300, 349))  # three full blocks, and one token

    async def num_cached(salt: str | None) -> int:
        output = await engine.generate(prompt, seed=1, max_tokens=2, cache_salt=salt)
        assert output.metrics is not None
        assert output.metrics.num_cached_tokens == output.num_cached_tokens
        return output.num_cached_tokens

    assert [await num_cached(salt) for salt in ("one", "another", None, "one", None, "another")] == [0] * 3 + [48] * 3


@pytest.mark.parametrize(("max_waiting", "expected"), [(9, "4321"), (1, "3421")])
async def test_a_policy_of_ones_own_is_found_by_its_path_and_orders_also_at_the_admission(
    opener: Opener, max_waiting: int, expected: str
) -> None:
    engine = await opener.open(scheduler="contract.fakes:ByTenant", max_num_seqs=1, max_waiting=max_waiting)
    await engine.pause()
    ended: list[str] = []

    async def ask(tenant: str) -> None:
        await engine.generate(PROMPT, seed=1, max_tokens=2, tenant=tenant)
        ended.append(tenant)

    async with asyncio.TaskGroup() as tasks:
        for tenant in "3142":
            tasks.create_task(ask(tenant))
        await until(has_load(engine, waiting=4))
        await engine.resume()
    assert ended == list(expected)


UNFIT = {
    "raises": "cannot order this request: LookupError: an unknown customer",
    **dict.fromkeys(["text", "none", "triple", "words", "nan"], r"wrong key: .*; it must be \(level, rank\)"),
    "number": "wrong tenant: 7; it must be a str",
    "a stranger": "cannot order this request: KeyError: 'a stranger'",
    **dict.fromkeys(["zero", "negative", "infinite", "no weight", "heavy"], "wrong weight: .*; it must be a number"),
}


async def test_one_that_a_policy_cannot_order_fails_alone(opener: Opener) -> None:
    engine = await opener.open(scheduler="contract.fakes:Unfit")
    async with engine.stream(PROMPT, seed=1, max_tokens=20) as other:
        for tenant, said in UNFIT.items():
            with pytest.raises(InternalError, match=f"policy Unfit .*{said}"):
                await engine.generate(PROMPT, seed=1, max_tokens=2, n=2, tenant=tenant)
        assert reasons_of(await other.finish()) == ["length"]
    assert engine.health().status == "ALIVE"
    assert engine.stats().waiting == engine.stats().running == 0


async def test_an_engine_whose_policy_breaks_says_of_what_it_died(opener: Opener) -> None:
    engine = await opener.open(scheduler="contract.fakes:Unfit")
    with pytest.raises(EngineDead, match="LookupError: an unknown account"):
        await engine.generate(PROMPT, seed=1, max_tokens=2, tenant="later")
    assert engine.health().status == "DEAD"


@pytest.mark.parametrize("way", REMOTE)
async def test_also_where_it_breaks_at_a_readers_message(opener: Opener) -> None:
    engine = await opener.open(scheduler="contract.fakes:Unfit")
    async with engine.stream(PROMPT, seed=1, max_tokens=200, max_unread_tokens=2, tenant="again") as stream:
        await anext(stream)  # it runs: it waited for its first turn, too

        async def read_what_waits() -> None:
            await until(has_load(engine, waiting=1))  # unless what was just read was enough
            await stream.finish()

        with pytest.raises(EngineDead, match="LookupError: an unknown place"):
            await read_what_waits()
    assert engine.health().status == "DEAD"


# Streams


async def read(stream: Any) -> list[Any]:
    async with stream:
        return [delta async for delta in stream]


@BOTH_LOOPS
@pytest.mark.parametrize("case", ["plain", "n", "n with logprobs", "greedy n", "stop token", "detokenize"])
async def test_the_deltas_of_a_stream_make_the_whole(engine: Engine, reference: Engine, case: str) -> None:
    sampling = {"seed": 21, "max_tokens": 24, **CASES[case]}
    stream = engine.stream(TEXT, **sampling)
    deltas = await read(stream)
    assert told(stream.result) == told(await reference.generate(TEXT, **sampling))
    for completion in stream.result.outputs:
        own = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in own) == completion.text
        assert [token for delta in own for token in delta.token_ids] == completion.token_ids
        assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
        assert (own[-1].finish_reason, own[-1].stop_reason) == (completion.finish_reason, completion.stop_reason)
        if completion.logprobs is not None:
            assert [line for delta in own for line in delta.logprobs] == completion.logprobs


async def test_prompt_logprobs_are_there_with_the_first_delta(engine: Engine, reference: Engine) -> None:
    async with engine.stream(PROMPT, seed=22, max_tokens=5, prompt_logprobs=2) as stream:
        await anext(stream)
        lines = stream.result.prompt_logprobs
    whole = await reference.generate(PROMPT, seed=22, max_tokens=5, prompt_logprobs=2)
    assert lines == whole.prompt_logprobs
    assert lines is not None
    assert (len(lines), lines[0]) == (len(PROMPT), None)


async def test_a_request_has_the_name_that_it_was_given(engine: Engine) -> None:
    output = await engine.generate(TEXT, max_tokens=1, request_id="🦊 mine")
    assert output.request_id == engine.stream(TEXT, request_id="🦊 mine").request_id == "🦊 mine"
    first, second = [await engine.generate(TEXT, max_tokens=1) for _ in range(2)]
    assert first.request_id != second.request_id


# Stop strings are found in the caller's process, and end what the engine computes exactly where they do in process


async def said(reference: Engine, seed: int) -> str:
    """What the model says if nothing stops it: text with gaps of a token's size at every place."""
    return (await reference.generate(TEXT, seed=seed, max_tokens=40)).text


@BOTH_LOOPS
@pytest.mark.parametrize("is_included", [False, True], ids=["left out", "included"])
@pytest.mark.parametrize("place", [0, 3, 40, 80])
async def test_a_stop_string_ends_text_and_tokens_where_it_does_in_process(
    engine: Engine, reference: Engine, place: int, is_included: bool
) -> None:
    stop = (await said(reference, 31))[place : place + 5]
    sampling: dict[str, Any] = {
        "seed": 31,
        "max_tokens": 40,
        "stop": ["never said", stop],
        "include_stop_str_in_output": is_included,
        "logprobs": 1,
    }
    output = await same_output(engine, reference, TEXT, **sampling)
    [completion] = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text.endswith(stop) is is_included


@BOTH_LOOPS
async def test_a_stream_that_nobody_reads_stops_where_it_should_and_is_computed_no_further(engine: Engine) -> None:
    text = (await engine.generate(TEXT, seed=35, max_tokens=200)).text
    stop = text[30:36]
    async with engine.stream(TEXT, seed=36, max_tokens=200, stop=stop, max_unread_tokens=1) as blocked:
        async with engine.stream(TEXT, seed=35, max_tokens=200, stop=stop) as stream:
            await until(lambda: stream.result.finished)
            assert stream.result.outputs[0].stop_reason == stop
            assert stream.result.text == text[: text.index(stop)]
            [num_sampled] = await engine.collective_rpc("contract.sampled", [35])
        await engine.generate(TEXT, seed=37, max_tokens=20)
        assert await engine.collective_rpc("contract.sampled", [35]) == [num_sampled]
        assert not blocked.result.finished
