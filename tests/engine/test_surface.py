"""What callers see: results, deltas, log-probabilities, where a text ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from engine.oracle import as_ids

from aioengine import CompletionDelta, RequestOutput

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Who lives here?"}]
IDS = [5, 6, 7]


def as_text(deltas: list[CompletionDelta]) -> str:
    return "".join(delta.text for delta in deltas)


# Prompts and results


async def test_a_chat_is_rendered_by_the_models_template(serve: Any) -> None:
    async with serve() as served:
        output = await served.engine.generate(tuple(MESSAGES), max_tokens=3)
        assert output.prompt == "<|im_start|>user\nWho lives here?<|im_end|>\n<|im_start|>assistant\n"
        assert output.prompt_token_ids == served.tokenizer.encode(output.prompt, add_special_tokens=False)


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


async def test_without_a_seed_each_request_is_another(serve: Any) -> None:
    async with serve() as served:
        first, second = [await served.engine.generate(IDS, max_tokens=8) for _ in range(2)]
        assert first.outputs != second.outputs


async def test_a_model_without_a_tokenizer_takes_and_gives_ids(serve: Any, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with serve(model=str(tmp_path)) as served:
        output = await served.engine.generate(IDS, max_tokens=4, logprobs=1)

        assert len(output.outputs[0].token_ids) == 4
        assert output.text == ""
        assert all(entry.decoded_token is None for line in output.outputs[0].logprobs for entry in line.values())


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


# Streams


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


async def test_a_stream_is_entered_once_before_it_is_used(serve: Any) -> None:
    async with serve() as served:
        stream = served.engine.stream(IDS, max_tokens=2)
        with pytest.raises(RuntimeError, match="enter the stream first"):
            await anext(stream)
        for use in (stream.take, lambda: stream.result, lambda: stream.is_ended):
            with pytest.raises(RuntimeError, match="enter the stream first"):
                use()
        assert not served.executor.plans
        async with stream:
            with pytest.raises(RuntimeError, match="entered once"):
                await stream.__aenter__()
            assert len((await stream.finish()).outputs[0].token_ids) == 2
        with pytest.raises(RuntimeError, match="entered once"):
            async with stream:
                pass


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
        assert len((await served.engine.generate(tuple(range(3, 22)))).outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("continuation", "sampling", "num_tokens", "text", "end"),
    [
        ([" a fox", [0], " more"], {}, -1, " a fox", ("stop", None)),
        ([" a fox", [2], " more"], {}, -1, " a fox", ("stop", None)),
        ([[50, 2, 60, 0, 70]], {"ignore_eos": True, "max_tokens": 5}, None, None, ("length", None)),
        ([" a fox", [70], " more"], {"stop_token_ids": [70, 1999]}, -1, " a fox", ("stop", 70)),
        ([*"one STO"], {"stop": "STOP", "max_tokens": 7}, None, "one STO", ("length", None)),
        ([*"one STOP"], {"stop": "STOP", "max_tokens": 8}, None, "one ", ("stop", "STOP")),
        ([*"one STOP more"], {"stop": "STOP", "max_unread_tokens": 1}, 8, "one ", ("stop", "STOP")),
        # The x of the second one is the fourth token, and no part of a match.
        ([*"xo xo xo"], {"stop": "xo", "min_tokens": 4}, None, "xo xo ", ("stop", "xo")),
    ],
    ids=["eos", "eos 2", "eos ignored", "stop token", "held back", "last token", "unread", "within min_tokens"],
)
async def test_a_text_ends_where_it_should(
    serve: Any, depth: int, continuation: list[Any], sampling: Any, num_tokens: Any, text: str | None, end: Any
) -> None:
    """``num_tokens`` -1: the last part is not reached."""
    async with serve(depth=depth) as served:
        encode = served.tokenizer.encode
        parts = [encode(part) if isinstance(part, str) else part for part in continuation]
        served.say(PROMPT, [token for part in parts for token in part])
        expected = [token for part in parts[:num_tokens] for token in part]
        async with served.engine.stream(PROMPT, **{"max_tokens": 50, **sampling}) as stream:
            shown = "".join([delta.text async for delta in stream])
        [completion] = stream.result.outputs
        assert completion.token_ids == expected
        assert (
            shown
            == completion.text
            == (served.tokenizer.decode(expected, skip_special_tokens=True) if text is None else text)
        )
        assert (completion.finish_reason, completion.stop_reason) == end


async def test_half_a_character_at_the_end_is_shown_as_the_decoder_shows_it(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        ids = served.tokenizer.encode("日")
        assert len(ids) > 1, "the demo's vocabulary cuts this character"
        served.say(PROMPT, ids)
        output = await served.engine.generate(PROMPT, max_tokens=len(ids) - 1)
        assert output.text == served.tokenizer.decode(ids[:-1], skip_special_tokens=True)


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
