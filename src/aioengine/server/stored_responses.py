"""Responses that clients may ask for again, or go on with: in memory, within bounds.

Of several servers of one port each keeps its own, and an id names the server that has the response: others ask that.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from aioengine.outputs import CompletionOutput
from aioengine.server.answers import message_of
from aioengine.server.errors import ApiError
from aioengine.server.group.siblings import Asked, AskStored
from aioengine.server.responses import InputItem, ResponseAnswer
from aioengine.server.retrieval import events_of
from aioengine.server.stream_group import StreamGroup

SHARED_ID = re.compile("resp_([0-9a-f]{2})[0-9a-f]{38}")
"""Of a response of one of several servers: its number."""
MAX_REFERRED_BYTES = 4 * 2**20
"""Of responses whose items a request names by their ids: reading them takes 15 ms."""
MAX_EVENTS = 1000
"""Most events that are looked at in one go."""
OVERHEAD_BYTES = 512
"""Of a stored response, beside what is in it."""


class _Output(msgspec.Struct):
    output: list[InputItem]


class StoredResponse(NamedTuple):
    """A response that has ended.

    Attributes:
        body: of it, as clients get it.
        messages: the conversation up to it and with it, as JSON; without the instructions, which are a response's own.
        is_cancelled: it was ended by its client.
        num_answered: messages before the response's own.
        events: that its client got, or would have got; empty unless it was streamed in the background.
        num_bytes: of all of it.
    """

    body: bytes
    messages: bytes
    is_cancelled: bool
    num_answered: int
    events: list[bytes]
    num_bytes: int


class OwnedId(NamedTuple):
    """The key of a response: another owner that knows its id finds none."""

    id: str
    owner: str


class Found(NamedTuple):
    """What there is of a response."""

    stored: StoredResponse | None
    is_running: bool


class Events(NamedTuple):
    """Some events of a response, and whether the last is among them."""

    events: list[bytes]
    is_over: bool


class RunningResponse(NamedTuple):
    """A response that is being generated, to these messages; with its events so far where they are recorded."""

    group: StreamGroup
    answer: ResponseAnswer
    messages: list[dict[str, Any]]
    events: list[bytes]

    async def body(self) -> bytes:
        """As far as it has come."""
        outputs = self.group.outputs()
        return await self.answer.body_of(outputs[0]) if outputs else self.answer.empty_body(None)

    async def cancel(self) -> bytes:
        """End it; returns what has come of it."""
        self.group.abort()
        outputs = self.group.outputs()
        return await self.answer.body_of(outputs[0]) if outputs else self.answer.empty_body("abort")


class StoredResponses:
    """Responses by their ids. Where there are too many, or too large ones, the one that was used longest ago goes.

    Args:
        max_num: responses that are kept.
        max_bytes: of all of them together.
    """

    def __init__(self, max_num: int, max_bytes: int) -> None:
        self._max_num = max_num
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[OwnedId, StoredResponse] = OrderedDict()
        self._running: dict[OwnedId, RunningResponse] = {}

    def make_id(self) -> str:
        """One that cannot be guessed, since with it a response may be read."""
        return f"resp_{secrets.token_hex(20)}"

    @contextlib.contextmanager
    def running(self, owned: OwnedId, response: RunningResponse) -> Iterator[None]:
        """While a response is being generated it can be found, and cancelled."""
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
        """A response has ended.

        Args:
            messages: that it answers.
            choice: what it says; None: it has failed.
            events: recorded ones, to which the last are added next.
        """
        answered = messages
        if choice is not None:
            answered = [*messages, {key: value for key, value in message_of(choice).items() if value is not None}]
        is_cancelled = choice is not None and choice.finish_reason == "abort"
        encoded, events = msgspec.json.encode(answered), events or []
        # The last events hold an item, and the body.
        num_bytes = len(body) * (3 if events else 1) + sum(map(len, events)) + len(encoded) + OVERHEAD_BYTES
        stored = StoredResponse(body, encoded, is_cancelled, len(messages), events, num_bytes)
        if stored.num_bytes > self._max_bytes:  # it would drive out all others, and then go itself
            return
        self._stored[owned] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_num or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    async def look_up(self, owned: OwnedId) -> Found:
        """A response to go on with."""
        if (stored := self._stored.get(owned)) is not None:
            self._stored.move_to_end(owned)
        return Found(stored, owned in self._running)

    async def conversation(self, owned: OwnedId) -> list[dict[str, Any]]:
        """The messages up to a response, and with it.

        Raises:
            ApiError: 400.
        """
        stored, is_running = await self.look_up(owned)
        if is_running:
            message = "the response is still being generated: wait for its end, or cancel it"
            raise ApiError(400, "response_running", message, param="previous_response_id")
        if stored is None:
            message = f"there is no response {owned.id[:100]!r}: it was not stored, or has given way to others"
            raise ApiError(400, "previous_response_not_found", message, param="previous_response_id")
        messages: list[dict[str, Any]] = msgspec.json.decode(stored.messages)
        return messages

    def item_finder(self, owner: str) -> Callable[[str], Awaitable[InputItem]]:
        """What finds stored items by their ids, for one request: each of them once, as a client would send it back.

        Raises (what is returned):
            ApiError: 404; or 400: an item is named twice, or their responses have more than `MAX_REFERRED_BYTES`.
        """
        found: dict[str, dict[str | None, InputItem]] = {}
        num_bytes = 0

        async def find(item_id: str) -> InputItem:
            nonlocal num_bytes
            response_id = f"resp_{item_id.partition('_')[2][:-2]}"  # see `ResponseAnswer`
            owned = OwnedId(response_id, owner)
            if response_id not in found and (stored := (await self.look_up(owned)).stored) is not None:
                num_bytes += len(stored.body)
                if num_bytes > MAX_REFERRED_BYTES:
                    told = f"input refers to responses of more than {MAX_REFERRED_BYTES:,} bytes; give their items"
                    raise ApiError(400, "invalid_value", told, param="input")
                found[response_id] = {item.id: item for item in msgspec.json.decode(stored.body, type=_Output).output}
            item = found.get(response_id, {}).pop(item_id, None)
            if item is None:
                told = f"there is no item {item_id[:100]!r}, or input names it twice; give the item itself"
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
        body = self._find(owned).body
        self._stored.move_to_end(owned)
        return body

    async def events(self, owned: OwnedId, after: int) -> Events:
        """The next events of a response behind the one of a number.

        Raises:
            ApiError: 404.
        """
        if (running := self._running.get(owned)) is not None:
            return Events(running.events[after + 1 :][:MAX_EVENTS], is_over=False)
        stored = self._find(owned)
        events = (stored.events or events_of(stored.body))[after + 1 :]
        return Events(events[:MAX_EVENTS], is_over=len(events) <= MAX_EVENTS)

    async def answered(self, owned: OwnedId) -> bytes:
        """The messages that a response answers, as JSON.

        Raises:
            ApiError: 404.
        """
        if (running := self._running.get(owned)) is not None:
            return msgspec.json.encode(running.messages)
        stored = self._find(owned)
        return msgspec.json.encode(msgspec.json.decode(stored.messages)[: stored.num_answered])

    async def cancel(self, owned: OwnedId) -> bytes:
        """End a running response; returns its body.

        Raises:
            ApiError: 404; or 400: it has ended otherwise.
        """
        if (running := self._running.get(owned)) is not None:
            return await running.cancel()
        stored = self._find(owned)
        if not stored.is_cancelled:
            message = "the response has ended, and cannot be cancelled any more"
            raise ApiError(400, "response_ended", message, param="id")
        return stored.body

    async def delete(self, owned: OwnedId) -> bytes:
        """Forget a response; returns nothing in it.

        Raises:
            ApiError: 404; or 400: it is running.
        """
        if owned in self._running:
            message = "the response is still being generated; cancel it first"
            raise ApiError(400, "response_running", message, param="id")
        self._num_bytes -= self._find(owned).num_bytes
        del self._stored[owned]
        return b""

    def _find(self, owned: OwnedId) -> StoredResponse:
        if owned not in self._stored:
            message = f"there is no response {owned.id[:100]!r}: it was not stored, or has given way to others"
            raise ApiError(404, "not_found", message, param="id")
        return self._stored[owned]


class SharedResponses(StoredResponses):
    """One server's responses, and by their ids those of the other servers of its port.

    Args:
        server: the number of this one, of ``num_servers``.
        ask: asks the server that a question names.
    """

    def __init__(
        self,
        max_num: int,
        max_bytes: int,
        *,
        server: int,
        num_servers: int,
        ask: Callable[[AskStored], Awaitable[bytes]],
    ) -> None:
        super().__init__(max_num, max_bytes)
        self._server = server
        self._num_servers = num_servers
        self._ask = ask

    def make_id(self) -> str:
        return f"resp_{self._server:02x}{secrets.token_hex(19)}"

    async def look_up(self, owned: OwnedId) -> Found:
        try:
            return msgspec.msgpack.decode(await self._do("copy", owned), type=Found)
        except ApiError as error:
            if error.status != 404:
                raise
            return Found(None, is_running=False)  # its server has ended

    async def retrieve(self, owned: OwnedId) -> bytes:
        return await self._do("retrieve", owned)

    async def events(self, owned: OwnedId, after: int) -> Events:
        return msgspec.msgpack.decode(await self._do("events", owned, after), type=Events)

    async def answered(self, owned: OwnedId) -> bytes:
        return await self._do("answered", owned)

    async def cancel(self, owned: OwnedId) -> bytes:
        return await self._do("cancel", owned)

    async def delete(self, owned: OwnedId) -> bytes:
        return await self._do("delete", owned)

    async def _do(self, do: Asked, owned: OwnedId, after: int = -1) -> bytes:
        """Do it where the response is."""
        if (server := self._server_of(owned)) is not None:
            return await self._ask(AskStored(server, do, *owned, after))
        return await self.answer(AskStored(self._server, do, *owned, after))

    async def answer(self, asked: AskStored) -> bytes:
        """Answer what a server asks of a response here.

        Raises:
            ApiError: as it would be here.
        """
        owned = OwnedId(asked.response_id, asked.owner)
        if asked.do == "copy":
            return msgspec.msgpack.encode(await super().look_up(owned))
        if asked.do == "events":
            return msgspec.msgpack.encode(await super().events(owned, asked.after))
        do: Callable[[OwnedId], Awaitable[bytes]] = getattr(super(), asked.do)
        return await do(owned)

    def _server_of(self, owned: OwnedId) -> int | None:
        """The server that has it, if that is another one."""
        found = SHARED_ID.fullmatch(owned.id)
        server = self._server if found is None else int(found[1], 16)
        return server if server != self._server and server < self._num_servers else None
