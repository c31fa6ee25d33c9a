"""The bundled model itself, in this process and in one of its own: the same of both, to the last digit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract.ways import described, error_of, ids_of, told
from nightly import few

from aioengine import Engine, InvalidRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell me a story."}]
CONFIG: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 2**24, "dtype": "float32"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here() -> AsyncIterator[Engine]:
    async with Engine(**CONFIG) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there() -> AsyncIterator[Engine]:
    """In a process of its own."""
    async with Engine(process=True, **CONFIG) as engine:
        yield engine


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "seeded": (TEXT, {"seed": 1, "temperature": 0.9}),
    "greedy with logprobs": (TEXT, {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 2}),
    "chat": (CHAT, {"seed": 2}),
    "filters": (TEXT, {"seed": 3, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "logprobs": 0}),
    "penalties": (
        TEXT,
        {"seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 1},
    ),
    "biases": (TEXT, {"seed": 5, "logit_bias": {20: 5.0, 30: -5.0}, "bad_words": ["fox", "forest"]}),
    "choices": (TEXT, {"seed": 6, "n": 3, "logprobs": 2, "logprob_token_ids": [10, 20]}),
    "processed": (TEXT, {"seed": 7, "temperature": 0.5, "top_p": 0.8, "logprobs": 5, "logprobs_mode": "processed"}),
    "stop string": (TEXT, {"temperature": 0.0, "stop": "."}),
}


@pytest.mark.parametrize("case", few(["greedy with logprobs", "chat", "penalties", "choices"], of=CASES))
async def test_a_process_of_its_own_brings_what_this_one_brings(here: Engine, there: Engine, case: str) -> None:
    prompt, sampling = CASES[case]
    sampling = {"max_tokens": 20, **sampling}
    outputs = [await engine.generate(prompt, cache_salt=case, **sampling) for engine in (here, there)]
    assert told(outputs[0]) == told(outputs[1])


async def test_weights_are_changed_saved_and_brought_back_there_as_here(
    here: Engine, there: Engine, tmp_path: Path
) -> None:
    """Its tensors cross in pieces of 8 MiB."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    async def say(engine: Engine) -> list[list[int]]:
        return ids_of(await engine.generate(TEXT, temperature=0.0, max_tokens=12))

    before = await say(here)
    files = await there.save_sharded_state(tmp_path / "saved")
    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= load_file(tmp_path / "saved" / file)
    changed = {name: tensor + 0.05 * torch.ones_like(tensor) for name, tensor in tensors.items()}
    for engine in (here, there):
        await engine.update_weights(tensors=changed)
    assert await say(here) == await say(there) != before
    for bad in ({"nothing": torch.ones(3)}, {next(iter(tensors)): torch.ones(3)}):
        errors = [described(await error_of(engine.update_weights(tensors=bad))) for engine in (here, there)]
        assert errors[0] == errors[1]
        assert errors[0][0] is InvalidRequest
    for engine in (here, there):
        await engine.update_weights(tmp_path / "saved")
    assert await say(here) == await say(there) == before
