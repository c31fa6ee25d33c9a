"""Several choices of one prompt on real weights.

A choice is what the model's logits (transformers') and the noise of its own draws make it, in every setting: beside any
number of other choices, and of other requests. How draws are distributed is the noise's: tests/sampler.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checkpoints import NUM_SPECIAL
from equality.conftest import (
    SEED,
    VOCAB_SIZE,
    Case,
    Cases,
    Counted,
    Oracle,
    Runs,
    check_lines,
    random_ids,
    starting,
    tokens_of,
)
from nightly import few, nightly
from sampler.batch import make_rows
from transformers.generation import logits_process as theirs

from aioengine.kernels.torch.draws import gumbel, noise_keys

NUM_CHOICES = 6
NUM_TOKENS = 20
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 61)
BIASES = dict.fromkeys(range(10, 200, 7), 2.0)
BOUNDARY_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 49)
"""Around the ends of blocks of 16."""
RUNS = few(
    (("qwen3", name, 2) for name in ("prefix hits", "preempted")),
    of=[
        ("qwen3", "alone", 2),
        *(("qwen3", name, depth) for name in ("batched", "chunked", "all at once") for depth in (1, 2, 4)),
        *((family, name, 2) for family in ("llama3", "mistral") for name in ("alone", "all at once")),
    ],
)
"""(family, setting, depth)"""


class Rules(NamedTuple):
    """What is asked of the sampling, and transformers' rules for the same, in the engine's order."""

    params: dict[str, Any]
    chain: list[theirs.LogitsProcessor]


def make_rules(num_prompt_tokens: int) -> list[Rules]:
    filters = {"temperature": 1.9, "min_p": 0.08, "top_k": 12, "top_p": 0.93}
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.6}
    of_penalties = [theirs.RepetitionPenaltyLogitsProcessor(1.4), Counted(num_prompt_tokens, presence=1, frequency=0.6)]
    biases = theirs.SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in BIASES.items()})
    return [
        filtered(temperature=0.6),
        filtered(**filters),
        Rules({**penalties, **filters}, [*of_penalties, *filtered(**filters).chain]),
        filtered(),
        filtered(temperature=1.6, top_k=12),
        filtered(temperature=1.8, top_p=0.7),
        filtered(temperature=1.8, min_p=0.05),
        filtered(temperature=1.9, min_p=0.1, top_p=0.85),
        filtered(temperature=1.9, top_k=20, top_p=0.85),
        Rules(
            {"temperature": 1.5, "top_k": 50, "repetition_penalty": 1.8, "logit_bias": BIASES},
            [biases, theirs.RepetitionPenaltyLogitsProcessor(1.8), *filtered(temperature=1.5, top_k=50).chain],
        ),
    ]


def filtered(**params: Any) -> Rules:
    """Of the filters alone, in the order of the engine's."""
    warpers = {
        "temperature": theirs.TemperatureLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
        "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper,
    }
    return Rules(params, [warper(params[name]) for name, warper in warpers.items() if name in params])


def make_cases(oracle: Oracle) -> Cases:
    """By (rules, n): each request is made for many choices and for two."""
    rng = random.Random(SEED)
    shared = random_ids(rng, 40)
    cases: Cases = {}
    for number in range(len(make_rules(0))):
        length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
        prompt = [*shared[: length - 2], *random_ids(rng, length - len(shared[: length - 2]))]
        params = {**make_rules(length)[number].params, "seed": SEED + number, "max_tokens": NUM_TOKENS, "logprobs": 0}
        for n in (NUM_CHOICES, 2):
            cases[number, n] = Case(prompt, {"temperature": 1.0, **params, "n": n})
    return cases


def noise(seed: int, choice: int, num_tokens: int) -> torch.Tensor:
    """float32 [num_tokens, vocab]: what decides a choice's draws beside the logits."""
    keys = noise_keys(make_rows(num_tokens, seed=seed, choice=choice, positions=np.arange(num_tokens)))
    return gumbel(keys[:, None], torch.arange(VOCAB_SIZE))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("choices"), make_cases)


# What a choice is


def drawn(
    chain: list[theirs.LogitsProcessor], case: Case, logits: list[torch.Tensor], choices: list[list[int]]
) -> list[list[int]]:
    """What the noise of each choice takes where the model gives these logits, under the rules."""
    rules, taken = theirs.LogitsProcessorList(chain), []
    for choice, (ids, rows) in enumerate(zip(choices, logits, strict=True)):
        scores = [rules(torch.tensor([[*case.prompt, *ids[:place]]]), row[None])[0] for place, row in enumerate(rows)]
        taken.append((torch.stack(scores) + noise(case.params["seed"], choice, NUM_TOKENS)).argmax(-1).tolist())
    return taken


@pytest.mark.parametrize("family", ["qwen3", *nightly("mistral")])
async def test_each_choice_is_made_by_transformers_logits_and_its_own_noise(runs: Runs, family: str) -> None:
    [round_] = await runs.rounds(family, "alone", 2)
    for (number, n), case in runs.checkpoint(family).cases.items():
        if n != NUM_CHOICES:
            continue
        choices = tokens_of(round_.outputs[number, n])
        assert len({tuple(ids) for ids in choices}) == NUM_CHOICES, "two choices are alike"
        logits = [runs.logits(family, case.prompt, ids) for ids in choices]

        chain = make_rules(len(case.prompt))[number].chain
        assert drawn(chain, case, logits, choices) == choices
        for place, rule in enumerate(chain):
            without = [*chain[:place], *chain[place + 1 :]]
            assert drawn(without, case, logits, choices) != choices, f"{rule} changes nothing"


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_choices_are_the_same_in_every_setting_and_beside_any_number_of_others(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    [alone] = await runs.rounds(family, "alone", 2)
    for round_ in await runs.rounds(family, setting, depth):
        for (number, n), output in round_.outputs.items():
            assert tokens_of(output) == tokens_of(alone.outputs[number, NUM_CHOICES])[:n]
            assert [completion.index for completion in output.outputs] == list(range(n))


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_each_choice_reads_its_own_tokens_and_the_shared_prompt(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    """Its log-probabilities are transformers': no other choice has written into its blocks."""
    for case, output in await runs.outputs(family, setting, depth):
        for completion in output.outputs:
            logits = runs.logits(family, case.prompt, completion.token_ids)
            check_lines(completion.logprobs or [], completion.token_ids, logits.log_softmax(-1), num_top=0)


# What choices cost


LIMITS: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 18},
    {"max_tokens": 9, "stop_token_ids": list(range(NUM_SPECIAL, 60))},
]


@pytest.mark.parametrize(
    ("enable_prefix_caching", "depth"),
    [(True, 2), *nightly((False, 4), (True, 1), (False, 1), (False, 2), (True, 4))],
)
async def test_choices_cost_the_prompt_once_and_their_own_tokens(
    runs: Runs, enable_prefix_caching: bool, depth: int
) -> None:
    rng = random.Random(SEED)
    async with starting(runs.checkpoint("qwen3").folder, depth, enable_prefix_caching=enable_prefix_caching) as engine:
        assert engine._runtime is not None
        core = engine._runtime.core
        for length, n, params in itertools.product(BOUNDARY_LENGTHS, (2, 5), LIMITS):
            before = core.executor.stats.num_computed_tokens
            output = await engine.generate(
                random_ids(rng, length), n=n, seed=rng.randrange(999), ignore_eos=True, **params
            )
            await engine.pause()  # until the device is idle: a stop may have left a step in flight
            await engine.resume()
            computed = core.executor.stats.num_computed_tokens - before
            assert output.num_cached_tokens == 0
            needed = length + sum(map(len, tokens_of(output))) - n  # the last token of each is never computed
            # A stop is seen when the steps behind it are launched already; a length is known beforehand.
            num_stopped = sum(completion.finish_reason == "stop" for completion in output.outputs)
            assert needed <= computed <= needed + num_stopped * (depth - 1)
        stats = core.stats()
        assert stats.preemptions == 0
        assert stats.free_blocks == stats.num_blocks


@pytest.mark.parametrize("depth", [*nightly(1), 2])
async def test_greedy_choices_cost_as_much_as_one(runs: Runs, depth: int) -> None:
    prompt = random_ids(random.Random(SEED), 33)
    async with starting(runs.checkpoint("qwen3").folder, depth) as engine:
        output = await engine.generate(prompt, n=5, temperature=0.0, max_tokens=20, ignore_eos=True)
        assert engine._runtime is not None
        assert engine._runtime.core.executor.stats.num_computed_tokens == 33 + 20 - 1
    assert tokens_of(output) == [runs.checkpoint("qwen3").oracle.generate(prompt, 20).token_ids] * 5
