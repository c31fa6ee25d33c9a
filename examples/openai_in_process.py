"""OpenAI's own client in the app's own loop: streaming, time limits, leaving early; no server, no port, no key.

    python examples/openai_in_process.py

Whatever speaks to an `openai.AsyncOpenAI` can be given this one: libraries that were written for a service run in the
app's loop, beside everything else that it does.
"""

from __future__ import annotations

import asyncio
import os

import openai
from openai import AsyncOpenAI

from aioengine import Engine
from aioengine.server import ServerConfig

QUESTIONS = [f"What is {number} + 7?" for number in range(3, 9)]


async def ask(client: AsyncOpenAI, question: str) -> str:
    """A whole answer."""
    answer = await client.chat.completions.create(
        model="local", messages=[{"role": "user", "content": question}], temperature=0
    )
    return answer.choices[0].message.content or ""


async def tell(client: AsyncOpenAI, hero: str, max_pieces: int) -> None:
    """A story as it comes, up to so many pieces; leaving the block aborts the rest."""
    message = f"Tell me a short story about {hero}."
    stream = await client.chat.completions.create(
        model="local", messages=[{"role": "user", "content": message}], stream=True
    )
    async with stream:
        num_pieces = 0
        async for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
            num_pieces += 1
            if num_pieces == max_pieces:
                print(" […]", end="")
                break
    print()


async def main() -> None:
    async with Engine(os.environ.get("MODEL")) as engine:
        client = engine.openai_client(config=ServerConfig(served_model_name=("local",)))

        # Side by side: all of them are computed in one batch.
        answers = await asyncio.gather(*(ask(client, question) for question in QUESTIONS))
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(question, answer)

        await tell(client, "a fox named Ruby", max_pieces=60)
        print(f"{engine.stats().running} requests run now")

        try:
            await client.with_options(timeout=0.001, max_retries=0).completions.create(
                model="local", prompt="Once upon a time", max_tokens=1000
            )
        except openai.APITimeoutError as error:
            print(f"a time limit: {error}")
        try:
            await ask(client, "word " * 5000)
        except openai.BadRequestError as error:
            print(f"a mistake: {error.code}")


if __name__ == "__main__":
    asyncio.run(main())
