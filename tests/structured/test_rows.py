"""A row's grammar in step with a device: what is sampled, what is forced, and that neither depends on the rest."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from nightly import nightly, seeds
from structured.conftest import (
    ANIMAL,
    NUM_TOKENS,
    check_json,
    compile_grammar,
    decode,
    ending_ids,
    tokenizer,
    vocabulary,
)

from aioengine import Choice, Grammar, Json, Regex, StructuralTags, Tag
from aioengine.structured import guidance
from aioengine.structured.grammar import CompiledGrammar, Thinking, ThinkingGrammar
from aioengine.structured.rows import GrammarRow, GrammarRows

CONSTRAINTS = {
    "json": Json(ANIMAL),
    "json with whitespace": Json(ANIMAL, whitespace=True),
    "regex": Regex("(ab|cd){2,5} and (one|two)"),
    "choice": Choice(["a red fox", "a red fox and a green owl", "nothing at all"]),
}


class Row:
    """One row of a device's."""

    def __init__(self, grammar: CompiledGrammar, first: int, output_ids: list[int], **options: Any) -> None:
        self._rows = GrammarRows(NUM_TOKENS // 32)
        self._row = self._rows.add(GrammarRow(grammar, first, **options), output_ids)
        self.unsent = self._row.unsent

    @property
    def problem(self) -> str:
        return self._row.problem

    def learn(self, position: int, token_id: int) -> list[int]:
        (told,) = self._rows.learn([(self._row, position, token_id)])
        return told

    def fill(self, position: int, masks: np.ndarray) -> None:
        self._rows.fill([(self._row, position)], masks)


def allowed(row: Row, position: int) -> list[int]:
    mask = np.zeros((1, NUM_TOKENS // 32), np.int32)
    row.fill(position, mask)
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little")).tolist()
    return ids


def choose(ids: list[int], output: list[int], seed: int) -> int:
    """What a device samples: it depends on the tokens before, and on nothing else."""
    return random.Random(f"{seed} {output}").choice(sorted(ids))


def run(grammar: CompiledGrammar, seed: int, *, depth: int = 1, breaks: bool = False, **options: Any) -> list[int]:
    """The output of a device with ``depth`` steps in flight.

    Args:
        breaks: the row is given up and taken again at random, as when it is preempted.
        options: of the row.
    """
    rng = random.Random(seed)
    output: list[int] = []
    """What the host knows."""
    history: list[int] = []
    """What the device has sampled or was sent."""
    row = Row(grammar, 0, output, **options)
    in_flight: list[tuple[int, int, list[int]]] = []
    while not (output and output[-1] in ending_ids()) and len(output) < 300:
        while len(in_flight) < depth:
            position = max(len(output), in_flight[-1][0] + 1 if in_flight else 0)
            while row.unsent:
                first, token_ids = row.unsent.popleft()
                history[first : first + len(token_ids)] = token_ids
            assert len(history) >= position, "the device lacks a token"
            token_id = choose(allowed(row, position), history[:position], seed)
            history[position : position + 1] = [token_id]
            in_flight.append((position, token_id, row.learn(position, token_id)))
        position, token_id, forced = in_flight.pop(0)
        if position == len(output):
            output += [token_id, *forced]
        else:
            assert output[position] == token_id, "a step in flight sampled another token than was forced"
            assert not forced, "what is forced is told once"
        if breaks and rng.random() < 0.2:
            in_flight.clear()
            row, history = Row(grammar, 0, output, **options), list(output)
    assert not row.problem
    return output


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_output_is_the_same_however_a_row_comes_to_it(name: str, seed: int) -> None:
    grammar = compile_grammar(CONSTRAINTS[name])
    wanted = run(grammar, seed)
    for depth in (1, 2, 4):
        for jumps in (True, False):
            for breaks in (True, False):
                assert run(grammar, seed, depth=depth, jumps=jumps, breaks=breaks) == wanted, (depth, jumps, breaks)


@pytest.mark.parametrize("seed", seeds(50))
def test_what_is_sampled_is_what_was_asked_for(seed: int) -> None:
    for whitespace in (True, False):
        output = run(compile_grammar(Json(ANIMAL, whitespace=whitespace)), seed)
        assert output[-1] in ending_ids()
        check_json(decode(output), ANIMAL)


def test_a_row_that_jumps_samples_fewer_tokens() -> None:
    grammar = compile_grammar(Json(ANIMAL))
    row = Row(grammar, 0, [])
    output: list[int] = []
    num_sampled = 0
    while not (output and output[-1] in ending_ids()):
        token_id = choose(allowed(row, len(output)), output, 3)
        output += [token_id, *row.learn(len(output), token_id)]
        num_sampled += 1
    assert num_sampled < 0.6 * len(output)


def test_forced_tokens_are_those_that_the_tokenizer_makes_of_their_text() -> None:
    text = '{"animal": "'
    row = Row(compile_grammar(Json(ANIMAL)), 0, [])
    first = allowed(row, 0)
    assert len(first) == 1
    ids: list[int] = []
    while len(first) == 1:
        ids += [*first, *row.learn(len(ids), first[0])]
        first = allowed(row, len(ids))
    wanted = tokenizer().encode(text).ids
    assert wanted[: len(ids)] == ids, "a prefix: the last piece may go on with what is sampled next"
    assert len(ids) >= len(wanted) - 1


def test_only_the_end_may_follow_where_nothing_else_can_come_and_only_there() -> None:
    grammar = compile_grammar(Choice(["yes", "yes please"]))
    row = Row(grammar, 0, [], is_forcing=False)
    output: list[int] = []
    for token_id in tokenizer().encode("yes").ids:
        assert not set(ending_ids()) & set(allowed(row, len(output)))
        row.learn(len(output), token_id)
        output.append(token_id)
    assert set(ending_ids()) < set(allowed(row, len(output)))
    for token_id in tokenizer().encode(" please").ids:
        row.learn(len(output), token_id)
        output.append(token_id)
    assert set(allowed(row, len(output))) == set(ending_ids())


def test_an_end_is_ignored_while_there_is_more_to_come() -> None:
    grammar = compile_grammar(Choice(["yes", "yes please"]))
    ids = tokenizer().encode("yes").ids
    row = Row(grammar, 0, ids, is_forcing=False, ignores_end=True)
    assert not set(ending_ids()) & set(allowed(row, len(ids)))
    ids += tokenizer().encode(" please").ids
    row = Row(grammar, 0, ids, is_forcing=False, ignores_end=True)
    assert set(allowed(row, len(ids))) == set(ending_ids())


def test_an_end_comes_late_while_there_is_more_to_come() -> None:
    grammar = compile_grammar(Choice(["yes", "yes please"]))
    for text in ("yes", "yes please"):
        ids = tokenizer().encode(text).ids
        for num_late in (0, len(ids), len(ids) + 1, 100):
            row = Row(grammar, 0, ids, is_forcing=False, late_ids=ending_ids(), num_late=num_late)
            assert (ending_ids()[0] in allowed(row, len(ids))) == (text == "yes please" or num_late <= len(ids))


def test_other_rules_of_a_request_take_tokens_away() -> None:
    grammar = compile_grammar(Regex("[ab]+"))
    (a,) = tokenizer().encode("a").ids
    bits = np.zeros(NUM_TOKENS // 32, np.int32)
    bits[a // 32] |= np.int32(1 << a % 32)
    row = Row(grammar, 0, [], is_forcing=False, allowed=bits)
    assert allowed(row, 0) == [a]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", ["<|im_end|>", "<|endoftext|>", "</think>", "<tool_call>"])
def test_the_name_of_a_token_in_a_text_is_written_as_text(name: str, depth: int) -> None:
    named = tokenizer().token_to_id(name)
    text = f"a{name}, and words that follow"
    key = {"type": "object", "properties": {text: {"const": name}}, "required": [text], "additionalProperties": False}
    for constraint, expected in (
        (Choice([text]), text),
        (Regex(re.escape(text)), text),
        (Json({"const": text}), json.dumps(text)),
        (Json(key), json.dumps({text: name})),
    ):
        *output, end = run(compile_grammar(constraint), 0, depth=depth)
        assert end in ending_ids()
        assert named not in output
        assert decode(output) == expected


def test_a_grammar_names_tokens_outside_of_its_texts() -> None:
    named = tokenizer().token_to_id("<tool_call>")
    output = run(compile_grammar(Grammar('start: "<tool_call>" <tool_call> /<tool_call>/')), 0)
    assert output.count(named) == 1
    assert tokenizer().decode(output, skip_special_tokens=False).startswith("<tool_call>" * 3)


def test_escapes_of_gbnf_are_their_characters() -> None:
    grammar = Grammar(r'root ::= "caf\u00e9 \U0001F600 \u0022\u005c \\u00e9 \" " [\u002d\u005d] [\u00e9-\u00ea]')
    output = decode(run(compile_grammar(grammar), 0))
    assert output[:-2] == 'café 😀 "\\ \\u00e9 " '
    assert output[-2] in "-]"
    assert output[-1] in "éê"


def test_a_tag_is_written_with_the_tokens_of_its_names() -> None:
    tag = Tag("<tool_call>x", "</tool_call>", pattern="[0-9]")
    row = Row(compile_grammar(StructuralTags((tag,), ("<tool_call>",))), 0, [])
    begin, end = (tokenizer().token_to_id(name) for name in ("<tool_call>", "</tool_call>"))
    free = allowed(row, 0)
    assert begin in free
    assert end not in free
    row.learn(0, begin)
    (x,) = allowed(row, 1)
    assert decode([x]) == "x"
    row.learn(1, x)
    row.learn(2, allowed(row, 2)[0])
    assert allowed(row, 3) == [end]


def test_a_token_that_the_grammar_does_not_admit_ends_the_row_and_says_so() -> None:
    row = Row(compile_grammar(Regex("[ab]+")), 0, [])
    row.learn(0, tokenizer().encode("x").ids[0])
    assert row.problem
    assert allowed(row, 1) == []


# Reasoning before an answer

BEGIN, END = tokenizer().encode("begin").ids, tokenizer().encode(" the end").ids


def thinking(**fields: Any) -> Thinking:
    return Thinking(end_ids=tuple(END), forced_end_ids=tuple(END), **fields)


def test_reasoning_is_free_and_the_grammar_begins_behind_it() -> None:
    grammar = ThinkingGrammar(thinking(is_begun=True), compile_grammar(Choice(["yes, it is"])), ending_ids())
    row = Row(grammar, 0, [])
    output = tokenizer().encode("the fox is red").ids
    for position, token_id in enumerate(output):
        ids = allowed(row, position)
        assert len(ids) == NUM_TOKENS - len(ending_ids()), "anything but an end, which would leave the answer out"
        assert row.learn(position, token_id) == []
    told = []
    for token_id in END:
        told = row.learn(len(output), token_id)
        output.append(token_id)
    assert decode(told) == "yes, it is"
    assert told[-1] in ending_ids()


def test_reasoning_ends_when_it_has_had_its_tokens() -> None:
    grammar = ThinkingGrammar(thinking(is_begun=True, max_tokens=3), None, ending_ids())
    row = Row(grammar, 0, [])
    (word,) = tokenizer().encode("a").ids
    assert row.learn(0, word) == []
    assert row.learn(1, word) == []
    told = row.learn(2, word)
    assert told in (END, []), "a short end is sampled, under a mask of its next token alone"
    for position, token_id in enumerate(END, 3):
        assert allowed(row, position) == [token_id]
        row.learn(position, token_id)
    assert len(allowed(row, 3 + len(END))) == NUM_TOKENS, "behind it nothing is asked for"


def test_reasoning_without_a_budget_of_any_token_is_ended_at_once() -> None:
    row = Row(ThinkingGrammar(thinking(is_begun=True, max_tokens=0), None, ending_ids()), 0, [])
    assert [allowed(row, position) for position in range(len(END))] == [[token_id] for token_id in END]


def test_a_model_may_begin_to_reason_by_itself() -> None:
    inner = compile_grammar(Choice(["yes, it is"]))
    grammar = ThinkingGrammar(thinking(begin_ids=tuple(BEGIN)), inner, ending_ids())
    row = Row(grammar, 0, [])
    assert set(allowed(row, 0)) == {BEGIN[0], *allowed(Row(inner, 0, [], is_forcing=False), 0)}
    output: list[int] = []
    for token_id in [*BEGIN, *tokenizer().encode("so").ids, *END]:
        assert token_id in allowed(row, len(output))
        told = row.learn(len(output), token_id)
        output.append(token_id)
    assert decode(told) == "yes, it is"


def test_a_model_may_leave_reasoning_out() -> None:
    inner = compile_grammar(Choice(["yes", "no, it is not"]))
    grammar = ThinkingGrammar(thinking(begin_ids=tuple(BEGIN)), inner, ending_ids())
    row = Row(grammar, 0, [])
    first = tokenizer().encode("no").ids[0]
    assert row.learn(0, first)[-1] in ending_ids()


def test_an_answer_may_stand_behind_a_blank_line_and_no_more() -> None:
    (newline,) = tokenizer().encode("\n").ids
    inner = compile_grammar(Choice(["yes, it is"]))
    first = allowed(Row(inner, 0, [], is_forcing=False), 0)
    for num_gaps in (0, 1, 2):
        row = Row(ThinkingGrammar(thinking(is_begun=True, gap_ids=(newline,)), inner, ending_ids()), 0, [])
        output: list[int] = []
        for token_id in [*END, *[newline] * num_gaps]:
            assert token_id in allowed(row, len(output))
            assert row.learn(len(output), token_id) == [] or len(output) + 1 == len(END) + 2
            output.append(token_id)
        if num_gaps < 2:
            assert set(allowed(row, len(output))) == {newline, *first}
        else:
            assert newline not in allowed(row, len(output))


@pytest.mark.parametrize("is_forcing", [True, False])
def test_the_whole_end_of_reasoning_is_forced_token_by_token(is_forcing: bool) -> None:
    end = tuple(tokenizer().encode(" and so it ends").ids)
    grammar = ThinkingGrammar(
        Thinking(end_ids=end, forced_end_ids=end, is_begun=True, max_tokens=1),
        compile_grammar(Choice(["yes, it is"])),
        ending_ids(),
    )
    row = Row(grammar, 0, [], is_forcing=is_forcing, jumps=False)
    row.learn(0, BEGIN[0])
    for position, token_id in enumerate(end, 1):
        assert allowed(row, position) == [token_id]
        row.learn(position, token_id)


def test_an_answer_that_begins_as_reasoning_does_is_an_answer() -> None:
    begin, answer = tokenizer().encode("the fox thinks").ids, "the fox is red"
    assert begin[0] == tokenizer().encode(answer).ids[0], "they share no token: take another text"
    inner = compile_grammar(Choice([answer]))
    grammar = ThinkingGrammar(thinking(begin_ids=tuple(begin)), inner, ending_ids())
    for reasoning in ([], [*begin, *tokenizer().encode(" so").ids, *END]):
        row = Row(grammar, 0, [], jumps=False)
        output: list[int] = []
        for token_id in [*reasoning, *tokenizer().encode(answer).ids]:
            assert token_id in allowed(row, len(output)), decode(output)
            row.learn(len(output), token_id)
            output.append(token_id)
        assert set(allowed(row, len(output))) <= set(ending_ids())


# What several rows share

WEARING = Regex("[a-z ]*[aeious][a-z ]{30}[xyz]")
"""Each mask finds some 270 states of the lexer: 50,000 are full after 180 tokens, of whatever rows."""


def random_rows(grammar: CompiledGrammar, num_rows: int, num_steps: int, *, seed: int) -> list[list[int]]:
    """The tokens that rows side by side sample, each by a seed of its own."""
    table = GrammarRows(NUM_TOKENS // 32)
    rows = [table.add(GrammarRow(grammar, 0), []) for _ in range(num_rows)]
    outputs: list[list[int]] = [[] for _ in rows]
    masks = np.zeros((num_rows, NUM_TOKENS // 32), np.int32)
    for _ in range(num_steps):
        table.fill([(row, len(output)) for row, output in zip(rows, outputs, strict=True)], masks)
        assert not any(row.problem for row in rows)
        for number, output in enumerate(outputs):
            ids = np.flatnonzero(np.unpackbits(masks[number].view(np.uint8), bitorder="little")).tolist()
            output.append(choose([one for one in ids if one not in ending_ids()], output, seed + number))
        told = table.learn([(row, len(out) - 1, out[-1]) for row, out in zip(rows, outputs, strict=True)])
        for output, forced in zip(outputs, told, strict=True):
            output.extend(forced)
    for row in rows:
        table.remove(row)
    return outputs


def test_rows_go_on_when_their_lexer_is_full_and_are_what_they_are_alone() -> None:
    grammar = compile_grammar(WEARING)
    together = random_rows(grammar, 40, 12, seed=0)
    for number in (0, 17, 39):
        assert random_rows(compile_grammar(WEARING), 1, 12, seed=number) == [together[number]]
    for _ in range(2):  # the grammar is as good as new
        assert random_rows(grammar, 3, 40, seed=100) == random_rows(compile_grammar(WEARING), 3, 40, seed=100)


@pytest.mark.parametrize("numbers", [range(0, 120, 35), *nightly(range(0, 120, 7))], ids=["some", "all"])
def test_forced_tokens_are_the_same_where_a_lexer_becomes_full(numbers: range) -> None:
    """Each mask is made by a lexer that is full since the one before, whichever part of a step has filled it."""
    text = Regex('([a-z]*[aeious][a-z]{30}<"and then some text that follows">)+')
    grammar = compile_grammar(text)
    wanted = run(grammar, 3)
    for num_begun in numbers:
        grammar = compile_grammar(text)
        random_rows(grammar, 1, num_begun, seed=5)
        assert run(grammar, 3) == wanted


def test_a_constraint_that_is_too_large_for_a_lexer_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guidance.LIMITS, "max_lexer_states", 1000)
    row = Row(compile_grammar(Json({"type": "string", "maxLength": 4000})), 0, [])
    output = tokenizer().encode('"' + "once upon a time " * 200).ids
    for position, token_id in enumerate(output):
        if row.problem:
            break
        assert token_id in allowed(row, position)
        row.learn(position, token_id)
    assert row.problem.startswith("the constraint is too large: lexer error: too many states")


def test_a_grammar_that_takes_long_to_compile_is_spent_with_its_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "MAX_RENEWAL_S", 0.0)
    grammar = compile_grammar(WEARING)
    assert not grammar.is_spent
    row, output = Row(grammar, 0, []), list[int]()
    while not row.problem:
        output.append(choose(allowed(row, len(output)), output, 0))
        row.learn(len(output) - 1, output[-1])
    assert row.problem.startswith("the constraint is too large")
    assert grammar.is_spent


def test_there_are_as_many_lexers_as_the_living_rows_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "MAX_LEXERS", 4)
    monkeypatch.setattr(guidance, "MAX_AGAIN_S", 10.0)
    grammar = vocabulary().compile(Regex("[ab]+"))
    for _ in range(100):
        grammar.matcher()
    assert grammar.num_lexers == 1
    matchers = [grammar.matcher() for _ in range(100)]
    assert grammar.num_lexers == 4
    del matchers
    grammar.matcher()
    assert grammar.num_lexers == 1


def test_a_large_grammar_is_freed_in_a_thread_when_no_row_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "MAX_AT_ONCE_S", 0.0)
    grammar = vocabulary().compile(Regex("[ab]+"))
    begun, row = grammar.matcher().lexer.begun, grammar.matcher()
    del grammar
    assert not begun.is_error()
    assert not row.problem
    del row
    join_ends_of_grammars()
    assert begun.is_error()  # it was ended, and what it had is free


def test_a_grammar_that_a_daemon_thread_frees_is_waited_for_at_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "MAX_AT_ONCE_S", 0.0)
    daemons = list[bool]()
    monkeypatch.setattr(guidance, "_free", lambda begun: daemons.append(threading.current_thread().daemon))
    grammars = [vocabulary().compile(Regex("[ab]+"))]
    thread = threading.Thread(target=grammars.clear, daemon=True)
    thread.start()
    thread.join()
    join_ends_of_grammars()
    assert daemons == [False]


def test_a_large_grammar_is_freed_at_the_interpreters_exit() -> None:
    script = (
        "import atexit\n"
        "from aioengine.structured import guidance\n"
        "from aioengine.structured.constraints import Regex\n"
        "from structured.test_rows import vocabulary\n"
        "guidance.MAX_AT_ONCE_S = 0.0\n"
        "grammars = [vocabulary().compile(Regex('[ab]+'))]\n"
        "atexit.register(grammars.clear)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def join_ends_of_grammars() -> None:
    for thread in threading.enumerate():
        if thread.name == "aioengine-grammar-end":
            thread.join()


def test_a_row_that_is_taken_again_makes_no_mask_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compile_grammar(Regex("[a-z ]+"))
    masked: list[Any] = []
    fill = guidance.GuidanceMatcher.fill
    monkeypatch.setattr(guidance.GuidanceMatcher, "fill", lambda self, mask: (masked.append(self), fill(self, mask))[1])
    output = tokenizer().encode("once upon a time " * 100).ids
    row = Row(grammar, 0, output)
    assert not masked
    assert allowed(row, len(output))
