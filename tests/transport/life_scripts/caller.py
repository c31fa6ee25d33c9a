"""A front end in a process of its own: ``python -m transport.life_scripts.caller ADDRESS``.

It has two requests, says "at busy" when one of them has a token, and how each ends.
"""

import asyncio
import sys
from contextlib import aclosing

import anyio

from aioengine import Engine
from aioengine.errors import AioEngineError


async def ask(engine: Engine, number: int) -> None:
    ended = "finished"
    try:
        async with engine.stream([9, 9, number], max_tokens=2000, ignore_eos=True) as stream:
            async for _ in stream:
                if number == 0:
                    print("at busy", flush=True)
                    number = -1
    except AioEngineError as error:
        ended = f"{type(error).__name__}: {error}"
    print(f"request {abs(number)}: {ended}", flush=True)


async def live(address: str) -> None:
    async with aclosing(await Engine.connect(address)) as engine, anyio.create_task_group() as tasks:
        for number in (0, 2):
            tasks.start_soon(ask, engine, number)


if __name__ == "__main__":
    asyncio.run(live(sys.argv[1]))
