"""A Starlette app with routes of its own, and the OpenAI-compatible API of the same engine mounted beside them.

    python examples/starlette_app.py          # or: uvicorn examples.starlette_app:app

    curl localhost:8000/story -H 'Content-Type: application/json' -d '{"about": "a fox named Ruby"}'
    curl -N localhost:8000/story/stream -H 'Content-Type: application/json' -d '{"about": "a dog named Max"}'
    curl localhost:8000/story/later -H 'Content-Type: application/json' -d '{"about": "a cow named Betty"}'
    curl localhost:8000/stories
    curl localhost:8000/ai/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "What is 8 + 7?"}], "stream": true}'

Press Ctrl-C in one of the first two: its request is aborted. http://localhost:8000/ai/ is a page to look at.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from aioengine import Engine
from aioengine.server import StreamResponse, create_app, engine_errors, while_connected

engine = Engine(os.environ.get("MODEL"), max_waiting=64)  # without MODEL the bundled one; loaded by the lifespan
stories: list[str] = []


class Wish(msgspec.Struct):
    about: str

    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Tell me a short story about {self.about}."}]


async def story(request: Request) -> JSONResponse:
    """Tell a story now."""
    wish = msgspec.json.decode(await request.body(), type=Wish)
    # Without while_connected the handler would run on when its client has left.
    output = await while_connected(request, engine.generate(wish.prompt(), max_tokens=400, on_full="raise"))
    return JSONResponse({"story": output.text, "finish_reason": output.outputs[0].finish_reason})


async def story_in_pieces(request: Request) -> StreamResponse:
    """Tell a story as it comes, as plain text."""
    wish = msgspec.json.decode(await request.body(), type=Wish)
    return StreamResponse(engine.stream(wish.prompt(), max_tokens=400, on_full="raise"))


async def story_later(request: Request) -> JSONResponse:
    """Answer at once, and tell the story behind requests that are waited for."""
    wish = msgspec.json.decode(await request.body(), type=Wish)
    engine.check_accepting()  # else a crowd of background tasks would wait where nothing bounds it
    return JSONResponse({"accepted": wish.about}, status_code=202, background=BackgroundTask(write_down, wish))


async def write_down(wish: Wish) -> None:
    output = await engine.generate(wish.prompt(), max_tokens=400, priority=1)  # larger goes later
    stories.append(output.text)


async def list_stories(request: Request) -> JSONResponse:
    return JSONResponse({"stories": stories})


async def bad_request(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 400)


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with engine:
        yield


app = Starlette(
    routes=[
        Route("/story", story, methods=["POST"]),
        Route("/story/stream", story_in_pieces, methods=["POST"]),
        Route("/story/later", story_later, methods=["POST"]),
        Route("/stories", list_stories),
        Mount("/ai", create_app(engine)),
    ],
    lifespan=lifespan,
    exception_handlers={**engine_errors, msgspec.DecodeError: bad_request},  # 503 where there is no room, ...
)

if __name__ == "__main__":
    # Without a timeout a shutdown waits for the slowest reader.
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=10)
