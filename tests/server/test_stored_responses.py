"""Responses of ``/v1/responses`` that end early, or are stored, over OpenAI's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from server.conftest import Adapter, both_adapters
from server.scripted import LOOKS_UP, TOOL, named, scripted
from waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@both_adapters
async def test_an_aborted_response_is_stored_as_a_cancelled_one(folder: Path, adapter: Adapter) -> None:
    async with scripted(folder, "A long story", adapter=adapter, is_manual=True) as served:
        asked: Any = {"model": "demo", "input": "Hi", "stream": True, "extra_headers": {"x-request-id": "a-story"}}
        events: list[Any] = []
        async with await served.openai.responses.create(**asked) as stream:
            async for event in stream:
                events.append(event)
                if event.type == "response.in_progress":
                    await until(lambda: served.executor.unfinished)
                    assert (await served.http.post("/abort", json={"request_id": "a-story"})).status_code == 200
        assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
        assert await served.openai.responses.retrieve(events[0].response.id) == events[-1].response
        for step in served.executor.unfinished:
            step.complete()


async def test_responses_in_the_background_are_refused_with_what_to_do_instead(folder: Path) -> None:
    async with scripted(folder, "Yes.") as served:
        responses = served.openai.responses
        with pytest.raises(openai.BadRequestError, match="stream the response, or keep the connection open"):
            await responses.create(model="demo", input="Hi", background=True)
        answer = await responses.create(model="demo", input="Hi", background=False)
        assert answer.background is False
        with pytest.raises(openai.BadRequestError, match="in the background"):
            await responses.retrieve(answer.id, stream=True)
        with pytest.raises(openai.NotFoundError, match="close the connection"):
            await responses.cancel(answer.id)


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
