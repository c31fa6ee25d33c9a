"""The official asynchronous client in the engine's own process: what comes, when it comes, and what leaving does."""

from __future__ import annotations

import asyncio
import functools
import gc
import subprocess
import sys
import warnings
from typing import Any

import openai
import pytest
import uvloop
from integrations.conftest import CUT_OFF, IDS, TOO_LATE, completion, in_process, read
from nightly import nightly
from waiting import Tasks, turns, until

from aioengine import ConfigError, Engine, StepFailed
from aioengine.integrations.in_process import MAX_UNREAD_BYTES
from aioengine.server import ServerConfig
from aioengine.testing import FakeExecutor

both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
virtual_clock = pytest.mark.virtual_clock()


# When it comes


@virtual_clock
async def test_each_token_is_read_when_its_step_ends() -> None:
    async with in_process(step_time_s=1.0) as at:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        stream = await at.client.completions.create(model="demo", **completion(max_tokens=5), stream=True)
        times = [loop.time() - began_at async for chunk in stream if chunk.choices[0].finish_reason is None]
        assert times == pytest.approx([1.0, 2.0, 3.0, 4.0])


@virtual_clock
async def test_256_at_once_get_what_each_would_get_alone() -> None:
    async with in_process(step_time_s=0.01, max_num_seqs=64, max_waiting=256) as at:

        async def ask(number: int) -> str:
            asked = completion(prompt=[5, 6, number], max_tokens=3 + number % 20)
            return await read(await at.client.completions.create(model="demo", **asked, stream=True))

        together = await asyncio.gather(*(ask(number) for number in range(256)))
        assert at.is_idle
        assert [await ask(number) for number in (0, 100, 255)] == [together[number] for number in (0, 100, 255)]
        assert len(set(together)) > 200


@virtual_clock
async def test_a_reader_that_stops_makes_the_writer_wait_within_a_bound() -> None:
    config = ServerConfig(max_unread_tokens=50)
    async with in_process(
        step_time_s=0.01, max_model_len=1600, client={"config": config, "timeout": None}, num_blocks=4096
    ) as at:
        stream = await at.client.completions.create(model="demo", **completion(max_tokens=1200), stream=True)
        await anext(stream)
        await asyncio.sleep(1000.0)
        (exchange,) = at.client._client._transport._api._open.values()
        assert MAX_UNREAD_BYTES < exchange._num_unread < 2 * MAX_UNREAD_BYTES
        computed = at.engine.stats().generation_tokens
        assert computed < 600, "an unread stream was computed on and on"
        await asyncio.sleep(1000.0)
        assert at.engine.stats().generation_tokens == computed
        rest = await read(stream)
        expected = (await at.engine.generate(IDS, max_tokens=1200, seed=7, ignore_eos=True)).text
        assert expected.endswith(rest)
        assert len(rest) > len(expected) * 0.99


# Leaving


@both_loops
@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_a_stream_that_is_closed_is_in_no_later_step(num_read: int) -> None:
    async with in_process(is_manual=True) as at, Tasks() as tasks:
        asked = tasks.start(at.client.completions.create(model="demo", **completion(), stream=True))
        await until(lambda: at.num_steps)
        (stream,) = await tasks.end(asked)
        for _ in range(num_read):
            await at.step()
            await anext(stream)
        assert at.engine.stats().running == 1
        await stream.close()
        assert at.is_idle, "closing returns when the engine has forgotten the request"
        await at.assert_aborted_at_once()


@both_loops
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_task_that_is_cancelled_is_in_no_later_step(is_stream: bool) -> None:
    async def ask() -> None:
        answer = await at.client.completions.create(model="demo", **completion(), stream=is_stream)
        await read(answer)

    async with in_process(is_manual=True) as at, Tasks() as tasks:
        asked = tasks.start(ask())
        await until(lambda: at.num_steps)
        await at.step(3)
        await turns(20)
        asked.cancel()
        await at.assert_aborted_at_once()
        assert isinstance((await tasks.end(asked))[0], asyncio.CancelledError)


@both_loops
@pytest.mark.parametrize("num_read", [*nightly(0), 1])
async def test_a_stream_that_is_dropped_is_aborted(num_read: int) -> None:
    async with in_process(is_manual=True) as at, Tasks() as tasks:
        asked = tasks.start(at.client.completions.create(model="demo", **completion(), stream=True))
        await until(lambda: at.num_steps)
        (stream,) = await tasks.end(asked)
        for _ in range(num_read):
            await at.step()
            await anext(stream)
        del stream, asked
        tasks._tasks.clear()
        await turns(5)  # what ran until now holds it, too
        gc.collect()  # one that was never read is in a circle with its reader
        await at.assert_aborted_at_once()


@both_loops
async def test_closing_the_client_ends_its_requests_and_no_others() -> None:
    async with in_process(is_manual=True) as at, Tasks() as tasks:
        other = at.engine.openai_client()
        asked = [client.completions.create(model="demo", **completion(), stream=True) for client in (at.client, other)]
        mine, others = await tasks.end(*map(tasks.start, asked))
        await until(lambda: at.num_registered == 2)
        await at.client.close()
        assert at.num_registered == at.num_tasks == 1
        with pytest.raises(CUT_OFF):
            await read(mine)
        await others.close()
        for step in at.executor.unfinished:
            step.complete()
        await until(lambda: at.is_idle)


# Time limits


@virtual_clock
async def test_a_client_that_waits_too_long_for_an_answer_gives_up() -> None:
    async with in_process(step_time_s=1.0, client={"timeout": 5.0}) as at:
        with pytest.raises(openai.APITimeoutError):
            await at.client.completions.create(model="demo", **completion())
        assert asyncio.get_running_loop().time() < 7.0
        await turns(10)
        assert at.is_idle
        answer = await at.client.completions.create(model="demo", **completion(max_tokens=2))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


@virtual_clock
async def test_a_stream_that_stands_still_ends_by_the_time_limit() -> None:
    async with in_process(step_time_s=0.1, client={"timeout": 5.0}) as at:
        stream = await at.client.completions.create(model="demo", **completion(), stream=True)
        for _ in range(5):
            await anext(stream)
        await at.engine.pause()
        began_at = asyncio.get_running_loop().time()
        with pytest.raises(TOO_LATE):
            await read(stream)
        assert 4.0 < asyncio.get_running_loop().time() - began_at < 5.5
        await turns(10)
        assert at.is_idle


@virtual_clock
async def test_a_stream_that_has_nothing_to_say_says_so_before_the_time_limit() -> None:
    async with in_process(step_time_s=0.1, client={"timeout": 40.0}) as at:
        stream = await at.client.completions.create(model="demo", **completion(), stream=True)
        await anext(stream)
        await at.engine.pause()
        asyncio.get_running_loop().call_later(100.0, lambda: at.runtime.core.resume())
        await read(stream)
        assert asyncio.get_running_loop().time() > 100.0


# Errors


async def test_what_the_engine_refuses_is_the_clients_own_error() -> None:
    async with in_process() as at:
        with pytest.raises(openai.BadRequestError, match="temperature") as refused:
            await at.client.completions.create(model="demo", prompt="Hi", temperature=-1)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
            await at.client.completions.create(model="gpt", prompt="Hi")
        with pytest.raises(openai.BadRequestError) as too_long:
            await at.client.completions.create(model="demo", prompt=[5] * 1000)
        assert too_long.value.code == "context_length_exceeded"
        assert at.is_idle


@pytest.mark.parametrize("num_ids", [2**10, *nightly(2**17)])
async def test_a_body_may_be_large(num_ids: int) -> None:
    config = ServerConfig(max_body_bytes=2**25)
    ids = [1000 + number % 1000 for number in range(num_ids)]
    async with in_process(max_model_len=2**18, num_blocks=2**15, client={"config": config}) as at:
        answer = await at.client.completions.create(model="demo", **completion(prompt=ids, max_tokens=2))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == num_ids


@virtual_clock
async def test_what_there_is_no_room_for_is_tried_again_as_often_as_the_client_says() -> None:
    full: dict[str, Any] = {"step_time_s": 0.1, "max_num_seqs": 1, "max_waiting": 1}
    async with in_process(**full) as at, Tasks() as tasks:
        ask = functools.partial(at.client.completions.create, model="demo", **completion(max_tokens=20))
        for _ in range(2):
            tasks.start(ask())
            await asyncio.sleep(0.2)
        with pytest.raises(openai.InternalServerError) as refused:
            await ask()
        assert refused.value.status_code == 503
        patient = at.client.with_options(max_retries=5)
        answer = await patient.completions.create(model="demo", **completion(max_tokens=20))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 20


@virtual_clock
async def test_a_step_that_fails_ends_its_stream_with_an_error(quiet_log: None) -> None:
    async with in_process(step_time_s=1.0) as at:
        at.executor.make_row_fail(3, 0, StepFailed("it broke"))
        stream = await at.client.completions.create(model="demo", **completion(), stream=True)
        with pytest.raises(openai.APIError, match="step"):
            await read(stream)
        assert at.is_idle


@both_loops
async def test_closing_the_engine_ends_streams_with_an_error_after_what_had_come() -> None:
    async with in_process(is_manual=True) as at, Tasks() as tasks:
        asked = tasks.start(at.client.completions.create(model="demo", **completion(), stream=True))
        whole = tasks.start(at.client.with_options(max_retries=2).completions.create(model="demo", **completion()))
        await until(lambda: at.num_registered == 2)
        (stream,) = await tasks.end(asked)
        await at.step(4)
        await turns(50)
        await at.engine.aclose()
        assert not at.num_tasks
        for _ in range(4):
            await anext(stream)
        with pytest.raises(openai.APIError, match="the engine was closed"):
            await anext(stream)
        async with asyncio.timeout(3.0):  # were it tried again, that would be after 5 s
            (error,) = await tasks.end(whole)
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503


@virtual_clock
async def test_closing_the_engine_does_not_wait_for_a_reader_that_has_stopped() -> None:
    async with in_process(step_time_s=0.01, max_model_len=1600, client={"timeout": None}, num_blocks=4096) as at:
        stream = await at.client.completions.create(model="demo", **completion(max_tokens=1200), stream=True)
        await anext(stream)
        await asyncio.sleep(1000.0)
        began_at = asyncio.get_running_loop().time()
        await at.engine.aclose()
        assert asyncio.get_running_loop().time() - began_at < 1.0
        assert not at.num_tasks
        await read(stream)  # all of it had been computed


@pytest.mark.parametrize("state", ["new", "closed"])
@virtual_clock
async def test_an_engine_that_does_not_serve_is_an_error_at_once(state: str) -> None:
    engine = Engine(executor=FakeExecutor(vocab_size=2048))
    client = engine.openai_client()  # with its usual retries
    client._platform = "Linux"
    if state == "closed":
        async with engine:
            pass
    began_at = asyncio.get_running_loop().time()
    with pytest.raises(openai.InternalServerError) as error:
        await client.completions.create(model="demo", prompt="Hi")
    assert error.value.status_code == 503
    assert ("has not been started" if state == "new" else "is closed") in error.value.message
    assert asyncio.get_running_loop().time() == began_at, "it was tried again"


def test_the_client_says_so_on_another_loop() -> None:
    async def make() -> Any:
        return engine.openai_client(max_retries=0)

    async def ask() -> None:
        with pytest.raises(openai.InternalServerError, match="another event loop"):
            await client.completions.create(model="demo", prompt="Hi")

    with asyncio.Runner() as runner:
        engine = runner.run(Engine.start(executor=FakeExecutor(vocab_size=2048)))
        client = runner.run(make())
        asyncio.run(ask())
        runner.run(engine.aclose())


# Lives


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_each_run_of_a_loop_may_have_an_engine_and_clients(loop_factory: Any) -> None:
    async def once() -> str:
        async with Engine(executor=FakeExecutor(vocab_size=2048)) as engine:
            clients = [engine.openai_client() for _ in range(2)]
            answers = [await client.completions.create(model="demo", **completion(max_tokens=10)) for client in clients]
            assert answers[0].choices[0].text == answers[1].choices[0].text
            left = await clients[0].completions.create(model="demo", **completion(), stream=True)
            await anext(left)
            return answers[0].choices[0].text  # with a stream that is open, and clients that are

    texts = []
    for _ in range(2):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            texts.append(runner.run(once()))
    assert texts[0] == texts[1]


def test_a_loop_that_ends_leaves_nothing_to_complain_of() -> None:
    async def once() -> None:
        engine = await Engine.start(executor=FakeExecutor(vocab_size=2048, step_time_s=0.1))
        stream = await engine.openai_client().completions.create(model="demo", **completion(), stream=True)
        await anext(stream)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asyncio.run(once())
        gc.collect()
    assert all("engine" in str(warning.message) for warning in told), [str(one.message) for one in told]


# Options


async def test_options_that_would_lead_elsewhere_are_refused() -> None:
    async with in_process() as at:
        for name, value in {"base_url": "http://other/v1", "http_client": openai.DefaultAsyncHttpxClient()}.items():
            with pytest.raises(ConfigError, match=f"{name}: this client speaks to the engine"):
                at.engine.openai_client(**{name: value})


async def test_the_environment_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with in_process() as at:
        assert (await at.client.completions.create(model="demo", **completion(max_tokens=1))).usage is not None


def test_without_the_package_an_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['openai'] = None\n"
        "from aioengine import ConfigError, Engine\n"
        "try: Engine().openai_client()\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'aioengine[openai]'" in done.stdout
