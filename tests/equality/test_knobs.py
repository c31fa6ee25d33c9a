"""What a request may ask of its sampling, through the whole engine, against transformers on the same weights.

Each rule alone, several together, and rules of the caller's own: greedy tokens are those of transformers' ``generate``
with the same rules. Log-probabilities, of outputs and of prompts, are those of its logits before any rule. All of it
holds however the requests are batched, cut, interrupted and cached.
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import EOS, FAMILIES, NUM_SPECIAL, OTHERS
from equality.conftest import (
    LOGPROB_TOLERANCE,
    SEED,
    SETTINGS,
    Case,
    Cases,
    Counted,
    Oracle,
    Runs,
    character_of,
    check_lines,
    random_ids,
    tokens_of,
)
from nightly import few, nightly
from transformers.generation import logits_process as theirs

from aioengine import LogitsRow

SAMPLING = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01}
BLOCK_SIZE = 16
NUM_OTHERS = 20
MIN_MARGIN = 1e-3
"""So far must each token lead in transformers' eyes, lest rounding decides."""

# What is asked, and what has to come


class Rules:
    """The cases of one checkpoint, by name; each rule changes what comes, and each of several together does."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.cases: Cases = {}
        self._rng = random.Random(SEED)
        self._shared = self.ids(37)

    def ids(self, count: int) -> list[int]:
        return random_ids(self._rng, count)

    def prompt(self, count: int) -> list[int]:
        """One of that length; they begin alike."""
        return self._shared[: count - 3] + self.ids(count - len(self._shared[: count - 3]))

    def plain(self, prompt: list[int], max_tokens: int) -> list[int]:
        return self.oracle.generate(prompt, max_tokens).token_ids

    def add(self, name: str, prompt: list[int], max_tokens: int, params: dict[str, Any], **options: Any) -> None:
        """A case whose ``options`` for transformers mean what ``params`` mean."""
        wanted = self.oracle.generate(prompt, max_tokens, **options)
        assert wanted.token_ids != wanted.logits.argmax(-1).tolist(), f"{name} changes nothing: choose another prompt"
        assert wanted.margin > MIN_MARGIN, f"{name} hangs by a hair: choose another prompt"
        self.cases[name] = Case(prompt, {"max_tokens": max_tokens, **params}, wanted)

    def wanted(self, name: str) -> list[int]:
        wanted = self.cases[name].wanted
        assert wanted is not None
        return wanted.token_ids


class OutputOnly(theirs.LogitsProcessor):
    """A rule of transformers' that sees the output alone."""

    def __init__(self, rule: theirs.LogitsProcessor, num_prompt_tokens: int) -> None:
        self._rule = rule
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self._rule(input_ids[:, self._num_prompt_tokens :], scores)
        return changed


class Squeezed(theirs.LogitsProcessor):
    """A rule that is not built in: of what a logit has above ``limit`` a third stays."""

    limit = 2.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(scores > self.limit, self.limit + (scores - self.limit) / 3, scores)


def squeeze(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
    """`Squeezed` for the engine."""
    logits.copy_(torch.where(logits > Squeezed.limit, Squeezed.limit + (logits - Squeezed.limit) / 3, logits))


def allow(ids: list[int]) -> theirs.LogitsProcessor:
    return theirs.PrefixConstrainedLogitsProcessor(lambda batch, sent: ids, num_beams=1)


def written(words: list[list[int]]) -> list[str]:
    return ["".join(map(character_of, word)) for word in words]


def forbid(words: list[list[int]], prompt: list[int]) -> theirs.LogitsProcessor:
    """Forbid words in the output, behind a space, too."""
    space = NUM_SPECIAL
    spellings = [spelling for word in words for spelling in (word, [space, *word])]
    return OutputOnly(theirs.NoBadWordsLogitsProcessor(spellings), len(prompt))


def make_cases(oracle: Oracle) -> Cases:
    rules = Rules(oracle)
    for penalty, length in ((1.7, 33), (0.8, 16)):
        params = {"repetition_penalty": penalty}
        rules.add(f"repetition penalty {penalty}", rules.prompt(length), 30, params, **params)
    add_biases(rules)
    add_bad_words(rules)
    allowed, prompt = sorted(rules.ids(60)), rules.prompt(40)
    rules.add("allowed ids", prompt, 30, {"allowed_token_ids": allowed}, logits_processor=[allow(allowed)])
    add_min_tokens(rules)
    add_counting_penalties(rules)
    add_combinations(rules)
    add_scored(rules)
    add_repetition_below_zero(rules)
    return rules.cases


def add_repetition_below_zero(rules: Rules) -> None:
    """Of tokens whose logits are all negative, which the penalty multiplies instead of dividing."""
    name, prompt = "repetition penalty below zero", rules.prompt(26)
    allowed = sorted({*rules.ids(12), *prompt[:8]})
    params = {"repetition_penalty": 1.15, "allowed_token_ids": allowed, "logit_bias": dict.fromkeys(allowed, -30.0)}
    chain = [allow(allowed), biased(params["logit_bias"]), theirs.RepetitionPenaltyLogitsProcessor(1.15)]
    rules.add(name, prompt, 30, params, logits_processor=chain)
    assert not comes_by(chain[:1], rules.cases[name])


def biased(biases: dict[int, float]) -> theirs.LogitsProcessor:
    return theirs.SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in biases.items()})


def add_biases(rules: Rules) -> None:
    prompt = rules.prompt(31)
    comes = rules.plain(prompt, 32)
    biases = {**dict.fromkeys(rules.ids(12), 4.5), comes[3]: -100.0, comes[9]: -7.25}
    rules.add("bias", prompt, 32, {"logit_bias": biases}, logits_processor=[biased(biases)])


def add_bad_words(rules: Rules) -> None:
    prompt = rules.prompt(20)
    comes = rules.plain(prompt, 28)
    words = [comes[4:6], comes[9:12], comes[20:21]]
    rules.add("bad words", prompt, 28, {"bad_words": written(words)}, logits_processor=[forbid(words, prompt)])
    # The prompt ends with the first part of a bad word: that is no beginning of one, and the second part may follow.
    name, prompt, words = "bad words that the prompt begins", [*prompt, *comes[:5]], [comes[4:6], comes[7:9]]
    rules.add(name, prompt, 30, {"bad_words": written(words)}, logits_processor=[forbid(words, prompt)])
    assert rules.wanted(name)[0] == comes[5]


def add_min_tokens(rules: Rules) -> None:
    name, prompt, minimum, limit = "stop tokens that come too early", rules.prompt(47), 11, 30
    stops = sorted({*rules.plain(prompt, 6)[2:6], *rules.ids(40)})
    params: dict[str, Any] = {"min_tokens": minimum, "stop_token_ids": stops}
    rules.add(name, prompt, limit, params, min_new_tokens=minimum, eos_token_id=stops)
    assert minimum < len(rules.wanted(name)) < limit, "the minimum or the limit decides, not a stop token"
    name, minimum, biases = "an EOS that comes too early", 17, {EOS: 100.0}
    params = {"min_tokens": minimum, "logit_bias": biases, "ignore_eos": False}
    options = {"min_new_tokens": minimum, "eos_token_id": EOS, "sequence_bias": {(EOS,): 100.0}}
    rules.add(name, rules.prompt(17), limit, params, **options)
    assert rules.wanted(name).index(EOS) == minimum


def add_counting_penalties(rules: Rules) -> None:
    for presence, frequency in ((1.5, 0.0), (0.0, 1.25), (-0.75, -0.5), (2.0, -0.25)):
        # Few tokens, so that they come again and again.
        name, allowed, prompt = f"presence {presence}, frequency {frequency}", sorted(rules.ids(8)), rules.prompt(29)
        allowed += prompt[:4]
        params = {"presence_penalty": presence, "frequency_penalty": frequency, "allowed_token_ids": allowed}
        chain = [allow(allowed), Counted(len(prompt), presence=presence, frequency=frequency)]
        rules.add(name, prompt, 36, params, logits_processor=chain)
        assert not comes_by(chain[:1], rules.cases[name])


def add_combinations(rules: Rules) -> None:
    """All rules together, in the documented order, which matters, as does each of them."""
    prompt, minimum = rules.prompt(50), 20
    allowed = sorted({*rules.ids(30), *prompt[:20]})
    biases = {**dict.fromkeys(allowed[::5], 2.5), **dict.fromkeys(allowed[1::5], -3.0)}
    stops = allowed[1::12]
    in_order = {
        "allowed_token_ids": (allowed, allow(allowed)),
        "min_tokens": (minimum, theirs.MinNewTokensLengthLogitsProcessor(len(prompt), minimum, stops)),
        "logit_bias": (biases, biased(biases)),
        "logits_processors": ([squeeze], Squeezed()),
        "repetition_penalty": (1.2, theirs.RepetitionPenaltyLogitsProcessor(1.2)),
        "frequency_penalty": (0.8, Counted(len(prompt), frequency=0.8)),
        "presence_penalty": (0.9, Counted(len(prompt), presence=0.9)),
    }
    chain = [rule for _, rule in in_order.values()]
    comes = rules.oracle.generate(prompt, 12, logits_processor=chain).token_ids
    words = [comes[1:3], comes[6:7]]
    in_order["bad_words"] = (written(words), forbid(words, prompt))
    chain.append(in_order["bad_words"][1])
    params = {name: value for name, (value, _) in in_order.items()}
    params["stop_token_ids"] = stops
    rules.add("all rules together", prompt, 40, params, logits_processor=chain, eos_token_id=stops)
    case, names = rules.cases["all rules together"], list(in_order)
    assert comes_by(chain, case)
    for place, name in enumerate(names):
        assert not comes_by([*chain[:place], *chain[place + 1 :]], case), f"{name} changes nothing"
    for one, other in (("logit_bias", "logits_processors"), ("logits_processors", "repetition_penalty")):
        swapped = list(chain)
        first, second = names.index(one), names.index(other)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        assert not comes_by(swapped, case), f"whether {one} comes before {other} makes no difference"


def comes_by(chain: list[theirs.LogitsProcessor], case: Case) -> bool:
    """Whether what is wanted of a case would come by these rules as well."""
    assert case.wanted is not None
    for place, (token_id, scores) in enumerate(zip(case.wanted.token_ids, case.wanted.logits, strict=True)):
        ids = torch.tensor([[*case.prompt, *case.wanted.token_ids[:place]]])
        changed = theirs.LogitsProcessorList(chain)(ids, scores[None])
        if int(changed.argmax()) != token_id:
            return False
    return True


def add_scored(rules: Rules) -> None:
    """Requests for log-probabilities of all kinds; the prompts are known to the cache, or come to be."""
    for name, prompt, params in (
        ("scored", rules.prompt(61), {"temperature": 0.0}),
        ("scored and sampled", rules.prompt(48), {"temperature": 1.0}),
        ("scored under rules", rules.prompt(17), {"temperature": 0.0, "repetition_penalty": 1.5, "top_k": 3}),
        ("a prompt of one token, scored", rules.ids(1), {"temperature": 1.2}),
    ):
        asked = {"prompt_logprobs": 4, "logprobs": 3, "logprob_token_ids": rules.ids(5), "seed": SEED}
        rules.cases[name] = Case(prompt, {"max_tokens": 30, **asked, **params})


# Beside them


def make_others(cases: Cases, rng: random.Random) -> list[dict[str, Any]]:
    """Requests of all kinds that run beside the cases, some with a case's prompt."""
    ids = partial(random_ids, rng)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
        {"n": 3, "repetition_penalty": 1.2, "logprobs": 4},
        {"allowed_token_ids": ids(10), "frequency_penalty": 0.5},
        {"logit_bias": dict.fromkeys(ids(20), 5.0), "presence_penalty": -1.0},
        {"logits_processors": [squeeze], "logprobs": 0, "logprob_token_ids": ids(25)},
        {"prompt_logprobs": 2},
        {"bad_words": written([ids(2), ids(3), ids(1)]), "min_tokens": 4, "stop_token_ids": ids(60)},
    ]
    return [
        {
            "prompt": rng.choice(list(cases.values())).prompt if rng.random() < 0.3 else ids(rng.randint(1, 60)),
            "max_tokens": rng.randint(5, 25),
            "seed": number,
            **kinds[number % len(kinds)],
        }
        for number in range(NUM_OTHERS)
    ]


# The tests

PLAIN_LENGTHS = (1, 7, 16, 31, 123)


def make_plain_cases(oracle: Oracle) -> Cases:
    """Prompts of odd lengths around block and chunk boundaries; three share 37 tokens, two are equal."""
    rng = random.Random(SEED)
    shared = random_ids(rng, 37)
    prompts = [*(random_ids(rng, n) for n in PLAIN_LENGTHS), *(shared + random_ids(rng, n) for n in (3, 11, 60))]
    cases: Cases = {}
    for index, prompt in enumerate([*prompts, prompts[4]]):
        params = {"max_tokens": rng.randint(24, 56), "seed": SEED + index}
        cases["greedy", index] = Case(prompt, params, oracle.generate(prompt, params["max_tokens"]))
        cases["sampled", index] = Case(prompt, {**params, **SAMPLING})
    return cases


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    return {
        "rules": Runs(tmp_path_factory.mktemp("rules"), make_cases, make_others),
        "plain": Runs(tmp_path_factory.mktemp("plain"), make_plain_cases),
    }


@pytest.fixture
def runs(runs_of: dict[str, Runs]) -> Runs:
    return runs_of["rules"]


RULES = few(
    [("qwen3", "preempted", 2)],
    of=[
        *(("qwen3", name, depth) for name in SETTINGS for depth in (1, 2)),
        *((family, name, 2) for family in ("llama3", "mistral") for name in ("alone", "all at once")),
        *(("qwen3", name, 4) for name in ("alone", "all at once")),
    ],
)
"""(family, setting, depth)"""
PLAIN = few(
    [("qwen3", "prefix hits", 2)],
    of=itertools.product((*FAMILIES, *OTHERS), SETTINGS, (1, 2)),
)
BOTH = [
    pytest.param(kind, *getattr(run, "values", run), marks=getattr(run, "marks", ()))
    for kind, some in (("rules", RULES), ("plain", PLAIN))
    for run in some
]
ONCE = ("gemma3",)
"""Whose layers are of two kinds, with ropes of their own."""
GREEDY = [
    pytest.param(*run.values, marks=() if run.values[1] in ONCE and run.values[2:] == ("all at once", 2) else run.marks)
    for run in BOTH
]


@pytest.mark.parametrize(("kind", "family", "setting", "depth"), GREEDY)
async def test_greedy_tokens_are_those_of_transformers(
    runs_of: dict[str, Runs], kind: str, family: str, setting: str, depth: int
) -> None:
    for case, output in await runs_of[kind].outputs(family, setting, depth):
        if case.wanted is not None:
            assert tokens_of(output) == [case.wanted.token_ids]


@pytest.mark.parametrize(("kind", "family", "setting", "depth"), BOTH)
async def test_sampled_tokens_are_the_same_in_every_setting(
    runs_of: dict[str, Runs], kind: str, family: str, setting: str, depth: int
) -> None:
    runs = runs_of[kind]
    [alone] = await runs.rounds(family, "alone", 2)
    cases = runs.checkpoint(family).cases
    sampled = [name for name, case in cases.items() if case.wanted is None]
    greedy = [[case.wanted.token_ids] for case in cases.values() if case.wanted is not None]
    assert not any(tokens_of(alone.outputs[name]) in greedy for name in sampled), "sampling was greedy"
    for round_ in await runs.rounds(family, setting, depth):
        for name in sampled:
            assert tokens_of(round_.outputs[name]) == tokens_of(alone.outputs[name])


@pytest.mark.parametrize(("kind", "family", "setting", "depth"), BOTH)
async def test_logprobs_and_ranks_are_those_of_the_models_logits_before_any_rule(
    runs_of: dict[str, Runs], kind: str, family: str, setting: str, depth: int
) -> None:
    runs = runs_of[kind]
    for case, output in await runs.outputs(family, setting, depth):
        [completion] = output.outputs
        assert completion.logprobs is not None
        logprobs = runs.logits(family, case.prompt, completion.token_ids).log_softmax(-1)
        asked = case.params.get("logprob_token_ids", ())
        check_lines(completion.logprobs, completion.token_ids, logprobs, asked=asked, num_top=2)
        total = float(logprobs.gather(1, torch.tensor(completion.token_ids)[:, None]).sum())
        assert completion.cumulative_logprob == pytest.approx(total, abs=10 * LOGPROB_TOLERANCE)


@pytest.mark.parametrize(("family", "setting", "depth"), RULES)
async def test_prompt_logprobs_are_whole_and_those_of_transformers_however_warm_the_cache(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    scored = [each for each in await runs.outputs(family, setting, depth) if "prompt_logprobs" in each[0].params]
    assert len(scored) == 4 * SETTINGS[setting].repeats
    for case, output in scored:
        assert output.num_cached_tokens == 0, "the cache has no logits"
        first, *lines = output.prompt_logprobs or []
        assert first is None
        known = [line for line in lines if line is not None]
        logprobs = runs.logits(family, case.prompt[:1], case.prompt[1:]).log_softmax(-1)
        check_lines(known, case.prompt[1:], logprobs, num_top=4)
        assert all(len(line) in (4, 5) for line in known)


@pytest.mark.parametrize(("family", "setting", "depth"), RULES)
async def test_the_setting_did_to_the_cases_what_it_is_there_for(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    rounds, cases = await runs.rounds(family, setting, depth), runs.checkpoint(family).cases
    if setting == "preempted":
        outputs = [each for round_ in rounds for each in round_.outputs.items()]
        preempted = {name for name, output in outputs if output.metrics and output.metrics.num_preemptions}
        assert len(preempted) >= 3
    if setting == "prefix hits":
        for name, case in cases.items():
            if "prompt_logprobs" not in case.params:
                whole_blocks = (len(case.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
                assert rounds[-1].outputs[name].num_cached_tokens == whole_blocks


@pytest.mark.parametrize("depth", [*nightly(1), 2])
async def test_the_device_computes_what_the_requests_need_and_nothing_more(
    runs_of: dict[str, Runs], depth: int
) -> None:
    for setting in ("batched", "chunked", "prefix hits"):
        for round_ in await runs_of["plain"].rounds("qwen3", setting, depth):
            outputs = round_.outputs.values()
            # The last token of each is sampled and never computed.
            needed = sum(
                len(output.prompt_token_ids) - output.num_cached_tokens + len(output.outputs[0].token_ids) - 1
                for output in outputs
            )
            assert sum(output.num_cached_tokens for output in outputs) > 0, "equal prompts share a prefix"
            assert round_.num_computed_tokens == needed
