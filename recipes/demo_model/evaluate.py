"""Measure the demo model: ``python -m demo_model.evaluate`` prints the numbers that its card states.

Generation is transformers' own, so that the numbers say something about the model and nothing about aioengine. Only
objects by a schema are the engine's, whose grammar writes what is no value.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from aioengine import LLM, SamplingParams
from aioengine.models.folder import DEMO_MODEL
from aioengine.structured.constraints import Json
from demo_model.chats import SMALL_TALK, Message
from demo_model.grammar import documents
from demo_model.people import CITIES, make_person, told
from demo_model.questions import NUMBER_LIMIT, animal_facts, animal_json, other_json, small_facts
from demo_model.shapes import OPERATORS, Shaped, shaped_animal, shaped_answer, shaped_person, shaped_sum
from demo_model.stories import make_story
from demo_model.template import END_OF_TEXT
from demo_model.thoughts import Thought, think
from demo_model.tool_chats import Chat, make_tool_chat
from demo_model.train import encode, grouped, held_out_loss, special_id
from demo_model.world import ANIMALS, BOYS, FANTASY_KINDS, GIRLS, Dice, fix_articles

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}

_WORD = re.compile(r"[A-Za-z]+")
_SMALL_LETTER_AFTER_END = re.compile(r"[.!?]\s+[a-z]\w*")
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
NUM_VOCABULARY_STORIES = 1500


@cache
def known_words() -> frozenset[str]:
    """Every word that stories write with a small letter, and every one that they begin with a capital."""
    dice = Dice("vocabulary")
    text = " ".join(make_story(dice).text for _ in range(NUM_VOCABULARY_STORIES))
    return frozenset(_WORD.findall(text))


def story_faults(story: str) -> list[str]:
    """What is wrong with the form of a story; nothing, if it is well formed.

    Sentences begin with a capital and end with a mark, quotation marks come in pairs, and each word is one that the
    grammar uses or, beginning with a capital, may be a name.
    """
    faults = []
    if story.count('"') % 2:
        faults.append("an odd number of quotation marks")
    if not story.rstrip().endswith((".", "!", "?", '"')):
        faults.append("the last sentence has no end")
    if not story.lstrip('"')[:1].isupper():
        faults.append("the first letter is small")
    faults += [f"a sentence begins with a small letter: {found!r}" for found in _SMALL_LETTER_AFTER_END.findall(story)]
    faults += [
        f"unknown word {word!r}" for word in _WORD.findall(story) if word[0].islower() and word not in known_words()
    ]
    return faults


class DemoModel:
    """The model folder as transformers sees it, in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def complete(self, prompts: Sequence[str], *, max_tokens: int, **sampling: Any) -> list[tuple[str, bool]]:
        """Complete a batch of prompts, greedily unless ``sampling`` says otherwise.

        Returns:
            For each prompt the text that follows it, and whether it ended with an end token.
        """
        batch = self.tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
        sampling = sampling or {"do_sample": False, "temperature": None, "top_p": None}
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max_tokens,
                **sampling,
            )
        completions = []
        ends = set(self.model.generation_config.eos_token_id)
        for ids in output[:, batch["input_ids"].shape[1] :].tolist():
            text_ids = list(itertools.takewhile(lambda token_id: token_id not in ends, ids))
            completions.append((self.tokenizer.decode(text_ids), len(text_ids) < len(ids)))
        return completions

    def answer(self, chats: Sequence[list[Message] | Chat], *, max_tokens: int = 96) -> list[str]:
        """The greedy answers to conversations that end before an answer; one that does not end is empty."""
        prompts = [self.prompt(chat) for chat in chats]
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for start in range(0, len(chats), 64):
            group = by_length[start : start + 64]
            completions = self.complete([prompts[index] for index in group], max_tokens=max_tokens)
            for index, (text, ended) in zip(group, completions, strict=True):
                answers[index] = text if ended else ""
        return answers

    def prompt(self, chat: list[Message] | Chat) -> str:
        messages, tools, is_thinking = chat if isinstance(chat, Chat) else Chat(chat, [])
        rendered: str = self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=is_thinking,
        )
        return rendered


def _user(question: str) -> list[Message]:
    return [{"role": "user", "content": question}]


def share_of_right_sums(model: DemoModel) -> dict[str, float]:
    """Every sum, difference and product of the model's small world, asked once; the share of exact answers."""
    sums = [(a, "+", b, a + b) for a in range(NUMBER_LIMIT + 1) for b in range(NUMBER_LIMIT + 1)]
    differences = [(a, "-", b, a - b) for a in range(NUMBER_LIMIT + 1) for b in range(a + 1)]
    products = [(a, "*", b, a * b) for a in range(11) for b in range(11)]
    shares = {}
    for name, problems in (("sums", sums), ("differences", differences), ("products", products)):
        answers = model.answer([_user(f"What is {a} {sign} {b}?") for a, sign, b, _ in problems], max_tokens=16)
        right = [
            answer == f"{a} {sign} {b} = {result}."
            for answer, (a, sign, b, result) in zip(answers, problems, strict=True)
        ]
        shares[name] = sum(right) / len(right)
    return shares


def share_of_valid_json(model: DemoModel, num_questions: int) -> dict[str, float]:
    """Questions for JSON: the share of answers that parse, and of those about one animal that are exact."""
    dice = Dice("evaluate-json")
    asked = [(topic, topic(dice, "plain")[0]) for topic in (animal_json, other_json) for _ in range(num_questions // 2)]
    answers = model.answer([_user(question) for _, (question, _) in asked])
    valid = [_parses(answer) for answer in answers]
    exact = [
        answer == right for answer, (topic, (_, right)) in zip(answers, asked, strict=True) if topic is animal_json
    ]
    return {"parses": sum(valid) / len(valid), "animal facts exact": sum(exact) / len(exact)}


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def share_of_right_answers(model: DemoModel, num_questions: int) -> dict[str, float]:
    """Facts and small talk with one right answer; the share of exact ones."""
    dice = Dice("evaluate-answers")
    topics: dict[str, list[tuple[str, str]]] = {
        "animals": [animal_facts(dice, "plain")[0] for _ in range(num_questions)],
        "opposites, colours, calendar": [small_facts(dice, "plain")[0] for _ in range(num_questions)],
        "small talk": [(dice.spin(question), answer) for question, answer in SMALL_TALK for _ in range(3)],
    }
    shares = {}
    for name, pairs in topics.items():
        answers = model.answer([_user(question) for question, _ in pairs])
        shares[name] = sum(answer == right for answer, (_, right) in zip(answers, pairs, strict=True)) / len(pairs)
    return shares


def story_shares(model: DemoModel, num_stories: int, prompt: str = "Once upon a time") -> dict[str, float]:
    """Sampled stories: the share that ends by itself, that is well formed, and that is unlike every other one."""
    stories: list[tuple[str, bool]] = []
    for seed in range(0, num_stories, 32):
        torch.manual_seed(seed)
        stories += model.complete([prompt] * min(32, num_stories - seed), max_tokens=480, **SAMPLING)
    texts = [prompt + text for text, _ in stories]
    return {
        "ends by itself": sum(ended for _, ended in stories) / len(stories),
        "well formed": sum(not story_faults(text) for text in texts) / len(texts),
        "different": len(set(texts)) / len(texts),
    }


def request_shares(model: DemoModel, num_stories: int) -> dict[str, float]:
    """Stories that were asked for, greedy: does the first sentence have the name and the kind that were asked for?"""
    dice = Dice("evaluate-requests")
    kinds = [animal.animal for animal in ANIMALS] + list(FANTASY_KINDS)
    heroes = [(dice.pick(kinds), dice.pick(GIRLS + BOYS)) for _ in range(num_stories)]
    questions = [fix_articles(f"Tell me a short story about a~ {kind} named {name}.") for kind, name in heroes]
    answers = model.answer([_user(question) for question in questions], max_tokens=400)
    asked = [(answer.split(".")[0], kind, name) for answer, (kind, name) in zip(answers, heroes, strict=True)]
    animals = [(first, kind) for first, kind, _ in asked if kind not in FANTASY_KINDS]
    others = [(first, kind) for first, kind, _ in asked if kind in FANTASY_KINDS]
    return {
        "has the name": sum(name in first for first, _, name in asked) / len(asked),
        "is the animal": sum(kind in first for first, kind in animals) / len(animals),
        "is the dragon, robot ...": sum(kind in first for first, kind in others) / len(others),
    }


def name_shares(model: DemoModel) -> dict[str, float]:
    """Every name of the world, given by the system or by the user a turn before, and asked for."""
    names = GIRLS + BOYS
    own = model.answer([[{"role": "system", "content": f"You are {name}."}, *_user("Who are you?")] for name in names])
    told: list[list[Message]] = []
    for name in names:
        greeting = {"role": "assistant", "content": f"Nice to meet you, {name}!"}
        told.append([*_user(f"My name is {name}."), greeting, *_user("What is my name?")])
    users = model.answer(told)
    return {
        "its own": sum(answer.startswith(f"I am {name},") for answer, name in zip(own, names, strict=True))
        / len(names),
        "the user's": sum(answer == f"Your name is {name}." for answer, name in zip(users, names, strict=True))
        / len(names),
    }


def calls_in(answer: str) -> list[tuple[str, Any]]:
    """Name and arguments of each call in an answer; one that is no such object is ``("", None)``."""
    calls = []
    for text in _CALL.findall(answer):
        call = json.loads(text) if _parses(text) else {}
        is_call = isinstance(call, dict) and call.keys() == {"name", "arguments"}
        calls.append((call["name"], call["arguments"]) if is_call else ("", None))
    return calls


def _calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def tool_turns(count: int) -> dict[str, list[tuple[Chat, Message]]]:
    """``count`` requests of each kind with tools as the corpus names them, each with the message that answers it."""
    dice = Dice("evaluate-tools")
    kinds: dict[str, list[tuple[Chat, Message]]] = {
        "one call": [],
        "two or three calls": [],
        "no call is needed": [],
        "answer from the result": [],
        "call after a result": [],
    }
    while any(len(turns) < count for turns in kinds.values()):
        messages, tools, is_thinking = make_tool_chat(dice)
        index = dice.pick([i for i, message in enumerate(messages) if message["role"] == "assistant"])
        has_result = messages[index - 1]["role"] == "tool"
        num_calls = len(messages[index].get("tool_calls", ()))
        if has_result:
            kind = "call after a result" if num_calls else "answer from the result"
        else:
            kind = ("no call is needed", "one call", "two or three calls")[min(num_calls, 2)]
        if not is_thinking and len(kinds[kind]) < count:
            kinds[kind].append((Chat(messages[:index], tools), messages[index]))
    return kinds


def _names(calls: list[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in calls]


def tool_shares(model: DemoModel, count: int) -> dict[str, float]:
    """The share of exact answers: the right tools with the right arguments in the right order, or the right text.

    Where there are calls, the share that has the right tools in the right order is another.
    """
    shares = {}
    for kind, turns in tool_turns(count).items():
        answers = model.answer([chat for chat, _ in turns], max_tokens=160)
        pairs = [(answer, message, _calls_of(message)) for answer, (_, message) in zip(answers, turns, strict=True)]
        if pairs[0][2]:
            shares[f"{kind}: the tools"] = sum(_names(calls_in(answer)) == _names(calls) for answer, _, calls in pairs)
        shares[kind] = sum(
            calls_in(answer) == calls and (bool(calls) or answer == message["content"])
            for answer, message, calls in pairs
        )
    return {kind: right / count for kind, right in shares.items()}


def _tool(name: str, description: str, /, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_NUMBER, _TEXT = {"type": "number"}, {"type": "string"}


def _seven_tools(names: Sequence[str], parameters: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A tool for each kind of question; the keys of facts are the only names that the corpus has."""
    a, b, sign, one, other, town, place = parameters
    signs = {"type": "string", "enum": ["+", "-", "*", "/"]}
    facts = {"animal": _TEXT, "food": _TEXT, "legs": {"type": "integer"}, "can_fly": {"type": "boolean"}}
    described: dict[str, tuple[str, dict[str, Any]]] = {
        "calculator": ("Does arithmetic with two numbers.", {a: _NUMBER, b: _NUMBER, sign: signs}),
        "adder": ("Adds two numbers.", {one: _NUMBER, other: _NUMBER}),
        "clock": ("The time of day.", {}),
        "city clock": ("The time in a city.", {town: _TEXT}),
        "weather": ("The weather in a city.", {place: _TEXT}),
        "animal facts": ("Facts about an animal.", facts),
        "person": ("A person.", {"name": _TEXT, "age": {"type": "integer"}}),
    }
    return {
        kind: _tool(name, description, **properties)
        for name, (kind, (description, properties)) in zip(names, described.items(), strict=True)
    }


UNSEEN_TOOLS = _seven_tools(
    ("NumberHelper", "sum_helper", "tell_the_hour", "ClockOfCity", "sky_today", "AnimalPage", "FriendRecord"),
    ("left_number", "right_number", "what_to_do", "number_one", "number_two", "name_of_city", "in_city"),
)
"""Tools with names that the corpus never uses, made of words that it does use."""

STRANGE_TOOLS = _seven_tools(
    ("WorkItOut", "ciphering_machine", "hourglass", "ZoneClock", "outlook_bulletin", "BeastCard", "HumanRecord"),
    ("leading", "trailing", "how", "augend", "addend", "municipality", "whereabouts"),
)
"""Tools with names of other words, which are many tokens each."""


def calls_for(tools: dict[str, dict[str, Any]], count: int) -> Iterator[tuple[Chat, tuple[str, dict[str, Any]]]]:
    """Questions for tools as `UNSEEN_TOOLS`, each with the call that answers it; some have a second tool beside it."""
    dice = Dice("evaluate-unseen")
    for index in range(count):
        kind = list(tools)[index % len(tools)]
        a, b, city = dice.between(0, 999), dice.between(1, 99), dice.pick(CITIES)
        sign = dice.pick(("+", "-", "*"))
        animal, person = dice.pick(ANIMALS), make_person(dice)
        asked: dict[str, tuple[list[Any], str]] = {
            "calculator": ([a, b, sign], f"What is {a} {sign} {b}?"),
            "adder": ([a, b], f"Add {a} and {b}."),
            "clock": ([], "What time is it?"),
            "city clock": ([city], f"What time is it in {city}?"),
            "weather": ([city], f"What is the weather in {city}?"),
            "animal facts": (
                [animal.animal, animal.food, animal.legs, animal.can_fly],
                f"Tell me about the {animal.animal}.",
            ),
            "person": ([person.name, person.age], told(dice, person, {"age", "likes"})),
        }
        values, question = asked[kind]
        given = [tools[kind]]
        beside = {"clock": "adder", "calculator": "weather", "adder": "clock", "weather": "calculator"}.get(kind)
        if beside and dice.chance(0.5):
            given = dice.sample([*given, tools[beside]], 2)
        function = tools[kind]["function"]
        arguments = dict(zip(function["parameters"]["properties"], values, strict=True))
        yield Chat(_user(question), given), (function["name"], arguments)


def new_tool_shares(model: DemoModel, count: int) -> dict[str, float]:
    """Tools that the corpus lacks: the share of calls with the right name, and of those that are right altogether."""
    shares = {}
    for words, tools in {"of its words": UNSEEN_TOOLS, "of other words": STRANGE_TOOLS}.items():
        asked = list(calls_for(tools, count))
        made = [calls_in(answer) for answer in model.answer([chat for chat, _ in asked], max_tokens=120)]
        pairs = [(calls, call) for calls, (_, call) in zip(made, asked, strict=True)]
        shares[f"{words}: the tool"] = sum(_names(calls) == [name] for calls, (name, _) in pairs) / count
        shares[words] = sum(calls == [call] for calls, call in pairs) / count
    return shares


def schema_of(value: Any) -> dict[str, Any]:
    """The schema with the keys of ``value`` in their order and the types of its values; signs are an enumeration."""
    if isinstance(value, dict):
        properties = {key: schema_of(item) for key, item in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0])}
    for signs in (OPERATORS.keys(), OPERATORS.values()):
        if value in signs:
            return {"enum": [*signs]}
    names = {str: "string", bool: "boolean", int: "integer"}
    return {"type": names[type(value)]}


def shaped_right(llm: LLM, wanted: Sequence[Shaped]) -> list[bool]:
    """Whether the engine's greedy object of each one's schema, of which the prompt says nothing, is the wanted one."""
    outputs = llm.chat(
        [_user(question) for question, _ in wanted],
        [SamplingParams(temperature=0, max_tokens=160, structured=Json(schema_of(value))) for _, value in wanted],
    )
    texts = [output.text for output in outputs]
    return [
        _parses(text) and json.dumps(json.loads(text)) == json.dumps(value)
        for text, (_, value) in zip(texts, wanted, strict=True)
    ]


def schema_shares(folder: Path, count: int) -> dict[str, float]:
    dice = Dice("evaluate-schemas")
    makers = {"animals": shaped_animal, "people": shaped_person, "sums": shaped_sum, "answers": shaped_answer}
    with LLM(folder, dtype="float32") as llm:
        return {
            name: sum(shaped_right(llm, [make(dice) for _ in range(count)])) / count for name, make in makers.items()
        }


def thinking_shares(model: DemoModel, count: int) -> dict[str, float]:
    """Thinking before the answer: the share of answers, what stands before them aside, that are exact."""
    dice = Dice("evaluate-thinking")
    kinds: dict[str, list[Thought]] = {"sums of two digits": [], "sums of three numbers": [], "other questions": []}
    while any(len(thoughts) < count for thoughts in kinds.values()):
        thought = think(dice)
        steps = thought.thought
        kind = "other questions"
        if "The tens" in steps:
            kind = "sums of two digits"
        elif steps.startswith("First"):
            kind = "sums of three numbers"
        if len(kinds[kind]) < count:
            kinds[kind].append(thought)
    shares = {}
    for kind, thoughts in kinds.items():
        answers = model.answer([Chat(_user(thought.question), [], is_thinking=True) for thought in thoughts])
        right = [
            answer.partition("</think>")[2].strip() == thought.answer
            for answer, thought in zip(answers, thoughts, strict=True)
        ]
        shares[kind] = sum(right) / len(right)
    return shares


def measure(folder: Path, num_samples: int) -> Iterator[tuple[str, dict[str, float]]]:
    """The numbers of the card, one group after another."""
    recorded = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    model = DemoModel(folder)
    held_out = list(documents(f"held-out-{recorded['recipe']['seed']}", recorded["recipe"]["num_held_out"]))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    limit = recorded["recipe"]["max_position_embeddings"]
    loss = held_out_loss(
        model.model, grouped(encode(tokenizer, held_out), 16, limit, special_id(tokenizer, END_OF_TEXT))
    )
    yield "held-out loss, nats a token", {"now": loss, "recorded": recorded["held_out_loss"]}
    yield "arithmetic, greedy, exact", share_of_right_sums(model)
    yield "JSON, greedy", share_of_valid_json(model, num_samples)
    yield "answers, greedy, exact", share_of_right_answers(model, num_samples)
    yield "names from the context, greedy, exact", name_shares(model)
    yield "tools, greedy, exact", tool_shares(model, num_samples)
    yield "tools with names that it has never seen, greedy, exact", new_tool_shares(model, num_samples)
    yield "objects by a schema (aioengine's grammar), greedy, all values exact", schema_shares(folder, num_samples)
    yield "thinking, greedy, exact", thinking_shares(model, num_samples)
    yield "stories on request, greedy", request_shares(model, num_samples)
    yield "stories, temperature 0.7, top_p 0.9", story_shares(model, num_samples)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo_model.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the bundled one)")
    parser.add_argument("--samples", type=int, default=200, help="questions or stories of each kind")
    options = parser.parse_args(arguments)
    for title, numbers in measure(options.model, options.samples):
        print(f"{title}: " + ", ".join(f"{name} {value:.4f}" for name, value in numbers.items()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
