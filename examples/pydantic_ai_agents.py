"""pydantic-ai in the app's own loop.

    pip install 'pydantic-ai-slim[openai]'
    python examples/pydantic_ai_agents.py

A tool that is called, typed answers and streams; no server, no port, no key.
"""

from __future__ import annotations

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from aioengine import Engine
from aioengine.server import ServerConfig


class AnimalFacts(BaseModel):
    """Facts about an animal."""

    name: str
    food: str
    legs: int


def add(a: float, b: float) -> float:
    """Adds two numbers."""
    return a + b


async def main() -> None:
    async with Engine(os.environ.get("MODEL")) as engine:
        client = engine.openai_client(config=ServerConfig(served_model_name=("local",)))
        model = OpenAIChatModel("local", provider=OpenAIProvider(openai_client=client), settings={"temperature": 0})
        calculator = Agent(model, tools=[add])

        # Agents side by side are computed in one batch.
        sums = await asyncio.gather(*(calculator.run(f"Add {number} and 45.") for number in (123, 200, 317)))
        for result in sums:
            print(result.output)

        # The schema is enforced: as the text of the answer, or as the arguments of a call.
        for output_type in (NativeOutput(AnimalFacts), AnimalFacts):
            facts = await Agent(model, output_type=output_type).run("Tell me about the fox.")
            print(repr(facts.output))

        async with calculator.run_stream("Add 123 and 45.") as stream:
            print("".join([piece async for piece in stream.stream_text(delta=True)]))


if __name__ == "__main__":
    asyncio.run(main())
