"""``/v1/messages``, as Anthropic's clients know it: requests, and answers as bodies, events and errors.

An answer is a list of blocks: thinking, text, uses of tools. A stream sends one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from aioengine.outputs import CompletionOutput, RequestOutput
from aioengine.server.answers import Part, PartsAnswer, TokenBytes, Usage, encode, line_of, num_reasoning_tokens
from aioengine.server.decoding import ChatBuilder, is_text, joined_texts, read_items, read_text
from aioengine.server.errors import JSON_HEADERS, ApiError, invalid_value, missing, unsupported
from aioengine.server.exchange import Response
from aioengine.server.schema import ChatGeneration, Generation, TextPart, is_given, read_response_format
from aioengine.structured.constraints import Constraint
from aioengine.tool_calls.calls import ToolCall, ToolCallDelta
from aioengine.validation import shorten

SIGNATURE = "aioengine"
"""The signature of thinking: clients want one, and send it back. It is not checked."""
OVERLOADED = 529
"""The status at which Anthropic's clients try again."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    OVERLOADED: "overloaded_error",
}
"""Types of errors by status; others are `invalid_request_error` below 500, and `api_error` from there on."""

# Requests


class ThinkingOption(msgspec.Struct):
    """``thinking``: whether the model is to reason before it answers, and for how long at most."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct):
    """``output_config``: the format of the answer's text, and the effort of its reasoning."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessageRequest(ChatGeneration, kw_only=True):
    """The body of ``/v1/messages``, and of ``/v1/messages/count_tokens``, which needs less of it.

    Fields of other APIs that have another name here are refused.
    """

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Generation.NEUTRAL,
        **dict.fromkeys((
            "container", "max_completion_tokens", "parallel_tool_calls", "reasoning_effort", "response_format",
            "thread",
        ), ()),
        "mcp_servers": ([],),
        "n": (1,),
    }  # fmt: skip
    HINTS: ClassVar[tuple[str, ...]] = (
        *Generation.HINTS, "billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks",
        "inference_geo", "speed", "user_profile_id", "workspace_id",
    )  # fmt: skip

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("compaction", "context_management")
    NAMES: ClassVar[dict[str, str]] = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "structured": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "max_thinking_tokens": "thinking.budget_tokens",
    }

    messages: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    stop_sequences: list[str] | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """Older clients' name of ``output_config.format``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop_sequences is not None:
            self.stop = self.stop_sequences
        if isinstance(self.tool_choice, dict):
            self.parallel_tool_calls = self.tool_choice.get("disable_parallel_tool_use") is not True
        if self.output_config is not None:
            self.reasoning_effort = self.output_config.effort

    def check(self) -> None:
        super().check()
        if self.max_tokens is None:
            raise missing("max_tokens")
        match self.tool_choice:
            case {"type": "auto" | "any" | "none"} | {"type": "tool", "name": str()}:
                pass
            case dict():
                raise invalid_value("tool_choice", "tool_choice.type is auto, any, none, or tool with the name of one")

    def variables(self) -> dict[str, Any] | None:
        """The variables of the chat template, with thinking on or off under the names that templates use."""
        if self.thinking is None:
            return self.chat_template_kwargs
        if self.thinking.type not in ("enabled", "disabled", "adaptive"):
            raise unsupported(
                "thinking", f"of type {shorten(self.thinking.type)} is not known; give enabled or disabled"
            )
        if self.thinking.display not in (None, "summarized"):
            raise unsupported("thinking", "is always sent: leave display out")
        thinks = self.thinking.type != "disabled"
        return {"enable_thinking": thinks, "thinking": thinks, **(self.chat_template_kwargs or {})}

    def sampling(self) -> dict[str, Any]:
        sampling = super().sampling()
        if self.thinking is not None and self.thinking.type == "enabled":
            if self.thinking.budget_tokens is None:
                raise invalid_value("thinking", "thinking.budget_tokens is missing")
            sampling["max_thinking_tokens"] = self.thinking.budget_tokens
        return sampling

    def _own_constraint(self) -> dict[str, Constraint | None]:
        config = self.output_config or OutputConfig()
        formats = {"output_config": config.format, "output_format": self.output_format}
        for name, given in formats.items():
            if given is not None and (given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict)):
                place = "output_config.format" if name == "output_config" else name
                raise invalid_value(name, f'{place} needs {{"type": "json_schema", "schema": {{...}}}}')
        return {name: read_response_format(given) for name, given in formats.items()}


class Block(msgspec.Struct):
    """A block of a message, also as clients send an answer's blocks back; other fields are ignored."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw()
    tool_use_id: str | None = None
    content: str | list[TextPart] | None = None
    is_error: bool | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Block]


def read_chat(request: MessageRequest, max_messages: int) -> list[dict[str, Any]]:
    """The system prompt and the messages as a chat."""
    chat = ChatBuilder()
    if is_given(request.system):
        if is_text(request.system):
            chat.add_message("system", read_text(request.system, "system"))
        else:
            chat.add_message(
                "system", joined_texts("system", read_items(request.system, TextPart, "system", max_messages))
            )
    for place, message in enumerate(read_items(request.messages, Message, "messages", max_messages)):
        blocks = message.content
        blocks = [Block("text", text=blocks)] if isinstance(blocks, str) else blocks
        if message.role not in ("user", "assistant", "system"):
            raise invalid_value("messages", f"messages[{place}].role: user or assistant is needed")
        if not blocks and message.role != "assistant":  # an answer of nothing has no blocks, and is sent back so
            raise invalid_value("messages", f"messages[{place}].content is empty; give a text or blocks")
        for kind, group in itertools.groupby(blocks, lambda block: block.type):
            _add_blocks(chat, f"messages[{place}]", message.role, kind, group)
    if not chat.messages:
        raise invalid_value("messages", "messages hold nothing but empty answers; give one of the user")
    return chat.messages


def _add_blocks(chat: ChatBuilder, place: str, role: str, kind: str, blocks: Iterator[Block]) -> None:
    """Add blocks of one type that follow each other."""
    if kind == "text":
        text = "\n".join([block.text or "" for block in blocks])
        if role == "assistant":
            chat.add_answer(text)
        else:
            chat.add_message(role, text)
    elif (kind, role) == ("thinking", "assistant"):
        chat.add_reasoning("\n".join([block.thinking or "" for block in blocks]))
    elif (kind, role) == ("tool_use", "assistant"):
        for block in blocks:
            if block.id is None or block.name is None:
                raise invalid_value("messages", f"{place} has a tool_use block without an id or a name")
            data = bytes(block.input) if is_given(block.input) else b"{}"
            if data[:1] != b"{":
                raise invalid_value("messages", f"{place} has a tool_use block whose input is no object")
            try:
                arguments = data.decode()  # as JSON text, which is decoded where the template runs
            except UnicodeDecodeError:
                raise invalid_value("messages", f"{place} has a tool_use block whose input is no UTF-8") from None
            chat.add_call(block.id, block.name, arguments)
    elif (kind, role) == ("tool_result", "user"):
        for block in blocks:
            if block.tool_use_id is None:
                raise invalid_value("messages", f"{place} has a tool_result block without a tool_use_id")
            text = joined_texts(place, block.content or "")
            chat.add_result(block.tool_use_id, f"Error: {text}" if block.is_error else text)
    else:
        raise unsupported("messages", f"has a block of type {shorten(kind)} ({place}, of the {role}); give texts")


# Answers


def error_response(error: ApiError, request_id: str) -> Response:
    """An error in Anthropic's format."""
    status = OVERLOADED if error.code == "overloaded" else error.status
    body = {**_error_of(error), "request_id": request_id}
    return Response(status, encode(body), {**JSON_HEADERS, **error.headers})


def _error_of(error: ApiError) -> dict[str, Any]:
    status = OVERLOADED if error.code == "overloaded" else error.status
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    fields: dict[str, Any] = {"type": kind, "message": error.message}
    if error.param == "thread":  # clients that read this send the whole conversation instead
        fields["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": fields}


class MessageAnswer(PartsAnswer):
    """The answer to ``/v1/messages``.

    Args:
        head: its "id" and "model".
    """

    KEEPALIVE = b'event: ping\ndata: {"type":"ping"}\n\n'
    max_positions = 1

    def __init__(self, head: dict[str, Any], token_bytes: TokenBytes) -> None:
        self._head = {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]}
        self._token_bytes = token_bytes
        self._num_blocks = 0
        self._delta_head = b""
        """The beginning of all deltas of the open block, up to their text."""

    async def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        (choice,) = outputs[0].outputs
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": SIGNATURE})
        if choice.text:
            content.append({"type": "text", "text": choice.text})
        for call in choice.tool_calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call)})
        return encode({**self._head, "content": content, **_ending(choice), "usage": self._usage(outputs[0])})

    def _usage(self, output: RequestOutput) -> Usage:
        (choice,) = output.outputs
        return {
            "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": output.num_cached_tokens,
            "output_tokens": len(choice.token_ids),
            "output_tokens_details": {"thinking_tokens": num_reasoning_tokens(choice, self._token_bytes)},
        }

    def opening(self, outputs: Sequence[RequestOutput], usage: Usage | None, prompt_ids: Sequence[bytes]) -> bytes:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = self._usage(outputs[0])
        return _event("message_start", message=message) + self.KEEPALIVE

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        ending = _ending(outputs[0].outputs[0])
        ended = _event("message_delta", delta=ending, usage=self._usage(outputs[0]))
        return self._close() + ended + _event("message_stop")

    def failing(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % line_of(_error_of(error))

    def _begin(self, part: Part, call: ToolCallDelta | None) -> bytes:
        block: dict[str, Any]
        if part == "text":
            block, kind, field = {"type": "text", "text": ""}, "text_delta", "text"
        elif part == "reasoning":
            block, kind, field = {"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"
        else:
            assert call is not None
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            kind, field = "input_json_delta", "partial_json"
        self._delta_head = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._num_blocks},'
            f'"delta":{{"type":"{kind}","{field}":'
        ).encode()
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, text: str) -> bytes:
        return b"%b%b}}\n\n" % (self._delta_head, line_of(text))

    def _close(self) -> bytes:
        if self._part is None:
            return b""
        index, signed = self._num_blocks, b""
        if self._part == "reasoning":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", index=index, delta=delta)
        self._part = None
        self._num_blocks += 1
        return signed + _event("content_block_stop", index=index)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), line_of({"type": kind, **fields}))


def _ending(choice: CompletionOutput) -> dict[str, Any]:
    """The reason of an answer's end. An aborted answer is like one that pauses: if it is sent back, it goes on."""
    reasons = {"length": "max_tokens", "abort": "pause_turn"}
    is_calling = choice.tool_calls and not choice.has_cut_call
    reason = reasons.get(choice.finish_reason or "", "tool_use" if is_calling else "end_turn")
    sequence = choice.stop_reason if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str) else None
    return {"stop_reason": "stop_sequence" if sequence is not None else reason, "stop_sequence": sequence}


def _input_of(call: ToolCall) -> dict[str, Any]:
    """A call's arguments as an object; if the model has written no JSON object, its text as the only argument."""
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"arguments": call.arguments}
