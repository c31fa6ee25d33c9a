"""Texts are the caller's side's, and the same whatever way the engine is had; so is what one hears before a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from contract.ways import BOTH_LOOPS, error_of, has_load, same_output, told
from waiting import until

from aioengine import CompletionDelta, Engine, EngineClosed, EngineDead, EngineOverloaded, Stream

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 140))
TEXT = "Once upon a time there was a 🦊"
CHAT = [{"role": "user", "content": "Who lives here?"}]
BEGUN = [*CHAT, {"role": "assistant", "content": "A fox and"}]
LONG = "Once upon a time there was a fox. " * 6_000
CONTINUED = {"continue_final_message": True}


@BOTH_LOOPS
@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["text", "chat"])
async def test_a_text_becomes_ids_and_text_again(engine: Engine, reference: Engine, prompt: Any) -> None:
    ids = await engine.tokenize(prompt)
    assert ids == await reference.tokenize(prompt)
    text = await engine.detokenize(ids, skip_special_tokens=False)
    assert text == await reference.detokenize(ids, skip_special_tokens=False)
    assert prompt is CHAT or text == prompt


async def test_a_text_of_many_times_the_models_length_becomes_ids_and_text_again(make_engine: Any) -> None:
    engine = await make_engine()
    ids = await engine.tokenize(LONG)
    assert len(ids) > 100 * engine.info.max_model_len
    assert await engine.detokenize(ids) == LONG


async def test_a_prompt_has_the_ids_that_it_was_told_to_have(engine: Engine) -> None:
    for prompt, kwargs in ((TEXT, None), (CHAT, None), (CHAT, {"add_generation_prompt": False}), (BEGUN, CONTINUED)):
        ids = await engine.tokenize(prompt, chat_template_kwargs=kwargs)
        output = await engine.generate(prompt, max_tokens=1, seed=1, chat_template_kwargs=kwargs)
        assert output.prompt_token_ids == ids


async def test_variables_for_the_template_bring_what_they_bring_in_process(engine: Engine, reference: Engine) -> None:
    output = await same_output(engine, reference, BEGUN, chat_template_kwargs=CONTINUED, seed=2, max_tokens=8)
    assert output.prompt is not None
    assert output.prompt.endswith("A fox and")


async def test_the_bytes_of_an_outputs_tokens_are_its_text(engine: Engine, reference: Engine) -> None:
    allowed = [i for i in range(3, 2048) if "\ufffd" not in await reference.detokenize([i])]
    output = await engine.generate(PROMPT, seed=3, max_tokens=40, allowed_token_ids=allowed)
    ids = output.outputs[0].token_ids
    assert b"".join(engine.token_bytes(ids)).decode() == output.text
    assert engine.token_bytes([*range(2048)]) == reference.token_bytes([*range(2048)])


def take_all(stream: Stream) -> list[CompletionDelta]:
    deltas = []
    while (delta := stream.take()) is not None:
        deltas.append(delta)
    return deltas


@BOTH_LOOPS
async def test_a_stream_is_taken_from_without_waiting(engine: Engine, reference: Engine) -> None:
    whole = told(await reference.generate(TEXT, seed=4, max_tokens=20, n=2))
    is_told = asyncio.Event()
    deltas: list[CompletionDelta] = []
    async with engine.stream(TEXT, seed=4, max_tokens=20, n=2) as stream:
        stream.watch(is_told.set)
        while not stream.is_ended:
            await is_told.wait()
            is_told.clear()
            deltas += take_all(stream)
        assert stream.take() is None
        assert told(stream.result) == whole
        for index, completion in enumerate(stream.result.outputs):
            own = [delta for delta in deltas if delta.index == index]
            assert "".join(delta.text for delta in own) == completion.text
            assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]


@pytest_asyncio.fixture(loop_scope="module")
async def full(make_engine: Any, tasks: Any) -> AsyncIterator[Engine]:
    """One runs, one waits, and there is no place for a third."""
    engine = await make_engine("make_slow", max_num_seqs=1, max_waiting=1)
    for number in range(2):
        tasks.start(engine.generate(PROMPT, seed=number, max_tokens=3000, ignore_eos=True))
        await until(has_load(engine, running=1, waiting=number))
    yield engine
    engine.abort_all()


async def test_an_engine_that_is_full_says_so_before_a_request(full: Engine) -> None:
    with pytest.raises(EngineOverloaded) as refused:
        full.check_accepting()
    error = await error_of(full.generate(PROMPT, on_full="raise"))
    assert (type(error), str(error)) == (EngineOverloaded, str(refused.value))
    assert refused.value.retry_after_s > 0
    full.abort_all()
    await until(has_load(full, running=0, waiting=0))
    full.check_accepting()


async def test_an_engine_that_drains_or_is_closed_says_so_before_a_request(full: Engine, tasks: Any) -> None:
    draining = tasks.start(full.drain())
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed, match="draining"):
        full.check_accepting()
    full.abort_all()
    await draining
    await full.resume()
    full.check_accepting()
    await full.aclose()
    with pytest.raises(EngineClosed):
        full.check_accepting()
    for work in (full.tokenize(TEXT), full.detokenize([5])):
        assert isinstance(await error_of(work), EngineClosed)
    with pytest.raises(EngineClosed):
        full.token_bytes([5])


async def test_a_dead_engine_says_so_before_a_request(make_engine: Any, quiet_log: None) -> None:
    engine = await make_engine()
    async with engine.stream(PROMPT, seed=5, max_tokens=400, ignore_eos=True) as stream:
        await engine.collective_rpc("contract.lose_device", ["gone"])
        with pytest.raises(EngineDead):
            await stream.finish()
        assert not stream.is_ended
        with pytest.raises(EngineDead):
            take_all(stream)
        assert stream.is_ended
    with pytest.raises(EngineDead):
        engine.check_accepting()
    assert isinstance(await error_of(engine.tokenize(TEXT)), EngineDead)
