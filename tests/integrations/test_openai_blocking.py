"""The official blocking client over `LLM`: its engine is on a loop in another thread."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from integrations.conftest import CUT_OFF, IDS, completion

from aioengine import LLM, Engine, EngineClosed
from doubles.fake_executor import FakeExecutor

LONG = 20_000
JOIN_TIMEOUT_S = 20.0

Open = Callable[..., LLM]


@pytest.fixture
def open_llm() -> Iterator[Open]:
    """Makes one over a fake device, whose requests of `LONG` tokens do not end within a test."""
    opened: list[LLM] = []

    def open_one(**device: Any) -> LLM:
        executor = FakeExecutor(
            **{"vocab_size": 2048, "max_model_len": LONG + 100, "num_blocks": LONG // 4, "step_time_s": 0.001, **device}
        )
        opened.append(LLM(executor=executor, seed=1))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def endless(**fields: Any) -> dict[str, Any]:
    return completion(max_tokens=LONG, stream=True, **fields)


def stats_of(llm: LLM) -> tuple[int, float]:
    stats = llm.stats()
    return stats.running + stats.waiting, stats.kv_cache_usage


def read(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream)


def num_tasks(llm: LLM) -> int:
    async def count(engine: Engine) -> int:
        assert engine._runtime is not None
        return len(engine._runtime._side_tasks)

    return llm._host.run(count)


def test_answers_and_streams_are_the_engines(open_llm: Open) -> None:
    llm = open_llm()
    client = llm.openai_client()
    expected = llm.generate(IDS, max_tokens=50, seed=7, ignore_eos=True)[0].text
    answer: Any = client.completions.create(model="demo", **completion(max_tokens=50))
    assert answer.choices[0].text == expected
    assert read(client.completions.create(model="", **completion(max_tokens=50), stream=True)) == expected
    assert [model.id for model in client.models.list()] == ["demo"]


def test_a_client_keeps_its_model_open() -> None:
    client = LLM(executor=FakeExecutor(vocab_size=2048)).openai_client()
    gc.collect()
    stream: Any = client.completions.create(model="demo", **completion(max_tokens=50), stream=True)
    del client
    gc.collect()
    assert read(stream)
    del stream
    gc.collect()  # a client is in circles with its parts; the model closes itself with the last of them


def test_a_stream_is_read_while_it_is_computed(open_llm: Open) -> None:
    llm = open_llm()
    stream: Any = llm.openai_client().completions.create(model="demo", **endless())
    assert [next(stream).choices[0].text for _ in range(20)]
    assert llm.stats().running == 1
    stream.close()
    assert stats_of(llm) == (0, 0.0)
    assert num_tasks(llm) == 0


@pytest.mark.nightly
def test_breaking_out_of_a_dropped_stream_aborts_it(open_llm: Open) -> None:
    llm = open_llm()
    for _ in llm.openai_client().completions.create(model="demo", **endless()):
        break
    gc.collect()
    assert stats_of(llm) == (0, 0.0)
    llm.openai_client().completions.create(model="demo", **endless())  # never read
    gc.collect()
    assert stats_of(llm) == (0, 0.0)


@pytest.mark.nightly
def test_threads_share_a_client_and_are_computed_together(open_llm: Open) -> None:
    llm = open_llm(step_time_s=0.002)
    client = llm.openai_client()

    def ask(number: int) -> str:
        asked = completion(prompt=[5, 6, number], max_tokens=20)
        if number % 2:
            return client.completions.create(model="demo", **asked).choices[0].text
        return read(client.completions.create(model="demo", **asked, stream=True))

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, range(32)))
    assert texts == [ask(number) for number in range(32)]
    assert len(set(texts)) > 28


def test_errors_are_the_clients_own(open_llm: Open) -> None:
    llm = open_llm()
    client = llm.openai_client()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo", prompt="Hi", temperature=-1)
    llm.close()
    with pytest.raises(openai.InternalServerError, match="closed"):
        client.completions.create(model="demo", prompt="Hi")
    with pytest.raises(EngineClosed):
        llm.openai_client()


def test_a_time_limit_is_heard(open_llm: Open) -> None:
    llm = open_llm(step_time_s=30.0)
    client = llm.openai_client(timeout=0.05, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="demo", **completion())
    assert stats_of(llm) == (0, 0.0)


async def test_on_a_loop_it_says_what_to_use_instead(open_llm: Open) -> None:
    client = (await asyncio.to_thread(open_llm)).openai_client()
    with pytest.raises(openai.InternalServerError, match=r"Engine\.start"):
        client.completions.create(model="demo", prompt="Hi")


def test_closing_the_model_ends_a_stream_that_is_read_in_another_thread(open_llm: Open) -> None:
    llm = open_llm()
    stream: Any = llm.openai_client().completions.create(model="demo", **endless())
    next(stream)
    ends: list[Exception] = []

    def read_on() -> None:
        try:
            read(stream)
        except Exception as error:
            ends.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    llm.close()
    reader.join(JOIN_TIMEOUT_S)
    assert isinstance(ends[0], openai.APIError)
    assert "the engine was closed before this request had ended" in ends[0].message


def test_what_had_come_can_be_read_after_the_model_was_closed(open_llm: Open) -> None:
    llm = open_llm()
    stream: Any = llm.openai_client().completions.create(model="demo", **completion(max_tokens=5), stream=True)
    while stats_of(llm)[0]:
        pass
    llm.close()
    assert read(stream)
    stream.close()


def test_closing_the_client_ends_its_streams(open_llm: Open) -> None:
    llm = open_llm()
    client = llm.openai_client()
    stream: Any = client.completions.create(model="demo", **endless())
    next(stream)
    client.close()
    assert stats_of(llm) == (0, 0.0)
    with pytest.raises(CUT_OFF):
        read(stream)
    llm.close()
    client.close()


def test_ctrl_c_ends_a_stream(open_llm: Open) -> None:
    llm = open_llm(step_time_s=0.01)
    pressed = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    stream = llm.openai_client().completions.create(model="demo", **endless())
    pressed.start()
    with pytest.raises(KeyboardInterrupt):
        read(stream)
    pressed.join()
    assert stats_of(llm) == (0, 0.0)
    assert llm.generate(IDS, max_tokens=1)
