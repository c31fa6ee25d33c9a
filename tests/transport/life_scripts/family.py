"""A plain script with an engine in a process of its own: ``python -m transport.life_scripts.family STAGE``.

It says on stdout what `Life` says, and goes on from its stage when a line comes on stdin.
"""

import asyncio
import logging
import sys

from transport.life_scripts.life import Life


def say(line: str) -> None:
    print(line, flush=True)


async def live(stage: str) -> None:
    life = Life(stage, says=say)

    def on_stdin() -> None:
        asyncio.get_running_loop().remove_reader(0)
        if sys.stdin.readline():
            life.go_on()

    asyncio.get_running_loop().add_reader(0, on_stdin)
    await life.run()


if __name__ == "__main__":
    logging.getLogger("aioengine").setLevel(logging.INFO)
    asyncio.run(live(sys.argv[1]))
