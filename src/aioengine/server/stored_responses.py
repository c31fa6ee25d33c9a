"""Responses that clients may ask for again, or continue: in memory, within bounds.

Each of several servers of one port has only its own responses.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from aioengine.outputs import CompletionOutput
from aioengine.server.answers import line_of, message_of
from aioengine.server.errors import ApiError, invalid_value
from aioengine.server.responses import InputItem, part_of

MISSED_BY_SEVERAL = (
    ", or another of this port's servers has it, which are separate: send the conversation with store: false, or run "
    "one server, or several at ports of their own behind a proxy that sends each client to one of them"
)
MAX_REFERRED_BYTES = 4 * 2**20
"""Most bytes of the responses whose items a request names by id: decoding them takes 15 ms."""


class _Output(msgspec.Struct):
    output: list[InputItem]


class StoredResponse(NamedTuple):
    """A response that has ended.

    Attributes:
        body: its body, as clients get it.
        messages: the conversation with the response, as JSON; without the instructions, which are for it alone.
        num_answered: messages before the response's own.
    """

    body: bytes
    messages: bytes
    num_answered: int

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.messages) + 512  # of the objects


class OwnedId(NamedTuple):
    """The key of a response: another owner that knows the id does not find it."""

    id: str
    owner: str


class StoredResponses:
    """Responses by their ids. Above a bound, the least recently used ones are dropped.

    Args:
        max_num: most responses that are kept.
        max_bytes: most bytes of all of them together.
    Attributes:
        is_one_of_several: other servers of the port have responses of their own, and errors mention it.
    """

    def __init__(self, max_num: int, max_bytes: int) -> None:
        self.is_one_of_several = False
        self._max_num = max_num
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[OwnedId, StoredResponse] = OrderedDict()

    def make_id(self) -> str:
        """An id that cannot be guessed, since it gives access to the response."""
        return f"resp_{secrets.token_hex(20)}"

    def keep(
        self, owned: OwnedId, body: bytes, messages: list[dict[str, Any]], choice: CompletionOutput | None
    ) -> None:
        """Store a response that has ended, unless it alone is larger than ``max_bytes``.

        Args:
            messages: the messages that it answers.
            choice: its output; None: it has failed.
        """
        answered = messages
        if choice is not None:
            answered = [*messages, {key: value for key, value in message_of(choice).items() if value is not None}]
        stored = StoredResponse(body, msgspec.json.encode(answered), len(messages))
        if stored.num_bytes > self._max_bytes:  # it would drive out all others, and then go itself
            return
        self._stored[owned] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_num or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def find(self, owned: OwnedId, *, is_previous: bool = False) -> StoredResponse:
        """A response, which becomes the most recently used one.

        Raises:
            ApiError: 404; 400 if it is the previous response of a request.
        """
        if (stored := self._look_up(owned)) is not None:
            return stored
        message = f"there is no response {owned.id[:100]!r}: it was not stored, or has given way to others"
        message += MISSED_BY_SEVERAL if self.is_one_of_several else ""
        if is_previous:
            raise ApiError(400, "previous_response_not_found", message, param="previous_response_id")
        raise ApiError(404, "not_found", message, param="id")

    def item_finder(self, owner: str) -> Callable[[str], InputItem]:
        """A function that returns stored items by id, each once, as a client would send them back; for one request.

        Raises (the function):
            ApiError: 404: no such item, or named twice; or 400: the responses have more than `MAX_REFERRED_BYTES`.
        """
        found: dict[str, dict[str | None, InputItem]] = {}
        num_bytes = 0

        def find(item_id: str) -> InputItem:
            nonlocal num_bytes
            response_id = f"resp_{item_id.partition('_')[2][:-2]}"  # see `ResponseAnswer`
            owned = OwnedId(response_id, owner)
            if response_id not in found and (stored := self._look_up(owned)) is not None:
                num_bytes += len(stored.body)
                if num_bytes > MAX_REFERRED_BYTES:
                    message = f"input refers to responses of more than {MAX_REFERRED_BYTES:,} bytes; give their items"
                    raise invalid_value("input", message)
                found[response_id] = {item.id: item for item in msgspec.json.decode(stored.body, type=_Output).output}
            item = found.get(response_id, {}).pop(item_id, None)
            if item is None:
                message = f"there is no item {item_id[:100]!r}, or input names it twice; give the item itself"
                message += MISSED_BY_SEVERAL if self.is_one_of_several else ""
                raise ApiError(404, "not_found", message, param="input")
            return item

        return find

    def delete(self, owned: OwnedId) -> None:
        """Forget a response.

        Raises:
            ApiError: 404.
        """
        self._num_bytes -= self.find(owned).num_bytes
        del self._stored[owned]

    def _look_up(self, owned: OwnedId) -> StoredResponse | None:
        if (stored := self._stored.get(owned)) is not None:
            self._stored.move_to_end(owned)
        return stored


def input_page(response_id: str, stored: StoredResponse, query: Mapping[str, str]) -> dict[str, Any]:
    """The messages that a response answers, as a page of items.

    Args:
        query: ``limit``, ``order`` ("asc" or "desc") and ``after``, the id of an item.
    Raises:
        ApiError: 400.
    """
    messages = msgspec.json.decode(stored.messages)[: stored.num_answered]
    items = _items_of(messages, response_id.partition("_")[2])
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise invalid_value("order", "order is asc or desc")
    if limit not in map(str, range(1, 101)):
        raise invalid_value("limit", "limit is a number from 1 to 100")
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
