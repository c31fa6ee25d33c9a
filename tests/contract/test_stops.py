"""Stop strings are found in the caller's process, and end what the engine computes exactly where they do in process."""

from __future__ import annotations

from typing import Any

import pytest
from contract.ways import BOTH_LOOPS, same_output
from waiting import until

from aioengine import Engine

pytestmark = BOTH_LOOPS

TEXT = "Once upon a time there was a fox"


async def said(reference: Engine, seed: int) -> str:
    """What the model says if nothing stops it: text with gaps of a token's size at every place."""
    return (await reference.generate(TEXT, seed=seed, max_tokens=40)).text


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


async def test_a_stop_string_does_not_count_before_min_tokens(engine: Engine, reference: Engine) -> None:
    stop = (await said(reference, 32))[2:4]
    output = await same_output(engine, reference, TEXT, seed=32, max_tokens=40, stop=stop, min_tokens=10)
    assert len(output.outputs[0].token_ids) >= 10


async def test_each_choice_stops_where_its_own_text_does(engine: Engine, reference: Engine) -> None:
    whole = await reference.generate(TEXT, seed=33, n=3, max_tokens=40)
    stops = [completion.text[30:34] for completion in whole.outputs[:2]]
    await same_output(engine, reference, TEXT, seed=33, n=3, max_tokens=40, stop=stops)


async def test_the_deltas_of_a_stream_hold_back_what_may_be_a_stop_string(engine: Engine, reference: Engine) -> None:
    text = await said(reference, 34)
    stop = text[50:58]
    async with engine.stream(TEXT, seed=34, max_tokens=40, stop=stop) as stream:
        read = "".join([delta.text async for delta in stream])
    assert read == stream.result.text == text[: text.index(stop)]


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


async def test_a_stop_token_is_the_last_token_and_no_part_of_the_text(engine: Engine, reference: Engine) -> None:
    whole = (await reference.generate(TEXT, seed=38, max_tokens=40)).outputs[0].token_ids
    stop = whole[9]
    output = await same_output(engine, reference, TEXT, seed=38, max_tokens=40, stop_token_ids=[stop])
    [completion] = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == whole[: whole.index(stop) + 1]
