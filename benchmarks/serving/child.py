"""A server in a process of its own, for `serve.py --self`: ``python -m serving.child bare|engine``.

It takes a port of its own, prints its URL when it serves, and dies with its parent.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from pathlib import Path

import uvicorn
import uvloop

from aioengine.processes.own_side import die_with_parent

BACKLOG = 2048
DRAIN_TIMEOUT_S = 2


async def serve_bare() -> None:
    """uvicorn with httptools, and nothing else."""
    from serving.bare import app

    # The protocol is named, since asyncio looks at it before it sets TCP_NODELAY.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(BACKLOG)
    config = uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
    )
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await uvicorn.Server(config).serve(sockets=[listening])


async def serve_engine(args: argparse.Namespace) -> None:
    """As ``aioengine serve`` does, with a device that brings each stream a token a step."""
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
    parser.add_argument("--profile", type=Path, help="write what cProfile saw here")
    parser.add_argument("--parent", type=int, help="die with this process")
    args = parser.parse_args()
    if args.parent is not None:
        die_with_parent(args.parent)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    serving = serve_bare() if args.kind == "bare" else serve_engine(args)
    if args.profile is None:
        uvloop.run(serving)
        return
    import cProfile

    profile = cProfile.Profile()
    try:
        profile.runcall(uvloop.run, serving)
    finally:
        profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
