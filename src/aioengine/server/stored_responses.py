"""Responses that clients may ask for again, or continue: in memory, within bounds.

Each of several servers of one port has only its own responses.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from aioengine.outputs import CompletionOutput, FinishReason
from aioengine.server.answers import message_of
from aioengine.server.errors import ApiError
from aioengine.server.responses import InputItem, ResponseAnswer
from aioengine.server.retrieval import events_of
from aioengine.server.stream_group import StreamGroup

ONE_SERVER = "run one server, or several at ports of their own behind a proxy that sends each client to one of them"
MISSED_BY_SEVERAL = (
    ", or another of this port's servers has it, which are separate: send the conversation with store: false, or "
    + ONE_SERVER
)
MAX_REFERRED_BYTES = 4 * 2**20
"""Most bytes of the responses whose items a request names by id: decoding them takes 15 ms."""
MAX_EVENTS = 1000
"""Most events that are returned at once."""
OVERHEAD_BYTES = 512
"""Bytes that a stored response takes beside its contents."""


class _Output(msgspec.Struct):
    output: list[InputItem]


class StoredResponse(NamedTuple):
    """A response that has ended.

    Attributes:
        body: its body, as clients get it.
        messages: the conversation with the response, as JSON; without the instructions, which are for it alone.
        is_cancelled: its client ended it.
        num_answered: messages before the response's own.
        events: the events of its stream; empty unless it was streamed in the background.
        num_bytes: the size of all of it.
    """

    body: bytes
    messages: bytes
    is_cancelled: bool
    num_answered: int
    events: list[bytes]
    num_bytes: int


class OwnedId(NamedTuple):
    """The key of a response: another owner that knows the id does not find it."""

    id: str
    owner: str


class RunningResponse(NamedTuple):
    """A response that is being generated, with the messages that it answers; and its events so far, if recorded."""

    group: StreamGroup
    answer: ResponseAnswer
    messages: list[dict[str, Any]]
    events: list[bytes]

    async def body(self, reason: FinishReason | None = None) -> bytes:
        """The response so far; if the engine has not begun it, an empty one with this finish reason."""
        outputs = self.group.outputs()
        return await self.answer.body_of(outputs[0]) if outputs else self.answer.empty_body(reason)


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
        self._running: dict[OwnedId, RunningResponse] = {}

    def make_id(self) -> str:
        """An id that cannot be guessed, since it gives access to the response."""
        return f"resp_{secrets.token_hex(20)}"

    @contextlib.contextmanager
    def running(self, owned: OwnedId, response: RunningResponse) -> Iterator[None]:
        """Make a response that is being generated available by its id, for reading and cancelling, within the block."""
        self._running[owned] = response
        try:
            yield
        finally:
            del self._running[owned]

    def keep(
        self,
        owned: OwnedId,
        body: bytes,
        messages: list[dict[str, Any]],
        choice: CompletionOutput | None,
        events: list[bytes] | None = None,
    ) -> None:
        """Store a response that has ended, unless it alone is larger than ``max_bytes``.

        Args:
            messages: the messages that it answers.
            choice: its output; None: it has failed.
            events: its recorded events; the caller appends the last ones afterwards.
        """
        answered = messages
        if choice is not None:
            answered = [*messages, {key: value for key, value in message_of(choice).items() if value is not None}]
        is_cancelled = choice is not None and choice.finish_reason == "abort"
        encoded, events = msgspec.json.encode(answered), events or []
        # The last events, which are not there yet, hold an item, and the body.
        num_bytes = len(body) * (3 if events else 1) + sum(map(len, events)) + len(encoded) + OVERHEAD_BYTES
        stored = StoredResponse(body, encoded, is_cancelled, len(messages), events, num_bytes)
        if stored.num_bytes > self._max_bytes:  # it would drive out all others, and then go itself
            return
        self._stored[owned] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_num or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _look_up(self, owned: OwnedId) -> StoredResponse | None:
        """A response that has ended, which becomes the most recently used one; None: there is none."""
        if (stored := self._stored.get(owned)) is not None:
            self._stored.move_to_end(owned)
        return stored

    def conversation(self, owned: OwnedId) -> list[dict[str, Any]]:
        """The messages up to a response, and with it.

        Raises:
            ApiError: 400.
        """
        if owned in self._running:
            message = "the response is still being generated: wait for its end, or cancel it"
            raise ApiError(400, "response_running", message, param="previous_response_id")
        if (stored := self._look_up(owned)) is None:
            raise ApiError(400, "previous_response_not_found", self._missed(owned), param="previous_response_id")
        messages: list[dict[str, Any]] = msgspec.json.decode(stored.messages)
        return messages

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
                    told = f"input refers to responses of more than {MAX_REFERRED_BYTES:,} bytes; give their items"
                    raise ApiError(400, "invalid_value", told, param="input")
                found[response_id] = {item.id: item for item in msgspec.json.decode(stored.body, type=_Output).output}
            item = found.get(response_id, {}).pop(item_id, None)
            if item is None:
                told = f"there is no item {item_id[:100]!r}, or input names it twice; give the item itself"
                told += MISSED_BY_SEVERAL if self.is_one_of_several else ""
                raise ApiError(404, "not_found", told, param="input")
            return item

        return find

    async def retrieve(self, owned: OwnedId) -> bytes:
        """A response's body, also of one that is running.

        Raises:
            ApiError: 404.
        """
        if (running := self._running.get(owned)) is not None:
            return await running.body()
        return self._find(owned).body

    def events(self, owned: OwnedId, after: int) -> tuple[list[bytes], bool]:
        """The events of a response after number ``after``, up to `MAX_EVENTS`, and whether its last is among them.

        Raises:
            ApiError: 404.
        """
        if (running := self._running.get(owned)) is not None:
            return running.events[after + 1 :][:MAX_EVENTS], False
        stored = self._find(owned)
        events = (stored.events or events_of(stored.body))[after + 1 :]
        return events[:MAX_EVENTS], len(events) <= MAX_EVENTS

    def answered(self, owned: OwnedId) -> bytes:
        """The messages that a response answers, as JSON.

        Raises:
            ApiError: 404.
        """
        if (running := self._running.get(owned)) is not None:
            return msgspec.json.encode(running.messages)
        stored = self._find(owned)
        return msgspec.json.encode(msgspec.json.decode(stored.messages)[: stored.num_answered])

    async def cancel(self, owned: OwnedId) -> bytes:
        """End a running response; returns its body, also if it was cancelled before.

        Raises:
            ApiError: 404; or 400: it has ended otherwise.
        """
        if (running := self._running.get(owned)) is not None:
            running.group.abort()
            return await running.body("abort")
        stored = self._find(owned)
        if not stored.is_cancelled:
            message = "the response has ended, and cannot be cancelled any more"
            raise ApiError(400, "response_ended", message, param="id")
        return stored.body

    def delete(self, owned: OwnedId) -> None:
        """Forget a response.

        Raises:
            ApiError: 404; or 400: it is running.
        """
        if owned in self._running:
            message = "the response is still being generated; cancel it first"
            raise ApiError(400, "response_running", message, param="id")
        self._num_bytes -= self._find(owned).num_bytes
        del self._stored[owned]

    def _find(self, owned: OwnedId) -> StoredResponse:
        if (stored := self._look_up(owned)) is None:
            raise ApiError(404, "not_found", self._missed(owned), param="id")
        return stored

    def _missed(self, owned: OwnedId) -> str:
        message = f"there is no response {owned.id[:100]!r}: it was not stored, or has given way to others"
        return message + (MISSED_BY_SEVERAL if self.is_one_of_several else "")
