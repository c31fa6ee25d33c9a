"""A chat over a websocket: each connection is a conversation, answers come as they are made, and can be stopped.

    python examples/websocket_chat.py          # or: uvicorn examples.websocket_chat:app   (pip install websockets)

Open http://localhost:8000/ or, in a terminal, ``python -m websockets ws://localhost:8000/chat``.

The client sends what the person says as text, or ``/stop``. The server sends JSON: ``{"text": ...}`` for each piece of
an answer, ``{"end": "stop" | "length" | "abort"}`` after it, ``{"error": ...}`` where there is none.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from aioengine import AioEngineError, Engine, Stream

engine = Engine(os.environ.get("MODEL"), max_waiting=64)  # without MODEL the bundled one; loaded by the lifespan

PAGE = """<!doctype html><meta charset=utf-8><title>Chat</title><style>body { white-space: pre-wrap }</style>
<form><input name=text autofocus autocomplete=off> <button>Say</button> <button type=button>Stop</button></form>
<script>
const socket = new WebSocket(new URL("chat", location.href).href.replace(/^http/, "ws")), form = document.forms[0]
const show = text => document.body.append(text)
form.onsubmit = () => { show(`> ${form.text.value}\\n`); socket.send(form.text.value); form.reset(); return false }
form.elements[2].onclick = () => socket.send("/stop")
socket.onmessage = ({data}) => { const {text, error} = JSON.parse(data); show(text ?? (error ?? "") + "\\n") }
socket.onclose = () => show("[the connection has ended]")
</script>"""


async def page(request: Request) -> HTMLResponse:
    return HTMLResponse(PAGE)


async def chat(websocket: WebSocket) -> None:
    """One task reads what the person says, another one writes the answer."""
    await websocket.accept()
    history: list[dict[str, str]] = []
    answering: Stream | None = None

    async def answer(stream: Stream) -> None:
        nonlocal answering
        try:
            event: dict[str, str | None]
            try:
                async with stream:
                    async for delta in stream:
                        await websocket.send_json({"text": delta.text})
                output = stream.result.outputs[0]
                history.append({"role": "assistant", "content": output.text})  # also what was stopped
                event = {"end": output.finish_reason}
            except AioEngineError as error:  # overloaded, too long, closed: the person may try again
                history.pop()
                event = {"error": str(error)}
            answering = None
            await websocket.send_json(event)
        except WebSocketDisconnect:
            group.cancel_scope.cancel()

    async def read() -> None:
        nonlocal answering
        while (message := await websocket.receive())["type"] != "websocket.disconnect":
            text = message.get("text") or ""
            if text == "/stop":
                if answering is not None:
                    answering.abort()
            elif answering is not None:
                await websocket.send_json({"error": "wait for the answer, or /stop it"})
            else:
                history.append({"role": "user", "content": text})
                # Made here and not in the task, so that a /stop which comes at once finds it.
                answering = engine.stream(history, max_tokens=400, on_full="raise")
                group.start_soon(answer, answering)

    async with anyio.create_task_group() as group:
        try:
            await read()
        except WebSocketDisconnect:
            pass
        group.cancel_scope.cancel()  # leaving the stream's block aborts the request


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with engine:
        yield


app = Starlette(routes=[Route("/", page), WebSocketRoute("/chat", chat)], lifespan=lifespan)

if __name__ == "__main__":
    # Without a timeout a shutdown waits for clients that are still connected.
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=10)
