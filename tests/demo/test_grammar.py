"""The corpus of the demo model: the same everywhere, and true to its own little world."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from nightly import nightly

from demo_model.evaluate import STRANGE_TOOLS, UNSEEN_TOOLS, story_faults
from demo_model.grammar import Document, corpus_hash, documents
from demo_model.template import END_OF_TEXT, IM_END, IM_START
from demo_model.thoughts import long_difference, long_sum
from demo_model.world import ANIMALS

# The first documents of the corpus that the shipped model was trained on.
HASH_OF_1500_DOCUMENTS = "fcdf8ca4bca2ab3666788f8e958a9597"
COPIES, ANY_COPIES = {"copies_share": 1.0}, {"any_share": 1.0}
SUM = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return list(documents("train-0", 1500))


def chat_turns(corpus: list[Document]) -> list[tuple[str, str]]:
    """(question, answer) for each turn of each chat that is answered by a text, learned as a whole."""
    return [
        (before["content"], message["content"])
        for document in corpus
        for before, message in pairwise(document.messages)
        if (before["role"], message["role"]) == ("user", "assistant") and "values" not in message and message["content"]
    ]


def test_the_corpus_is_the_one_that_the_shipped_model_was_trained_on(corpus: list[Document]) -> None:
    assert corpus_hash(corpus) == HASH_OF_1500_DOCUMENTS


def test_every_document_is_whole_and_only_what_the_assistant_says_is_learned(corpus: list[Document]) -> None:
    stories = [document.text for document in corpus if not document.messages]
    assert len(set(stories)) == len(stories) > 300
    for document in corpus:
        assert document.text.endswith(END_OF_TEXT)
        learned = "".join(segment.text for segment in document.segments if segment.is_target)
        said = [message for message in document.messages if message["role"] == "assistant"]
        if not said:
            assert learned == document.text
            assert story_faults(document.text.removesuffix(END_OF_TEXT)) == []
        elif not any("values" in message for message in said):
            answers = re.findall(r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>)", document.text, re.DOTALL)
            assert learned == "".join(answers)
            assert len(answers) == len(said) == learned.count(IM_END)
            assert document.text.count(IM_START) == document.text.count(IM_END) >= 2
            assert ("<think>" in document.text) == document.is_thinking


def test_chats_hold_no_template_mark_no_wrong_sum_and_the_json_that_was_asked_for(corpus: list[Document]) -> None:
    known = {animal.animal: animal._asdict() for animal in ANIMALS}
    num_sums = num_json = num_animals = 0
    # With tools a result may be anything.
    for question, answer in chat_turns([document for document in corpus if not document.tools]):
        assert "JSON" in question or not re.search(r"[{}|~\[\]]", question)
        assert not re.search(r"[~|]", question + answer)
        for a, sign, b, result in SUM.findall(answer):
            if not re.search(rf"[-+*] {a} {re.escape(sign)} {b} =", answer):
                assert OPERATIONS[sign](int(a), int(b)) == int(result)
                num_sums += 1
        if "JSON" in question:
            facts = json.loads(answer)
            num_json += 1
            if isinstance(facts, dict) and facts.get("animal") in known:
                shown = {
                    key: value for key, value in facts.items() if key in known["fox"] and value != [facts.get("food")]
                }
                assert {k: v for k, v in shown.items() if not isinstance(v, list)}.items() <= known[
                    facts["animal"]
                ].items()
                num_animals += 1
    assert (num_sums > 300, num_json > 150, num_animals > 80) == (True, True, True)
    wanted = [d for d in corpus if d.messages[:1] and "JSON" in d.messages[0]["content"]]
    only_json = [document for document in wanted if document.messages[0]["role"] == "system"]
    assert len(only_json) > 40
    for _, answer in chat_turns(only_json):
        json.loads(answer)


def allows(schema: dict[str, Any], value: Any) -> bool:
    """Whether ``value`` is of ``schema``; a calculator of integers, too, is asked for decimals now and then."""
    kind = "number" if schema.get("type") == "integer" else schema.get("type")
    relaxed = {**schema, "type": kind} if kind is not None else schema
    return bool(Draft202012Validator(relaxed).is_valid(value))


@pytest.mark.parametrize("shares", [*nightly({}, COPIES), ANY_COPIES], ids=str)
def test_each_call_fits_a_tool_of_its_request_and_gets_a_result(shares: dict[str, float]) -> None:
    corpus = documents("calls", 1800, **shares)
    with_tools = [document for document in corpus if document.tools]
    num_calls = num_pairs = 0
    for document in with_tools:
        functions = {tool["function"]["name"]: tool["function"] for tool in document.tools}
        assert 1 <= len(functions) == len(document.tools) <= 4
        num_missing = 0
        for message in document.messages:
            if message["role"] == "tool":
                num_missing -= 1
                continue
            assert num_missing == 0
            calls = [each["function"] for each in message.get("tool_calls", ())]
            num_missing = len(calls)
            num_calls += len(calls)
            num_pairs += len(calls) > 1
            for made in calls:
                parameters = functions[made["name"]].get("parameters", {"properties": {}})
                assert made["arguments"].keys() <= parameters["properties"].keys()
                assert {*parameters.get("required", ())} <= made["arguments"].keys()
                for name, value in made["arguments"].items():
                    assert allows(parameters["properties"][name], value)
    assert (len(with_tools) > 300, num_calls > 500, num_pairs > 50) == (True, True, True)


def test_a_servants_arguments_stand_in_the_question(corpus: list[Document]) -> None:
    """So that the model can copy them; an operator may be spelt out there."""
    num_checked = 0
    for document in corpus:
        for before, message in pairwise(document.messages):
            for each in message.get("tool_calls", ()) if before["role"] == "user" else ():
                for value in each["function"]["arguments"].values():
                    if (
                        isinstance(value, int | float)
                        and not isinstance(value, bool)
                        and len(message["tool_calls"]) > 1
                    ):
                        assert str(value) in before["content"]
                        num_checked += 1
    assert num_checked > 40


@pytest.mark.parametrize("shares", [COPIES, ANY_COPIES], ids=str)
def test_copies_are_exact_and_the_names_of_their_tools_are_odd(shares: dict[str, float]) -> None:
    corpus = list(documents("copies", 300, **shares))
    turns = chat_turns([document for document in corpus if not document.tools])
    assert len(turns) > 300
    for question, answer in turns:
        if question.endswith("?"):
            name, value = answer.split(" = ")
            assert f"What is {name}?" in question
            assert f"{name} = {value}" in question or f"{json.dumps(name)}: {json.dumps(value)}" in question
        else:
            assert question.endswith(": " + answer)
    names = [tool["function"]["name"] for document in corpus for tool in document.tools]
    assert len(set(names)) > 0.9 * len(names) > 100


def test_of_an_answer_with_forced_keys_only_the_values_are_learned(corpus: list[Document]) -> None:
    num_answers = 0
    for document in corpus:
        if not any("values" in message for message in document.messages):
            continue
        said = [message for message in document.messages if message["role"] == "assistant"]
        learned = "".join(segment.text for segment in document.segments if segment.is_target)
        values = ["".join(m["content"][first:last] for first, last in m["values"]) + IM_END for m in said]
        assert learned == "".join(values)
        for message in said:
            num_answers += 1
            json.loads(message["content"])
            assert not any(message["content"][last : last + 1] == ":" for _, last in message["values"])
    assert num_answers > 200


def test_thoughts_on_sums_are_right() -> None:
    for a in range(10, 100):
        for b in range(10, 100):
            steps = long_sum(a, b)
            if a >= b:
                steps += long_difference(a, b)
                assert f"So {a} - {b} = {a - b}." in steps
            assert f"So {a} + {b} = {a + b}." in steps
            for terms, result in re.findall(r"((?:\d+ [-+] )+\d+) = (\d+)", steps):
                numbers = re.findall(r"([-+]?) ?(\d+)", terms)
                assert sum(-int(n) if sign == "-" else int(n) for sign, n in numbers) == int(result)


def test_the_corpus_has_none_of_the_names_that_the_model_is_tested_with(corpus: list[Document]) -> None:
    copies = (document for shares in (COPIES, ANY_COPIES) for document in documents("copies", 500, **shares))
    text = "".join(document.text for document in (*corpus, *copies))
    functions = [tool["function"] for tool in (*UNSEEN_TOOLS.values(), *STRANGE_TOOLS.values())]
    assert not [function["name"] for function in functions if f'"{function["name"]}"' in text]
    of_facts = {"animal", "food", "legs", "can_fly", "name", "age"}
    names = {name for function in functions for name in function["parameters"]["properties"]} - of_facts
    assert len(names) > 10
    assert not [name for name in names if f'"{name}"' in text]


@pytest.mark.parametrize(
    ("story", "fault"),
    [
        ("Once upon a time, there was a frog", "the last sentence has no end"),
        ("The frog was happy. he smiled.", "a sentence begins with a small letter: '. he'"),
        ("the frog was happy.", "the first letter is small"),
        ('"Hello, said the frog.', "an odd number of quotation marks"),
        ("The frog was xqzzy.", "unknown word 'xqzzy'"),
    ],
)
def test_the_check_of_stories_finds_faults(story: str, fault: str) -> None:
    assert story_faults(story) == [fault]
