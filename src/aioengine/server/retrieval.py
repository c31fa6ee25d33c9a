"""Responses that clients ask for again: as events, and the items of their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from aioengine.server.answers import line_of
from aioengine.server.errors import invalid_value
from aioengine.server.responses import part_of

POLL_S = 0.1
"""How often a response that is running is looked at for a client that follows it, at least."""
MAX_SHARE = 0.1
"""Of the loop's time, for looking at one response."""
IN_PROGRESS: dict[str, Any] = {
    "status": "in_progress", "completed_at": None, "error": None, "incomplete_details": None, "usage": None,
    "output": [],
}  # fmt: skip
CALL_TEXTS = {"function_call": "arguments", "custom_tool_call": "input"}
"""The field of a call that has its text, by the item's type."""
TEXTS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""What an item's text is called in events."""
MAX_ITEMS = 100
"""Of one page."""


class _Part(msgspec.Struct):
    text: str


class _Item(msgspec.Struct):
    """An item of a response, without its log-probabilities, which may be megabytes."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: str
    role: str | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    content: list[_Part] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET

    def with_text(self, status: str, text: str | None) -> Any:
        """The item with another status and text; None: without its part."""
        known = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        if self.content is UNSET:
            return {**known, "status": status, CALL_TEXTS[self.type]: text or ""}
        return {**known, "status": status, "content": [] if text is None else [self.part(text)]}

    def part(self, text: str | None) -> msgspec.Raw:
        return msgspec.Raw(part_of("text" if self.type == "message" else "reasoning", line_of(text)))


def events_after(body: bytes, after: int) -> tuple[bytes, int, bool]:
    """A response's events as far as it has come, from its body. Log-probabilities are in the last event alone.

    An event's number counts the events before it and the characters of all deltas up to its end. So it does not depend
    on how a text was cut into deltas, and a client that comes again goes on where it was.

    Args:
        after: number of the last event that the client has; -1: none.
    Returns:
        the events; the last one's number; whether there will be no more.
    """
    response = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    status = msgspec.json.decode(response["status"], type=str)
    items = msgspec.json.decode(response["output"], type=list[_Item])
    is_over = status != "in_progress"
    events: list[bytes] = []
    number = -1

    def add(kind: str, fields: dict[str, Any], num: int = 1) -> None:
        nonlocal number
        number += num
        if number > after:
            told = line_of({"type": f"response.{kind}", "sequence_number": number, **fields})
            events.append(b"event: response.%b\ndata: %b\n\n" % (kind.encode(), told))

    for kind in ("created", "in_progress"):
        add(kind, {"response": {**response, **IN_PROGRESS}})
    for index, item in enumerate(items):
        is_call = item.content is UNSET
        is_closed = is_over or index < len(items) - 1
        text = item.content[0].text if item.content else item.arguments or item.input or ""
        if not (is_over or is_call or text):
            break  # before its first token it is not known what the response begins with
        name = TEXTS[item.type]
        place = {"item_id": item.id, "output_index": index, **({} if is_call else {"content_index": 0})}
        logprobs: dict[str, Any] = {"logprobs": []} if item.type == "message" else {}
        add("output_item.added", {"output_index": index, "item": item.with_text("in_progress", None)})
        if not is_call:
            add("content_part.added", {**place, "part": item.part("")})
        if text and (is_closed or item.type != "custom_tool_call"):  # whose input is known when all of it is there
            add(f"{name}.delta", {**place, "delta": text[max(0, after - number) :], **logprobs}, len(text))
        if not is_closed:
            break
        if is_call:
            names = {"name": item.name} if item.type == "function_call" else {}
            add(f"{name}.done", {**place, **names, CALL_TEXTS[item.type]: text})
        else:
            add(f"{name}.done", {**place, "text": text, **logprobs})
            add("content_part.done", {**place, "part": item.part(text)})
        item_status = item.status if is_over else "completed"
        add("output_item.done", {"output_index": index, "item": item.with_text(item_status, text)})
    if is_over:
        kind = status if status in ("completed", "failed") else "incomplete"
        add(kind, {"response": msgspec.Raw(body)})
    return b"".join(events), max(number, after), is_over


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
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_ITEMS):
        raise invalid_value("limit", f"limit is a number from 1 to {MAX_ITEMS}")
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise invalid_value("after", "after is the id of an item of this input")
        items = items[place + 1 :]
    data = items[: int(limit)]
    first_id, last_id = (data[place]["id"] if data else None for place in (0, -1))
    return {
        "object": "list",
        "data": data,
        "first_id": first_id,
        "last_id": last_id,
        "has_more": len(items) > len(data),
    }


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
            add(
                "message", role=role, content=[{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
            )
        elif role != "assistant":
            add("message", role=role, content=[{"type": "input_text", "text": text}])
        for call in message.get("tool_calls") or ():
            add("function_call", call_id=call["id"], **call["function"])
    return items
