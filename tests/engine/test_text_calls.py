"""What a server in front of an engine asks beside requests: would it take one, streams read without waiting, texts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.ways import Opener
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import Split
from waiting import Ticker

from aioengine import (
    CompletionDelta,
    ConfigError,
    Engine,
    EngineClosed,
    EngineOverloaded,
    InvalidRequest,
    StepFailed,
    Stream,
)
from aioengine.testing import FakeExecutor
from aioengine.text import template_limits
from aioengine.text.chat_input import MAX_BYTES
from aioengine.text.token_table import TokenTables, WindowTable

PROMPT = list(range(100, 120))
TEXT = "Once upon a time there was a 🦊"
CHAT = [{"role": "user", "content": "Who lives here?"}]
BEGUN = [*CHAT, {"role": "assistant", "content": "A fox and"}]
LONG = "Once upon a time there was a fox. " * 60_000  # 2 MB
ONE_AT_A_TIME = {"max_waiting": 2, "max_num_seqs": 1}


# Whether it takes a request


@pytest.mark.virtual_clock
async def test_asking_takes_no_place_and_passes_nobody(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth, is_manual=True, config=ONE_AT_A_TIME) as served:
        for _ in range(10):
            served.engine.check_accepting(2)
        started = [tasks.start(served.engine.generate([1] * 20, max_tokens=2))]
        await served.until(lambda: served.core.stats().running == 1)
        for number in (2, 3):  # the second needs more places than there are, and stands in line for them
            started.append(tasks.start(served.engine.generate([number] * 20, max_tokens=2, n=number - 1)))
            await served.turn()
        assert served.runtime.admission.num_free == 1
        with pytest.raises(EngineOverloaded):
            served.engine.check_accepting()
        await served.rest_until_done(started)


@pytest.mark.parametrize("num_sequences", [0, -1, True, 1.0, "1", None, 3])
async def test_a_number_of_sequences_is_a_positive_int_that_may_find_room(serve: Any, num_sequences: Any) -> None:
    async with serve(config=ONE_AT_A_TIME) as served:
        with pytest.raises(InvalidRequest) as refused:
            served.engine.check_accepting(num_sequences)
        assert refused.value.param == "num_sequences"


# A chat template of one's own


async def test_a_chat_template_may_be_given_in_place_of_the_models() -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}[TOOL_CALLS]"
    async with Engine(executor=FakeExecutor(vocab_size=2048), chat_template=template) as engine:
        rendered = await engine.detokenize(await engine.tokenize(CHAT), skip_special_tokens=False)
        assert rendered == "[Who lives here?][TOOL_CALLS]"
        assert engine.has_tools, "how calls are written is read from it, too"


async def test_those_who_connect_have_the_engines_template() -> None:
    opener = Opener("served")
    try:
        engine = await opener.open(chat_template="{{ messages[0].content }}!")
        rendered = await engine.detokenize(await engine.tokenize(CHAT), skip_special_tokens=False)
        assert rendered == "Who lives here?!"
    finally:
        await opener.aclose()


@pytest.mark.parametrize("given", ["a/file.jinja", "", 3, "x" * 5000, "{" * (2**20 + 1), Path("a")])
def test_what_is_no_chat_template_is_refused_before_anything_is_loaded(given: Any) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        Engine(chat_template=given)


# A stream without waiting


def take_all(stream: Stream) -> list[CompletionDelta]:
    deltas = []
    while (delta := stream.take()) is not None:
        deltas.append(delta)
    return deltas


@pytest.mark.virtual_clock
async def test_what_is_there_is_taken_and_nothing_is_waited_for(serve: Any, depth: int) -> None:
    async with (
        serve(depth=depth, is_manual=True) as served,
        served.engine.stream(PROMPT, max_tokens=3, seed=1) as stream,
    ):
        taken = []
        for count in range(1, 4):
            assert stream.take() is None
            assert not stream.is_ended
            await served.until(lambda: served.executor.unfinished)
            served.executor.complete()
            await served.until(lambda: len(stream.result.outputs[0].token_ids) == count)  # noqa: B023 - called now
            taken += take_all(stream)
        assert [len(delta.token_ids) for delta in taken] == [1, 1, 1]
        assert taken[-1].finish_reason == "length"
        assert stream.is_ended
        assert stream.take() is None
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert stream.result.outputs[0].token_ids == [i for delta in taken for i in delta.token_ids]


async def test_it_is_ended_once_all_of_it_is_read_and_not_before(serve: Any) -> None:
    async with serve() as served, served.engine.stream(PROMPT, max_tokens=4) as stream:
        await stream.finish()
        assert not stream.is_ended
        assert [len(delta.token_ids) for delta in take_all(stream)] == [4]
        assert stream.is_ended


async def test_an_error_comes_once_after_all_that_had_arrived(serve: Any, quiet_log: None) -> None:
    async with serve(is_manual=True) as served:
        served.executor.make_step_fail(2, RuntimeError("upside down"))
        async with served.engine.stream(PROMPT, max_tokens=8) as stream:
            while len(served.executor.plans) < 3:
                served.complete_all()
                await served.turn()
            served.complete_all()
            await served.until(lambda: stream._state.is_ended)
            assert not stream.is_ended
            [delta] = [stream.take()]
            assert (len(delta.token_ids), delta.finish_reason) == (2, None)
            assert not stream.is_ended
            with pytest.raises(StepFailed):
                stream.take()
            assert stream.is_ended
            assert stream.take() is None


async def test_one_reader_reads_many_streams_by_what_they_say(serve: Any) -> None:
    async with serve() as served, contextlib.AsyncExitStack() as stack:
        expected = {i: await served.engine.generate([i] * 5, seed=i, max_tokens=3 + i, n=2) for i in range(1, 9)}
        news: asyncio.Queue[int] = asyncio.Queue()
        streams = {}
        for i in expected:
            stream = served.engine.stream([i] * 5, seed=i, max_tokens=3 + i, n=2)
            streams[i] = await stack.enter_async_context(stream)
            streams[i].watch(lambda i=i: news.put_nowait(i))
        texts = {(i, index): "" for i in expected for index in range(2)}
        open_ones = set(expected)
        while open_ones:
            i = await news.get()
            for delta in take_all(streams[i]):
                texts[i, delta.index] += delta.text
            if streams[i].is_ended:
                open_ones.discard(i)
        assert texts == {(i, c.index): c.text for i, output in expected.items() for c in output.outputs}


# Texts to ids, and back


async def test_special_tokens_are_added_as_the_caller_says(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as served:
        heard = []
        encode = served.tokenizer.encode

        def noted(text: str, *, add_special_tokens: bool) -> list[int]:
            heard.append(add_special_tokens)
            return encode(text, add_special_tokens=add_special_tokens)

        served.tokenizer.encode = noted
        for prompt in (TEXT, CHAT):
            for add in (None, True, False):
                await served.engine.tokenize(prompt, add_special_tokens=add)
        assert heard == [True, True, False, False, True, False]


async def test_ids_come_back_as_the_text(serve: Any) -> None:
    async with serve() as served:
        ids = await served.engine.tokenize(TEXT)
        for given in (ids, tuple(ids), np.array(ids), [np.int64(i) for i in ids]):
            assert await served.engine.detokenize(given) == TEXT
        assert await served.engine.detokenize([]) == ""
        assert await served.engine.tokenize("") == []


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda engine: engine.tokenize(5), "prompt"),
        (lambda engine: engine.tokenize(None), "prompt"),
        (lambda engine: engine.tokenize([]), "prompt"),
        (lambda engine: engine.tokenize([5, 6]), "prompt"),
        (lambda engine: engine.tokenize(b"fox"), "prompt"),
        (lambda engine: engine.tokenize("\ud800"), "prompt"),
        (lambda engine: engine.tokenize(TEXT * 100 + "\ud800"), "prompt"),
        (lambda engine: engine.tokenize([{"content": "fox"}]), "prompt"),
        (lambda engine: engine.tokenize([*CHAT, 5]), "prompt"),
        (lambda engine: engine.tokenize([{"role": "wizard", "content": "fox"}]), "prompt"),
        (lambda engine: engine.tokenize(TEXT, add_special_tokens=1), "add_special_tokens"),
        (lambda engine: engine.tokenize(TEXT, chat_template_kwargs={"a": 1}), "chat_template_kwargs"),
        (lambda engine: engine.tokenize(CHAT, chat_template_kwargs={"tools": []}), "chat_template_kwargs"),
        (lambda engine: engine.detokenize("fox"), "token_ids"),
        (lambda engine: engine.detokenize(None), "token_ids"),
        (lambda engine: engine.detokenize(np.zeros((2, 2), int)), "token_ids"),
        (lambda engine: engine.detokenize([5, "six"]), "token_ids"),
        (lambda engine: engine.detokenize([2048]), "token_ids"),
        (lambda engine: engine.detokenize([-1]), "token_ids"),
        (lambda engine: engine.detokenize([5] * 100_000 + [2048]), "token_ids"),
        (lambda engine: engine.detokenize([5], skip_special_tokens=None), "skip_special_tokens"),
    ],
)
async def test_bad_values_are_the_callers_fault(serve: Any, call: Any, param: str) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest) as refused:
            await call(served.engine)
        assert refused.value.param == param
        assert len(str(refused.value)) < 400


async def test_an_engine_that_is_closed_meanwhile_gives_what_is_done_and_begins_nothing(serve: Any, tasks: Any) -> None:
    async with serve() as served:
        encode_gate, render_gate = served.hold_tokenizing(), threading.Event()
        render = served.tokenizer.render_chat

        def gated(*args: Any, **options: Any) -> str:
            assert render_gate.wait(30), "nobody let it go on"
            return str(render(*args, **options))

        served.tokenizer.render_chat = gated
        of_a_huge_text = tasks.start(served.engine.tokenize(LONG[:200_000]))
        of_a_chat = tasks.start(served.engine.tokenize(CHAT))
        for _ in range(3):
            await served.turn()
        closing = tasks.start(served.engine.aclose())
        await served.turn()
        encode_gate.set()
        render_gate.set()
        await closing
        ids, error = await tasks.end(of_a_huge_text, of_a_chat)
        assert len(ids) > 20_000
        assert isinstance(error, EngineClosed)


async def test_short_work_is_done_at_once_and_long_work_in_a_thread(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noting(method: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            threads.append(threading.current_thread())
            return method(*args, **options)

        return noted

    async with serve() as served:
        for name in ("encode", "token_table", "render_chat"):
            monkeypatch.setattr(served.tokenizer, name, noting(getattr(served.tokenizer, name)))
        await served.engine.tokenize(TEXT)
        await served.engine.detokenize([5] * 100)
        assert set(threads) == {threading.current_thread()}
        threads.clear()
        await served.engine.tokenize(LONG[:5000])
        await served.engine.tokenize([{"role": "user", "content": LONG[:5000]}])
        await served.engine.detokenize([5] * 5000)
        assert len(threads) == 4
        assert threading.current_thread() not in threads


async def test_long_bad_words_are_tokenized_in_a_thread_and_short_ones_at_once(serve: Any) -> None:
    async with serve() as served:
        threads: list[threading.Thread] = []
        encode_bad_words = served.tokenizer.encode_bad_words

        def noted(words: Any) -> Any:
            threads.append(threading.current_thread())
            return encode_bad_words(words)

        served.tokenizer.encode_bad_words = noted
        for words in (["short"], ["a word " * 100] * 20):
            await served.engine.generate([1, 2, 3], max_tokens=2, seed=1, ignore_eos=True, bad_words=words)
        assert [thread is threading.current_thread() for thread in threads] == [True, False]


async def test_the_loop_goes_on_while_megabytes_are_turned_into_ids_and_back(serve: Any) -> None:
    async with serve() as served:
        async with Ticker() as ticker:
            ids = await served.engine.tokenize(LONG)
        assert ticker.count > 100
        async with Ticker() as ticker:
            assert await served.engine.detokenize(ids) == LONG
        assert ticker.count > 20


@pytest.mark.parametrize("is_chat", [False, True])
async def test_short_texts_and_requests_pass_a_huge_one(serve: Any, tasks: Any, is_chat: bool) -> None:
    async with serve() as served:
        prompt: Any = [{"role": "user", "content": LONG[:200_000]}] if is_chat else LONG[:200_000]
        gate = served.hold_tokenizing()
        huge = tasks.start(served.engine.tokenize(prompt))
        await served.until(lambda: served.num_held)
        assert await served.engine.detokenize([5] * 5000)
        assert (await served.engine.generate(PROMPT, max_tokens=2)).finished
        assert not huge.done()
        gate.set()
        assert len((await tasks.end(huge))[0]) > 20_000


@pytest.mark.parametrize("size", [5000, 200_000])
async def test_cancelling_stops_the_wait_and_leaves_nothing(serve: Any, tasks: Any, size: int) -> None:
    async with serve() as served:
        gate = served.hold_tokenizing()
        begun, queued = [tasks.start(served.engine.tokenize(LONG[:size])) for _ in range(2)]
        for _ in range(3):
            await served.turn()
        for task in (queued, begun):
            task.cancel()
        assert [type(outcome) for outcome in await tasks.end(begun, queued)] == [asyncio.CancelledError] * 2
        gate.set()
        assert await served.engine.tokenize(LONG[:size]) == served.tokenizer.encode(LONG[:size])


# Variables for the template


@pytest.mark.parametrize(
    ("prompt", "kwargs", "end"),
    [
        (CHAT, {}, "lives here?<|im_end|>\n<|im_start|>assistant\n"),
        (BEGUN, {"continue_final_message": True}, "<|im_start|>assistant\nA fox and"),
        (CHAT, {"add_generation_prompt": False}, "lives here?<|im_end|>\n"),
    ],
)
async def test_a_chat_ends_as_its_variables_say_and_has_the_ids_of_a_request(
    serve: Any, prompt: Any, kwargs: Any, end: str
) -> None:
    async with serve() as served:
        output = await served.engine.generate(prompt, max_tokens=1, chat_template_kwargs=kwargs)
        assert output.prompt.endswith(end)
        assert await served.engine.tokenize(prompt, chat_template_kwargs=kwargs) == output.prompt_token_ids
        assert await served.engine.detokenize(output.prompt_token_ids, skip_special_tokens=False) == output.prompt
        assert "<|im_start|>" not in await served.engine.detokenize(output.prompt_token_ids)


@pytest.mark.parametrize(
    ("prompt", "kwargs"),
    [
        (TEXT, {"enable_thinking": False}),
        (PROMPT, {"enable_thinking": False}),
        (CHAT, {"messages": []}),
        (CHAT, {"x": "x" * MAX_BYTES}),
        (CHAT, {"x": object()}),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}),
        (CHAT, "enable_thinking"),
    ],
)
async def test_variables_that_cannot_be_are_refused_before_anything_is_queued(
    serve: Any, prompt: Any, kwargs: Any
) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest) as refused:
            served.engine.stream(prompt, chat_template_kwargs=kwargs)
        assert refused.value.param == "chat_template_kwargs"


async def test_a_message_that_the_template_does_not_show_cannot_be_continued(serve: Any) -> None:
    async with serve() as served:
        served.tokenizer.chat_template = "{{ messages[0].content }}"
        with pytest.raises(InvalidRequest, match="does not appear in the chat"):
            await served.engine.generate(BEGUN, chat_template_kwargs={"continue_final_message": True})


async def test_variables_are_taken_at_the_call(serve: Any) -> None:
    async with serve() as served:
        served.tokenizer.chat_template = "{{ names }}"
        names = ["fox"]
        stream = served.engine.stream(CHAT, max_tokens=1, chat_template_kwargs={"names": names})
        names.append("badger")
        async with stream:
            assert (await stream.finish()).prompt == "['fox']"


async def test_the_bytes_of_an_outputs_tokens_are_its_text(serve: Any) -> None:
    async with serve() as served:
        ids = served.say(PROMPT, TEXT + " and a naïve 日本 badger")
        output = await served.engine.generate(PROMPT, max_tokens=len(ids))
        parts = served.engine.token_bytes(output.outputs[0].token_ids)
        assert len(parts) == len(ids)
        assert b"".join(parts).decode() == output.text == TEXT + " and a naïve 日本 badger"
        assert any("\ufffd" in part.decode(errors="replace") for part in parts), "no character is cut"


async def test_the_bytes_of_a_stream_are_those_of_the_whole(serve: Any) -> None:
    async with serve() as served:
        num_tokens = len(served.say(PROMPT, TEXT))
        parts: list[bytes] = []
        async with served.engine.stream(PROMPT, max_tokens=num_tokens) as stream:
            async for delta in stream:
                parts += served.engine.token_bytes(delta.token_ids, is_start=not parts)
            assert b"".join(parts).decode() == stream.result.text


async def test_ids_outside_the_vocabulary_have_no_bytes(serve: Any) -> None:
    async with serve() as served:
        for bad in ([2048], [-1], ["x"], "fox", None):
            with pytest.raises(InvalidRequest) as refused:
                served.engine.token_bytes(bad)
            assert refused.value.param == "token_ids"
        assert served.engine.token_bytes([]) == []


# What the model's own files do


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SLOW = "{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}"


async def test_a_template_that_loops_ends_and_holds_up_no_text(serve: Any, tasks: Any) -> None:
    async with serve(config={"chat_template_timeout_s": 0.5}) as served:
        served.tokenizer.chat_template = SLOW + "{{ messages[0].content }}"
        slow = [tasks.start(served.engine.generate([{"role": "user", "content": "slow"}])) for _ in range(3)]
        await asyncio.sleep(0)
        chat, text = [{"role": "user", "content": "quick"}], "a text of its own " * 10
        next_chat = tasks.start(served.engine.generate(chat, max_tokens=2))
        async with asyncio.TaskGroup() as group:
            quick = [group.create_task(served.engine.generate(text, max_tokens=2)) for _ in range(5)]
        assert all(task.result().finished for task in quick)
        assert any(not task.done() for task in slow)
        assert [str(error) for error in await tasks.end(*slow)] == [
            "the model's chat template does not take these messages: it takes longer than 0.5 s "
            "(chat_template_timeout_s)"
        ] * 3
        [output] = await tasks.end(next_chat)
        assert output.finished, "the next chat waits its turn"


async def test_closing_ends_templates_that_loop(serve: Any, tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 2**62)
    async with serve(config={"chat_template_timeout_s": 3600}) as served:
        served.tokenizer.chat_template = LOOPS
        loops = [tasks.start(served.engine.generate(CHAT)) for _ in range(3)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await served.engine.aclose()
        assert time.monotonic() - began < 5
        assert [type(error) for error in await tasks.end(*loops)] == [EngineClosed] * 3


async def test_a_panic_of_the_tokenizer_is_an_error_of_its_request(serve: Any, tasks: Any) -> None:
    """Of a regular expression that gives up at long texts: a BaseException, which would end its siblings."""
    async with serve() as served:
        served.tokenizer._fast = Backend.from_str(served.tokenizer.backend.to_str())
        served.tokenizer._fast.pre_tokenizer = Split(Regex(r"(\w+\s*)+\d$"), "isolated")

        async def asked(prompt: str) -> str:
            try:
                return (await served.engine.generate(prompt, max_tokens=2)).outputs[0].finish_reason or ""
            except Exception as error:
                return type(error).__name__

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(asked(prompt)) for prompt in ("a fox", "hello " * 100, "a fox")]
        assert [task.result() for task in asking] == ["length", "InvalidRequest", "length"]
        with pytest.raises(InvalidRequest, match="cannot encode this text"):
            await served.engine.tokenize("hello " * 500)


async def test_a_decoder_that_fails_ends_its_request_alone(serve: Any, tasks: Any) -> None:
    def decode(ids: list[int]) -> str:
        if 77 in ids:
            raise InvalidRequest("the model's tokenizer cannot decode these tokens: out of bounds")
        return "x" * len(ids)

    async with serve() as served:
        table = WindowTable(decode=decode, kinds=bytes([WindowTable.SETTLES] * 2048))
        served.tokenizer._tables = TokenTables(table, table)
        served.script[(5, 6)] = [10, 77, 11, 12]
        served.script[(5, 7)] = [10, 11, 11, 12]
        failing, other = [tasks.start(served.engine.generate([5, i], max_tokens=4)) for i in (6, 7)]
        error, output = await tasks.end(failing, other)
        assert "cannot decode" in str(error)
        assert output.text == "xxxx"
