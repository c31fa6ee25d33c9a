"""The shipped demo model does what its card says; generation is transformers' own."""

from __future__ import annotations

import json
import re
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from aioengine import LLM
from aioengine.models.folder import DEMO_MODEL
from demo_model.evaluate import SAMPLING, UNSEEN_TOOLS, DemoModel, calls_in, shaped_right, story_faults
from demo_model.shapes import Shaped
from demo_model.tool_chats import Chat

MAX_BYTES = 10_000_000


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return DemoModel(DEMO_MODEL)


@pytest.fixture(scope="module")
def stories(demo: DemoModel) -> list[tuple[str, bool]]:
    """Eight sampled stories, and whether each ended by itself."""
    torch.manual_seed(0)
    completions = demo.complete(["Once upon a time"] * 8, max_tokens=480, **SAMPLING)
    return [("Once upon a time" + text, ended) for text, ended in completions]


def test_the_weights_are_at_most_ten_megabytes() -> None:
    assert (DEMO_MODEL / "model.safetensors").stat().st_size <= MAX_BYTES


def test_the_config_loads_and_names_both_ends() -> None:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    generation = GenerationConfig.from_pretrained(DEMO_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.tie_word_embeddings
    assert config.bos_token_id is None
    assert config.max_position_embeddings >= 1024
    assert set(config.eos_token_id) == set(generation.eos_token_id) == ends
    assert config.vocab_size == len(tokenizer)


def test_any_text_survives_the_tokenizer(demo: DemoModel) -> None:
    @given(text=st.text(max_size=80))
    def survives(text: str) -> None:
        assert demo.tokenizer.decode(demo.tokenizer.encode(text, add_special_tokens=False)) == text

    survives()


def test_each_digit_is_a_token_and_a_plain_prompt_gets_no_special_token(demo: DemoModel) -> None:
    assert demo.tokenizer.tokenize("2026") == ["2", "0", "2", "6"]
    ids = demo.tokenizer("Once upon a time")["input_ids"]
    assert not set(ids) & set(demo.tokenizer.all_special_ids)


def test_the_chat_template_can_open_the_answer_and_refuses_an_unknown_role(demo: DemoModel) -> None:
    chat = [{"role": "user", "content": "Hello!"}]
    opened = demo.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert opened == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"

    with pytest.raises(jinja2.TemplateError, match="unknown role wizard: use system, user, assistant or tool"):
        demo.tokenizer.apply_chat_template([{"role": "wizard", "content": "Abracadabra"}], tokenize=False)


def test_stories_end_by_themselves_and_are_well_formed(stories: list[tuple[str, bool]]) -> None:
    assert [ended for _, ended in stories] == [True] * len(stories)
    assert [story_faults(story) for story, _ in stories] == [[]] * len(stories)
    assert all(story.count(".") >= 5 for story, _ in stories)
    assert len({story for story, _ in stories}) == len(stories)


TURNS = [
    ("Hello!", "Hello! How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Who are you?", "I am Pip, the tiny demo model of aioengine."),
    ("What is 2 + 3?", "2 + 3 = 5."),
    ("What is 7 + 8?", "7 + 8 = 15."),
    ("What is 9 - 4?", "9 - 4 = 5."),
    ("How many legs does a spider have?", "A spider has 8 legs."),
    ("Can a duck fly?", "Yes, a duck can fly."),
    ("What is the opposite of big?", "The opposite of big is small."),
    (
        "Tell me about the fox as JSON.",
        '{"animal": "fox", "home": "forest", "food": "berries", "legs": 4, "colour": "red"}',
    ),
]


def test_greedy_answers_are_exact_where_there_is_one_answer(demo: DemoModel) -> None:
    answers = demo.answer([[{"role": "user", "content": question}] for question, _ in TURNS])
    assert answers == [answer for _, answer in TURNS]


def test_the_system_message_earlier_turns_and_the_bounds_of_its_world_are_kept(demo: DemoModel) -> None:
    asked = [
        ("Who are you?", [{"role": "system", "content": "You are Ruby."}]),
        ("What is 2 + 3?", [{"role": "system", "content": "Always answer in JSON."}]),
        (
            "What is my name?",
            [
                {"role": "user", "content": "My name is Clara."},
                {"role": "assistant", "content": "Nice to meet you, Clara!"},
            ],
        ),
        *((question, []) for question in ("What is the capital of France?", "Explain quantum physics.", "Write code.")),
    ]
    answers = demo.answer([[*before, {"role": "user", "content": question}] for question, before in asked])
    assert answers[0] == "I am Ruby, the tiny demo model of aioengine."
    assert json.loads(answers[1]) == {"a": 2, "b": 3, "operator": "+", "result": 5}
    assert answers[2] == "Your name is Clara."
    assert all(answer.startswith("I am sorry, I do not know that.") for answer in answers[3:])


def test_a_story_on_request_is_about_who_was_asked_for(demo: DemoModel) -> None:
    [story] = demo.answer(
        [[{"role": "user", "content": "Tell me a short story about a fox named Ruby."}]], max_tokens=400
    )
    assert story_faults(story) == []
    assert re.search(r"\bfox\b", story)
    assert "Ruby" in story


def _tool(name: str, *names: str, type_: str = "number") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {each: {"type": type_} for each in names}, "required": list(names)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD, CLOCK, CITY_CLOCK = _tool("add", "a", "b"), _tool("get_time"), _tool("get_time", "city", type_="string")
CALLS: list[tuple[str, list[dict[str, Any]], list[tuple[str, Any]]]] = [
    ("What is 123 + 45?", [ADD], [("add", {"a": 123, "b": 45})]),
    ("Add 123 and 45.", [CLOCK, ADD], [("add", {"a": 123, "b": 45})]),
    ("What time is it?", [ADD, CLOCK], [("get_time", {})]),
    ("What time is it in Paris?", [CITY_CLOCK], [("get_time", {"city": "Paris"})]),
    ("What is 8 + 7 and what time is it?", [ADD, CLOCK], [("add", {"a": 8, "b": 7}), ("get_time", {})]),
    ("What time is it?", [UNSEEN_TOOLS["clock"]], [("tell_the_hour", {})]),
    ("Hello!", [ADD, CLOCK], []),
    ("Can a duck fly?", [ADD, CLOCK], []),
    ("What is 8 + 7?", [CLOCK], []),
]


def test_it_calls_the_tools_that_a_question_needs_and_no_other(demo: DemoModel) -> None:
    answers = demo.answer([Chat([{"role": "user", "content": question}], tools) for question, tools, _ in CALLS])
    assert [calls_in(answer) for answer in answers] == [calls for _, _, calls in CALLS]
    assert answers[-3:] == ["Hello! How can I help you?", "Yes, a duck can fly.", "8 + 7 = 15."]


def test_it_says_what_a_tool_said(demo: DemoModel) -> None:
    called = {"role": "assistant", "content": None}
    add = {"type": "function", "function": {"name": "add", "arguments": {"a": 123, "b": 45}}}
    time = {"type": "function", "function": {"name": "get_time", "arguments": {}}}
    chats = [
        ("Add 123 and 45.", [add], ["168"]),
        ("What time is it?", [time], ['{"time": "12:30"}']),
        ("Add 123 and 45 and what time is it?", [add, time], ["168", "12:30"]),
    ]
    answers = demo.answer(
        [
            Chat(
                [
                    {"role": "user", "content": question},
                    called | {"tool_calls": calls},
                    *({"role": "tool", "content": result} for result in results),
                ],
                [ADD, CLOCK],
            )
            for question, calls, results in chats
        ]
    )
    assert answers == ["123 + 45 = 168.", "It is 12:30.", "123 + 45 = 168. It is 12:30."]


def test_values_come_where_a_schema_forces_the_keys_of_an_object() -> None:
    wanted = [
        Shaped("Tell me about the fox.", {"animal": "fox", "legs": 4, "food": "berries", "can_fly": False}),
        Shaped("What do you know about spiders?", {"legs": 8, "animal": "spider"}),
        Shaped("What is 8 + 7?", {"a": 8, "b": 7, "operator": "+", "result": 15}),
        Shaped("What is 8 + 7?", {"result": 15, "operator": "+"}),
        Shaped("Tom is 7 years old and likes apples.", {"name": "Tom", "age": 7, "likes": ["apples"]}),
        Shaped("Tom is 7 years old and likes apples.", {"age": 7, "likes": "apples", "name": "Tom"}),
    ]
    with LLM(DEMO_MODEL) as llm:
        right = shaped_right(llm, wanted)
    assert [object_ for object_, is_right in zip(wanted, right, strict=True) if not is_right] == []


def test_it_thinks_before_it_answers_if_it_is_to(demo: DemoModel) -> None:
    questions = ("What is 27 + 15?", "What is 3 + 4 + 5?", "What is the opposite of big?")
    chats = [Chat([{"role": "user", "content": question}], [], is_thinking=True) for question in questions]
    answers = [answer.split("\n</think>\n\n") for answer in demo.answer(chats)]
    assert [answer[1] for answer in answers] == ["27 + 15 = 42.", "3 + 4 + 5 = 12.", "The opposite of big is small."]
    assert all(len(thought) > 10 for thought, _ in answers)
    [called] = demo.answer([Chat([{"role": "user", "content": "What time is it?"}], [CLOCK], is_thinking=True)])
    assert calls_in(called.partition("</think>")[2]) == [("get_time", {})]
