"""The engine against transformers on the same weights, in every way that requests can be batched, cut and interrupted.

Tokens are equal, greedy ones to transformers' and seeded ones to the engine's own when it serves them one by one; and
log-probabilities are within 1e-3 of transformers'.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from checkpoints import FAMILIES
from equality.conftest import MAX_MODEL_LEN, SEED, Case, Reference

from aioengine import Engine, RequestOutput
from aioengine.core.engine_core import EngineCore

LOGPROB_TOLERANCE = 1e-3
TOP = 5
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01}


class Setting(msgspec.Struct, frozen=True):
    """A way to serve the cases.

    Attributes:
        one_by_one: each request alone, after the other; otherwise all at once.
        budget: tokens a step; a small odd one cuts prefills anywhere.
        kv_sequences: KV for this many sequences of the greatest length.
        repeats: how often the cases are served: the second time the prefix cache knows them.
        aborts: requests that are cancelled at random moments run beside them.
    """

    one_by_one: bool = False
    budget: int = 512
    kv_sequences: float = 8
    repeats: int = 1
    aborts: bool = False


SETTINGS = {
    "alone": Setting(one_by_one=True),
    "batched": Setting(),
    "chunked": Setting(budget=23),
    "prefix hits": Setting(repeats=2),
    "preempted": Setting(kv_sequences=1.3),
    "aborts beside": Setting(aborts=True),
    "all at once": Setting(budget=23, kv_sequences=1.3, repeats=2, aborts=True),
}


@asynccontextmanager
async def serving(reference: Reference, setting: Setting, depth: int) -> AsyncIterator[tuple[Engine, EngineCore]]:
    async with Engine(
        str(reference.folder),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=setting.budget,
        kv_cache_memory_bytes=int(setting.kv_sequences * MAX_MODEL_LEN * bytes_a_token(reference)),
        max_in_flight=depth,
        num_threads=1,
        show_progress=False,
    ) as engine:
        assert engine._runtime is not None
        yield engine, engine._runtime.core


def bytes_a_token(reference: Reference) -> int:
    config = msgspec.json.decode((reference.folder / "config.json").read_bytes())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim) * 4


async def serve(
    engine: Engine, cases: list[Case], setting: Setting, rng: random.Random, **params: Any
) -> list[RequestOutput]:
    """Serve the cases as the setting says; returns the last repetition's outputs."""
    outputs: list[RequestOutput] = []
    for _ in range(setting.repeats):
        if setting.one_by_one:
            outputs = [await one(engine, index, case, params) for index, case in enumerate(cases)]
            continue
        async with asyncio.TaskGroup() as group:
            tasks = []
            for index, case in enumerate(cases):
                if setting.aborts:
                    group.create_task(cancelled_soon(engine, case, rng))
                tasks.append(group.create_task(one(engine, index, case, params)))
        outputs = [task.result() for task in tasks]
    return outputs


async def one(engine: Engine, index: int, case: Case, params: dict[str, Any]) -> RequestOutput:
    return await engine.generate(case.prompt, max_tokens=case.max_tokens, ignore_eos=True, seed=SEED + index, **params)


async def cancelled_soon(engine: Engine, case: Case, rng: random.Random) -> None:
    """A request with a prompt like the case's, left after a random number of deltas."""
    patience = rng.randint(0, 8)
    prompt = case.prompt[: rng.randint(1, len(case.prompt))]
    async with engine.stream(prompt, max_tokens=100, ignore_eos=True) as stream:
        async for _ in stream:
            patience -= 1
            if patience < 0:
                break


def check_setting(setting: Setting, core: EngineCore) -> None:
    """The setting did what it is there for, and left nothing behind."""
    stats = core.stats()
    if setting.kv_sequences < 2:
        assert stats.preemptions > 0, "nothing was preempted: the KV cache is too large for this test"
    if setting.repeats > 1:
        assert stats.prefix_cache_hits > 0, "no prefix was found again"
    assert stats.running == stats.waiting == stats.blocked == 0
    assert stats.free_blocks == stats.num_blocks
    core.scheduler.check_integrity()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    reference: Callable[[str], Reference], family: str, setting: Setting, depth: int
) -> None:
    ref = reference(family)
    async with serving(ref, setting, depth) as (engine, core):
        outputs = await serve(engine, ref.cases, setting, random.Random(SEED), temperature=0.0, logprobs=TOP)
        check_setting(setting, core)
    for case, output in zip(ref.cases, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == case.token_ids
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        for position, line in enumerate(completion.logprobs):
            want = case.logprobs[position]
            assert set(want.topk(TOP).indices.tolist()) <= set(line)
            for token_id, found in line.items():
                assert abs(found.logprob - float(want[token_id])) < LOGPROB_TOLERANCE
                assert found.rank == 1 + int((want > want[token_id]).sum())


@pytest.mark.parametrize(("family", "depths"), [("llama3", (1, 2)), ("mistral", (1, 2)), ("qwen3", (1, 2, 4))])
async def test_seeded_sampling_gives_the_same_tokens_in_every_setting(
    reference: Callable[[str], Reference], family: str, depths: tuple[int, ...]
) -> None:
    ref = reference(family)
    found: dict[tuple[str, int], list[list[int]]] = {}
    for depth in depths:
        for name, setting in SETTINGS.items():
            async with serving(ref, setting, depth) as (engine, core):
                outputs = await serve(engine, ref.cases, setting, random.Random(SEED), **SAMPLING)
                check_setting(setting, core)
            found[name, depth] = [output.outputs[0].token_ids for output in outputs]
    alone = found["alone", 1]
    assert alone != [case.token_ids for case in ref.cases], "sampling was greedy"
    for key, tokens in found.items():
        assert tokens == alone, f"{key} gave other tokens than one request after the other"


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_device_computes_what_the_requests_need_and_nothing_more(
    reference: Callable[[str], Reference], depth: int
) -> None:
    ref = reference("qwen3")
    for setting in (SETTINGS["batched"], SETTINGS["chunked"], SETTINGS["prefix hits"]):
        async with serving(ref, setting, depth) as (engine, core):
            outputs: list[RequestOutput] = []
            for _ in range(setting.repeats):
                once = msgspec.structs.replace(setting, repeats=1)
                outputs += await serve(engine, ref.cases, once, random.Random(SEED), temperature=0.0)
            # The last token of each is sampled and never computed.
            needed = sum(
                len(output.prompt_token_ids) - output.num_cached_tokens + len(output.outputs[0].token_ids) - 1
                for output in outputs
            )
            assert sum(output.num_cached_tokens for output in outputs) > 0, "equal prompts share a prefix"
            assert core.executor.stats.num_computed_tokens == needed


@pytest.mark.parametrize(("dtype", "mean_tolerance"), [("bfloat16", 0.15), ("float16", 0.02)])
@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3"])
async def test_log_probabilities_in_half_precision_stay_near_those_of_float32(
    reference: Callable[[str], Reference], family: str, dtype: str, mean_tolerance: float
) -> None:
    """Within what 8 or 11 bits give on these models: the mean error is small and no wrong layer hides behind it."""
    ref = reference(family)
    errors = []
    async with Engine(str(ref.folder), dtype=dtype, num_threads=1, show_progress=False) as engine:
        for case in ref.cases:
            out = await engine.generate(case.prompt, max_tokens=1, temperature=0.0, logprobs=TOP)
            line = (out.outputs[0].logprobs or [{}])[0]
            errors += [abs(found.logprob - float(case.logprobs[0][token])) for token, found in line.items()]
    assert sum(errors) / len(errors) < mean_tolerance
