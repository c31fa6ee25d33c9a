"""What streaming costs without an engine: a plain ASGI app that writes one JSON event a token, as fast as it can.

The least that any server on uvicorn can need: the event is made anew for each token, and each is a write of its own,
since all streams take turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from serving.load import WORDS

MODEL = "bare"
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Answer ``/v1/models``, and whatever is posted with ``max_tokens`` words."""
    if scope["type"] != "http":
        return
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    if scope["method"] == "GET":
        await _answer(send, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        return
    asked = msgspec.json.decode(body)
    await _stream(send, is_chat="messages" in asked, num_tokens=asked["max_tokens"])


async def _answer(send: Send, content: object) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(content)})


async def _stream(send: Send, *, is_chat: bool, num_tokens: int) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    created = int(time.time())

    def event(text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish_reason}
        if not is_chat:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {
            "id": "chatcmpl-0123456789abcdef0123456789abcdef",
            "object": "chat.completion.chunk",
            "created": created,
            "model": MODEL,
            "choices": [choice],
        }

    for place in range(num_tokens):
        data = b"data: " + msgspec.json.encode(event(" " + WORDS[place % len(WORDS)])) + b"\n\n"
        await send({"type": "http.response.body", "body": data, "more_body": True})
        await asyncio.sleep(0)
    usage = {"prompt_tokens": 0, "completion_tokens": num_tokens, "total_tokens": num_tokens}
    last = [{**event("", "length")}, {**event(""), "choices": [], "usage": usage}]
    data = b"".join(b"data: " + msgspec.json.encode(part) + b"\n\n" for part in last) + b"data: [DONE]\n\n"
    await send({"type": "http.response.body", "body": data})
