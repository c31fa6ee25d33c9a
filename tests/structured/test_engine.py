"""Structured output through whole engines: the same tokens in whatever company, and nothing left waiting."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from executor.late_device import start_late
from integrity import check_integrity
from nightly import few, nightly
from structured.conftest import ANIMAL, check_json, compile_grammar, decode, ending_ids
from waiting import Tasks, until

from aioengine import (
    Choice,
    Engine,
    EngineClosed,
    EngineOverloaded,
    Grammar,
    InvalidRequest,
    Json,
    NoTokenLeft,
    Regex,
    RequestOutput,
    StructuralTags,
    Tag,
)
from aioengine.core import grammars
from aioengine.models.folder import DEMO_MODEL
from aioengine.scheduler.plan import RowSampling
from aioengine.structured.guidance import Vocabulary
from aioengine.testing import sample_hash
from doubles.fake_accelerator import FakeAccelerator
from doubles.fake_executor import FakeExecutor

TAGS = StructuralTags((Tag("<f>", "</f>", schema=ANIMAL), Tag("<n>", "</n>", pattern="[0-9]{1,4}")), ("<",))
CONSTRAINTS: dict[str, Any] = {
    "schema": ANIMAL,
    "whitespace": Json(ANIMAL, whitespace=True),
    "regex": Regex("(fox|owl){1,4} [0-9]{2,6}"),
    "choice": Choice(["a red fox", "a red fox and a green owl", "nothing at all"]),
    "grammar": Grammar('start: "(" item ("," item)~0..4 ")"\nitem: /[a-f]{1,6}/'),
    "gbnf": Grammar('root ::= "<" [a-c] [a-c] [a-c] ">"'),
    "none": None,
}


def requests(count: int, seed: int, **fields: Any) -> list[dict[str, Any]]:
    """Requests of all kinds, some of them without a grammar; they begin alike."""
    rng = random.Random(seed)
    kinds = list(CONSTRAINTS.values())
    return [
        {
            "prompt": [*range(100, 120), *(rng.randrange(3, 2000) for _ in range(rng.randrange(30)))],
            "structured": kinds[number % len(kinds)],
            "max_tokens": 120,
            "seed": number,
            **fields,
        }
        for number in range(count)
    ]


@contextlib.asynccontextmanager
async def over_fake(depth: int = 1, *, num_blocks: int = 400, **config: Any) -> AsyncIterator[Engine]:
    def sample(token_ids: list[int], sampling: RowSampling) -> int:
        return 3 + sample_hash(token_ids, sampling, vocab_size=2045)

    executor = FakeExecutor(
        num_blocks=num_blocks, block_size=4, max_model_len=256, vocab_size=2048, max_in_flight=depth, sampler=sample
    )
    async with Engine(executor=executor, **config) as engine:
        yield engine
        assert engine._runtime is not None
        check_integrity(engine._runtime.core.scheduler)
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


async def alone(asked: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Each by itself, one step at a time, each token sampled: what all else is compared with."""
    async with over_fake() as engine:
        return tokens_of([await engine.generate(**request, logprobs=0) for request in asked])


SETTINGS: dict[str, dict[str, Any]] = {
    "depth 1": {"depth": 1},
    "depth 2": {"depth": 2},
    "depth 4": {"depth": 4},
    "small chunks": {"depth": 2, "max_num_batched_tokens": 16, "max_num_seqs": 16},
    "preempted": {"depth": 2, "num_blocks": 70},
    "preempted at depth 4": {"depth": 4, "num_blocks": 70, "enable_prefix_caching": False},
}


@pytest.mark.virtual_clock
@pytest.mark.parametrize("seed", few([0], of=range(6)))
@pytest.mark.parametrize("name", few(["preempted at depth 4"], of=SETTINGS))
async def test_tokens_do_not_depend_on_company_depth_chunks_or_preemption(name: str, seed: int) -> None:
    asked = requests(21, seed)
    wanted = await alone(asked)
    async with over_fake(**SETTINGS[name]) as engine:
        for _ in range(2):  # the second time with prefixes cached
            outputs = await asyncio.gather(*(engine.generate(**request) for request in asked))
            assert tokens_of(outputs) == wanted
        if "num_blocks" in SETTINGS[name]:
            assert engine._runtime is not None
            assert engine._runtime.core.stats().preemptions > 0
    for request, output in zip(asked, outputs, strict=True):
        if request["structured"] is ANIMAL and output.outputs[0].finish_reason == "stop":
            check_json(output.text, ANIMAL)


@pytest.mark.virtual_clock
async def test_each_of_several_choices_is_right_and_like_a_single_one() -> None:
    asked = requests(7, 3, n=3)
    async with over_fake(2) as engine:
        outputs = await asyncio.gather(*(engine.generate(**request) for request in asked))
    async with over_fake(1, max_num_batched_tokens=32, max_num_seqs=32) as engine:
        others = [await engine.generate(**request, logprobs=1) for request in asked]
    assert tokens_of(outputs) == tokens_of(others)
    for choice in outputs[0].outputs:
        check_json(choice.text, ANIMAL)


@pytest.mark.virtual_clock
async def test_rules_beside_a_grammar_hold_too() -> None:
    async with over_fake(2) as engine:
        for seed in range(8):
            with contextlib.suppress(NoTokenLeft):
                out = await engine.generate("x", structured=Choice(["a", "b"]), bad_words=["a"], seed=seed)
                assert out.text == "b"
        (b, *_) = [await engine.tokenize("b", add_special_tokens=False)]
        out = await engine.generate("x", structured=Regex("[abc]+"), allowed_token_ids=b, max_tokens=5)
        assert out.text == "bbbbb"
        out = await engine.generate("x", structured=Choice(["stop here", "stop there"]), stop=["here"], seed=4)
        assert out.text in ("stop ", "stop t")
        out = await engine.generate("x", structured=Choice(["yes", "yes yes yes"]), min_tokens=3, seed=2)
        assert out.text == "yes yes yes"
        out = await engine.generate("x", structured=Choice(["yes", "yes yes yes"]), ignore_eos=True)
        assert (out.text, out.outputs[0].finish_reason) == ("yes yes yes", "stop")


async def test_a_text_that_is_complete_before_min_tokens_ends_the_answer() -> None:
    """Nothing else may come; the text is kept."""
    word = Json({"type": "integer", "minimum": 7, "maximum": 7})
    for make in (lambda: over_fake(2), lambda: real("depth 2")):
        async with make() as engine:
            for structured, text in ((Choice(["yes"]), "yes"), (word, "7"), (Choice(["yes", "yes yes"]), "yes yes")):
                for more in ({}, {"ignore_eos": True}, {"logprobs": 1}, {"temperature": 0}, {"n": 2}):
                    asked: dict[str, Any] = {"structured": structured, "min_tokens": 10, "seed": 1, **more}
                    out = await engine.generate("x", **asked)
                    choices = [(choice.text, choice.finish_reason, choice.stop_reason) for choice in out.outputs]
                    assert set(choices) == {(text, "stop", None)}, more


@pytest.mark.virtual_clock
async def test_a_conflict_that_leaves_no_token_ends_its_request_and_no_other() -> None:
    async with over_fake(2) as engine:
        bad = {"structured": Choice(["yes", "no"]), "allowed_token_ids": [500]}
        good = {"structured": Choice(["yes", "no"])}
        outcomes = await asyncio.gather(
            *(engine.generate("x", **params, seed=1) for params in (bad, good, bad)), return_exceptions=True
        )
        assert isinstance(outcomes[0], NoTokenLeft)
        assert "leave" in str(outcomes[0])
        assert outcomes[1].text in ("yes", "no")
        assert isinstance(outcomes[2], NoTokenLeft)


@pytest.mark.virtual_clock
async def test_aborting_at_any_token_leaves_nothing() -> None:
    async with over_fake(2) as engine:
        for patience in range(8):
            async with engine.stream("x", structured=Json(ANIMAL), seed=patience) as stream:
                async for _ in stream:
                    patience -= 1
                    if patience < 0:
                        break
        async with engine.stream("x", structured=ANIMAL, max_unread_tokens=3, seed=5) as stream:
            texts = [delta.text async for delta in stream]
        check_json("".join(texts), ANIMAL)


# The real model


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


class Masked(transformers.LogitsProcessor):
    """What llguidance's own matcher says, token by token, with the tokens that it forces."""

    def __init__(self, grammar: Any, num_prompt_tokens: int) -> None:
        self._grammar = grammar
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = input_ids[0, self._num_prompt_tokens :].tolist()
        matcher = self._grammar.matcher().raw
        forced: list[int] = []
        for token_id in output:
            if not forced:
                forced = matcher.compute_ff_tokens()
            assert not forced or forced.pop(0) == token_id
            matcher.consume_token(token_id)
        forced = forced or matcher.compute_ff_tokens()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        ids = forced[:1] if forced else np.flatnonzero(bits).tolist()
        masked = torch.full_like(scores, -torch.inf)
        masked[0, ids] = scores[0, ids]
        return masked


QUESTIONS = ["Tell me about the fox as JSON.", "What is 8 + 7?", "Tell me about the owl as JSON.", "Hello!"]


@functools.cache
def wanted_by_transformers() -> dict[tuple[str, str], str]:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    wanted = {}
    for name, constraint in CONSTRAINTS.items():
        if constraint is None:
            continue
        grammar = compile_grammar(constraint)
        for question in QUESTIONS:
            ids = tokenizer.apply_chat_template(chat(question), add_generation_prompt=True, return_dict=False)
            out = model.generate(
                torch.tensor([ids]),
                do_sample=False,
                max_new_tokens=80,
                eos_token_id=list(ending_ids()),
                pad_token_id=0,
                logits_processor=transformers.LogitsProcessorList([Masked(grammar, len(ids))]),
            )
            wanted[name, question] = decode(out[0, len(ids) :].tolist())
    return wanted


@contextlib.asynccontextmanager
async def real(way: str) -> AsyncIterator[Engine]:
    config: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
    if way == "late device":
        executor = await start_late(DEMO_MODEL, FakeAccelerator(), max_in_flight=2, max_model_len=512, **config)
        async with Engine(executor=executor, max_num_seqs=8) as engine:
            yield engine
    else:
        more = {"process": True} if way == "process" else {"max_in_flight": 2 if way == "depth 2" else 1}
        async with Engine(**config, **more) as engine:
            yield engine


@pytest.mark.parametrize("way", ["depth 2", *nightly("depth 1", "late device", "process")])
async def test_greedy_answers_are_those_of_transformers_under_the_same_masks(way: str) -> None:
    wanted = await asyncio.to_thread(wanted_by_transformers)
    async with real(way) as engine:

        async def ask(name: str, question: str, **params: Any) -> str:
            params |= {"structured": CONSTRAINTS[name], "temperature": 0.0, "max_tokens": 80}
            return (await engine.generate(chat(question), **params)).text

        for params in ({}, {"logprobs": 2}):
            texts = await asyncio.gather(*(ask(*key, **params) for key in wanted))
            assert dict(zip(wanted, texts, strict=True)) == wanted, params


@pytest.mark.parametrize("way", ["depth 2", *nightly("late device", "process")])
async def test_processed_log_probabilities_are_of_the_admitted_tokens_alone(way: str) -> None:
    constraint = CONSTRAINTS["gbnf"]
    grammar = await asyncio.to_thread(compile_grammar, constraint)
    async with real(way) as engine:

        async def ask(**params: Any) -> list[dict[int, float]]:
            params |= {"max_tokens": 9, "logprobs": 20, "logprobs_mode": "processed"}
            lines = (await engine.generate("Once upon a time", **params)).outputs[0].logprobs or []
            return [{token: entry.logprob for token, entry in line.items()} for line in lines]

        sampling = [
            {"temperature": 0.0},
            {"temperature": 1.5, "seed": 1},
            {"temperature": 0.7, "seed": 2, "top_p": 0.9},
        ]
        free = asyncio.gather(*(ask(**each) for each in sampling))
        for output in await asyncio.gather(*(ask(structured=constraint, **each) for each in sampling)):
            matcher, forced = grammar.matcher().raw, list[int]()
            for line in output:
                forced = forced or matcher.compute_ff_tokens()
                bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
                left = {token: logprob for token, logprob in line.items() if logprob > -math.inf}
                token = next(iter(line))
                assert token in left
                assert left.keys() <= set(forced[:1] or np.flatnonzero(bits).tolist())
                forced = forced[1:]
                assert math.fsum(map(math.exp, left.values())) == pytest.approx(1.0, abs=1e-4)
                matcher.consume_token(token)
        assert all(logprob > -math.inf for line in (await free)[0] for logprob in line.values()), "greedy, all is left"


async def test_tags_in_free_text_are_kept_to() -> None:
    async with Engine() as engine:
        for seed in range(6):
            out = await engine.generate(chat("Hello!"), structured=TAGS, seed=seed, temperature=2.0, max_tokens=60)
            for part in out.text.split("<")[1:]:
                assert part.startswith(("f>", "n>", "/f>", "/n>")) or len(part) < 3


# While a grammar is compiled


@pytest.mark.virtual_clock
async def test_a_request_waits_for_its_grammar_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks()
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    compile_now = Vocabulary.compile

    def compile_late(self: Vocabulary, constraint: Any) -> Any:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return compile_now(self, constraint)

    monkeypatch.setattr(Vocabulary, "compile", compile_late)
    async with over_fake(2) as engine:
        waiting = [tasks.start(engine.generate("x", structured=Regex("[ab]{5}"), seed=n)) for n in range(3)]
        out = await engine.generate("y", max_tokens=5)
        assert len(out.outputs[0].token_ids) == 5
        assert engine.stats().waiting == 3
        assert not any(task.done() for task in waiting)
        waiting[1].cancel()
        gate.set()
        outs = await asyncio.gather(waiting[0], waiting[2])
        assert all(set(out.text) <= {"a", "b"} for out in outs)


async def test_what_cannot_be_enforced_is_the_requests_error_and_says_why() -> None:
    async with over_fake(2) as engine:
        for bad, told in (
            ({"not": {"pattern": "a"}}, 'Unimplemented keys: ["not"]'),
            (Regex("a(?=b)"), "look-around"),
            (Regex("("), "structured"),
            (Grammar("start: nothing"), "unknown name"),
            ({"$ref": "#/$defs/x"}, "$defs"),
        ):
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="structured") as raised:
                    await engine.generate("x", structured=bad)
                assert told in str(raised.value)
                assert raised.value.param == "structured"
        out = await engine.generate(
            "x", structured=Json({"not": {"pattern": "a"}, "type": "boolean"}, lenient=True), seed=1
        )
        assert out.text in ("true", "false")


@pytest.mark.virtual_clock
async def test_a_grammar_that_takes_too_long_is_given_up_and_the_next_one_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    compile_now = Vocabulary.compile

    def compile_slowly(self: Vocabulary, constraint: Any) -> Any:
        if constraint == Regex("slow"):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return compile_now(self, constraint)

    monkeypatch.setattr(Vocabulary, "compile", compile_slowly)
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 0.0)
    async with over_fake(1) as engine:
        with pytest.raises(InvalidRequest, match="takes more than"):
            await engine.generate("x", structured=Regex("slow"))
        monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 10.0)
        out = await engine.generate("x", structured=Choice(["yes"]))
        assert out.text == "yes"
        gate.set()


@pytest.mark.virtual_clock
async def test_threads_that_are_left_behind_are_bounded_and_what_is_queued_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = Tasks()
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    begun: list[Any] = []

    def compile_never(self: Vocabulary, constraint: Any) -> Any:
        begun.append(constraint)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

    monkeypatch.setattr(Vocabulary, "compile", compile_never)
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 0.0)
    async with over_fake(1) as engine:
        waiting = [tasks.start(engine.generate("x", structured=Regex(f"slow{number}"))) for number in range(5)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert Counter(map(type, outcomes)) == {InvalidRequest: 2, EngineOverloaded: 3}
        assert len(begun) <= 2, "its thread may be given up before it has begun"
        gate.set()


@pytest.mark.virtual_clock
async def test_what_nothing_waits_for_any_more_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks()
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    begun: list[Any] = []
    compile_now = Vocabulary.compile

    def compile_late(self: Vocabulary, constraint: Any) -> Any:
        begun.append(constraint)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return compile_now(self, constraint)

    monkeypatch.setattr(Vocabulary, "compile", compile_late)
    async with over_fake(1) as engine:
        first = tasks.start(engine.generate("x", structured=Choice(["one"])))
        await until(lambda: begun)
        left, last = (tasks.start(engine.generate("x", structured=Choice([text]))) for text in ("two", "three"))
        await until(lambda: engine.stats().waiting == 3)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        gate.set()
        assert [(await first).text, (await last).text] == ["one", "three"]
        assert begun == [Choice(["one"]), Choice(["three"])]


async def test_closing_ends_those_that_wait_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def compile_late(self: Vocabulary, constraint: Any) -> Any:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

    monkeypatch.setattr(Vocabulary, "compile", compile_late)
    engine = await Engine.start(executor=FakeExecutor(vocab_size=2048))
    tasks = Tasks()
    task = tasks.start(engine.generate("x", structured=Regex("a+")))
    await until(lambda: engine.stats().waiting)
    closing = tasks.start(engine.aclose())
    with pytest.raises(EngineClosed):
        await task
    gate.set()
    await closing


async def test_a_grammar_is_compiled_once_for_all_that_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    compile_now = Vocabulary.compile
    monkeypatch.setattr(
        Vocabulary, "compile", lambda self, constraint: (compiled.append(constraint), compile_now(self, constraint))[1]
    )
    async with over_fake(2) as engine:
        await asyncio.gather(*(engine.generate("x", structured=ANIMAL, seed=n, max_tokens=9) for n in range(20)))
        await engine.generate("x", structured=Json(ANIMAL), seed=1, max_tokens=9)
    assert compiled == [Json(ANIMAL)]


WEARING = Regex("[a-z ]*[aeious][a-z ]{30}[xyz]")
"""Its lexer is full after 180 tokens of any requests."""


@pytest.mark.nightly
async def test_a_grammar_lasts_for_any_number_of_requests_and_choices() -> None:
    async with Engine(dtype="float32") as engine:

        async def ask(seed: int, **params: Any) -> list[list[int]]:
            out = await engine.generate(
                "Once", structured=WEARING, temperature=2.0, max_tokens=100, seed=seed, ignore_eos=True, **params
            )
            assert {choice.finish_reason for choice in out.outputs} == {"length"}
            return [choice.token_ids for choice in out.outputs]

        one_by_one = [await ask(seed) for seed in range(4)]
        assert await asyncio.gather(*(ask(seed) for seed in range(4))) == one_by_one
        assert await ask(1, n=3) == await ask(1, n=3)


async def test_a_constraint_that_is_too_large_is_the_requests_error_amid_its_text() -> None:
    for make in (lambda: over_fake(2), lambda: real("depth 2")):
        async with make() as engine:
            with pytest.raises(InvalidRequest, match=r"the constraint is too large: .*too many expressions") as raised:
                await engine.generate("x", structured=Regex("(((a{1,30}){1,30}){1,30}){1,30}"), min_tokens=200)
            assert raised.value.param == "structured"
            out = await engine.generate("x", structured=Choice(["yes"]))
            assert out.text == "yes"


async def test_no_more_grammars_are_remembered_than_their_lexers_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    compile_now = Vocabulary.compile
    monkeypatch.setattr(
        Vocabulary, "compile", lambda self, constraint: (compiled.append(constraint), compile_now(self, constraint))[1]
    )
    monkeypatch.setattr(grammars, "MAX_REMEMBERED_LEXERS", 2)
    async with over_fake(1) as engine:
        for text in ("a", "b", "a", "c", "a", "b"):
            await engine.generate("x", structured=Choice([text]))
    assert compiled == [Choice([text]) for text in ("a", "b", "c", "b")]
