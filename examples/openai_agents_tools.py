"""openai-agents in the app's own loop.

    pip install openai-agents
    python examples/openai_agents_tools.py

A tool that is called, typed answers and streams; no server, no port, no key.
"""

from __future__ import annotations

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from pydantic import BaseModel

from aioengine import Engine
from aioengine.server import ServerConfig

disable_tracing(True)  # else each run is told to a service


class AnimalFacts(BaseModel):
    """Facts about an animal."""

    name: str
    food: str
    legs: int


@function_tool
def add(a: float, b: float) -> float:
    """Adds two numbers."""
    return a + b


async def main() -> None:
    async with Engine(os.environ.get("MODEL")) as engine:
        client = engine.openai_client(config=ServerConfig(served_model_name=("local",)))
        options = {"name": "Helper", "model_settings": ModelSettings(temperature=0)}
        # Over either of OpenAI's APIs.
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = kind("local", openai_client=client)
            print(kind.__name__)

            result = await Runner.run(Agent(model=model, tools=[add], **options), "Add 123 and 45.")
            print([item.type for item in result.new_items], result.final_output)

            facts = await Runner.run(Agent(model=model, output_type=AnimalFacts, **options), "Tell me about the fox.")
            print(repr(facts.final_output))

            stream = Runner.run_streamed(Agent(model=model, **options), "What is 8 + 7?")
            events = [event.data async for event in stream.stream_events() if event.type == "raw_response_event"]
            print("".join(event.delta for event in events if event.type == "response.output_text.delta"))


if __name__ == "__main__":
    asyncio.run(main())
