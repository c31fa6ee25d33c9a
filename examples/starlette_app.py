"""A Starlette app with routes of its own, and the OpenAI-compatible API of the same engine mounted beside them.

    python examples/starlette_app.py          # or: uvicorn examples.starlette_app:app

    curl localhost:8000/story -H 'Content-Type: application/json' -d '{"about": "a fox named Ruby"}'
    curl localhost:8000/story/later -H 'Content-Type: application/json' -d '{"about": "a cow named Betty"}'
    curl localhost:8000/stories
    curl localhost:8000/ai/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "What is 8 + 7?"}], "stream": true}'

Press Ctrl-C in the first one: its request is aborted. http://localhost:8000/ai/ is a page to look at.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import anyio
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from aioengine import Engine, EngineOverloaded, InvalidRequest, Stream
from aioengine.server import create_app

engine = Engine(os.environ.get("MODEL"), max_waiting=64)  # without MODEL the bundled one; loaded by the lifespan
stories: list[str] = []


class Wish(msgspec.Struct):
    about: str

    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Tell me a short story about {self.about}."}]


async def story(request: Request) -> JSONResponse:
    """Tell a story now."""
    wish = msgspec.json.decode(await request.body(), type=Wish)
    async with (
        engine.stream(wish.prompt(), max_tokens=400, on_full="raise") as stream,
        anyio.create_task_group() as group,
    ):
        group.start_soon(abort_when_gone, request, stream)
        output = await stream.finish()
        group.cancel_scope.cancel()
    return JSONResponse({"story": output.text, "finish_reason": output.outputs[0].finish_reason})


async def abort_when_gone(request: Request, stream: Stream) -> None:
    """Starlette lets a handler run on when its client has left. Only for a request whose body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.abort()


async def story_later(request: Request) -> JSONResponse:
    """Answer at once, and tell the story behind requests that somebody waits for."""
    wish = msgspec.json.decode(await request.body(), type=Wish)
    engine.check_accepting()  # else a crowd of background tasks would wait where nothing bounds it
    return JSONResponse({"accepted": wish.about}, status_code=202, background=BackgroundTask(write_down, wish))


async def write_down(wish: Wish) -> None:
    output = await engine.generate(wish.prompt(), max_tokens=400, priority=1)  # larger goes later
    stories.append(output.text)


async def list_stories(request: Request) -> JSONResponse:
    return JSONResponse({"stories": stories})


async def overloaded(request: Request, error: Exception) -> JSONResponse:
    retry_after_s = error.retry_after_s if isinstance(error, EngineOverloaded) else 1.0
    return JSONResponse({"error": str(error)}, 503, {"Retry-After": f"{max(1.0, retry_after_s):.0f}"})


async def bad_request(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 400)


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with engine:
        yield


app = Starlette(
    routes=[
        Route("/story", story, methods=["POST"]),
        Route("/story/later", story_later, methods=["POST"]),
        Route("/stories", list_stories),
        Mount("/ai", create_app(engine)),
    ],
    lifespan=lifespan,
    exception_handlers={EngineOverloaded: overloaded, InvalidRequest: bad_request, msgspec.DecodeError: bad_request},
)

if __name__ == "__main__":
    # Without a timeout a shutdown waits for the slowest reader.
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=10)
