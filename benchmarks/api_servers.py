"""HTTP throughput by the number of HTTP servers of one port; and how connections are spread over them.

    python -m benchmarks.api_servers [--servers 1 2 4] [--demo] [--seconds 4] [--rounds 3] [--json FILE]

For each number of servers a program of its own serves one replica, as ``aioengine serve --api-servers N`` does (1: the
server is in the replicas' parent). The replica's device is a stand-in whose steps cost nothing, so that HTTP is the
load; with ``--demo`` it is the bundled model. The generator is a process, too, with ``--clients`` connections that each
send the next request when they have read an answer (a closed loop), in turns of two loads:

- **short**: a completion of one token, answered whole;
- **streams**: a chat that streams 64 tokens.

Beside the rate stands what each role took of CPU time for a request: where there are fewer cores than processes these
wait for each other, and a rate says how many cores there are. Of the costs the last column is made: the rate at which
the busiest process would take a whole core, had each a core of its own. Other programs take of the rate, and less of
the costs; how much of the cores they used stands there, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import uvloop

FOLDER = Path(__file__).parent
WARM_UP_S = 1.0
STREAM_TOKENS = 64
LOADS = {
    "short": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 1}),
    "streams": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Tell a story"}],
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        },
    ),
}
SERVER, REPLICA = "aioengine.server.group.child", "aioengine.transport.child"


# The program that serves


async def serve_here(num_servers: int, is_demo: bool) -> None:
    """As ``aioengine serve --api-servers N`` does, with a device that costs nothing."""
    from aioengine import Engine
    from aioengine.config import ProcessOptions, ReplicaOptions
    from aioengine.processes.own_process import asked_by_signals, prepare_interpreter
    from aioengine.server import HttpLimits, ServerConfig, create_app
    from aioengine.server.access_log import logging_off_loop
    from aioengine.server.group.channel import ServerSettings
    from aioengine.server.group.serve_group import serve_group
    from aioengine.server.http_listener import HttpListener, ServerAddress
    from aioengine.server.http_server import StopRequest, serve

    stop = StopRequest()
    with (
        tempfile.TemporaryDirectory(prefix="aio-") as folder,
        HttpListener(ServerAddress(port=0), num_servers) as listener,
    ):
        os.environ["AIOENGINE_BENCH_BOARD"] = f"{folder}/board"
        address = f"ipc://{folder}/cluster.sock"
        process = ProcessOptions(executor=None if is_demo else "stand_in:make")
        options: dict[str, Any] = {"max_num_batched_tokens": 32_768, "log_stats_interval_s": 0.0, "max_waiting": 4096}
        replicas = ReplicaOptions(replicas=1, cluster_address=address)
        async with Engine(process=process, replicas=replicas, **options) as engine:
            config = ServerConfig()
            with (
                asked_by_signals(lambda _: stop.ask()),
                open(os.devnull, "w") as log,  # noqa: ASYNC230
                logging_off_loop(stream=log),
            ):
                if num_servers == 1:
                    prepare_interpreter()
                    await serve(
                        create_app(engine, config),
                        engine=engine,
                        listener=listener,
                        stop=stop,
                        on_serving=lambda server: print(server.url, flush=True),
                    )
                    return
                settings = ServerSettings(
                    index=0,
                    num_servers=num_servers,
                    shares=[],
                    where=listener.where,
                    config=config,
                    limits=HttpLimits(),
                    drain_timeout_s=2.0,
                    log_format="text",
                    log_descriptor=log.fileno(),
                    engine_address=f"cluster+{address}",
                )
                await serve_group(
                    settings,
                    [listener],
                    stop,
                    engine=engine,
                    on_serving=lambda _, urls: print(urls[0], flush=True),
                )


@contextlib.contextmanager
def serving(num_servers: int, is_demo: bool) -> Iterator[tuple[str, int]]:
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, __file__, "--serve", str(num_servers), *["--demo"] * is_demo]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit("the servers did not start")
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


# The load


class Load:
    """Connections that each send the next request when the last one is answered."""

    def __init__(self, url: str, name: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._where = (host, int(port))
        path, body = LOADS[name]
        encoded = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        self._request = f"{head}content-length: {len(encoded)}\r\n\r\n".encode() + encoded
        self._end = b"\r\n0\r\n\r\n" if "stream" in body else b"}"
        self.num_answered = 0
        self.is_over = False

    async def client(self) -> None:
        reader, writer = await asyncio.open_connection(*self._where)
        try:
            while not self.is_over:
                writer.write(self._request)
                answer = b""
                while not answer.endswith(self._end):
                    piece = await reader.read(2**16)
                    if not piece:
                        raise SystemExit("a connection was closed")
                    answer = (answer + piece) if len(answer) < 64 else answer[:64] + answer[-8:] + piece
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"a request failed: {answer!r}")
                self.num_answered += 1
        finally:
            writer.close()


def cpu_of(pid: int) -> dict[str, float]:
    """CPU seconds so far: of the servers, the replica, the process above, and this one."""
    spent: Counter[str] = Counter()
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        told = process.cmdline()
        role = "servers" if SERVER in told else "replica" if REPLICA in told else "parent"
        spent[role] += sum(process.cpu_times()[:2])
    spent["generator"] = sum(psutil.Process().cpu_times()[:2])
    return dict(spent)


async def measure(url: str, pid: int, name: str, num_clients: int, seconds: float) -> dict[str, float]:
    """Requests/s, and CPU µs of each role for a request."""
    load = Load(url, name)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_clients):
            tasks.create_task(load.client())
        await asyncio.sleep(WARM_UP_S)
        before, num_before, began = cpu_of(pid), load.num_answered, time.perf_counter()
        machine = psutil.cpu_times()
        await asyncio.sleep(seconds)
        after, num_requests = cpu_of(pid), load.num_answered - num_before
        took_s = time.perf_counter() - began
        busy = sum(psutil.cpu_times()[:3]) - sum(machine[:3])
        load.is_over = True
    spent = {role: after[role] - before.get(role, 0.0) for role in after}
    costs = {role: 1e6 * seconds_ / max(1, num_requests) for role, seconds_ in spent.items()}
    return {"rate": num_requests / took_s, "others": max(0.0, busy - sum(spent.values())) / took_s, **costs}


async def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for num_servers in args.servers:
        with serving(num_servers, args.demo) as (url, pid):
            for name in LOADS:
                rounds = [await measure(url, pid, name, args.clients, args.seconds) for _ in range(args.rounds)]
                found[f"{num_servers} {name}"] = summary(rounds, num_servers)
    return found


def summary(rounds: list[dict[str, float]], num_servers: int) -> dict[str, float]:
    """Medians, the best rate, and the rate at which a process would be at its whole core."""
    median = {key: statistics.median(one.get(key, 0.0) for one in rounds) for key in rounds[0]}
    server = median["parent"] if num_servers == 1 else median["servers"] / num_servers
    busiest = max(server, median["replica"], 0.0 if num_servers == 1 else median["parent"])
    return {**median, "best": max(one["rate"] for one in rounds), "with_cores": 1e6 / busiest}


def show(found: dict[str, Any]) -> None:
    for name in LOADS:
        unit = "requests/s" if name == "short" else f"streams/s of {STREAM_TOKENS} tokens"
        print(f"\n{name}: CPU µs a request\n")
        print(
            f"| servers | {unit} | best | servers' | replica's | parent's | generator's | others' cores | a core each |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for key, one in found.items():
            num_servers, _, of = key.partition(" ")
            if of != name:
                continue
            is_one = num_servers == "1"
            servers, parent = (one["parent"], 0.0) if is_one else (one["servers"], one["parent"])
            cells = [one["rate"], one["best"], servers, one["replica"], parent, one["generator"]]
            rest = f"{one['others']:.1f} | {one['with_cores']:,.0f}"
            print(f"| {num_servers} | {' | '.join(f'{cell:,.0f}' for cell in cells)} | {rest} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--demo", action="store_true", help="the bundled model in place of the stand-in")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        uvloop.run(serve_here(args.serve, args.demo))
        return
    print(f"load before: {os.getloadavg()[0]:.1f}, cores: {os.cpu_count()}")
    found = uvloop.run(measure_all(args))
    show(found)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
