"""The engine against transformers on the same weights, in every way that requests can be batched, cut and interrupted.

Tokens are equal, greedy ones to transformers' and seeded ones to the engine's own when it serves them one by one; and
log-probabilities are within 1e-3 of transformers'.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from checkpoints import FAMILIES, cached_checkpoints
from equality.conftest import SEED, Oracle, Setting, random_ids, serving, starting
from equality.conftest import SETTINGS as OF_ALL
from nightly import few, nightly

from aioengine import Engine, RequestOutput

LOGPROB_TOLERANCE = 1e-3
TOP = 5
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01}


class Case(NamedTuple):
    """One prompt and what has to follow it."""

    prompt: list[int]
    max_tokens: int
    token_ids: list[int]
    logprobs: torch.Tensor
    """float32 [max_tokens, vocab]: of each position's next token."""


Reference = tuple[Path, list[Case]]


def make_prompts() -> list[tuple[list[int], int]]:
    """(prompt, max_tokens) of odd lengths around block and chunk boundaries; three share 37 tokens, two are equal."""
    rng = random.Random(SEED)
    shared = random_ids(rng, 37)
    prompts = [random_ids(rng, n) for n in (1, 7, 16, 31, 123)] + [shared + random_ids(rng, n) for n in (3, 11, 60)]
    prompts.append(list(prompts[4]))
    return [(prompt, rng.randint(24, 56)) for prompt in prompts]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Family → its checkpoint and what transformers makes of the prompts; each is made once."""
    checkpoint = cached_checkpoints(tmp_path_factory.mktemp("equality"))
    made: dict[str, Reference] = {}

    def make(family: str) -> Reference:
        if family not in made:
            folder = checkpoint(family)
            oracle, cases = Oracle(folder), []
            for prompt, max_tokens in make_prompts():
                wanted = oracle.generate(prompt, max_tokens)
                cases.append(Case(prompt, max_tokens, wanted.token_ids, wanted.logits.log_softmax(-1)))
            made[family] = folder, cases
        return made[family]

    return make


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


SETTINGS = {**OF_ALL, "aborts beside": Setting(aborts=True)}
RUNS = few(
    [*(("qwen3", name, 2) for name in SETTINGS), ("llama3", "all at once", 1), ("mistral", "all at once", 1)],
    of=itertools.product(FAMILIES, SETTINGS, (1, 2)),
)
"""(family, setting, depth)"""


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    reference: Callable[[str], Reference], family: str, setting: str, depth: int
) -> None:
    folder, cases = reference(family)
    async with serving(folder, SETTINGS[setting], depth) as (engine, _):
        outputs = await serve(engine, cases, SETTINGS[setting], random.Random(SEED), temperature=0.0, logprobs=TOP)
    for case, output in zip(cases, outputs, strict=True):
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


@pytest.mark.parametrize(
    ("family", "depths"), [("qwen3", (2,)), *nightly(("llama3", (1, 2)), ("mistral", (1, 2)), ("qwen3", (1, 2, 4)))]
)
async def test_seeded_sampling_gives_the_same_tokens_in_every_setting(
    reference: Callable[[str], Reference], family: str, depths: tuple[int, ...]
) -> None:
    folder, cases = reference(family)
    found: dict[tuple[str, int], list[list[int]]] = {}
    for depth in depths:
        for name, setting in SETTINGS.items():
            async with serving(folder, setting, depth) as (engine, _):
                outputs = await serve(engine, cases, setting, random.Random(SEED), **SAMPLING)
            found[name, depth] = [output.outputs[0].token_ids for output in outputs]
    alone = found["alone", depths[0]]
    assert alone != [case.token_ids for case in cases], "sampling was greedy"
    for key, tokens in found.items():
        assert tokens == alone, f"{key} gave other tokens than one request after the other"


@pytest.mark.parametrize("depth", [*nightly(1), 2])
async def test_the_device_computes_what_the_requests_need_and_nothing_more(
    reference: Callable[[str], Reference], depth: int
) -> None:
    folder, cases = reference("qwen3")
    for setting in (SETTINGS["batched"], SETTINGS["chunked"], SETTINGS["prefix hits"]):
        async with serving(folder, setting, depth) as (engine, core):
            outputs: list[RequestOutput] = []
            for _ in range(setting.repeats):
                once = msgspec.structs.replace(setting, repeats=1)
                outputs += await serve(engine, cases, once, random.Random(SEED), temperature=0.0)
            # The last token of each is sampled and never computed.
            needed = sum(
                len(output.prompt_token_ids) - output.num_cached_tokens + len(output.outputs[0].token_ids) - 1
                for output in outputs
            )
            assert sum(output.num_cached_tokens for output in outputs) > 0, "equal prompts share a prefix"
            assert core.executor.stats.num_computed_tokens == needed


@pytest.mark.parametrize(("dtype", "mean_tolerance"), [("bfloat16", 0.15), ("float16", 0.02)])
@pytest.mark.parametrize("family", [*nightly("llama3", "mistral", "qwen2"), "qwen3"])
async def test_log_probabilities_in_half_precision_stay_near_those_of_float32(
    reference: Callable[[str], Reference], family: str, dtype: str, mean_tolerance: float
) -> None:
    """Within what 8 or 11 bits give on these models: the mean error is small and no wrong layer hides behind it."""
    folder, cases = reference(family)
    errors = []
    async with starting(folder, dtype=dtype) as engine:
        for case in cases:
            out = await engine.generate(case.prompt, max_tokens=1, temperature=0.0, logprobs=TOP)
            line = (out.outputs[0].logprobs or [{}])[0]
            errors += [abs(found.logprob - float(case.logprobs[0][token])) for token, found in line.items()]
    assert sum(errors) / len(errors) < mean_tolerance
