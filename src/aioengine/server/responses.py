"""``/v1/responses``: requests, and responses as bodies and as events.

A response is a list of items: reasoning, a message, calls. A stream sends one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from aioengine.outputs import CompletionDelta, CompletionOutput, FinishReason, RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine.server.answers import Part, PartsAnswer, Usage, line_of, num_reasoning_tokens, usage_of
from aioengine.server.chat_builder import ChatBuilder
from aioengine.server.decoding import is_text, joined_texts, read_items, read_text
from aioengine.server.errors import ApiError, invalid_value, missing, unsupported
from aioengine.server.response_tools import ClientTool, arguments_of
from aioengine.server.schema import ChatGeneration, Generation, Integer, TextPart, is_given, read_response_format
from aioengine.server.token_logprobs import PositionWriter, TokenBytes, encode, positions_a_slice
from aioengine.structured.constraints import Constraint
from aioengine.tool_calls.calls import ToolCallDelta
from aioengine.validation import shorten

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",  # reasoning is never encrypted
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""The allowed values of ``include``; most are for tools that this server does not have."""
STATUSES: dict[FinishReason, str] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "cancelled",
    "error": "failed",
}


# Requests


class TextConfig(msgspec.Struct):
    """``text``: the format of the answer's text. Its other fields are hints."""

    format: dict[str, Any] | None = None


class ReasoningConfig(msgspec.Struct):
    """``reasoning``. A summary may be asked for: there is none, since the response has the reasoning itself."""

    effort: str | None = None
    summary: str | None = None


class ResponseRequest(ChatGeneration, kw_only=True):
    """The body of ``/v1/responses``. Fields of other APIs that have another name here are refused."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Generation.NEUTRAL,
        **dict.fromkeys((
            "access_programs", "background_options", "conversation", "image", "max_completion_tokens", "max_tokens",
            "moderation", "prompt", "reasoning_effort",
        ), ()),
        "background": (False,),
        "context_management": ([],),
        "n": (1,),
        "response_format": ({"type": "text"},),
        "truncation": ("disabled", "auto"),  # what is too long is refused by both
    }  # fmt: skip
    HINTS: ClassVar[tuple[str, ...]] = (*Generation.HINTS, "client_metadata", "max_tool_calls")
    INSTEAD: ClassVar[dict[str, str]] = {
        **Generation.INSTEAD,
        "background": "is not supported: stream the response, or keep the connection open until it has ended",
        "conversation": "is not kept here: give the previous_response_id of the response to go on with",
    }
    NAMES: ClassVar[dict[str, str]] = {
        "prompt": "input",
        "messages": "input",
        "logprobs": "top_logprobs",
        "structured": "text",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning",
    }

    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    previous_response_id: str | None = None
    max_output_tokens: Integer | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    top_logprobs: Integer | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_tokens = self.max_output_tokens
        if self.reasoning is not None:
            self.reasoning_effort = self.reasoning.effort

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens to report at each position; None: no log-probabilities are asked for."""
        return self.top_logprobs or (0 if LOGPROBS in (self.include or ()) else None)

    def check(self) -> None:
        super().check()
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise invalid_value("include", f"include has {shorten(name)}, which is not known; leave it out")
        if len(self.metadata or ()) > MAX_METADATA:
            raise invalid_value("metadata", f"metadata has {len(self.metadata or ())} pairs; at most {MAX_METADATA}")

    def add_tools(self, tools: Sequence[msgspec.Raw]) -> None:
        """Append the tools of input items, a list each, to the request's own, undecoded."""
        lists = [bytes(each) for each in (self.tools, *tools) if is_given(each)]
        if not all(each.startswith(b"[") for each in lists):
            raise invalid_value("tools", "tools are a list, also those of an item of the input")
        self.tools = msgspec.Raw(b"[%b]" % b",".join(filter(None, (each[1:-1].strip() for each in lists))))

    def sampling(self) -> dict[str, Any]:
        sampling = super().sampling()
        if self.num_top_logprobs is not None:
            sampling["logprobs"] = self.num_top_logprobs
        return sampling

    def _own_constraint(self) -> dict[str, Constraint | None]:
        given = self.text.format if self.text is not None else None
        if given is not None and given.get("type") == "json_schema":
            if not isinstance(given.get("schema"), dict):
                raise invalid_value("text", 'text.format needs {"type": "json_schema", "name": ..., "schema": {...}}')
        elif given is not None and given.get("type") not in ("text", "json_object"):
            raise invalid_value("text", "text.format.type is text, json_object or json_schema")
        return {"text": read_response_format(given)}

    def head(self, response_id: str, model: str | None, params: SamplingParams, tools: Any) -> dict[str, Any]:
        """The fields that a response has from its beginning on."""
        reasoning = self.reasoning or ReasoningConfig()
        return {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": self.instructions if is_given(self.instructions) else None,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "store": self.store is not False,
            "temperature": params.temperature,
            "text": {"format": (self.text.format if self.text is not None else None) or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }


Content = str | list[TextPart]


class InputItem(msgspec.Struct):
    """An item of the input, also as clients send an answer's items back; other fields are ignored."""

    id: str | None = None
    type: str | None = None
    role: str | None = None
    content: Content | None = None
    summary: list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    output: Content | None = None


async def read_input(
    request: ResponseRequest, max_items: int, find_item: Callable[[str], InputItem]
) -> list[dict[str, Any]]:
    """The input as a chat; tools among its items become the request's.

    Args:
        find_item: returns the stored item of an id, for input items that have only that.
    """
    if not is_given(request.input):
        raise missing("input")
    if is_text(request.input):
        return [{"role": "user", "content": read_text(request.input, "input")}]
    chat, tools = ChatBuilder(), list[msgspec.Raw]()
    for place, item in enumerate(read_items(request.input, InputItem, "input", max_items)):
        if item.type == "item_reference":
            item = find_item(_needed(f"input[{place}]", "id", item.id))
        if item.type == "additional_tools":
            tools.append(item.tools)
        else:
            _add_item(chat, f"input[{place}]", item)
    if tools:
        request.add_tools(tools)
    return chat.messages


ROLES = ("user", "system", "developer", "assistant")


def _add_item(chat: ChatBuilder, place: str, item: InputItem) -> None:
    kind = item.type or "message"
    if kind == "message":
        role = _needed(place, "role", item.role)
        if role not in ROLES:
            raise invalid_value("input", f"{place}.role: user, assistant, system or developer is needed")
        text = _text_of(f"{place}.content", item.content)
        if role == "assistant":
            chat.add_answer(text)
        else:
            chat.add_message("system" if role == "developer" else role, text)
    elif kind == "reasoning":
        if text := _text_of(f"{place}.content", item.content or item.summary or ""):
            chat.add_reasoning(text)
    elif kind in ("function_call", "custom_tool_call"):
        call_id, tool = _needed(place, "call_id", item.call_id), ClientTool(_needed(place, "name", item.name))
        if kind == "function_call":
            arguments = _needed(place, "arguments", item.arguments)
        else:
            arguments = arguments_of(_needed(place, "input", item.input))
        chat.add_call(call_id, tool._replace(namespace=item.namespace).function, arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        chat.add_result(_needed(place, "call_id", item.call_id), _text_of(f"{place}.output", item.output))
    else:
        raise unsupported(
            "input", f"has an item of type {shorten(kind)} ({place}); messages, reasoning and function calls are taken"
        )


def _needed(place: str, name: str, value: str | None) -> str:
    if value is None:
        raise invalid_value("input", f"{place}.{name} is missing")
    return value


def _text_of(place: str, content: Content | None) -> str:
    if content is None:
        raise invalid_value("input", f"{place} is missing")
    return joined_texts(place, content)


def with_instructions(request: ResponseRequest, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with the request's instructions before it; they are for this response alone, and in no conversation."""
    if not is_given(request.instructions):
        return messages
    chat = ChatBuilder()
    chat.add_message("system", read_text(request.instructions, "instructions"))
    if messages and messages[0]["role"] == "system":
        chat.add_message("system", messages[0]["content"])
        messages = messages[1:]
    return [*chat.messages, *messages]


# Responses


class _OutputItem(NamedTuple):
    """An item of a response.

    Attributes:
        part: the part of the answer that it holds.
        number: its place among all items.
        tool: the tool that it calls, if it is a call.
    """

    part: Part
    number: int
    id: str
    tool: ClientTool | None
    call_id: str

    @property
    def place(self) -> bytes:
        """The fields that name the item in events of its text."""
        content = b',"content_index":0' if self.tool is None else b""
        return b'"item_id":"%b","output_index":%d%b' % (self.id.encode(), self.number, content)


class ResponseAnswer(PartsAnswer):
    """The answer to ``/v1/responses``.

    Args:
        head: see `ResponseRequest.head`.
        top_logprobs: likeliest tokens to report at each position; None: no log-probabilities.
        tools: the request's tools, by the names of their functions.
        keep: takes the body and the choice before a client gets them; None for the choice of a failed response.
    """

    def __init__(
        self,
        head: dict[str, Any],
        token_bytes: TokenBytes,
        *,
        top_logprobs: int | None,
        tools: Mapping[str, ClientTool],
        keep: Callable[[bytes, CompletionOutput | None], None],
    ) -> None:
        self._head = line_of(head)[:-1]
        self._suffix = str(head["id"]).partition("_")[2]
        self._token_bytes = token_bytes
        self._top_logprobs = top_logprobs
        self._tools = tools
        self._keep = keep
        self.max_positions = positions_a_slice(top_logprobs)
        self._num_events = 0
        self._open: _OutputItem | None = None
        self._texts: list[str] = []
        self._delta_head = b""
        """The beginning of all deltas of the open item, up to the number of the event."""
        self._done: list[tuple[_OutputItem, str, str]] = []
        """Items that have ended, each with its status and its text."""
        self._writer = PositionWriter(token_bytes, top_logprobs or 0)
        self._positions: list[bytes] = []
        """All log-probabilities so far."""
        self._num_told = 0
        """Number of them that were in events; the text of the other tokens is held back, or not the message's."""

    # Whole

    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        (choice,) = outputs[0].outputs
        self._positions += await self._in_turns(choice.logprobs or (), lambda each: self._writer.encode(0, each))
        calls = [
            ToolCallDelta(index, call.id, call.name, call.arguments) for index, call in enumerate(choice.tool_calls)
        ]
        reasoning = choice.reasoning or ""
        self.event(0, CompletionDelta(index=0, token_ids=[], text=choice.text, reasoning=reasoning, tool_calls=calls))
        self._end_items(choice)
        return self._whole_body(outputs[0])

    def _usage(self, output: RequestOutput) -> Usage:
        usage = usage_of([output])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens(output.outputs[0], self._token_bytes)},
            "total_tokens": usage["total_tokens"],
        }

    def _body(self, status: str, reason: FinishReason | None, usage: Usage | None, error: Any = None) -> bytes:
        """The response with the items that have ended."""
        told = {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "usage": usage,
        }
        return b'%b,"output":[%b],%b' % (self._head, b",".join(self._items()), line_of(told)[1:])

    def _item(self, part: Part, number: int, call: ToolCallDelta | None) -> _OutputItem:
        """An item; ``call`` if its part is one."""
        prefix = {"text": "msg", "reasoning": "rs"}.get(str(part), "fc")
        item_id = f"{prefix}_{self._suffix}{number:02x}"
        if call is None:
            return _OutputItem(part, number, item_id, None, "")
        name = call.name or ""
        return _OutputItem(part, number, item_id, self._tools.get(name) or ClientTool(name), call.id or "")

    def _encoded(
        self, item: _OutputItem, status: str, text: str, positions: Sequence[bytes] = (), *, is_begun: bool = True
    ) -> bytes:
        """An item as JSON.

        Args:
            text: the item's text, or its arguments.
            is_begun: the item has its part; else a later event adds it.
        """
        if item.tool is not None:
            kind = b"custom_tool_call" if item.tool.is_custom else b"function_call"
            rest = line_of({"call_id": item.call_id, **item.tool.fields(text)})[1:-1]
        else:
            content = part_of(item.part, line_of(text), positions) if is_begun else b""
            is_text = item.part == "text"
            kind, head = (b"message", b'"role":"assistant"') if is_text else (b"reasoning", b'"summary":[]')
            rest = b'%b,"content":[%b]' % (head, content)
        return b'{"id":%b,"type":"%b","status":"%b",%b}' % (encode(item.id), kind, status.encode(), rest)

    # As events

    def opening(self, outputs: Sequence[RequestOutput], usage: Usage | None, prompt_ids: Sequence[bytes]) -> bytes:
        told = b'"response":%b' % self._body("in_progress", None, None)
        return self._event(b"response.created", told) + self._event(b"response.in_progress", told)

    def event(self, choice: int, delta: CompletionDelta, usage: Usage | None = None) -> bytes:
        if delta.logprobs:
            self._positions += [self._writer.encode(0, position) for position in delta.logprobs]
        return super().event(choice, delta, usage)

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        (choice,) = outputs[0].outputs
        last = self._end_items(choice)
        return last + self._end(_status_of(choice), self._whole_body(outputs[0]))

    def _end_items(self, choice: CompletionOutput) -> bytes:
        """Events that end the last item; a response without items gets an empty message."""
        events = self._begin("text", None) if self._open is None and not self._done else b""
        is_done = choice.finish_reason == "stop"
        if self._open is not None and self._open.tool is not None:
            is_done = any(call.id == self._open.call_id for call in choice.tool_calls)
        elif self._num_told < len(self._positions) and self._open is not None and self._open.part == "text":
            events += self._delta("")
        return events + self._close("completed" if is_done else "incomplete")

    def _whole_body(self, output: RequestOutput) -> bytes:
        """The body of the ended response, which is kept."""
        (choice,) = output.outputs
        body = self._body(_status_of(choice), choice.finish_reason, self._usage(output))
        self._keep(body, choice)
        return body

    def _end(self, status: str, body: bytes) -> bytes:
        """The last event of a response with this status."""
        kind = status if status in ("completed", "failed") else "incomplete"
        return self._event(b"response.%b" % kind.encode(), b'"response":%b' % body)

    def failing(self, error: ApiError) -> bytes:
        code = "invalid_prompt" if error.status < 500 else "server_error"
        told = {"code": code, "message": error.message}
        body = self._body("failed", "error", None, told)
        self._keep(body, None)
        return self._end("failed", body)

    def _event(self, kind: bytes, fields: bytes) -> bytes:
        number = self._num_events
        self._num_events += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (kind, kind, number, fields)

    def _begin(self, part: Part, call: ToolCallDelta | None) -> bytes:
        item = self._open = self._item(part, len(self._done), call)
        self._texts = []
        kind = b"response.%b.delta" % PART_TYPES.get(part, b"function_call_arguments")
        self._delta_head = b'event: %b\ndata: {"type":"%b",%b,"sequence_number":' % (kind, kind, item.place)
        told = self._encoded(item, "in_progress", "", is_begun=False)
        added = self._event(b"response.output_item.added", b'"output_index":%d,"item":%b' % (item.number, told))
        if item.tool is not None:
            return added
        content = b'%b,"part":%b' % (item.place, part_of(part, b'""'))
        return added + self._event(b"response.content_part.added", content)

    def _delta(self, text: str) -> bytes:
        item = self._open
        assert item is not None
        self._texts.append(text)
        if item.tool is not None and item.tool.is_custom:  # its input is sent when it is complete
            return b""
        number = self._num_events
        self._num_events += 1
        logprobs = b""
        if item.part == "text":
            logprobs = b',"logprobs":[%b]' % b",".join(self._positions[self._num_told :])
            self._num_told = len(self._positions)
        return b'%b%d,"delta":%b%b}\n\n' % (self._delta_head, number, line_of(text), logprobs)

    def _close(self, status: str | None = None) -> bytes:
        """End the open item, if there is one.

        Args:
            status: the item's; None: another item follows, and so only a call may be incomplete.
        """
        item, self._open, self._part = self._open, None, None
        if item is None:
            return b""
        said = "".join(self._texts)
        if item.tool is not None:
            status = status or ("completed" if _is_whole(said) else "incomplete")
            done = self._call_done(item.tool, item.place, said)
        else:
            kind, text = PART_TYPES[item.part], line_of(said)
            logprobs = b',"logprobs":[]' if item.part == "text" else b""
            done = self._event(b"response.%b.done" % kind, b'%b,"text":%b%b' % (item.place, text, logprobs))
            part = part_of(item.part, text)
            done += self._event(b"response.content_part.done", b'%b,"part":%b' % (item.place, part))
        status = status or "completed"
        self._done.append((item, status, said))
        # Log-probabilities, of which there may be megabytes, are sent only twice: in deltas, and at the response's end.
        told = b'"output_index":%d,"item":%b' % (item.number, self._encoded(item, status, said))
        return done + self._event(b"response.output_item.done", told)

    def _call_done(self, tool: ClientTool, place: bytes, arguments: str) -> bytes:
        """The events that end a call's arguments."""
        fields = tool.fields(arguments)
        if not tool.is_custom:
            return self._event(b"response.function_call_arguments.done", b"%b,%b" % (place, line_of(fields)[1:-1]))
        text = line_of(fields["input"])
        kind = b"response.custom_tool_call_input."
        delta = self._event(kind + b"delta", b'%b,"delta":%b' % (place, text))
        return delta + self._event(kind + b"done", b'%b,"input":%b' % (place, text))

    def _items(self) -> list[bytes]:
        """The ended items as JSON; the first message has the log-probabilities of all tokens."""
        items, positions = [], self._positions
        for item, status, text in self._done:
            items.append(self._encoded(item, status, text, positions))
            positions = [] if item.part == "text" else positions
        return items


PART_TYPES: dict[Part, bytes] = {"text": b"output_text", "reasoning": b"reasoning_text"}


def part_of(part: Part, text: bytes, positions: Sequence[bytes] = ()) -> bytes:
    """The part of an item that is no call."""
    if part != "text":
        return b'{"type":"reasoning_text","text":%b}' % text
    return b'{"type":"output_text","annotations":[],"logprobs":[%b],"text":%b}' % (b",".join(positions), text)


def _status_of(choice: CompletionOutput) -> str:
    """The status of an ended response; a cut call makes one incomplete that the model has ended."""
    if choice.finish_reason == "stop" and choice.has_cut_call:
        return "incomplete"
    return STATUSES[choice.finish_reason or "abort"]


def _is_whole(arguments: str) -> bool:
    """Whether a call's arguments are a JSON object, and so were not cut."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return False
    return True
