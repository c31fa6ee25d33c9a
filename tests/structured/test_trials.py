"""Constraints that take long to compile: tried in a process, which is killed, beside a lane for those that do not."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from structured.conftest import ANIMAL, compile_grammar, ending_ids, tokenizer, vocabulary
from structured.schema_sample import SAMPLE, SchemaCase
from structured.test_engine import over_fake
from waiting import Tasks, until

from aioengine import Choice, EngineOverloaded, Grammar, InternalError, InvalidRequest, Json, Regex, StructuralTags, Tag
from aioengine.core import grammars
from aioengine.structured import trials
from aioengine.structured.constraints import Either
from aioengine.structured.guidance import LIMITS, Vocabulary
from aioengine.structured.trials import is_to_be_tried, try_compiling

ENDLESS = (Path(__file__).parent / "endless.lark").read_text()
"""Found by chance: compiling these 500 characters takes more than a minute, and gigabytes."""


def test_a_grammar_that_takes_minutes_is_given_up_with_all_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "CPU_S", 1)
    tried = Vocabulary(tokenizer().to_str(), 2048, ending_ids())
    with pytest.raises(InvalidRequest, match="takes more than 1 s or 1024 MiB to compile"):
        tried.compile(Grammar(ENDLESS))
    tried.compile(Grammar('start: "a"+'))


def test_a_process_that_does_not_work_lets_nothing_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(trials, "_CHILD", tmp_path / "broken.py")
    with pytest.raises(InternalError, match="does not work"):
        try_compiling('start: "a"', 2048, LIMITS)


def few(count: int) -> dict[str, Any]:
    return {"enum": [f"v{number}" for number in range(count)]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [few(10)] * 4},
        {"allOf": [few(100)] * 2},
        {"allOf": [{"$ref": "#/$defs/a"}] * 8, "$defs": {"a": few(4)}},
        {**few(9), "anyOf": [few(9)] * 9, "oneOf": [few(9), few(3)]},
        {"properties": {f"x{number}": {"allOf": [few(4)] * 3} for number in range(40)}},
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(6)]},
        {"anyOf": [{"properties": {f"q{n}": {}}} for n in range(60)], "properties": {f"p{n}": {} for n in range(60)}},
        {"properties": {f"p{number}": {"type": "integer", "multipleOf": 991 + number} for number in range(20)}},
    ],
)
def test_schemas_whose_options_multiply_are_tried(schema: dict[str, Any]) -> None:
    assert is_to_be_tried(Json(schema))
    assert is_to_be_tried(Either((Choice(["a"]), StructuralTags((Tag("<f>", schema=schema),), ("<f>",)))))


COMBINED = {"all of any of", "all of patterns", "date of one century", "email at one host", "https address"}


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_of_the_sample_the_large_and_those_of_several_patterns_are(case: SchemaCase) -> None:
    constraint = Json(case.schema)
    is_large = len(constraint.content) > trials.LARGE_BYTES
    assert is_to_be_tried(constraint) == (is_large or case.name in COMBINED)


def test_patterns_of_one_text_that_take_for_ever_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "CPU_S", 1)
    definitions: dict[str, Any] = {
        f"{n}": {"pattern": f"a{{{n}}}.*b", "allOf": [{"$ref": f"#/$defs/{n + 1}"}]} for n in range(100)
    }
    schema = {"type": "string", "$ref": "#/$defs/0", "$defs": {**definitions, "100": {}}}
    tried = Vocabulary(tokenizer().to_str(), 2048, ending_ids())
    for is_lenient in (False, True):
        with pytest.raises(InvalidRequest):
            tried.compile(Json(schema, lenient=is_lenient))
    tried.compile(Json({"type": "string", "allOf": [{"pattern": f"^[a-{letter}]*$"} for letter in "bcdefghij"]}))


def test_small_schemas_and_expressions_pay_for_no_process() -> None:
    large = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}
    assert not any(
        map(is_to_be_tried, (Json(ANIMAL), Regex("a+"), Choice(["a"]), Grammar("start: A", is_forcing=True)))
    )
    assert all(map(is_to_be_tried, (Json(large), Grammar('start: "a"'), Regex("a" * 20_000))))


@pytest.mark.virtual_clock
async def test_a_slow_grammar_holds_up_no_small_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks()
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    compile_now = Vocabulary.compile

    def compile_slowly(self: Vocabulary, constraint: Any) -> Any:
        if isinstance(constraint, Grammar):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return compile_now(self, constraint)

    monkeypatch.setattr(Vocabulary, "compile", compile_slowly)
    async with over_fake(2) as engine:
        slow = [tasks.start(engine.generate("x", structured=Grammar(f'start: "{n}"'))) for n in range(3)]
        for number in range(5):
            assert (await engine.generate("x", structured={"const": number})).text == str(number)
        assert not any(task.done() for task in slow)
        gate.set()
        assert [out.text for out in await asyncio.gather(*slow)] == ["0", "1", "2"]


@pytest.mark.virtual_clock
async def test_a_small_one_that_is_slow_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks()
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    compile_now = Vocabulary.compile

    def compile_slowly(self: Vocabulary, constraint: Any) -> Any:
        if constraint == Regex("slow"):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return compile_now(self, constraint)

    monkeypatch.setattr(Vocabulary, "compile", compile_slowly)
    monkeypatch.setattr(grammars, "GIVE_WAY_S", 0.0)
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 1e9)
    async with over_fake(2) as engine:
        slow = tasks.start(engine.generate("x", structured=Regex("slow")))
        assert (await engine.generate("x", structured={"const": 1})).text == "1"
        assert not slow.done()
        gate.set()
        assert (await slow).text == "slow"


@pytest.mark.virtual_clock
@pytest.mark.parametrize("is_fair", [False, True])
async def test_slow_grammars_of_one_tenant_hold_up_no_other_and_none_is_refused(
    is_fair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, gate, begun = Tasks(), asyncio.Event(), list[Any]()
    loop = asyncio.get_running_loop()
    compile_now = Vocabulary.compile

    def compile_slowly(self: Vocabulary, constraint: Any) -> Any:
        begun.append(constraint)
        if constraint != Grammar('start: "good"'):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return compile_now(self, constraint)

    monkeypatch.setattr(Vocabulary, "compile", compile_slowly)
    monkeypatch.setattr(grammars, "GIVE_WAY_S", 0.0)
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 1e9)
    async with over_fake(2, scheduler="fair" if is_fair else "priority") as engine:

        def ask(text: str, tenant: str) -> Any:
            return tasks.start(engine.generate("x", structured=Grammar(f'start: "{text}"'), tenant=tenant))

        slow = [ask(f"{n}", "many") for n in range(20)]
        good = [ask("good", "many"), ask("good", "few")]  # for a tenant's own it would be the last
        assert [(await out).text for out in good] == ["good", "good"]
        assert begun.index(Grammar('start: "good"')) <= grammars.MAX_OVERDUE_OF_TENANT
        assert (await ask("good", "another")).text == "good"
        assert not any(task.done() for task in slow)
        gate.set()
        assert [out.text for out in await asyncio.gather(*slow)] == [f"{n}" for n in range(20)]
        assert begun.count(Grammar('start: "good"')) == 1


@pytest.mark.virtual_clock
async def test_a_tenant_has_so_many_grammars_waiting_and_the_next_is_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks, gate = Tasks(), asyncio.Event()
    loop = asyncio.get_running_loop()
    compile_now = Vocabulary.compile

    def compile_slowly(self: Vocabulary, constraint: Any) -> Any:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return compile_now(self, constraint)

    monkeypatch.setattr(Vocabulary, "compile", compile_slowly)
    monkeypatch.setattr(grammars, "MAX_QUEUED", 3)
    async with over_fake(2) as engine:
        asked = [tasks.start(engine.generate("x", structured=Grammar(f'start: "{n}"'))) for n in range(8)]
        refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        other = tasks.start(engine.generate("x", structured=Grammar('start: "b"'), tenant="other"))
        gate.set()
        assert (await other).text == "b"
        ended = await tasks.end(*asked)
        assert {type(ended[asked.index(task)]) for task in refused} == {EngineOverloaded}
        served = [(number, out.text) for number, out in enumerate(ended) if not isinstance(out, EngineOverloaded)]
        assert 3 <= len(served) <= 5, "those that wait, and those that are compiled"
        assert all(text == str(number) for number, text in served)


@pytest.mark.virtual_clock
async def test_requests_that_were_cancelled_while_they_waited_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, gate = Tasks(), asyncio.Event()
    loop = asyncio.get_running_loop()
    compile_now = Vocabulary.compile

    def compile_slowly(self: Vocabulary, constraint: Any) -> Any:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return compile_now(self, constraint)

    monkeypatch.setattr(Vocabulary, "compile", compile_slowly)
    monkeypatch.setattr(grammars, "MAX_QUEUED", 3)
    monkeypatch.setattr(grammars, "GIVE_WAY_S", 1e9)
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 1e9)
    async with over_fake(2) as engine:
        lane = engine._runtime.core.grammars._tried
        queues = lane.queues
        first = tasks.start(engine.generate("x", structured=Grammar('start: "a"')))
        await until(lambda: lane.is_busy)
        for tenant in (*map(str, range(20)), "many"):
            ended = [
                tasks.start(engine.generate("x", structured=Grammar(f'start: "{tenant} {n}"'), tenant=tenant))
                for n in range(3)
            ]
            await until(lambda tenant=tenant: len(queues.get(tenant, ())) == 3)
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)
        last = tasks.start(engine.generate("x", structured=Grammar('start: "b"'), tenant="many"))
        await until(lambda: len(queues.get("many", ())) == 1)
        assert len(queues) == 1
        gate.set()
        assert [out.text for out in await asyncio.gather(first, last)] == ["a", "b"]


def doubling(keyword: str, leaf: Any) -> dict[str, Any]:
    definitions = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, "d40": leaf}}


TEXT, OBJECT = {"type": "string"}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LAUGHS: dict[str, Any] = {
    "allOf that doubles": doubling("allOf", TEXT),
    "anyOf that doubles": doubling("anyOf", OBJECT),
    "oneOf that doubles": doubling("oneOf", TEXT),
    "items that double": doubling("prefixItems", TEXT),
    "allOf of anyOfs": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}{j}": TEXT}, "required": [f"p{i}{j}"]} for j in range(6)]}
            for i in range(12)
        ],
    },
    "allOf of types": {"allOf": [{"anyOf": [{"minLength": i}, {"type": "integer"}]} for i in range(60)]},
    "patterns of one text": {"allOf": [{"pattern": f".*{c}.{{{i}}}"} for i, c in enumerate("abcd", 8)]},
    "a pattern of many states": {"type": "string", "pattern": "^(a|b)*a(a|b){18}$"},
    "patterns of names": {"patternProperties": {f"^a{{{i}}}.*b{{{i}}}$": {} for i in range(200)}},
    "a list in a list": {"items": {"items": TEXT, "minItems": 300, "maxItems": 900}, "minItems": 300, "maxItems": 900},
    "a long list": {"type": "array", "items": TEXT, "maxItems": 10**9},
    "multiples": {"allOf": [{"type": "integer", "multipleOf": p} for p in (2, 3, 5, 7, 11, 13)]},
}


@pytest.mark.parametrize("name", LAUGHS)
def test_a_small_schema_compiles_or_is_refused_at_once(name: str) -> None:
    began = time.thread_time()
    assert len(json.dumps(LAUGHS[name])) < trials.LARGE_BYTES
    try:
        grammar = compile_grammar(LAUGHS[name])
    except InvalidRequest:
        pass
    else:
        matcher = grammar.matcher()
        for token in vocabulary().tokenizer.tokenize_str('{"a": 1}'):
            matcher.consume([token])
    assert time.thread_time() - began < 1
