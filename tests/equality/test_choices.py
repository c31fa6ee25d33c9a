"""Several choices of one prompt on real weights, and what is drawn when there are many.

A choice is what the model's logits (transformers') and the noise of its own draws make it, in every setting: beside any
number of other choices, and of other requests. The first tokens of thousands of choices are distributed as
transformers' warpers say.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checkpoints import NUM_SPECIAL, make_checkpoint
from equality.conftest import MAX_MODEL_LEN, SEED, VOCAB_SIZE, Counted, Oracle, Reference
from equality.test_equality import Setting, check_setting, serving
from transformers.generation import logits_process as theirs

from aioengine import Engine, LogitsRow, RequestOutput
from aioengine.sampler.blocks import BLOCK, Scratch
from aioengine.sampler.noise import gumbel, noise_keys

LOGPROB_TOLERANCE = 1e-3
NUM_CHOICES = 8
NUM_TOKENS = 20
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 61)
BOUNDARY_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 49)
"""Around the ends of blocks of 16."""

SETTINGS = {
    "alone": Setting(one_by_one=True),
    "batched": Setting(),
    "chunked": Setting(budget=23),
    "prefix hits": Setting(repeats=2, kv_sequences=40),
    "preempted": Setting(kv_sequences=1.3),
    "all at once": Setting(budget=23, kv_sequences=1.3, repeats=2),
}
RUNS = [
    *(("qwen3", name, depth) for name in SETTINGS for depth in (1, 2)),
    *(("qwen3", name, 4) for name in ("alone", "all at once")),
    *(("mistral", name, 2) for name in ("alone", "all at once")),
]
"""(family, setting, depth)"""


class Rules(NamedTuple):
    """What is asked of the sampling, and transformers' rules for the same, in the engine's order."""

    params: dict[str, Any]
    chain: list[theirs.LogitsProcessor]


def make_rules(num_prompt_tokens: int) -> list[Rules]:
    filters = {"temperature": 1.3, "min_p": 0.001, "top_k": 60, "top_p": 0.97}
    return [
        Rules({"temperature": 0.9}, [theirs.TemperatureLogitsWarper(0.9)]),
        Rules(filters, warpers(**filters)),
        Rules(
            {"repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.6, **filters},
            [
                theirs.RepetitionPenaltyLogitsProcessor(1.4),
                Counted(num_prompt_tokens, presence=1.0, frequency=0.6),
                *warpers(**filters),
            ],
        ),
    ]


def warpers(
    *, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> list[theirs.LogitsProcessor]:
    """transformers' filters, in the order of the engine's."""
    return [
        *([theirs.TemperatureLogitsWarper(temperature)] if temperature != 1 else []),
        *([theirs.MinPLogitsWarper(min_p)] if min_p else []),
        *([theirs.TopKLogitsWarper(top_k)] if top_k else []),
        *([theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []),
    ]


class Case(NamedTuple):
    """A request, to be made for two choices and for many."""

    prompt: list[int]
    seed: int
    rules: Rules

    def params(self, n: int) -> dict[str, Any]:
        return {"n": n, "seed": self.seed, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0}


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(count)]


def make_cases() -> list[Case]:
    rng = random.Random(SEED)
    shared = random_ids(rng, 40)
    cases = []
    for number, length in enumerate(PROMPT_LENGTHS):
        prompt = [*shared[: length - 2], *random_ids(rng, length - len(shared[: length - 2]))]
        rules = make_rules(length)
        cases.append(Case(prompt, SEED + number, rules[number % len(rules)]))
    return cases


def noise(seed: int, choice: int, num_tokens: int) -> torch.Tensor:
    """float32 [num_tokens, vocab]: what decides a choice's draws beside the logits."""
    positions = np.arange(num_tokens, dtype=np.int32)
    keys = noise_keys(np.full(num_tokens, seed, np.int64), np.full(num_tokens, choice, np.int32), positions)
    num_blocks = -(-VOCAB_SIZE // BLOCK)
    lines = torch.arange(num_tokens).repeat_interleave(num_blocks)
    values = gumbel(keys.rows(lines), torch.arange(num_blocks).repeat(num_tokens), Scratch())
    return values.view(num_tokens, -1)[:, :VOCAB_SIZE].clone()


# Serving


class Served(NamedTuple):
    """What came of one case."""

    many: RequestOutput
    two: RequestOutput


class Runs:
    """What the engine made of all cases, by (family, setting, depth); each run is made once."""

    def __init__(self, root: Path) -> None:
        self.cases = make_cases()
        self._root = root
        self._checkpoints: dict[str, tuple[Path, Oracle]] = {}
        self._logits: dict[tuple[str | int, ...], torch.Tensor] = {}
        self._rounds: dict[tuple[str, str, int], list[list[Served]]] = {}

    def folder(self, family: str) -> Path:
        return self._checkpoint(family)[0]

    def oracle(self, family: str) -> Oracle:
        return self._checkpoint(family)[1]

    def _checkpoint(self, family: str) -> tuple[Path, Oracle]:
        if family not in self._checkpoints:
            folder = make_checkpoint(self._root / family, family)
            self._checkpoints[family] = (folder, Oracle(folder))
        return self._checkpoints[family]

    def logits(self, family: str, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocab]: those that each of the output tokens is drawn from, by transformers."""
        key = (family, *prompt, *token_ids)
        if key not in self._logits:
            self._logits[key] = self.oracle(family).logits([*prompt, *token_ids])[len(prompt) - 1 : -1]
        return self._logits[key]

    async def rounds(self, family: str, name: str, depth: int) -> list[list[Served]]:
        key = (family, name, depth)
        if key not in self._rounds:
            setting = SETTINGS[name]
            async with serving(Reference(self.folder(family), []), setting, depth) as (engine, core):
                rng = random.Random(SEED)
                rounds = [await serve(engine, self.cases, setting, rng) for _ in range(setting.repeats)]
                check_setting(setting, core)
            self._rounds[key] = rounds
        return self._rounds[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("choices"))


async def serve(engine: Engine, cases: list[Case], setting: Setting, rng: random.Random) -> list[Served]:
    """Serve all cases: alone, one after the other; or all at once, in any order."""
    asked = [(place, n) for place in range(len(cases)) for n in (NUM_CHOICES, 2)]
    rng.shuffle(asked)

    async def ask(place: int, n: int) -> RequestOutput:
        case = cases[place]
        return await engine.generate(case.prompt, **case.params(n), **case.rules.params)

    if setting.one_by_one:
        outputs = {key: await ask(*key) for key in asked}
    else:
        async with asyncio.TaskGroup() as group:
            tasks = {key: group.create_task(ask(*key)) for key in asked}
        outputs = {key: task.result() for key, task in tasks.items()}
    return [Served(many=outputs[place, NUM_CHOICES], two=outputs[place, 2]) for place in range(len(cases))]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


# What a choice is


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
async def test_each_choice_is_made_by_transformers_logits_and_its_own_noise(runs: Runs, family: str) -> None:
    [round_] = await runs.rounds(family, "alone", 2)
    for case, served in zip(runs.cases, round_, strict=True):
        assert len({tuple(ids) for ids in tokens_of(served.many)}) == NUM_CHOICES, "two choices are alike"
        chain = theirs.LogitsProcessorList(case.rules.chain)
        for choice, ids in enumerate(tokens_of(served.many)):
            assert len(ids) == NUM_TOKENS
            logits = runs.logits(family, case.prompt, ids)
            scores = torch.stack([
                chain(torch.tensor([[*case.prompt, *ids[:place]]]), line[None])[0]
                for place, line in enumerate(logits)
            ])  # fmt: skip
            assert (scores + noise(case.seed, choice, NUM_TOKENS)).argmax(-1).tolist() == ids


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_choices_are_the_same_in_every_setting_and_beside_any_number_of_others(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    [alone] = await runs.rounds(family, "alone", 2)
    for round_ in await runs.rounds(family, setting, depth):
        for served, wanted in zip(round_, alone, strict=True):
            assert tokens_of(served.many) == tokens_of(wanted.many)
            assert tokens_of(served.two) == tokens_of(wanted.many)[:2]
            assert [completion.index for completion in served.many.outputs] == list(range(NUM_CHOICES))


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_each_choice_reads_its_own_tokens_and_the_shared_prompt(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    """Its log-probabilities are transformers': no other choice has written into its blocks."""
    for round_ in await runs.rounds(family, setting, depth):
        for case, served in zip(runs.cases, round_, strict=True):
            for completion in (*served.many.outputs, *served.two.outputs):
                logits = runs.logits(family, case.prompt, completion.token_ids)
                wanted = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                lines = zip(completion.token_ids, completion.logprobs or [], strict=True)
                found = torch.tensor([line[token_id].logprob for token_id, line in lines])
                assert torch.allclose(found, wanted, atol=LOGPROB_TOLERANCE, rtol=0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cached", "uncached"])
async def test_choices_that_go_on_greedily_are_continuations_of_their_first_tokens(
    runs: Runs, enable_prefix_caching: bool, depth: int
) -> None:
    def go_on_greedily(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
        for line, row in zip(logits, rows, strict=True):
            if len(row.output_token_ids):
                line[torch.arange(VOCAB_SIZE) != line.argmax()] = -torch.inf

    rng, num_first = random.Random(SEED), []
    async with starting(runs.folder("qwen3"), depth, enable_prefix_caching=enable_prefix_caching) as engine:
        for length in BOUNDARY_LENGTHS:
            prompt = random_ids(rng, length)
            forked = await engine.generate(
                prompt,
                n=4,
                seed=length,
                temperature=1.5,
                max_tokens=18,
                ignore_eos=True,
                logits_processors=[go_on_greedily],
            )
            first = [ids[0] for ids in tokens_of(forked)]
            num_first.append(len(set(first)))
            alone = [
                await engine.generate([*prompt, token_id], temperature=0.0, max_tokens=17, ignore_eos=True)
                for token_id in first
            ]
            assert [ids[1:] for ids in tokens_of(forked)] == [output.outputs[0].token_ids for output in alone]
        assert sum(num_first) > 2 * len(num_first), "most choices begin alike"
        wanted = runs.oracle("qwen3").generate([*prompt, first[-1]], 17)
        assert alone[-1].outputs[0].token_ids == wanted.token_ids


# What choices cost


LIMITS: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 18},
    {"max_tokens": 9, "stop_token_ids": list(range(NUM_SPECIAL, 60))},
]


def starting(folder: Path, depth: int, **config: Any) -> Engine:
    return Engine(
        str(folder),
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=2**24,
        max_in_flight=depth,
        num_threads=1,
        show_progress=False,
        **config,
    )


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cached", "uncached"])
async def test_choices_cost_the_prompt_once_and_their_own_tokens(
    runs: Runs, enable_prefix_caching: bool, depth: int
) -> None:
    rng = random.Random(SEED)
    async with starting(runs.folder("qwen3"), depth, enable_prefix_caching=enable_prefix_caching) as engine:
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


@pytest.mark.parametrize("depth", [1, 2])
async def test_greedy_choices_cost_as_much_as_one(runs: Runs, depth: int) -> None:
    prompt = random_ids(random.Random(SEED), 33)
    async with starting(runs.folder("qwen3"), depth) as engine:
        output = await engine.generate(prompt, n=5, temperature=0.0, max_tokens=20, ignore_eos=True)
        assert engine._runtime is not None
        assert engine._runtime.core.executor.stats.num_computed_tokens == 33 + 20 - 1
    assert tokens_of(output) == [runs.oracle("qwen3").generate(prompt, 20).token_ids] * 5


# What is drawn

LEVEL = 1e-4
"""A right sampler fails a test of these with this probability, once and for all: the seeds are fixed."""
NUM_REQUESTS = 60
MANY_CHOICES = 128
MIN_EXPECTED = 8
"""Draws in a cell; tokens with fewer share one."""

BIASES = dict.fromkeys(range(10, 200, 7), 2.0)
PROMPT = random_ids(random.Random(SEED + 7), 21)
DISTRIBUTIONS: dict[str, Rules] = {
    "temperature 1": Rules({}, []),
    "cold": Rules({"temperature": 0.6}, warpers(temperature=0.6)),
    "hot": Rules({"temperature": 1.9}, warpers(temperature=1.9)),
    "top k": Rules({"temperature": 1.6, "top_k": 12}, warpers(temperature=1.6, top_k=12)),
    "top p": Rules({"temperature": 1.8, "top_p": 0.7}, warpers(temperature=1.8, top_p=0.7)),
    "min p": Rules({"temperature": 1.8, "min_p": 0.05}, warpers(temperature=1.8, min_p=0.05)),
    "top p of what min p leaves": Rules(
        {"temperature": 1.9, "min_p": 0.1, "top_p": 0.85}, warpers(temperature=1.9, min_p=0.1, top_p=0.85)
    ),
    "top p of what top k leaves": Rules(
        {"temperature": 1.9, "top_k": 20, "top_p": 0.85}, warpers(temperature=1.9, top_k=20, top_p=0.85)
    ),
    "penalties and biases": Rules(
        {"temperature": 1.5, "top_k": 50, "repetition_penalty": 1.8, "logit_bias": BIASES},
        [
            theirs.SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in BIASES.items()}),
            theirs.RepetitionPenaltyLogitsProcessor(1.8),
            *warpers(temperature=1.5, top_k=50),
        ],
    ),
}


def warped(oracle: Oracle, token_ids: list[int], chain: Sequence[theirs.LogitsProcessor]) -> torch.Tensor:
    """float64 [vocab]: the probability of each token after these."""
    scores = theirs.LogitsProcessorList(chain)(torch.tensor([token_ids]), oracle.logits(token_ids)[-1:])
    probabilities: torch.Tensor = scores[0].double().softmax(-1)
    return probabilities


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's chi-square test; 0 where something came that never may. Rare tokens share a cell."""
    if int(counts[probabilities == 0].sum()):
        return 0.0
    expected = probabilities * counts.sum()
    is_rare = expected < MIN_EXPECTED
    cells = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    found = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]]).double()
    cells, found = cells[cells > 0], found[cells > 0]
    assert len(cells) > 4, "too few cells to see anything"
    chi_square = ((found - cells) ** 2 / cells).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), chi_square / 2))


def count(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.bincount(torch.tensor(token_ids), minlength=VOCAB_SIZE)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
async def test_first_tokens_of_many_choices_are_distributed_as_transformers_says(runs: Runs, name: str) -> None:
    rules = DISTRIBUTIONS[name]
    async with starting(runs.folder("qwen3"), 2) as engine:
        outputs = await asyncio.gather(
            *(
                engine.generate(PROMPT, n=MANY_CHOICES, seed=seed, max_tokens=1, **rules.params)
                for seed in range(NUM_REQUESTS)
            )
        )
    counts = count([ids[0] for output in outputs for ids in tokens_of(output)])
    assert int(counts.sum()) == NUM_REQUESTS * MANY_CHOICES
    probabilities = warped(runs.oracle("qwen3"), PROMPT, rules.chain)
    assert p_value(counts, probabilities) > LEVEL
    # The test would notice a higher temperature, and the lack of any rule.
    assert p_value(counts, (probabilities.log() / 1.3).softmax(-1)) < LEVEL
    for place in range(len(rules.chain)):
        lacking = [*rules.chain[:place], *rules.chain[place + 1 :]]
        assert p_value(counts, warped(runs.oracle("qwen3"), PROMPT, lacking)) < LEVEL, f"rule {place} changes nothing"


async def test_first_tokens_of_many_seeds_are_distributed_as_transformers_says(runs: Runs) -> None:
    rules = DISTRIBUTIONS["top p of what top k leaves"]
    async with starting(runs.folder("qwen3"), 2) as engine:
        outputs = await asyncio.gather(
            *(engine.generate(PROMPT, seed=seed, max_tokens=1, **rules.params) for seed in range(-400, 400))
        )
    counts = count([tokens_of(output)[0][0] for output in outputs])
    assert p_value(counts, warped(runs.oracle("qwen3"), PROMPT, rules.chain)) > LEVEL


async def test_choices_of_a_request_are_drawn_independently(runs: Runs) -> None:
    """The likeliest tokens of neighbouring choices come together as often as chance would have it."""
    async with starting(runs.folder("qwen3"), 2) as engine:
        outputs = await asyncio.gather(
            *(
                engine.generate(PROMPT, n=MANY_CHOICES, seed=seed, max_tokens=1, temperature=1.5, top_k=4)
                for seed in range(1000, 1000 + NUM_REQUESTS)
            )
        )
    probabilities = warped(runs.oracle("qwen3"), PROMPT, warpers(temperature=1.5, top_k=4))
    likeliest = probabilities.topk(4).indices.tolist()
    pairs = [
        4 * likeliest.index(one[0]) + likeliest.index(other[0])
        for output in outputs
        for one, other in itertools.pairwise(tokens_of(output))
    ]
    of_four = probabilities[likeliest]
    assert p_value(torch.bincount(torch.tensor(pairs), minlength=16), torch.outer(of_four, of_four).flatten()) > LEVEL


@pytest.mark.parametrize("penalties", [(1.5, 0.0), (0.0, 1.2), (-1.0, -0.5)])
async def test_tokens_after_the_first_are_distributed_as_the_penalties_on_it_say(
    runs: Runs, penalties: tuple[float, float]
) -> None:
    oracle = runs.oracle("qwen3")
    presence, frequency = penalties
    chain = [Counted(len(PROMPT), presence=presence, frequency=frequency), *warpers(temperature=1.6)]
    # The likeliest token after the prompt and itself twice, so that both penalties meet it there.
    repeated = likely_again(oracle)
    said = [repeated, repeated]

    def say(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
        for line, row in zip(logits, rows, strict=True):
            if len(row.output_token_ids) < len(said):
                line[torch.arange(VOCAB_SIZE) != said[len(row.output_token_ids)]] = -torch.inf

    async with starting(runs.folder("qwen3"), 2) as engine:
        outputs = await asyncio.gather(
            *(
                engine.generate(
                    PROMPT,
                    n=MANY_CHOICES,
                    seed=seed,
                    max_tokens=3,
                    ignore_eos=True,
                    temperature=1.6,
                    presence_penalty=presence,
                    frequency_penalty=frequency,
                    logits_processors=[say],
                )
                for seed in range(8)
            )
        )
    ids = [ids for output in outputs for ids in tokens_of(output)]
    assert all(line[:2] == said for line in ids)
    counts = count([line[2] for line in ids])
    assert p_value(counts, warped(oracle, [*PROMPT, *said], chain)) > LEVEL
    assert p_value(counts, warped(oracle, [*PROMPT, *said], chain[1:])) < LEVEL


def likely_again(oracle: Oracle) -> int:
    """A token that is likely where it has come twice already."""
    chances = [
        float(warped(oracle, [*PROMPT, token_id, token_id], warpers(temperature=1.6))[token_id])
        for token_id in range(NUM_SPECIAL, VOCAB_SIZE)
    ]
    return NUM_SPECIAL + int(torch.tensor(chances).argmax())
