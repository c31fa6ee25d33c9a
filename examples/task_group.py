"""Many prompts at once, each with a time limit that keeps what has come by then; no server.

    python examples/task_group.py          # or: python examples/task_group.py SECONDS FILE (a prompt a line)

Try it with 0.3 and with 5 seconds, and press Ctrl-C: what runs is aborted, the table of what has come is printed, and
nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from aioengine import Engine, RequestOutput

HEROES = ["a fox named Ruby", "a cow named Betty", "a robot named Max", "a dragon named Fuzzy"]
QUESTIONS = [f"What is {a} + {b}?" for a in range(2, 6) for b in range(3, 8)]
PROMPTS = [f"Tell me a short story about {hero}." for hero in HEROES] + QUESTIONS


async def main(timeout_s: float, prompts: Sequence[str]) -> None:
    outputs: dict[int, RequestOutput] = {}

    async def answer(engine: Engine, number: int) -> None:
        # Entering the block waits for a place in the engine, and the time limit begins after that.
        async with engine.stream([{"role": "user", "content": prompts[number]}], max_tokens=400) as stream:
            try:
                async with asyncio.timeout(timeout_s):
                    await stream.finish()
            except TimeoutError:
                pass
            finally:
                outputs[number] = stream.result  # whole, or what there is of it
        # Leaving the block has aborted what was not done.

    try:
        # The engine bounds what runs at once, so start as many tasks as there are prompts.
        async with Engine(os.environ.get("MODEL"), max_num_seqs=8, max_waiting=1) as engine:
            print(engine.describe())
            async with asyncio.TaskGroup() as group:
                for number in range(len(prompts)):
                    group.create_task(answer(engine, number))
    finally:
        print_table(prompts, outputs)


def print_table(prompts: Sequence[str], outputs: dict[int, RequestOutput]) -> None:
    print(f"{'prompt':<50} {'end':<8} {'tokens':>6}  text")
    for number, prompt in enumerate(prompts):
        if number not in outputs:
            print(f"{prompt:<50} {'not run':<8}")
            continue
        output = outputs[number].outputs[0]
        end = output.finish_reason or "timeout"
        print(f"{prompt:<50} {end:<8} {len(output.token_ids):>6}  {output.text[-50:]!r}")


if __name__ == "__main__":
    timeout_s = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    prompts = Path(sys.argv[2]).read_text().splitlines() if len(sys.argv) > 2 else PROMPTS
    try:
        asyncio.run(main(timeout_s, prompts))
    except KeyboardInterrupt:
        sys.exit(130)
