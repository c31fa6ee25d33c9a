"""Responses of ``/v1/responses`` that run, run in the background, or are stored, over OpenAI's own client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from server.conftest import Adapter, both_adapters
from server.scripted import EVENT, LOOKS_UP, TOOL, named, scripted, sse_events
from waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADDED = "response.output_item.added"


# Responses that run


@both_adapters
async def test_a_running_response_can_be_looked_at_and_cancelled(folder: Path, adapter: Adapter) -> None:
    async with scripted(folder, "A long story of a fox", adapter=adapter, is_manual=True) as served:
        responses = served.openai.responses
        async with await responses.create(model="demo", input="Hi", stream=True) as stream:
            events = [await anext(stream)]
            response_id = events[0].response.id  # type: ignore[union-attr]
            await until(lambda: served.executor.unfinished)
            while events[-1].type != "response.output_text.delta":
                events.append(await anext(stream))
                if events[-1].type == "response.in_progress":
                    served.executor.complete()
            looked_at = await responses.retrieve(response_id)
            assert (looked_at.status, looked_at.output_text) == ("in_progress", "A")
            with pytest.raises(openai.BadRequestError, match="wait for its end"):
                await responses.create(model="demo", input="And?", previous_response_id=response_id)
            with pytest.raises(openai.BadRequestError, match="cancel it first"):
                await responses.delete(response_id)
            cancelled = await responses.cancel(response_id)
            assert (cancelled.status, cancelled.output_text, cancelled.error) == ("cancelled", "A", None)
            *_, last = [event async for event in stream]
        assert last.type == "response.incomplete"
        assert last.response.status == "cancelled"
        assert (await responses.cancel(response_id)).status == "cancelled"
        assert (await responses.retrieve(response_id)).output_text == "A"
        served.executor.is_manual = False
        while served.executor.unfinished:
            served.executor.complete()
            await anyio.lowlevel.checkpoint()
        assert served.engine.stats().running == 0


@both_adapters
async def test_a_client_that_leaves_ends_its_response(folder: Path, adapter: Adapter) -> None:
    async with scripted(folder, "A long story", adapter=adapter, is_manual=True) as served:
        stream = await served.openai.responses.create(model="demo", input="Hi", stream=True)
        created = await anext(stream)
        await until(lambda: served.engine.stats().running == 1)
        await stream.close()
        await until(lambda: served.engine.stats().running == 0)
        with pytest.raises(openai.NotFoundError):
            await served.openai.responses.retrieve(created.response.id)  # type: ignore[union-attr]
        for step in served.executor.unfinished:
            step.complete()


@both_adapters
async def test_a_step_that_fails_amid_a_stream_fails_the_response(folder: Path, adapter: Adapter) -> None:
    async with scripted(folder, "A long story of a fox", adapter=adapter) as served:
        served.executor.make_step_fail(3, RuntimeError("secret of the device"))
        events = [event async for event in await served.openai.responses.create(model="demo", input="Hi", stream=True)]
        assert events[-1].type == "response.failed"
        response = events[-1].response
        assert response.status == "failed"
        assert response.error is not None
        assert response.error.code == "server_error"
        assert "secret" not in response.model_dump_json()
        assert (await served.openai.responses.retrieve(response.id)).error == response.error


@both_adapters
async def test_a_response_in_the_background_goes_on_without_its_client(folder: Path, adapter: Adapter) -> None:
    async with scripted(folder, "A long story", "No.", adapter=adapter, is_manual=True) as served:
        responses, executor = served.openai.responses, served.executor
        begun = await responses.create(model="demo", input="Hi", background=True)
        assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
        cancelled = await responses.create(model="demo", input="Ho", background=True)
        await until(lambda: executor.unfinished)
        executor.complete()
        assert (await responses.cancel(cancelled.id)).status == "cancelled"
        executor.is_manual = False
        while executor.unfinished:
            executor.complete()
            await anyio.lowlevel.checkpoint()
        await until(lambda: served.engine.stats().running == 0)
        ended = await responses.retrieve(begun.id)
        assert (ended.status, ended.output_text) == ("completed", "A long story")
        assert (await responses.retrieve(cancelled.id)).status == "cancelled"
        whole = await responses.create(model="demo", input="Hi")
        assert whole.model_dump()["output"][0]["content"] == ended.model_dump()["output"][0]["content"]


@both_adapters
async def test_what_fails_in_the_background_is_told_of(folder: Path, adapter: Adapter) -> None:
    async with scripted(folder, "A long story", adapter=adapter) as served:
        responses = served.openai.responses
        for fields, param in (
            ({"store": False}, "store"),
            ({"input": "word " * 5000}, ""),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await responses.create(**{"model": "demo", "input": "Hi", "background": True, **fields})
            assert (refused.value.param or "") in (param, "input")
        bad: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "array", "uniqueItems": True}}}
        shaped = await responses.create(model="demo", input="Hi", background=True, text=bad)
        served.executor.make_step_fail(3, RuntimeError("secret of the device"))
        failing = await responses.create(model="demo", input="Hi", background=True)
        for begun, code in ((shaped, "invalid_prompt"), (failing, "server_error")):
            while (told := await responses.retrieve(begun.id)).status == "in_progress":
                pass
            assert told.status == "failed"
            assert told.error is not None
            assert told.error.code == code
            assert "secret" not in told.model_dump_json()
        assert served.engine.stats().running == 0


def added_up(events: list[Any]) -> list[str]:
    """The texts and arguments of a stream's items, of its deltas; each event is one that the client knows."""
    texts: dict[int, str] = {}
    for event in events:
        EVENT.validate_json(event.model_dump_json())
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    return list(texts.values())


def texts_of(response: Response) -> list[str]:
    return [item.arguments if item.type == "function_call" else item.content[0].text for item in response.output]  # type: ignore[union-attr, index]


@both_adapters
async def test_an_ended_response_is_told_again_as_events_and_from_any_of_them_on(
    folder: Path, adapter: Adapter
) -> None:
    async with scripted(folder, LOOKS_UP, "", adapter=adapter) as served:
        responses = served.openai.responses
        asked: Any = {"include": ["message.output_text.logprobs"], "tools": [TOOL]}
        told = [event async for event in await responses.create(model="demo", input="Hi", stream=True, **asked)]
        response = await responses.retrieve(told[0].response.id)  # type: ignore[union-attr]
        events: list[Any] = [event async for event in await responses.retrieve(response.id, stream=True)]
        assert added_up(events) == texts_of(response) == added_up(told)
        assert [event.type for event in events] == [
            event.type for place, event in enumerate(told) if not event.type == told[place - 1].type != ADDED
        ], "one delta for each item"
        assert events[-1].response == response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.id for item in done] == [item.id for item in response.output]
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(len(events)))
        for after in range(-1, numbers[-1] + 3):
            rest = [event async for event in await responses.retrieve(response.id, stream=True, starting_after=after)]
            expected = [event for event in events if event.sequence_number > after]
            assert rest == expected
        empty = await responses.create(model="demo", input="Ho")
        *_, last = [event async for event in await responses.retrieve(empty.id, stream=True)]
        assert (last.type, last.response.output_text) == ("response.completed", "")
        answer = await served.http.get(f"/v1/responses/{response.id}?stream=true&starting_after=x")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve("resp_none", stream=True)


@both_adapters
async def test_a_response_in_the_background_is_followed_by_whoever_asks(
    folder: Path, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioengine.server.generation.POLL_S", 0.001)
    async with scripted(folder, "A long story of a fox", "Another", adapter=adapter, is_manual=True) as served:
        responses, executor = served.openai.responses, served.executor
        stream = await responses.create(model="demo", input="Hi", background=True, stream=True)
        events: list[Any] = []

        async def read_until(kind: str) -> None:
            while not events or events[-1].type != kind:
                events.append(await anext(stream))

        await read_until("response.in_progress")
        response_id = events[0].response.id
        await until(lambda: executor.unfinished)
        executor.complete()
        await read_until("response.output_text.delta")
        await stream.close()  # it goes on without its client
        last = events[-1].sequence_number
        executor.is_manual = False
        while executor.unfinished:
            executor.complete()
            await anyio.lowlevel.checkpoint()
        async with await responses.retrieve(response_id, stream=True, starting_after=last) as rest:
            events += [event async for event in rest]
        whole = await responses.retrieve(response_id)
        assert added_up(events) == [whole.output_text] == ["A long story of a fox"]
        assert events[-1].response == whole
        begun = await responses.create(model="demo", input="Ho", background=True)
        async with await responses.retrieve(begun.id, stream=True) as following:
            assert added_up([event async for event in following]) == ["Another"]


async def test_a_response_that_is_followed_keeps_the_order_in_which_the_model_has_written_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole response has its text before its calls, also what came between these: no call is told twice for that."""
    monkeypatch.setattr("aioengine.server.generation.POLL_S", 0.001)
    calls = [
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in "abc"
    ]
    said = f"First {calls[0]}\nand then {calls[1]}\n{calls[2]}"
    async with scripted(folder, said) as served:
        responses = served.openai.responses
        asked: Any = {"model": "demo", "background": True, "stream": True, "tools": [TOOL]}
        events: list[Any] = [event async for event in await responses.create(input="Hi", **asked)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.type for item in done] == ["message", "function_call", "message", *["function_call"] * 2]
        assert events[-1].response.output == done
        again = [event async for event in await responses.retrieve(events[0].response.id, stream=True)]
        assert again == events


async def test_who_follows_a_response_that_is_not_kept_hears_so_at_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioengine.server.generation.POLL_S", 0.001)
    async with scripted(folder, "Never kept.", is_manual=True) as served:
        responses, executor = served.openai.responses, served.executor
        stream = await responses.create(model="demo", input="Hi", store=False, stream=True)
        first: Any = await anext(stream)
        async with served.http.stream("GET", f"/v1/responses/{first.response.id}?stream=true") as following:
            executor.is_manual = False
            while executor.unfinished:
                executor.complete()
                await anyio.lowlevel.checkpoint()
            assert [event.type async for event in stream][-1] == "response.completed"
            told = await following.aread()
        ((kind, data),) = sse_events(told)
        assert (kind, json.loads(data)["type"], json.loads(data)["code"]) == ("error", "error", "not_found")


@both_adapters
async def test_the_items_of_a_responses_input_are_listed_page_by_page(folder: Path, adapter: Adapter) -> None:
    async with scripted(folder, LOOKS_UP, "Sunny.", adapter=adapter, is_manual=False) as served:
        responses = served.openai.responses
        first = await responses.create(model="demo", input="Hi", instructions="Be kind", tools=[TOOL])  # type: ignore[list-item]
        (only,) = [item async for item in responses.input_items.list(first.id)]
        assert (only.type, only.role, only.content[0].text) == ("message", "user", "Hi")  # type: ignore[union-attr]
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await responses.create(model="demo", input=results, previous_response_id=first.id)
        items = [item async for item in responses.input_items.list(second.id, order="asc", limit=1)]
        assert [item.type for item in items] == [
            "message", "reasoning", "message", "function_call", "function_call", *["function_call_output"] * 2
        ]  # fmt: skip
        assert len({item.id for item in items}) == 7
        assert [item.call_id for item in items[3:5]] == [item.call_id for item in items[5:]]  # type: ignore[union-attr]
        assert items[2].content[0].text == "Let me see."  # type: ignore[union-attr, index]
        page = await responses.input_items.list(second.id, limit=3)
        assert (page.data, page.has_more) == (items[:3:-1], True), "the last one comes first"
        assert (page.first_id, page.last_id) == (items[-1].id, items[4].id)
        rest = await responses.input_items.list(second.id, after=page.last_id)
        assert (rest.data, rest.has_more) == (items[3::-1], False)
        for query, param in (("limit=0", "limit"), ("limit=1e3", "limit"), ("order=up", "order"), ("after=x", "after")):
            answer = await served.http.get(f"/v1/responses/{second.id}/input_items?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        with pytest.raises(openai.NotFoundError):
            await responses.input_items.list("resp_none")
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await responses.create(model="demo", input="Hi", conversation="conv_1")


async def test_an_ended_response_is_not_cancelled(folder: Path) -> None:
    async with scripted(folder, "Yes.") as served:
        answer = await served.openai.responses.create(model="demo", input="Hi")
        with pytest.raises(openai.BadRequestError, match="has ended"):
            await served.openai.responses.cancel(answer.id)


# Bounds


async def found(client: AsyncOpenAI, response_ids: list[str]) -> list[int]:
    """Places of those that are still there; looking uses them."""
    there = []
    for place, response_id in enumerate(response_ids):
        try:
            await client.responses.retrieve(response_id)
        except openai.NotFoundError:
            continue
        there.append(place)
    return there


async def test_the_one_that_was_used_longest_ago_goes_first(folder: Path) -> None:
    async with scripted(folder, *map(str, range(5)), config=named(max_stored_responses=3)) as served:
        ids: list[str] = []
        for number in range(3):
            ids.append((await served.openai.responses.create(model="demo", input=f"a{number}")).id)
        assert await found(served.openai, ids[:1]) == [0]  # used, and so the newest
        ids.append((await served.openai.responses.create(model="demo", input="b", previous_response_id=ids[1])).id)
        assert await found(served.openai, ids) == [0, 1, 3]


async def test_what_is_kept_is_bounded_in_bytes(folder: Path) -> None:
    config = named(max_stored_response_bytes=12_000)
    async with scripted(folder, *map(str, range(12)), config=config) as served:
        create = served.openai.responses.create
        ids = [(await create(model="demo", input=f"a{number} " + "word " * 100)).id for number in range(10)]
        there = await found(served.openai, ids)
        assert 1 < len(there) < 10
        assert there == list(range(10 - len(there), 10))
        too_large = await create(model="demo", input="b", metadata={str(place): "x" * 1000 for place in range(14)})
        assert await found(served.openai, [*ids, too_large.id]) == there, "it drives nothing out"


async def test_nothing_is_kept_where_nothing_may_be(folder: Path) -> None:
    async with scripted(folder, "Yes.", config=named(max_stored_responses=0)) as served:
        answer = await served.openai.responses.create(model="demo", input="Hi")
        assert await found(served.openai, [answer.id]) == []
