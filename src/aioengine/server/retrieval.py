"""Responses that clients ask for again: as events, and the items of their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.json import decode

from aioengine.outputs import CompletionDelta
from aioengine.server.answers import line_of
from aioengine.server.decoding import joined_texts
from aioengine.server.errors import invalid_value
from aioengine.server.response_tools import ClientTool, arguments_of
from aioengine.server.responses import InputItem, ResponseAnswer, part_of
from aioengine.tool_calls.calls import ToolCallDelta

TOLD_LAST = ("status", "completed_at", "error", "incomplete_details", "usage", "output")
"""A response's fields that are not in `ResponseRequest.head`."""
MAX_ITEMS = 100
"""Most items of one page."""


class _StoredItem(InputItem):
    """An item of a response."""

    status: str = ""


def events_of(body: bytes) -> list[bytes]:
    """The events of an ended response, made from its body: one delta an item, log-probabilities in the last event."""
    response = decode(body, type=dict[str, msgspec.Raw])
    items = decode(response["output"], type=list[_StoredItem])
    tools: dict[str, ClientTool] = {}
    deltas: list[CompletionDelta] = []
    for item in items:
        text = joined_texts("output", item.content or "")
        reasoning, text = (text, "") if item.type == "reasoning" else ("", text)
        calls: list[ToolCallDelta] = []
        if item.call_id is not None:
            tool = ClientTool(item.name or "", item.namespace, item.input is not None)
            tools[tool.function] = tool
            arguments = item.arguments if item.input is None else arguments_of(item.input)
            calls = [ToolCallDelta(len(deltas), item.call_id, tool.function, arguments or "")]
        deltas.append(CompletionDelta(index=0, token_ids=[], text=text, reasoning=reasoning, tool_calls=calls))
    head = {name: value for name, value in response.items() if name not in TOLD_LAST}
    answer = ResponseAnswer(
        {**head, "id": decode(head["id"])}, list, top_logprobs=None, tools=tools, keep=lambda body, choice: None
    )
    events = [answer.opening((), None, ()), *(answer.event(0, delta) for delta in deltas)]
    events.append(answer.end_items(items[-1].status) if items else b"")
    return split_events(b"".join(events) + answer.end(decode(response["status"]), body))


def split_events(data: bytes) -> list[bytes]:
    """Split the bytes of a stream into its events."""
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def input_page(response_id: str, messages: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The messages that a response answers, as a page of items.

    Args:
        query: ``limit``, ``order`` ("asc" or "desc") and ``after``, the id of an item.
    Raises:
        ApiError: 400.
    """
    items = _items_of(messages, response_id.partition("_")[2])
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise invalid_value("order", "order is asc or desc")
    if limit not in map(str, range(1, MAX_ITEMS + 1)):
        raise invalid_value("limit", f"limit is a number from 1 to {MAX_ITEMS}")
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise invalid_value("after", "after is the id of an item of this input")
        items = items[place + 1 :]
    data = items[: int(limit)]
    first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    has_more = len(items) > len(data)
    return {"object": "list", "data": data, "first_id": first_id, "last_id": last_id, "has_more": has_more}


def _items_of(messages: Sequence[dict[str, Any]], suffix: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []

    def add(kind: str, **fields: Any) -> None:
        items.append({"id": f"in_{suffix}_{len(items)}", "type": kind, "status": "completed", **fields})

    for message in messages:
        role, text = message["role"], message.get("content") or ""
        if reasoning := message.get("reasoning_content"):
            add("reasoning", summary=[], content=[{"type": "reasoning_text", "text": reasoning}])
        if role == "tool":
            add("function_call_output", call_id=message["tool_call_id"], output=text)
        elif role == "assistant" and text:
            add("message", role=role, content=[msgspec.Raw(part_of("text", line_of(text)))])
        elif role != "assistant":
            add("message", role=role, content=[{"type": "input_text", "text": text}])
        for call in message.get("tool_calls") or ():
            add("function_call", call_id=call["id"], **call["function"])
    return items
