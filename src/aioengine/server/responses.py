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
from aioengine.server.answers import (
    Part,
    PartsAnswer,
    PositionWriter,
    TokenBytes,
    Usage,
    encode,
    line_of,
    num_reasoning_tokens,
    positions_a_slice,
    usage_of,
)
from aioengine.server.decoding import ChatBuilder, is_text, joined_texts, read_items, read_text
from aioengine.server.errors import ApiError, invalid_value, missing, unsupported
from aioengine.server.schema import ChatGeneration, Generation, Integer, TextPart, is_given, read_response_format
from aioengine.structured.constraints import Constraint
from aioengine.tool_calls.calls import ToolCallDelta
from aioengine.validation import shorten

HOSTED = (
    "web_search", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell", "shell", "apply_patch",
    "computer", "tool_search", "programmatic_tool_calling",
)  # fmt: skip
"""Types of tools that a server would run; dates and "_preview" may follow."""
INPUT = "input"
"""The one argument that a custom tool has as a function."""


class ClientTool(NamedTuple):
    """A tool as its client names it. A custom one has free text for its input."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function(self) -> str:
        """The name of its function."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name

    def fields(self, arguments: str) -> dict[str, str]:
        """The fields of a call's item beside its ids and its status."""
        names = {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}
        return names | ({"input": input_of(arguments)} if self.is_custom else {"arguments": arguments})


class ResponseTools(NamedTuple):
    """A request's tools.

    Attributes:
        functions: for the model, as the engine takes them; None: there are none.
        choice: the ``tool_choice``, in the names of these.
        by_function: each tool by the name of its function.
    """

    functions: list[dict[str, Any]] | None = None
    choice: Any = None
    by_function: dict[str, ClientTool] = {}  # noqa: RUF012  # never written to


def read_response_tools(tools: list[Any] | None, choice: Any, leave_out: Callable[[str], None]) -> ResponseTools:
    """The tools of a request.

    Args:
        leave_out: called with the type of each tool that is left out.
    Raises:
        ApiError: a namespace holds no list of tools.
    """
    if tools is None:
        return ResponseTools(None, _own_choice(choice))
    functions: list[Any] = []
    known: dict[str, ClientTool] = {}

    def add(tool: Any, namespace: str | None) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        hosted = next((name for name in HOSTED if isinstance(kind, str) and kind.startswith(name)), None)
        if hosted is not None:
            leave_out(hosted)
        elif kind == "namespace" and namespace is None:
            if not isinstance(tool.get("name"), str) or not isinstance(tool.get("tools"), list):
                raise invalid_value("tools", "tools has a namespace without a name or a list of tools")
            for inner in tool["tools"]:
                add(inner, tool["name"])
        elif kind in ("function", "custom") and isinstance(tool.get("name"), str) and "custom" not in tool:
            named = ClientTool(tool["name"], namespace, kind == "custom")
            known[named.function] = named
            functions.append(_of_custom(tool, named) if named.is_custom else {**tool, "name": named.function})
        else:  # the engine refuses it, with a reason
            functions.append(tool)

    for tool in tools:
        add(tool, None)
    return ResponseTools(functions, _own_choice(choice), known)


def _of_custom(tool: dict[str, Any], named: ClientTool) -> dict[str, Any]:
    """A custom tool as a function; the grammar of its input goes into the description, and constrains nothing."""
    texts = [tool.get("description")]
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        texts.append(f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}")
    about = {"type": "string", "description": "The tool's whole input, as plain text"}
    schema = {"type": "object", "properties": {INPUT: about}, "required": [INPUT], "additionalProperties": False}
    description = "\n\n".join(text for text in texts if isinstance(text, str))
    return {"type": "function", "name": named.function, "description": description, "parameters": schema}


def _own_choice(choice: Any) -> Any:
    """A ``tool_choice`` that names tools, in the names of their functions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        kept = [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") in ("function", "custom")]
        return {**choice, "tools": [_own_choice(tool) for tool in kept]}
    if choice.get("type") in ("function", "custom") and isinstance(choice.get("name"), str):
        return {"type": "function", "name": ClientTool(choice["name"], choice.get("namespace")).function}
    return choice


def arguments_of(text: str) -> str:
    """A custom tool's input as its function's arguments."""
    return msgspec.json.encode({INPUT: text}).decode()


def input_of(arguments: str) -> str:
    """The text that `arguments_of` was given; other arguments are returned as they are."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return arguments
    return given[INPUT] if isinstance(given.get(INPUT), str) else arguments


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
            item = find_item(_needed(f"input[{place}].id", item.id))
        if item.type == "additional_tools":
            tools.append(item.tools)
        else:
            _add_item(chat, f"input[{place}]", item)
    if tools:
        request.add_tools(tools)
    return chat.messages


def _add_item(chat: ChatBuilder, place: str, item: InputItem) -> None:
    kind = item.type or "message"
    if kind == "message":
        role = _needed(f"{place}.role", item.role)
        if role not in ("user", "system", "developer", "assistant"):
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
        call_id, tool = _needed(f"{place}.call_id", item.call_id), ClientTool(_needed(f"{place}.name", item.name))
        if kind == "function_call":
            arguments = _needed(f"{place}.arguments", item.arguments)
        else:
            arguments = arguments_of(_needed(f"{place}.input", item.input))
        chat.add_call(call_id, tool._replace(namespace=item.namespace).function, arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        chat.add_result(_needed(f"{place}.call_id", item.call_id), _text_of(f"{place}.output", item.output))
    else:
        raise unsupported(
            "input", f"has an item of type {shorten(kind)} ({place}); messages, reasoning and function calls are taken"
        )


def _needed(place: str, value: str | None) -> str:
    if value is None:
        raise invalid_value("input", f"{place} is missing")
    return value


def _text_of(place: str, content: Content | None) -> str:
    return joined_texts(place, _needed(place, content) if content is None else content)


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
        self._num_sent = 0
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

    def _body(self, status: str, reason: FinishReason | None, usage: Usage | None, error: Any = None) -> bytes:
        """The response with the items that have ended; the first message has the log-probabilities of all tokens."""
        items, positions = [], self._positions
        for item, item_status, text in self._done:
            items.append(self._encoded(item, item_status, text, positions))
            positions = [] if item.part == "text" else positions
        fields = {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "usage": usage,
        }
        return b'%b,"output":[%b],%b' % (self._head, b",".join(items), line_of(fields)[1:])

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
        response = b'"response":%b' % self._body("in_progress", None, None)
        return self._event(b"response.created", response) + self._event(b"response.in_progress", response)

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
        elif self._num_sent < len(self._positions) and self._open is not None and self._open.part == "text":
            events += self._delta("")
        return events + self._close("completed" if is_done else "incomplete")

    def _whole_body(self, output: RequestOutput) -> bytes:
        """The body of the ended response, which is kept."""
        (choice,) = output.outputs
        counts = usage_of([output])
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens(choice, self._token_bytes)},
            "total_tokens": counts["total_tokens"],
        }
        body = self._body(_status_of(choice), choice.finish_reason, usage)
        self._keep(body, choice)
        return body

    def _end(self, status: str, body: bytes) -> bytes:
        """The last event of a response with this status."""
        kind = status if status in ("completed", "failed") else "incomplete"
        return self._event(b"response.%b" % kind.encode(), b'"response":%b' % body)

    def failing(self, error: ApiError) -> bytes:
        code = "invalid_prompt" if error.status < 500 else "server_error"
        body = self._body("failed", "error", None, {"code": code, "message": error.message})
        self._keep(body, None)
        return self._end("failed", body)

    def _event(self, kind: bytes, fields: bytes) -> bytes:
        number = self._num_events
        self._num_events += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (kind, kind, number, fields)

    def _begin(self, part: Part, call: ToolCallDelta | None) -> bytes:
        number = len(self._done)
        item_id = f"{ID_PREFIXES.get(part, 'fc')}_{self._suffix}{number:02x}"
        name = "" if call is None else call.name or ""
        tool = None if call is None else self._tools.get(name) or ClientTool(name)
        item = self._open = _OutputItem(part, number, item_id, tool, "" if call is None else call.id or "")
        self._texts = []
        kind = b"response.%b.delta" % PART_TYPES.get(part, b"function_call_arguments")
        self._delta_head = b'event: %b\ndata: {"type":"%b",%b,"sequence_number":' % (kind, kind, item.place)
        begun = self._encoded(item, "in_progress", "", is_begun=False)
        added = self._event(b"response.output_item.added", b'"output_index":%d,"item":%b' % (item.number, begun))
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
            logprobs = b',"logprobs":[%b]' % b",".join(self._positions[self._num_sent :])
            self._num_sent = len(self._positions)
        return b'%b%d,"delta":%b%b}\n\n' % (self._delta_head, number, line_of(text), logprobs)

    def _close(self, status: str | None = None) -> bytes:
        """End the open item, if there is one.

        Args:
            status: the item's; None: another item follows, and so only a call may be incomplete.
        """
        item, self._open, self._part = self._open, None, None
        if item is None:
            return b""
        whole = "".join(self._texts)
        if item.tool is not None:
            status = status or ("completed" if _is_whole(whole) else "incomplete")
            fields = item.tool.fields(whole)
            if item.tool.is_custom:
                kind, text = b"response.custom_tool_call_input.", line_of(fields["input"])
                done = self._event(kind + b"delta", b'%b,"delta":%b' % (item.place, text))
                done += self._event(kind + b"done", b'%b,"input":%b' % (item.place, text))
            else:
                kind = b"response.function_call_arguments.done"
                done = self._event(kind, b"%b,%b" % (item.place, line_of(fields)[1:-1]))
        else:
            kind, text = PART_TYPES[item.part], line_of(whole)
            logprobs = b',"logprobs":[]' if item.part == "text" else b""
            done = self._event(b"response.%b.done" % kind, b'%b,"text":%b%b' % (item.place, text, logprobs))
            part = part_of(item.part, text)
            done += self._event(b"response.content_part.done", b'%b,"part":%b' % (item.place, part))
        status = status or "completed"
        self._done.append((item, status, whole))
        # Log-probabilities, of which there may be megabytes, are sent only twice: in deltas, and at the response's end.
        ended = b'"output_index":%d,"item":%b' % (item.number, self._encoded(item, status, whole))
        return done + self._event(b"response.output_item.done", ended)


ID_PREFIXES: dict[Part, str] = {"text": "msg", "reasoning": "rs"}
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
        return isinstance(msgspec.json.decode(arguments, type=dict[str, msgspec.Raw]), dict)
    except msgspec.DecodeError:
        return False
