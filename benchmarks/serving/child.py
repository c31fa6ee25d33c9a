"""A server in a process of its own, for `serve.py --self`: ``python -m serving.child bare|engine``.

It takes a port of its own, prints its URL when it serves, and dies with its parent. **bare** shows the cost of
streaming without an engine, the least that any server on uvicorn can need: a plain ASGI app that writes one JSON event
a token, each encoded and written by itself, since all streams take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from aioengine.processes.own_side import die_with_parent
from serving.load import WORDS

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BACKLOG = 2048
DRAIN_TIMEOUT_S = 2


async def bare_app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Answer ``/v1/models``, and whatever is posted with ``max_tokens`` words."""
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    is_get = scope["method"] == "GET"
    kind = b"application/json" if is_get else b"text/event-stream; charset=utf-8"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if is_get:
        models = {"object": "list", "data": [{"id": "bare", "object": "model"}]}
        await send({"type": "http.response.body", "body": msgspec.json.encode(models)})
        return
    num_tokens, created = msgspec.json.decode(body)["max_tokens"], int(time.time())
    chunk = {"id": f"chatcmpl-{0:032x}", "object": "chat.completion.chunk", "created": created, "model": "bare"}

    def write(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**chunk, "choices": choices, **more}) + b"\n\n"

    for place in range(num_tokens):
        delta = {"content": " " + WORDS[place % len(WORDS)]}
        data = write([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])
        await send({"type": "http.response.body", "body": data, "more_body": True})
        await asyncio.sleep(0)
    usage = {"prompt_tokens": 0, "completion_tokens": num_tokens, "total_tokens": num_tokens}
    last = write([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]) + write([], usage=usage)
    await send({"type": "http.response.body", "body": last + b"data: [DONE]\n\n"})


async def serve_bare() -> None:
    """Serve `bare_app` by uvicorn with httptools, and nothing else."""
    # The protocol is named, since asyncio looks at it before it sets TCP_NODELAY.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(BACKLOG)
    options = {"http": "httptools", "lifespan": "off", "log_level": "warning", "access_log": False}
    config = uvicorn.Config(bare_app, timeout_graceful_shutdown=DRAIN_TIMEOUT_S, **options)  # type: ignore[arg-type]
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await uvicorn.Server(config).serve(sockets=[listening])


async def serve_engine(args: argparse.Namespace) -> None:
    """Serve as ``aioengine serve`` does, with a device that brings each stream a token a step."""
    from stand_in import Board, StandIn

    from aioengine import Engine
    from aioengine.processes.own_process import asked_by_signals, prepare_interpreter
    from aioengine.server import ServerConfig, create_app
    from aioengine.server.http_listener import HttpListener, ServerAddress
    from aioengine.server.http_server import StopRequest, serve

    with tempfile.TemporaryDirectory(prefix="aio-serve-") as folder:
        board = Board(Path(folder) / "board")
        board.step_time_s = args.step_ms / 1e3
        async with Engine(
            executor=StandIn(board),
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=32_768,
            max_waiting=args.max_waiting,
            log_stats_interval_s=0.0,
            show_progress=False,
        ) as engine:
            stop = StopRequest()
            prepare_interpreter()
            with asked_by_signals(lambda _: stop.ask()), HttpListener(ServerAddress(port=0)) as listener:
                await serve(
                    create_app(engine, ServerConfig(max_concurrent_requests=args.max_concurrent)),
                    engine=engine,
                    listener=listener,
                    stop=stop,
                    drain_timeout_s=DRAIN_TIMEOUT_S,
                    on_serving=lambda server: print(server.url, flush=True),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["bare", "engine"])
    parser.add_argument("--core", type=int, help="pin the process to this one")
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-waiting", type=int, default=1024)
    parser.add_argument("--max-concurrent", type=int, help="requests served at once")
    parser.add_argument("--parent", type=int, required=True, help="die with this process")
    args = parser.parse_args()
    die_with_parent(args.parent)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    uvloop.run(serve_bare() if args.kind == "bare" else serve_engine(args))


if __name__ == "__main__":
    main()
