"""LangChain in the app's own loop.

    pip install langchain-openai
    python examples/langchain_chat.py

A tool that is called, typed answers and streams; no server, no port, no key.
"""

from __future__ import annotations

import asyncio
import os

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from aioengine import Engine
from aioengine.server import ServerConfig


class AnimalFacts(BaseModel):
    """Facts about an animal."""

    name: str
    food: str
    legs: int


@tool
def add(a: float, b: float) -> float:
    """Adds two numbers."""
    return a + b


async def main() -> None:
    async with Engine(os.environ.get("MODEL")) as engine:
        client = engine.openai_client(config=ServerConfig(served_model_name=("local",)))
        model = ChatOpenAI(
            model="local",
            api_key="none",
            base_url="http://aioengine.invalid/v1",  # `invoke` has a client of its own, which would ask OpenAI
            temperature=0,
            async_client=client.chat.completions,
            root_async_client=client,
        )
        calculator = model.bind_tools([add])

        chat = [HumanMessage("Add 123 and 45.")]
        asked = await calculator.ainvoke(chat)
        results = [await add.ainvoke(call) for call in asked.tool_calls]
        print([(call["name"], call["args"]) for call in asked.tool_calls])
        answer = await calculator.ainvoke([*chat, asked, *results])
        print(answer.content)

        # The schema is enforced: as the text of the answer, or as the arguments of a call.
        for method in ("json_schema", "function_calling"):
            typed = model.with_structured_output(AnimalFacts, method=method)
            print(repr(await typed.ainvoke("Tell me about the fox.")))

        async for piece in model.astream("What is 8 + 7?"):
            print(piece.content, end="")
        print()


if __name__ == "__main__":
    asyncio.run(main())
