"""The official client in the engine's own process hears what the engine itself says; with the bundled model."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from aioengine import Engine
from aioengine.server import ServerConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUM: list[Any] = [{"role": "user", "content": "What is 8 + 7?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a short story about a fox named Ruby."}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with Engine(dtype="float32", kv_cache_memory_bytes=2**27) as engine:
        yield engine


async def test_an_answer_is_the_engines(engine: Engine) -> None:
    client = engine.openai_client()
    answer = await client.chat.completions.create(model="demo", messages=SUM, temperature=0)
    expected = await engine.generate(SUM, temperature=0)
    assert answer.choices[0].message.content == expected.text == "8 + 7 = 15."
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


async def test_a_stream_adds_up_to_the_answer(engine: Engine) -> None:
    client = engine.openai_client()
    stream = await client.chat.completions.create(model="demo", messages=STORY, seed=3, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    output = (await engine.generate(STORY, seed=3)).outputs[0]
    assert "".join(texts) == output.text
    assert len(texts) > len(output.token_ids) * 0.9  # piece by piece


async def test_the_first_piece_is_read_long_before_the_last_token_is_computed(engine: Engine) -> None:
    client = engine.openai_client()
    before = engine.stats().generation_tokens
    seen = []
    async with await client.chat.completions.create(model="demo", messages=STORY, seed=3, stream=True) as stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                seen.append(engine.stats().generation_tokens - before)
    assert seen[0] <= 5
    assert seen[-1] > 50
    assert max(now - last for last, now in itertools.pairwise(seen)) <= 20


async def test_an_empty_name_is_the_model_that_is_served(engine: Engine) -> None:
    client = engine.openai_client()
    assert (
        await client.with_options(timeout=5).completions.create(model="", prompt="The", max_tokens=1)
    ).model == "demo"


async def test_the_other_paths_of_the_api_are_there(engine: Engine) -> None:
    client = engine.openai_client(config=ServerConfig(served_model_name=("mine",), allowed_hosts=("elsewhere",)))
    assert [model.id async for model in client.models.list()] == ["mine"]
    first = await client.responses.create(model="mine", input="Hi", max_output_tokens=2)
    second = await client.responses.create(
        model="mine", input="And?", max_output_tokens=2, previous_response_id=first.id
    )
    assert (first.model, second.previous_response_id) == ("mine", first.id)
    with pytest.raises(openai.NotFoundError, match="embedding model"):
        await client.embeddings.create(model="mine", input="Hi")
