"""What a request may ask of its sampling, through the whole engine, against transformers on the same weights.

Each rule alone, several together, and rules of the caller's own: greedy tokens are those of transformers' ``generate``
with the same rules. Log-probabilities, of outputs and of prompts, are those of its logits before any rule. All of it
holds however the requests are batched, cut, interrupted and cached. The text is what the tokenizer's decode makes of
the tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from checkpoints import EOS, NUM_SPECIAL, make_checkpoint
from equality.conftest import (
    RUNS,
    SEED,
    SETTINGS,
    VOCAB_SIZE,
    Counted,
    Generated,
    Oracle,
    Runs,
    Setting,
    character_of,
    random_ids,
    save_tokenizer,
    serving,
    starting,
)
from transformers.generation import logits_process as theirs

from aioengine import Engine, LogitsRow, RequestOutput
from aioengine.models.folder import DEMO_MODEL
from aioengine.outputs import TokenLogprobs

BLOCK_SIZE = 16
NUM_OTHERS = 20
LOGPROB_TOLERANCE = 1e-3
RANK_TOLERANCE = 1e-4
"""Logits nearer than this may change places by rounding alone."""
MIN_MARGIN = 1e-3
"""So far must each token lead in transformers' eyes, lest rounding decides."""

# What is asked, and what has to come


class Case(NamedTuple):
    """A request, and what transformers makes of it."""

    prompt: list[int]
    params: dict[str, Any]
    wanted: Generated | None = None
    """None: it is sampled."""


class Rules:
    """The cases of one checkpoint, by name; each rule changes what comes, and each of several together does."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.cases: dict[str, Case] = {}
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
        self.cases[name] = Case(prompt, {"max_tokens": max_tokens, "ignore_eos": True, **params}, wanted)

    def add_like(self, other: str, name: str, params: dict[str, Any]) -> None:
        """A case that says in another way what ``other`` says."""
        case = self.cases[other]
        stays = {"max_tokens": case.params["max_tokens"], "ignore_eos": True}
        self.cases[name] = Case(case.prompt, {**stays, **params}, case.wanted)


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


class BiasOf:
    """``logit_bias`` as a processor of the caller's own, which gives a new tensor; checks what it is told."""

    def __init__(self, prompt: list[int], biases: dict[int, float]) -> None:
        self._prompt = prompt
        self._biases = biases
        self.num_outputs: set[int] = set()

    def __call__(self, logits: torch.Tensor, rows: list[LogitsRow]) -> torch.Tensor:
        assert logits.shape == (len(rows), VOCAB_SIZE)
        for row in rows:
            assert row.prompt_token_ids.tolist() == self._prompt
            self.num_outputs.add(len(row.output_token_ids))
        return logits.index_add(1, torch.tensor(list(self._biases)), self._values().expand(len(rows), -1))

    def _values(self) -> torch.Tensor:
        return torch.tensor(list(self._biases.values()))


def repeat_less(penalty: float) -> Callable[[torch.Tensor, list[LogitsRow]], None]:
    """``repetition_penalty`` as a processor that changes the logits in place."""
    rule = theirs.RepetitionPenaltyLogitsProcessor(penalty)

    def processor(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
        for line, row in zip(logits, rows, strict=True):
            seen = torch.tensor([[*row.prompt_token_ids.tolist(), *row.output_token_ids.tolist()]])
            line.copy_(rule(seen, line[None])[0])

    return processor


def only(ids: Sequence[int]) -> Callable[[torch.Tensor, list[LogitsRow]], torch.Tensor]:
    """``allowed_token_ids`` as a processor."""

    def processor(logits: torch.Tensor, rows: list[LogitsRow]) -> torch.Tensor:
        kept = torch.full_like(logits, -torch.inf)
        kept[:, ids] = logits[:, ids]
        return kept

    return processor


def allow(ids: list[int]) -> theirs.LogitsProcessor:
    return theirs.PrefixConstrainedLogitsProcessor(lambda batch, sent: ids, num_beams=1)


def written(words: list[list[int]]) -> list[str]:
    return ["".join(map(character_of, word)) for word in words]


def forbid(words: list[list[int]], prompt: list[int]) -> theirs.LogitsProcessor:
    """Forbid words in the output, behind a space, too."""
    space = NUM_SPECIAL
    spellings = [spelling for word in words for spelling in (word, [space, *word])]
    return OutputOnly(theirs.NoBadWordsLogitsProcessor(spellings), len(prompt))


def make_cases(oracle: Oracle) -> dict[str, Case]:
    rules = Rules(oracle)
    for penalty, length in ((1.7, 33), (0.8, 16)):
        params = {"repetition_penalty": penalty}
        rules.add(f"repetition penalty {penalty}", rules.prompt(length), 30, params, **params)
    add_biases(rules)
    add_bad_words(rules)
    allowed, prompt = sorted(rules.ids(60)), rules.prompt(40)
    rules.add(
        "allowed ids",
        prompt,
        30,
        {"allowed_token_ids": allowed},
        prefix_allowed_tokens_fn=lambda batch, sent: allowed,
    )
    add_min_tokens(rules)
    add_counting_penalties(rules)
    add_combinations(rules)
    add_processors(rules)
    add_scored(rules)
    add_repetition_below_zero(rules)
    return rules.cases


def add_repetition_below_zero(rules: Rules) -> None:
    """Of tokens whose logits are all negative, which the penalty multiplies instead of dividing."""
    prompt = rules.prompt(26)
    allowed = sorted({*rules.ids(12), *prompt[:8]})
    biases = dict.fromkeys(allowed, -30.0)
    rules.add(
        "repetition penalty below zero",
        prompt,
        30,
        {"repetition_penalty": 1.15, "allowed_token_ids": allowed, "logit_bias": biases},
        logits_processor=[
            allow(allowed),
            theirs.SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in biases.items()}),
            theirs.RepetitionPenaltyLogitsProcessor(1.15),
        ],
    )
    assert not comes_by([allow(allowed)], rules.cases["repetition penalty below zero"])


def add_biases(rules: Rules) -> None:
    prompt = rules.prompt(31)
    comes = rules.plain(prompt, 32)
    biases = {**dict.fromkeys(rules.ids(12), 4.5), comes[3]: -100.0, comes[9]: -7.25}
    rules.add("bias", prompt, 32, {"logit_bias": biases}, sequence_bias={(token,): b for token, b in biases.items()})


def add_bad_words(rules: Rules) -> None:
    prompt = rules.prompt(20)
    comes = rules.plain(prompt, 28)
    words = [comes[4:6], comes[9:12], comes[20:21]]
    rule = forbid(words, prompt)
    rules.add("bad words", prompt, 28, {"bad_words": written(words)}, logits_processor=[rule])
    # The prompt ends with the first part of a bad word: that is no beginning of one, and the second part may follow.
    prompt = [*prompt, *comes[:5]]
    words = [comes[4:6], comes[7:9]]
    rules.add(
        "bad words that the prompt begins",
        prompt,
        30,
        {"bad_words": written(words)},
        logits_processor=[forbid(words, prompt)],
    )
    case = rules.cases["bad words that the prompt begins"]
    assert case.wanted is not None
    assert case.wanted.token_ids[0] == comes[5]


def add_min_tokens(rules: Rules) -> None:
    prompt, minimum, limit = rules.prompt(47), 11, 30
    stops = sorted({*rules.plain(prompt, 6)[2:6], *rules.ids(40)})
    params = {"min_tokens": minimum, "stop_token_ids": stops}
    rules.add("stop tokens that come too early", prompt, limit, params, min_new_tokens=minimum, eos_token_id=stops)
    case = rules.cases["stop tokens that come too early"]
    assert case.wanted is not None
    assert minimum < len(case.wanted.token_ids) < limit, "the minimum or the limit decides, not a stop token"
    params = {"min_tokens": 17, "logit_bias": {EOS: 100.0}, "ignore_eos": False}
    rules.add(
        "an EOS that comes too early",
        rules.prompt(17),
        limit,
        params,
        min_new_tokens=17,
        eos_token_id=EOS,
        sequence_bias={(EOS,): 100.0},
    )
    case = rules.cases["an EOS that comes too early"]
    assert case.wanted is not None
    assert case.wanted.token_ids.index(EOS) == 17


def add_counting_penalties(rules: Rules) -> None:
    for presence, frequency in ((1.5, 0.0), (0.0, 1.25), (-0.75, -0.5), (2.0, -0.25)):
        # Few tokens, so that they come again and again.
        allowed, prompt = sorted(rules.ids(8)), rules.prompt(29)
        params = {
            "presence_penalty": presence,
            "frequency_penalty": frequency,
            "allowed_token_ids": [*allowed, *prompt[:4]],
        }
        penalty = Counted(len(prompt), presence=presence, frequency=frequency)
        rules.add(
            f"presence {presence}, frequency {frequency}",
            prompt,
            36,
            params,
            logits_processor=[allow([*allowed, *prompt[:4]]), penalty],
        )
        without = [allow([*allowed, *prompt[:4]])]
        assert not comes_by(without, rules.cases[f"presence {presence}, frequency {frequency}"])


def add_combinations(rules: Rules) -> None:
    """All rules together, in the documented order, which matters, as does each of them."""
    prompt, minimum = rules.prompt(50), 20
    allowed = sorted({*rules.ids(30), *prompt[:20]})
    biases = {**dict.fromkeys(allowed[::5], 2.5), **dict.fromkeys(allowed[1::5], -3.0)}
    stops = allowed[1::12]
    in_order = {
        "allowed_token_ids": (allowed, allow(allowed)),
        "min_tokens": (minimum, theirs.MinNewTokensLengthLogitsProcessor(len(prompt), minimum, stops)),
        "logit_bias": (biases, theirs.SequenceBiasLogitsProcessor({(t,): b for t, b in biases.items()})),
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


def add_processors(rules: Rules) -> None:
    """Rules that are built in, and the same as the caller's own."""
    biased = rules.cases["bias"]
    processor = BiasOf(biased.prompt, biased.params["logit_bias"])
    rules.add_like("bias", "bias by a processor", {"logits_processors": [processor]})
    rules.add_like(
        "repetition penalty 1.7", "repetition penalty by a processor", {"logits_processors": [repeat_less(1.7)]}
    )
    allowed = rules.cases["allowed ids"].params["allowed_token_ids"]
    rules.add_like(
        "allowed ids",
        "allowed ids by the second of two processors",
        {"logits_processors": [lambda logits, rows: None, only(allowed)]},
    )


def add_scored(rules: Rules) -> None:
    """Requests for log-probabilities of all kinds; the prompts are known to the cache, or come to be."""
    for name, prompt, params in (
        ("scored", rules.prompt(61), {"temperature": 0.0}),
        ("scored and sampled", rules.prompt(48), {"temperature": 1.0}),
        ("scored under rules", rules.prompt(17), {"temperature": 0.0, "repetition_penalty": 1.5, "top_k": 3}),
        ("a prompt of one token, scored", rules.ids(1), {"temperature": 1.2}),
    ):
        asked = {"prompt_logprobs": 4, "logprobs": 3, "logprob_token_ids": rules.ids(5), "seed": SEED}
        rules.cases[name] = Case(prompt, {"max_tokens": 30, "ignore_eos": True, **asked, **params})


# Serving them


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("knobs"), make_cases, serve)


async def serve(
    engine: Engine, cases: dict[str, Case], setting: Setting, rng: random.Random
) -> dict[str, RequestOutput]:
    """Serve all cases: alone, one after the other; or all at once among others, in any order."""
    asked = {
        name: {"prompt": case.prompt, "temperature": 0.0, "logprobs": 2, **case.params} for name, case in cases.items()
    }
    if setting.one_by_one:
        return {name: await engine.generate(**request) for name, request in asked.items()}
    everything = [*asked.items(), *((None, request) for request in make_others(list(cases.values()), rng))]
    rng.shuffle(everything)
    async with asyncio.TaskGroup() as group:
        tasks = [(name, group.create_task(engine.generate(**request))) for name, request in everything]
    return {name: task.result() for name, task in tasks if name is not None}


def make_others(cases: list[Case], rng: random.Random) -> list[dict[str, Any]]:
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
            "prompt": rng.choice(cases).prompt if rng.random() < 0.3 else ids(rng.randint(1, 60)),
            "max_tokens": rng.randint(5, 25),
            "seed": number,
            **kinds[number % len(kinds)],
        }
        for number in range(NUM_OTHERS)
    ]


# The tests


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_greedy_tokens_under_each_rule_are_those_of_transformers(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    rounds, cases = await runs.rounds(family, setting, depth), runs.checkpoint(family).cases
    wanted = {name: case.wanted.token_ids for name, case in cases.items() if case.wanted is not None}
    for outputs in rounds:
        assert {name: outputs[name].outputs[0].token_ids for name in wanted} == wanted


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_sampled_tokens_are_the_same_in_every_setting(runs: Runs, family: str, setting: str, depth: int) -> None:
    [alone] = await runs.rounds(family, "alone", 2)
    sampled = [name for name, case in runs.checkpoint(family).cases.items() if case.wanted is None]
    for outputs in await runs.rounds(family, setting, depth):
        for name in sampled:
            assert outputs[name].outputs[0].token_ids == alone[name].outputs[0].token_ids


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_logprobs_and_ranks_are_those_of_the_models_logits_before_any_rule(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    for outputs in await runs.rounds(family, setting, depth):
        for name, case in runs.checkpoint(family).cases.items():
            completion = outputs[name].outputs[0]
            assert completion.logprobs is not None
            logprobs = runs.logits(family, case.prompt, completion.token_ids).log_softmax(-1)
            asked = case.params.get("logprob_token_ids", ())
            check_lines(completion.logprobs, completion.token_ids, logprobs, asked=asked, num_top=2)
            total = float(logprobs.gather(1, torch.tensor(completion.token_ids)[:, None]).sum())
            assert completion.cumulative_logprob == pytest.approx(total, abs=10 * LOGPROB_TOLERANCE)


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_prompt_logprobs_are_whole_and_those_of_transformers_however_warm_the_cache(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    scored = {name: case for name, case in runs.checkpoint(family).cases.items() if "prompt_logprobs" in case.params}
    assert len(scored) == 4
    for outputs in await runs.rounds(family, setting, depth):
        for name, case in scored.items():
            lines = outputs[name].prompt_logprobs
            assert lines is not None
            assert len(lines) == len(case.prompt)
            assert lines[0] is None
            assert outputs[name].num_cached_tokens == 0, "the cache has no logits"
            known = [line for line in lines if line is not None]
            check_lines(
                known, case.prompt[1:], runs.logits(family, case.prompt[:1], case.prompt[1:]).log_softmax(-1), num_top=4
            )
            assert all(len(line) in (4, 5) for line in known)


@pytest.mark.parametrize(("family", "setting", "depth"), RUNS)
async def test_the_setting_did_to_the_cases_what_it_is_there_for(
    runs: Runs, family: str, setting: str, depth: int
) -> None:
    rounds, cases = await runs.rounds(family, setting, depth), runs.checkpoint(family).cases
    if SETTINGS[setting].kv_sequences < 2:
        preempted = {
            name
            for outputs in rounds
            for name, output in outputs.items()
            if output.metrics is not None and output.metrics.num_preemptions
        }
        assert len(preempted) >= 3
    if setting == "prefix hits":
        whole_blocks = {
            name: (len(case.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
            for name, case in cases.items()
            if "prompt_logprobs" not in case.params
        }
        assert {name: rounds[-1][name].num_cached_tokens for name in whole_blocks} == whole_blocks
    processor = cases["bias by a processor"].params["logits_processors"][0]
    assert processor.num_outputs == set(range(32)), "it is called for each output token"


async def test_what_a_scored_prompt_computes_is_there_for_those_after_it(runs: Runs) -> None:
    checkpoint = runs.checkpoint("qwen3")
    prompt = checkpoint.cases["scored"].prompt
    async with serving(checkpoint.folder, SETTINGS["alone"], 1) as (engine, core):
        for asked, computed in (
            ({"prompt_logprobs": 0}, len(prompt)),
            ({}, len(prompt) - 48),
            ({"prompt_logprobs": 0}, len(prompt)),
        ):
            before = core.executor.stats.num_computed_tokens
            output = await engine.generate(prompt, max_tokens=1, **asked)
            assert core.executor.stats.num_computed_tokens - before == computed
            assert output.num_cached_tokens == len(prompt) - computed


def check_lines(
    lines: list[TokenLogprobs],
    token_ids: list[int],
    logprobs: torch.Tensor,
    *,
    asked: Sequence[int] = (),
    num_top: int,
) -> None:
    """Each line has its token first, the likeliest and those asked for; and all figures are right.

    Args:
        logprobs: float32 [lines, vocab], what transformers says.
    """
    assert [next(iter(line)) for line in lines] == token_ids
    entries = [(place, token_id, found) for place, line in enumerate(lines) for token_id, found in line.items()]
    if not entries:
        return
    places, ids, found = (list(column) for column in zip(*entries, strict=True))
    whole, wanted = logprobs[places], logprobs[places, ids]
    assert torch.allclose(torch.tensor([entry.logprob for entry in found]), wanted, atol=LOGPROB_TOLERANCE, rtol=0)
    ranks = torch.tensor([entry.rank for entry in found])
    assert (ranks > (whole > wanted[:, None] + RANK_TOLERANCE).sum(-1)).all()
    assert (ranks <= (whole > wanted[:, None] - RANK_TOLERANCE).sum(-1)).all()
    for line in lines:
        assert set(range(1, num_top + 1)) <= {entry.rank for entry in line.values()}
        assert set(asked) <= set(line)


# Text


class Said(NamedTuple):
    """A model that says what it is told, its own tokenizer by transformers, and what it is told.

    Attributes:
        token_ids: with special tokens, an EOS among them, with half a character before one and another at the end.
    """

    folder: Path
    tokenizer: transformers.PreTrainedTokenizerBase
    token_ids: list[int]
    eos: int

    def decode(self, token_ids: list[int], **options: Any) -> str:
        text = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False, **options)
        assert isinstance(text, str)
        return text

    def params(self, *, num_tokens: int | None = None, **params: Any) -> dict[str, Any]:
        ids = self.token_ids

        def say(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
            for line, row in zip(logits, rows, strict=True):
                line[torch.arange(len(line)) != ids[len(row.output_token_ids)]] = -torch.inf

        return {"logits_processors": [say], "max_tokens": num_tokens or len(ids), "ignore_eos": True, **params}


@pytest.fixture(scope="module", params=["demo", "bytes"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    if request.param == "demo":
        folder, eos = DEMO_MODEL, 2
    else:
        folder, eos = make_checkpoint(tmp_path_factory.mktemp("text") / "bytes", "qwen3", tokenizer=True), EOS
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    fox, naive = encode(" a \N{FOX FACE}"), encode(" na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve")
    assert len(fox) > 3, "the fox is one token"
    ids = [1, *encode("Once upon a time"), *fox, 1, 1, *naive, *fox[:-2], eos, *encode(" there was"), eos, eos]
    return Said(folder, tokenizer, [*ids, *naive, *fox[:-1]], eos)


async def test_the_text_is_the_tokenizers_decode_of_the_whole_output(said: Said) -> None:
    options: list[dict[str, bool]] = [
        {},
        {"skip_special_tokens": False},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},  # nothing is between them anyhow
    ]
    lengths = [*range(1, len(said.token_ids), 3), len(said.token_ids)]
    asked = list(itertools.product(lengths, options))
    async with starting(said.folder, max_model_len=None) as engine:
        outputs = await asyncio.gather(
            *(engine.generate([5], **said.params(num_tokens=length), **shown) for length, shown in asked)
        )
    for (length, shown), output in zip(asked, outputs, strict=True):
        assert output.outputs[0].token_ids == said.token_ids[:length]
        is_skipped = shown.get("skip_special_tokens", True)
        assert output.text == said.decode(said.token_ids[:length], skip_special_tokens=is_skipped)
    assert outputs[-1].text != outputs[-3].text, "there are no special tokens"


async def test_without_detokenizing_there_are_tokens_and_no_text(said: Said) -> None:
    async with starting(said.folder, max_model_len=None) as engine:
        output = await engine.generate([5], **said.params(detokenize=False, logprobs=1))
    [completion] = output.outputs
    assert (completion.text, completion.token_ids) == ("", said.token_ids)
    assert {found.decoded_token for line in completion.logprobs or [] for found in line.values()} == {None}


@pytest.mark.parametrize("is_included", [False, True], ids=["left out", "included"])
@pytest.mark.parametrize("is_skipped", [False, True], ids=["specials skipped", "specials shown"])
async def test_the_text_ends_before_the_stop_or_behind_it(said: Said, is_included: bool, is_skipped: bool) -> None:
    shown = {"skip_special_tokens": is_skipped, "include_stop_str_in_output": is_included}

    def text_of(num_tokens: int) -> str:
        return said.decode(said.token_ids[:num_tokens], skip_special_tokens=is_skipped)

    async with starting(said.folder, max_model_len=None) as engine:
        whole = text_of(len(said.token_ids))
        for stop in ("n a ti", "\N{FOX FACE}", "ve a \N{REPLACEMENT CHARACTER}", "there"):
            output = await engine.generate([5], **said.params(stop=[stop, "never said"]), **shown)
            end = whole.index(stop) + (len(stop) if is_included else 0)
            assert output.text == whole[:end]
            assert output.outputs[0].stop_reason == stop
            assert len(output.outputs[0].token_ids) < len(said.token_ids)
        for params, stop_id in (
            ({"ignore_eos": False}, said.eos),
            ({"stop_token_ids": [said.token_ids[3]]}, said.token_ids[3]),
        ):
            output = await engine.generate([5], **said.params(**params), **shown)
            num_tokens = said.token_ids.index(stop_id) + 1
            assert output.outputs[0].token_ids == said.token_ids[:num_tokens], "with what ended it"
            assert output.text == text_of(num_tokens if is_included else num_tokens - 1)
            assert output.outputs[0].finish_reason == "stop"


async def test_special_tokens_side_by_side_are_joined_on_demand(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    save_tokenizer(folder, {token_id: f"w{token_id}" for token_id in range(NUM_SPECIAL, VOCAB_SIZE)}, of_words=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = Said(folder, tokenizer, [5, 1, 0, 7, EOS, EOS, EOS, 9, 8, 1, 1], EOS)
    async with starting(said.folder, max_model_len=None) as engine:
        texts = [
            (
                await engine.generate(
                    [5], **said.params(skip_special_tokens=False, spaces_between_special_tokens=is_so)
                )
            ).text
            for is_so in (True, False)
        ]
    assert texts == [
        "w5 <s> <pad> w7 </s> </s> </s> w9 w8 <s> <s>",
        "w5 <s><pad> w7 </s></s></s> w9 w8 <s><s>",
    ]
    assert texts[0] == said.decode(said.token_ids)
