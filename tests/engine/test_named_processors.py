"""Logits processors of the engine's, which requests name: made where the device is, of arguments that travel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from nightly import nightly

from aioengine import ConfigError, Engine, EngineConfig, InvalidRequest, LogitsProcessor, SamplingParams
from aioengine.server import create_app

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERE = "engine.test_named_processors"
PROCESSORS = tuple(f"{HERE}:{name}" for name in ("ban", "only", "nothing", "refuse", "broken"))
PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def ban(token_ids: list[int]) -> LogitsProcessor:
    """None of these tokens comes."""

    def process(logits: Any, rows: Any) -> None:
        logits[:, token_ids] = float("-inf")

    return process


def only(token_id: int) -> LogitsProcessor:
    """This token comes, and no other."""

    def process(logits: Any, rows: Any) -> None:
        kept = logits[:, token_id].clone()
        logits[:] = float("-inf")
        logits[:, token_id] = kept

    return process


def nothing(_: Any) -> None:
    """A row that needs none has none."""


def refuse(**_: Any) -> LogitsProcessor:
    raise ValueError("not these")


def broken(_: Any) -> LogitsProcessor:
    def process(logits: Any, rows: Any) -> None:
        raise RuntimeError("it broke")

    return process


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[*nightly(False), True], ids=["here", "child"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=":")
        config: dict[str, Any] = {"kv_cache_memory_bytes": 2**24, "device": "cpu", "process": request.param}
        async with Engine(logits_processors=PROCESSORS, **config) as engine:
            yield engine


async def ids(engine: Engine, **sampling: Any) -> list[int]:
    return (await engine.generate(PROMPT, **{**GREEDY, **sampling})).outputs[0].token_ids


async def test_a_request_that_names_one_gets_it_with_its_arguments_and_others_do_not(engine: Engine) -> None:
    plain = await ids(engine)
    banned = await ids(engine, extra_args={"ban": {"token_ids": plain}})
    assert not set(banned) & set(plain)
    assert await ids(engine) == plain
    assert await ids(engine, extra_args={"ban": plain}) == banned, "one that is no dict is the only argument"
    assert await ids(engine, extra_args={"only": 77}) == [77] * 6
    assert await ids(engine, extra_args={"nothing": 1}) == plain
    assert await ids(engine, extra_args={}) == plain


async def test_all_choices_have_it(engine: Engine) -> None:
    out = await engine.generate(PROMPT, n=3, max_tokens=4, seed=1, ignore_eos=True, extra_args={"only": 70})
    assert [choice.token_ids for choice in out.outputs] == [[70] * 4] * 3


@pytest.mark.parametrize(
    ("extra_args", "told"),
    [
        ({"bann": 1}, "bann.*it has: ban, only"),
        ({"refuse": {"a": 1}}, "refuse cannot be made: ValueError: not these"),
        ({"ban": {"tokens": [1]}}, "ban cannot be made: TypeError"),
    ],
)
async def test_what_cannot_be_made_is_refused_by_name(engine: Engine, extra_args: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        await engine.generate(PROMPT, max_tokens=1, extra_args=extra_args)
    assert caught.value.param == "extra_args"


async def test_over_http_they_are_vllms_xargs(engine: Engine) -> None:
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body: dict[str, Any] = {"prompt": PROMPT, **GREEDY, "vllm_xargs": {"only": 77}}
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == await engine.detokenize([77] * 6)
        for path, more in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [CHAT]})):
            answer = await client.post(f"/v1/{path}", json={**more, "vllm_xargs": {"bann": 1}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "vllm_xargs")


CHAT = {"role": "user", "content": "a"}


@pytest.mark.parametrize("value", [{"a": object()}, {"a": {1, 2, lambda: 1}}, {"a": "x" * 70_000}, {1: 2}, [1], "ban"])
async def test_extra_args_are_plain_data(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(extra_args=value)
    assert caught.value.param == "extra_args"


async def test_extra_args_are_copied() -> None:
    token_ids = [1, 2]
    params = SamplingParams(extra_args={"ban": token_ids})
    token_ids.append(3)
    assert params.extra_args == {"ban": [1, 2]}


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (["no_such_module:f"], "no_such_module"),
        ([f"{HERE}:HERE"], "HERE is a str"),
        ([f"{HERE}:ban", "other:ban"], "apart"),
        (["ban"], "logits_processors"),
        ([lambda: 1], "top of a module"),
    ],
)
async def test_what_is_no_processor_stops_the_start(paths: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        await Engine.start(logits_processors=paths)


async def test_functions_are_given_as_they_are() -> None:
    assert EngineConfig(logits_processors=[ban, "m:f"]).logits_processors == (f"{__name__}:ban", "m:f")  # type: ignore[list-item]
