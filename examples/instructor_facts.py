"""instructor in the app's own loop.

    pip install instructor
    python examples/instructor_facts.py

Typed answers in each of its ways, and one that comes piece by piece; no server, no port, no key.
"""

from __future__ import annotations

import asyncio
import os

import instructor
from pydantic import BaseModel

from aioengine import Engine
from aioengine.server import ServerConfig


class AnimalFacts(BaseModel):
    """Facts about an animal."""

    name: str
    food: str
    legs: int


async def main() -> None:
    async with Engine(os.environ.get("MODEL")) as engine:
        openai_client = engine.openai_client(config=ServerConfig(served_model_name=("local",)))
        options = {"model": "local", "temperature": 0}

        # TOOLS asks for a call, the others for a text; either is held to the schema.
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
            client = instructor.from_openai(openai_client, mode=mode)
            question = [{"role": "user", "content": "Tell me about the fox."}]
            print(repr(await client.chat.completions.create(response_model=AnimalFacts, messages=question, **options)))

        client = instructor.from_openai(openai_client, mode=instructor.Mode.JSON_SCHEMA)
        question = [{"role": "user", "content": "Tell me about an owl."}]
        partial = client.chat.completions.create_partial(response_model=AnimalFacts, messages=question, **options)
        seen = [facts async for facts in partial]
        print(f"{len(seen)} pieces, the last: {seen[-1]!r}")


if __name__ == "__main__":
    asyncio.run(main())
