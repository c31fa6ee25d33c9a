"""What callers see: results, deltas, log-probabilities, where a text ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from engine.oracle import as_ids

from aioengine import CompletionDelta, RequestOutput, SamplingParams, Stream

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Who lives here?"}]
IDS = [5, 6, 7]


async def read(stream: Stream) -> list[CompletionDelta]:
    async with stream:
        return [delta async for delta in stream]


def as_text(deltas: list[CompletionDelta]) -> str:
    return "".join(delta.text for delta in deltas)


# Prompts and results


async def test_a_text_is_completed(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        ids = served.say(PROMPT, " there was a fox")
        output = await served.engine.generate(PROMPT, max_tokens=len(ids))

        assert isinstance(output, RequestOutput)
        assert output.prompt == PROMPT
        assert output.prompt_token_ids == served.tokenizer.encode(PROMPT)
        assert output.text == output.outputs[0].text == " there was a fox"
        assert output.outputs[0].token_ids == ids
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].stop_reason is None
        assert output.outputs[0].logprobs is None
        assert output.outputs[0].cumulative_logprob is None
        assert output.finished


@pytest.mark.parametrize(
    "prompt",
    [tuple(IDS), np.array(IDS), np.array(IDS, np.int32), [np.int64(token_id) for token_id in IDS]],
    ids=["tuple", "array", "int32 array", "list of numpy integers"],
)
async def test_token_ids_come_as_any_sequence_of_integers(serve: Any, prompt: Any) -> None:
    async with serve() as served:
        output = await served.engine.generate(prompt, seed=1, max_tokens=5)
        assert output.outputs == (await served.engine.generate(IDS, seed=1, max_tokens=5)).outputs
        assert output.prompt_token_ids == IDS
        assert all(type(token_id) is int for token_id in output.prompt_token_ids)


async def test_a_chat_is_rendered_by_the_models_template(serve: Any) -> None:
    async with serve() as served:
        output = await served.engine.generate(MESSAGES, max_tokens=3)

        assert output.prompt == "<|im_start|>user\nWho lives here?<|im_end|>\n<|im_start|>assistant\n"
        assert output.prompt_token_ids == served.tokenizer.encode(output.prompt, add_special_tokens=False)


async def test_a_model_without_a_tokenizer_takes_and_gives_ids(serve: Any, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with serve(model=str(tmp_path)) as served:
        output = await served.engine.generate(IDS, max_tokens=4, logprobs=1)

        assert len(output.outputs[0].token_ids) == 4
        assert output.text == ""
        assert all(entry.decoded_token is None for line in output.outputs[0].logprobs for entry in line.values())


async def test_the_models_generation_config_has_the_defaults_of_keywords(serve: Any) -> None:
    async with serve(is_manual=True) as served:
        stream = served.engine.stream
        async with stream(IDS), stream(IDS, top_p=0.5), stream(IDS, SamplingParams()):
            await served.until(lambda: served.executor.plans)
            rows = [added.sampling for added in served.executor.plans[0].added]

        assert [(row.temperature, row.top_p) for row in rows] == [(0.7, 0.9), (0.7, 0.5), (1.0, 1.0)]


async def test_a_prompt_is_what_it_was_at_the_call(serve: Any, tasks: Any) -> None:
    """A chat's list goes on to be used by the caller while the request waits."""
    async with serve(is_manual=True, config={"max_waiting": 1, "max_num_seqs": 1}) as served:
        ids, messages = list(IDS), [dict(message) for message in MESSAGES]
        tasks.start(served.engine.generate(IDS, max_tokens=1))
        await served.until(lambda: served.executor.plans)
        waiting = [tasks.start(served.engine.generate(prompt, max_tokens=1)) for prompt in (ids, messages, ids)]
        await served.turn()
        ids.clear()
        messages[0]["content"] = "Something else"
        messages.append({"role": "assistant", "content": "A fox."})
        await served.until(lambda: served.complete_all() or all(task.done() for task in waiting))
        first, chat, last = await tasks.end(*waiting)

        assert first.prompt_token_ids == last.prompt_token_ids == IDS
        assert "Who lives here?" in chat.prompt
        assert "A fox." not in chat.prompt


async def test_a_huge_text_holds_up_no_shorter_one(serve: Any, tasks: Any) -> None:
    async with serve(max_model_len=40_000, num_blocks=2500) as served:
        encode, gate = served.tokenizer.encode, threading.Event()

        def gated(text: str, **options: Any) -> list[int]:
            assert len(text) < 100_000 or gate.wait(30)
            return encode(text, **options)

        served.tokenizer.encode = gated
        huge = tasks.start(served.engine.generate("fox and owl " * 10_000, max_tokens=1))
        await served.turn()
        assert (await served.engine.generate("fox and owl " * 200, max_tokens=1)).finished
        assert not huge.done()
        gate.set()
        assert (await huge).finished


# Streams


async def test_deltas_join_to_the_result(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        text = " a café, 日本茶 and 😀"
        ids = served.say(PROMPT, text)
        stream = served.engine.stream(PROMPT, max_tokens=len(ids), logprobs=2)
        deltas = await read(stream)
        result = stream.result.outputs[0]

        assert as_text(deltas) == result.text == text
        assert as_ids(deltas) == result.token_ids == ids
        assert [line for delta in deltas for line in delta.logprobs] == result.logprobs
        assert all(delta.index == 0 for delta in deltas)
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert "�" not in "".join(delta.text for delta in deltas)


@pytest.mark.virtual_clock
async def test_what_a_slow_reader_has_not_read_is_merged_and_holds_nobody_up(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        async with served.engine.stream(IDS, max_tokens=20, logprobs=0) as stream:
            first = await anext(stream)
            other = await served.engine.generate([8, 9], max_tokens=5)
            await asyncio.sleep(10)
            rest = [delta async for delta in stream]

        assert len(first.token_ids) == 1
        assert len(other.outputs[0].token_ids) == 5
        assert [len(delta.token_ids) for delta in rest] == [19]
        assert len(rest[0].logprobs) == 19
        assert first.text + rest[0].text == stream.result.text
        assert rest[0].finish_reason == "length"


async def test_a_stream_that_was_read_to_its_end_stays_at_its_end(serve: Any) -> None:
    async with serve() as served, served.engine.stream(IDS, max_tokens=3) as stream:
        assert [delta async for delta in stream]
        assert [delta async for delta in stream] == []
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_the_result_midway_is_the_output_so_far(serve: Any) -> None:
    async with serve(is_manual=True) as served:
        ids = served.say(PROMPT, " there was a fox")
        async with served.engine.stream(PROMPT, max_tokens=len(ids)) as stream:
            assert stream.result.outputs[0].token_ids == []
            assert stream.result.text == ""
            assert not stream.result.finished
            read_ids = []
            for count in range(1, len(ids)):
                await served.until(lambda: served.executor.unfinished)
                served.executor.complete()
                read_ids += (await anext(stream)).token_ids
                result = stream.result
                assert result.outputs[0].token_ids == read_ids == ids[:count]
                assert result.text == served.tokenizer.decode(ids[:count], skip_special_tokens=True)
                assert result.outputs[0].finish_reason is None
                assert not result.finished


async def test_a_result_does_not_change_when_more_tokens_come(serve: Any) -> None:
    async with serve() as served, served.engine.stream(IDS, max_tokens=6) as stream:
        await anext(stream)
        early = stream.result
        count = len(early.outputs[0].token_ids)
        async for _ in stream:
            pass
        assert len(early.outputs[0].token_ids) == count < len(stream.result.outputs[0].token_ids)


async def test_a_stream_has_one_reader(serve: Any, tasks: Any) -> None:
    async with serve(is_manual=True) as served, served.engine.stream(IDS, max_tokens=2) as stream:
        first = tasks.start(anext(stream))
        await served.turn()
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(stream)
        with pytest.raises(RuntimeError, match="one reader"):
            await stream.finish()
        served.executor.complete()
        assert len((await first).token_ids) == 1


async def test_a_stream_is_entered_once(serve: Any) -> None:
    async with serve() as served:
        stream = served.engine.stream(IDS, max_tokens=2)
        async with stream:
            with pytest.raises(RuntimeError, match="entered once"):
                await stream.__aenter__()
            assert len((await stream.finish()).outputs[0].token_ids) == 2
        with pytest.raises(RuntimeError, match="entered once"):
            async with stream:
                pass


async def test_a_stream_outside_its_block_says_to_enter_it(serve: Any) -> None:
    async with serve() as served:
        stream = served.engine.stream(IDS)
        with pytest.raises(RuntimeError, match="enter the stream first"):
            await anext(stream)
        for use in (stream.take, lambda: stream.result, lambda: stream.is_ended):
            with pytest.raises(RuntimeError, match="enter the stream first"):
                use()
        assert not served.executor.plans


async def test_finish_waits_for_the_whole_output_also_after_some_was_read(serve: Any) -> None:
    async with serve() as served, served.engine.stream(IDS, max_tokens=6) as stream:
        await anext(stream)
        output = await stream.finish()
        assert len(output.outputs[0].token_ids) == 6
        assert output.finished


@pytest.mark.virtual_clock
async def test_a_cancelled_read_loses_nothing(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served, served.engine.stream(IDS, max_tokens=20) as stream:
        deltas = []
        while not deltas or deltas[-1].finish_reason is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0037):
                    deltas.append(await anext(stream))
        assert as_ids(deltas) == stream.result.outputs[0].token_ids
        assert as_text(deltas) == stream.result.text


# Log-probabilities


@pytest.mark.parametrize("width", [0, 1, 5, 20])
async def test_each_token_has_its_logprob_and_the_likeliest(serve: Any, depth: int, width: int) -> None:
    async with serve(depth=depth) as served:
        # A neighbour that asks for more widens the step's arrays, and must not widen this one's lines.
        output, _ = await asyncio.gather(
            served.engine.generate(IDS, max_tokens=4, logprobs=width),
            served.engine.generate([9, 9], max_tokens=6, logprobs=20),
        )
        completion = output.outputs[0]

        assert len(completion.logprobs) == 4
        for token_id, line in zip(completion.token_ids, completion.logprobs, strict=True):
            assert next(iter(line)) == token_id, "the sampled token is the first"
            assert len(line) == max(1, width)  # the fake's sampled token is its likeliest
            assert line[token_id].decoded_token == served.tokenizer.decode([token_id], skip_special_tokens=False)
            assert line[token_id].rank == 1
            assert [entry.rank for entry in line.values()] == list(range(1, len(line) + 1))
        assert completion.cumulative_logprob == pytest.approx(4 * -0.5)


# Where it ends


async def test_a_long_wish_ends_at_max_model_len(serve: Any, depth: int) -> None:
    async with serve(depth=depth, max_model_len=20) as served:
        for max_tokens in (None, 17, 18, 1000):
            output = await served.engine.generate(IDS, max_tokens=max_tokens)
            assert len(output.outputs[0].token_ids) == 17
            assert output.outputs[0].finish_reason == "length"
        assert len((await served.engine.generate(IDS, max_tokens=16)).outputs[0].token_ids) == 16


async def test_the_longest_prompt_still_brings_a_token(serve: Any, depth: int) -> None:
    async with serve(depth=depth, max_model_len=20) as served:
        output = await served.engine.generate(list(range(3, 22)))
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("eos", [0, 2])
async def test_eos_ends_a_text_and_is_none_of_it(serve: Any, depth: int, eos: int) -> None:
    async with serve(depth=depth) as served:
        ids = served.say(PROMPT, [*served.tokenizer.encode(" a fox"), eos, 50, 60])
        output = await served.engine.generate(PROMPT, max_tokens=50)

        assert output.text == " a fox"
        assert output.outputs[0].token_ids == ids[:-2]
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].stop_reason is None


async def test_an_ignored_eos_ends_nothing(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        ids = served.say(PROMPT, [50, 2, 60, 0, 70])
        output = await served.engine.generate(PROMPT, max_tokens=5, ignore_eos=True)

        assert output.outputs[0].token_ids == ids
        assert output.outputs[0].finish_reason == "length"
        assert output.text == served.tokenizer.decode(ids, skip_special_tokens=True)


async def test_a_stop_token_ends_a_text_and_is_none_of_it(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        ids = served.say(PROMPT, [50, 60, 70, 80])
        output = await served.engine.generate(PROMPT, max_tokens=50, stop_token_ids=[70, 1999])

        assert output.outputs[0].token_ids == ids[:3]
        assert output.text == served.tokenizer.decode(ids[:2], skip_special_tokens=True)
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 70)


# Stop strings


async def test_a_stop_string_is_found_across_tokens_and_never_shown_in_part(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        ids = [i for char in " a STOP. STAY. STOPPED!" for i in served.tokenizer.encode(char)]
        served.say(PROMPT, ids)
        stream = served.engine.stream(PROMPT, max_tokens=len(ids), stop="STOPPE")
        shown = ""
        async with stream:
            async for delta in stream:
                shown += delta.text
                assert " a STOP. STAY. ".startswith(shown)
                assert shown == stream.result.text or delta.finish_reason is None

        assert shown == stream.result.text == " a STOP. STAY. "
        assert (delta.finish_reason, delta.stop_reason) == ("stop", "STOPPE")


async def test_what_was_held_back_for_a_stop_string_comes_with_the_end(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        ids = [i for char in "one STO" for i in served.tokenizer.encode(char)]
        served.say(PROMPT, ids)
        deltas = await read(served.engine.stream(PROMPT, max_tokens=len(ids), stop="STOP"))

        assert as_text(deltas) == "one STO"
        assert deltas[-1].text.endswith("STO")
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", None)


async def test_a_stop_string_at_the_last_token_allowed_is_a_stop(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        ids = [i for char in "one STOP" for i in served.tokenizer.encode(char)]
        served.say(PROMPT, ids)
        output = await served.engine.generate(PROMPT, max_tokens=len(ids), stop="STOP")

        assert output.text == "one "
        assert output.outputs[0].token_ids == ids
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "STOP")


@pytest.mark.virtual_clock
async def test_an_unread_stream_stops_at_its_stop_string(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        served.say(PROMPT, " there was a fox. The end. " + "More and more. " * 5)
        async with served.engine.stream(PROMPT, seed=11, stop="The end") as stream:
            await asyncio.sleep(10)
            plans_with_it = [seeds for seeds in served.seeds_of_plans() if 11 in seeds]
            deltas = [delta async for delta in stream]

        assert as_text(deltas) == " there was a fox. "
        assert deltas[-1].stop_reason == "The end"
        # What was launched when the stop string was seen still runs; nothing after it.
        assert len(plans_with_it) <= len(stream.result.outputs[0].token_ids) + depth


async def test_a_stop_string_within_min_tokens_is_overlooked(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        ids = [i for char in "xo xo xo" for i in served.tokenizer.encode(char)]
        served.say(PROMPT, ids)
        output = await served.engine.generate(PROMPT, max_tokens=len(ids), stop="xo", min_tokens=4)
        # The x of the second one is the fourth token, and no part of a match.
        assert output.text == "xo xo "
        assert output.outputs[0].stop_reason == "xo"


async def test_half_a_character_at_the_end_is_shown_as_the_decoder_shows_it(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        ids = served.tokenizer.encode("日")
        assert len(ids) > 1, "the demo's vocabulary cuts this character"
        served.say(PROMPT, ids)
        deltas = await read(served.engine.stream(PROMPT, max_tokens=len(ids) - 1))
        assert as_text(deltas) == served.tokenizer.decode(ids[:-1], skip_special_tokens=True)
