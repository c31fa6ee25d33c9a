"""A FastAPI app whose endpoints are given the engine as a dependency; the OpenAI-compatible API is mounted beside them.

    python examples/fastapi_dependency.py          # or: uvicorn examples.fastapi_dependency:app

    curl localhost:8000/ask -H 'Content-Type: application/json' -d '{"question": "What is 8 + 7?"}'
    curl -N localhost:8000/ask/stream -H 'Content-Type: application/json' \
        -d '{"question": "Tell me a short story about a fox named Ruby."}'
    curl localhost:8000/ai/v1/models

Press Ctrl-C in the second one: its request is aborted. http://localhost:8000/docs has all of them.
In tests, ``app.dependency_overrides[get_engine]`` puts another engine in this one's place.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import anyio
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from aioengine import AioEngineError, Engine, EngineOverloaded, InvalidRequest, Stream
from aioengine.server import create_app

engine = Engine(os.environ.get("MODEL"), max_waiting=64)  # without MODEL the bundled one; loaded by the lifespan


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


async def get_engine() -> Engine:  # async: a plain function would cost a trip to a thread at each request
    return engine


app = FastAPI(title="An app with an engine", lifespan=lifespan)
app.mount("/ai", create_app(engine))


class Question(BaseModel):
    question: Annotated[str, Field(min_length=1, max_length=4000)]
    max_tokens: Annotated[int, Field(ge=1, le=400)] = 400


class Answer(BaseModel):
    answer: str
    finish_reason: str | None
    num_tokens: int


async def ask(question: Question, engine: Annotated[Engine, Depends(get_engine)]) -> Stream:
    """The stream behind both endpoints: itself a dependency, made of another one; entered by who uses it."""
    prompt = [{"role": "user", "content": question.question}]
    return engine.stream(prompt, max_tokens=question.max_tokens, on_full="raise")


@app.post("/ask")
async def answer(stream: Annotated[Stream, Depends(ask)], request: Request) -> Answer:
    async with stream, anyio.create_task_group() as group:
        group.start_soon(abort_when_gone, request.receive, stream)
        output = (await stream.finish()).outputs[0]
        group.cancel_scope.cancel()
    return Answer(answer=output.text, finish_reason=output.finish_reason, num_tokens=len(output.token_ids))


@app.post("/ask/stream", response_class=Response)
async def answer_in_pieces(stream: Annotated[Stream, Depends(ask)]) -> Response:
    return DeltaResponse(stream)


async def abort_when_gone(receive: Receive, stream: Stream) -> None:
    """Nobody stops an endpoint whose client has left. Only for a request whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.abort()


class DeltaResponse(Response):
    """Sends a stream as server-sent events, and owns it: however this ends, the request ends with it.

    A StreamingResponse says 200 before the engine has been asked. And it does not close the generator that it reads:
    where a client leaves amid a write, its request runs on until the generator is collected.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.status_code = 200
        self.background = None
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Entered before the response begins, so that an overloaded engine still makes a 503.
        async with self.stream as stream, anyio.create_task_group() as group:
            group.start_soon(abort_when_gone, receive, stream)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = b""
            try:
                async for delta in stream:
                    data = event(text=delta.text, finish_reason=delta.finish_reason)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except AioEngineError as error:  # too late for a status
                last = event(error=type(error).__name__)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            group.cancel_scope.cancel()


def event(**fields: str | None) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


@app.exception_handler(EngineOverloaded)
async def overloaded(request: Request, error: EngineOverloaded) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 503, {"Retry-After": f"{max(1.0, error.retry_after_s):.0f}"})


@app.exception_handler(InvalidRequest)
async def bad_request(request: Request, error: InvalidRequest) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 400)


if __name__ == "__main__":
    # Without a timeout a shutdown waits for the slowest reader.
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=10)
