"""Responses that clients ask for again: as events, and the items of their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.json import decode

from aioengine.server.answers import line_of
from aioengine.server.errors import invalid_value
from aioengine.server.responses import part_of

IN_PROGRESS: dict[str, Any] = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")) | {
    "status": "in_progress",
    "output": [],
}
TEXTS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""The name of an item's text in events, and the field that has it, by the item's type."""
MAX_ITEMS = 100
"""Most items of one page."""


class _Part(msgspec.Struct):
    """A part of an item, without its log-probabilities, which may be megabytes."""

    text: str


def events_of(body: bytes) -> list[bytes]:
    """The events of a response that has ended, by its body; a delta an item, log-probabilities in the last event."""
    response = decode(body, type=dict[str, msgspec.Raw])
    items = decode(response["output"], type=list[dict[str, msgspec.Raw]])
    events: list[bytes] = []

    def add(kind: str, fields: dict[str, Any]) -> None:
        event = line_of({"type": f"response.{kind}", "sequence_number": len(events), **fields})
        events.append(b"event: response.%b\ndata: %b\n\n" % (kind.encode(), event))

    for kind in ("created", "in_progress"):
        add(kind, {"response": {**response, **IN_PROGRESS}})
    for index, item in enumerate(items):
        kind, is_call = decode(item["type"]), "content" not in item
        name, field = TEXTS[kind]
        text: str = decode(item[field]) if is_call else decode(item["content"], type=list[_Part])[0].text
        place = {"item_id": item["id"], "output_index": index, **({} if is_call else {"content_index": 0})}
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        empty, part = (msgspec.Raw(part_of("text" if logprobs else "reasoning", line_of(told))) for told in ("", text))
        begun: dict[str, Any] = {**item, "status": "in_progress", **({field: ""} if is_call else {"content": []})}
        add("output_item.added", {"output_index": index, "item": begun})
        if not is_call:
            add("content_part.added", {**place, "part": empty})
        if text:
            add(f"{name}.delta", {**place, "delta": text, **logprobs})
        names = {"name": item["name"]} if kind == "function_call" else {}
        add(f"{name}.done", {**place, **names, field: text, **logprobs})
        if not is_call:
            add("content_part.done", {**place, "part": part})
            item["content"] = msgspec.Raw(b"[%b]" % part)
        add("output_item.done", {"output_index": index, "item": item})
    status = decode(response["status"])
    add(status if status in ("completed", "failed") else "incomplete", {"response": msgspec.Raw(body)})
    return events


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
