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

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from pydantic import BaseModel, Field

from aioengine import AioEngineError, CompletionDelta, Engine, Stream
from aioengine.server import StreamResponse, create_app, engine_errors, while_connected

engine = Engine(os.environ.get("MODEL"), max_waiting=64)  # without MODEL the bundled one; loaded by the lifespan


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


async def get_engine() -> Engine:  # async: a plain function would cost a trip to a thread at each request
    return engine


# What the engine refuses is answered by its handlers: 400, or 503 with Retry-After.
app = FastAPI(title="An app with an engine", lifespan=lifespan, exception_handlers=engine_errors)
app.mount("/ai", create_app(engine))


class Question(BaseModel):
    question: Annotated[str, Field(min_length=1, max_length=4000)]
    max_tokens: Annotated[int, Field(ge=1, le=400)] = 400


class Answer(BaseModel):
    answer: str
    finish_reason: str | None
    num_tokens: int


async def ask(question: Question, engine: Annotated[Engine, Depends(get_engine)]) -> Stream:
    """The stream behind both endpoints: itself a dependency, made of another one; entered where it is used."""
    prompt = [{"role": "user", "content": question.question}]
    return engine.stream(prompt, max_tokens=question.max_tokens, on_full="raise")


@app.post("/ask")
async def answer(stream: Annotated[Stream, Depends(ask)], request: Request) -> Answer:
    async with stream:
        # Without while_connected the endpoint would run on when its client has left.
        output = (await while_connected(request, stream.finish())).outputs[0]
    return Answer(answer=output.text, finish_reason=output.finish_reason, num_tokens=len(output.token_ids))


@app.post("/ask/stream", response_class=Response)
async def answer_in_pieces(stream: Annotated[Stream, Depends(ask)]) -> Response:
    return StreamResponse(stream, event, encode_error=error_event, media_type="text/event-stream")


def event(delta: CompletionDelta) -> bytes:
    return b"data: %b\n\n" % json.dumps({"text": delta.text, "finish_reason": delta.finish_reason}).encode()


def error_event(error: AioEngineError) -> bytes:
    return b"data: %b\n\n" % json.dumps({"error": type(error).__name__}).encode()  # too late for a status


if __name__ == "__main__":
    # Without a timeout a shutdown waits for the slowest reader.
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=10)
