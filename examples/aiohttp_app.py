"""An aiohttp app whose ``cleanup_ctx`` owns the engine: handlers of its own, and the OpenAI-compatible API under /ai.

    python examples/aiohttp_app.py

    curl localhost:8000/ask -H 'Content-Type: application/json' -d '{"question": "What is 8 + 7?"}'
    curl -N localhost:8000/story?about=a+fox+named+Ruby
    curl localhost:8000/ai/v1/models

Press Ctrl-C in the second one: its request is aborted.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from aiohttp import web

from aioengine import Engine
from aioengine.server import aiohttp_errors, aiohttp_routes

ENGINE = web.AppKey("engine", Engine)
routes = web.RouteTableDef()


@routes.post("/ask")
async def ask(request: web.Request) -> web.Response:
    """Answer a question. A client that leaves cancels this handler (see ``run_app`` below), and that aborts."""
    try:
        question = str((await request.json())["question"])
    except (ValueError, KeyError, TypeError):
        raise web.HTTPBadRequest(text='the body must be {"question": "..."}') from None
    prompt = [{"role": "user", "content": question}]
    output = await request.app[ENGINE].generate(prompt, max_tokens=400, on_full="raise")
    return web.json_response({"answer": output.text, "finish_reason": output.outputs[0].finish_reason})


@routes.get("/story")
async def story(request: web.Request) -> web.StreamResponse:
    """Stream a story as plain text."""
    prompt = [{"role": "user", "content": f"Tell me a short story about {request.query.get('about', 'a fox')}."}]
    response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
    async with request.app[ENGINE].stream(prompt, max_tokens=400, on_full="raise") as stream:
        await response.prepare(request)
        async for delta in stream:
            await response.write(delta.text.encode())
        await response.write_eof()
    return response


async def own_engine(app: web.Application) -> AsyncIterator[None]:
    async with app[ENGINE]:
        yield


def make_app() -> web.Application:
    app = web.Application(middlewares=[aiohttp_errors])  # 400 and 503 for what the engine refuses
    app[ENGINE] = engine = Engine(os.environ.get("MODEL"), max_waiting=64)  # without MODEL the bundled one
    app.cleanup_ctx.append(own_engine)
    app.add_routes(routes)
    app.add_routes(aiohttp_routes(engine, prefix="/ai"))
    return app


if __name__ == "__main__":
    # By default aiohttp lets a handler run on when its client has left, and waits a minute for it at the end.
    port = int(os.environ.get("PORT", "8000"))
    web.run_app(make_app(), host="127.0.0.1", port=port, handler_cancellation=True, shutdown_timeout=10)
