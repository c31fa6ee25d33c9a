"""What a streamed token costs its reader: by `engine.stream`, by OpenAI's client in process, by the same over a port.

    python benchmarks/in_process.py          # --num-streams 1 --num-tokens 200 --repeats 7

CPU time of the loop's thread, which in each way holds all of it: the engine, the API, and the client. The device is a
fake one that gives each stream a token a step, and waits in between, so that each token is an event of its own. All
ways are run in turn, and their ratios are those of one turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import uvloop

from aioengine import Engine
from aioengine.server import start_server
from aioengine.testing import FakeExecutor

IDS = [600, 601, 602]
TOKEN = 603
"""A piece of an ordinary word."""
STEP_TIME_S = 0.001
"""For each stream, at a step: more than any way takes to read its event."""

Read = Callable[[], Awaitable[int]]
"""Reads one stream; gives the number of its events that have a text."""


def read_by_engine(engine: Engine, num_tokens: int) -> Read:
    async def read() -> int:
        num_events = 0
        async with engine.stream(IDS, max_tokens=num_tokens, ignore_eos=True) as stream:
            async for delta in stream:
                num_events += bool(delta.text)
        return num_events

    return read


def read_by_http(client: openai.AsyncOpenAI, num_tokens: int) -> Read:
    """The bytes alone, by the HTTP client inside: what is below the official one."""

    async def read() -> int:
        body = {"prompt": IDS, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        num_events = 0
        async with client._client.stream("POST", f"{client.base_url}completions", json=body) as response:
            async for piece in response.aiter_raw():
                num_events += piece.count(b'"text"')
        return num_events

    return read


def read_by_client(client: openai.AsyncOpenAI, num_tokens: int) -> Read:
    async def read() -> int:
        extra: Any = {"ignore_eos": True}
        stream = await client.completions.create(
            model="demo", prompt=IDS, max_tokens=num_tokens, extra_body=extra, stream=True
        )
        return sum([bool(chunk.choices[0].text) async for chunk in stream])

    return read


async def measure(read: Read, num_streams: int, num_tokens: int) -> float:
    """CPU time of a token, in µs."""
    before = time.thread_time()
    num_events = await asyncio.gather(*(read() for _ in range(num_streams)))
    spent_s = time.thread_time() - before
    if sum(num_events) < 0.95 * num_streams * num_tokens:
        print(f"  {sum(num_events)} events for {num_streams * num_tokens} tokens: the machine is too slow for the step")
    return spent_s / (num_streams * num_tokens) * 1e6


async def main(num_streams: int, num_tokens: int, repeats: int) -> None:
    step_time_s = STEP_TIME_S * max(num_streams, 2)
    executor = FakeExecutor(
        vocab_size=2048, num_blocks=16384, max_model_len=2048, step_time_s=step_time_s, sampler=lambda ids, row: TOKEN
    )
    async with Engine(executor=executor, max_num_seqs=num_streams) as engine:
        server = await start_server(engine, port=0)
        over_port = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any")
        in_process = engine.openai_client()
        ways = {
            "engine.stream": read_by_engine(engine, num_tokens),
            "bytes in process": read_by_http(in_process, num_tokens),
            "bytes over a port": read_by_http(over_port, num_tokens),
            "client in process": read_by_client(in_process, num_tokens),
            "client over a port": read_by_client(over_port, num_tokens),
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(repeats + 1):
            for name, read in ways.items():
                of_token = await measure(read, num_streams, num_tokens)
                if repeat:  # the first turn warms up
                    spent[name].append(of_token)
        await over_port.close()
        await server.aclose()
    print(f"{num_streams} streams of {num_tokens} tokens, {repeats} turns: CPU µs a token, medians (least to most)")
    for name, values in spent.items():
        ratios = [value / base for value, base in zip(values, spent["client over a port"], strict=True)]
        told = f"{statistics.median(values):7.1f} ({min(values):.1f}–{max(values):.1f})"
        print(f"  {name:<20} {told:<26} {statistics.median(ratios):.2f} of the client over a port")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-streams", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(options.num_streams, options.num_tokens, options.repeats))
