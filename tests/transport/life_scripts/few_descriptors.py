"""Starts engines in processes of their own with ever so few file descriptors free; a line for each start.

The first has enough. The arguments are how many. A line: how many, seconds, descriptors that were left open, and
"served" or the error.
"""

import asyncio
import os
import resource
import sys
import time

from aioengine import AioEngineError, Engine, ProcessOptions

NAME = "/dev/fd"


async def start(num_free: int) -> None:
    before = set(os.listdir(NAME))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) - 1 + num_free, limits[1]))
    began = time.monotonic()
    try:
        options = ProcessOptions(executor="transport.life_scripts.devices:steady")
        async with await Engine.start(process=options) as engine:
            await engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
        outcome = "served"
    except AioEngineError as error:
        outcome = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - began
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    num_left = len(os.listdir(NAME)) - len(before)
    print(num_free, f"{took_s:.2f}", num_left, outcome, sep="\t")


async def main() -> None:
    for num_free in (200, *map(int, sys.argv[1:])):  # the first one imports all, for which descriptors are needed, too
        await start(num_free)


asyncio.run(main())
