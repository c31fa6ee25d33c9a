"""Reasoning is split off the beginning of an answer."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_calls.answers import PARIS, Seen, make_parser, read

from aioengine.errors import ConfigError
from aioengine.tool_calls.reasoning import (
    ReasoningFormat,
    ReasoningParser,
    detect_reasoning_format,
    find_reasoning_format,
)

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Case(NamedTuple):
    title: str
    format: str
    text: str
    reasoning: str
    content: str
    is_begun: bool = False
    inner: str | None = None
    calls: tuple[tuple[str, str], ...] = ()


CASES = [
    Case("both", "think", "<think>\nRain?\n\nNo.\n</think>\n\nIt is dry.\n", "Rain?\n\nNo.", "It is dry.\n"),
    Case("on one line", "think", "<think>a</think>b", "a", "b"),
    Case("space before it", "think", " \n<think>a</think>b", "a", "b"),
    Case("other space is kept", "think", "<think> a </think> b ", " a ", " b "),
    Case("nothing in it", "think", "<think>\n\n</think>\n\nb", "", "b"),
    Case("none", "think", "It <think> is dry.</think>", "", "It <think> is dry.</think>"),
    Case("space and none", "think", "\n\nIt is dry.", "", "\n\nIt is dry."),
    Case("nothing", "think", "", "", ""),
    Case("begun by the prompt", "think", "\nRain?\n</think>\n\nNo.", "Rain?", "No.", True),
    Case("begun, and begun again", "think", "\n<think>\nRain?\n</think>\n\nNo.", "Rain?", "No.", True),
    Case("begun and not ended", "think", "\nRain?\n", "Rain?\n", "", True),
    Case("cut in the end", "think", "<think>Rain?\n</thi", "Rain?\n</thi", ""),
    Case("cut in the beginning", "think", "\n<thi", "", "\n<thi"),
    Case("a beginning of the end", "think", "<think>a </thin </think>b", "a </thin ", "b"),
    Case("a second one", "think", "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    Case("newlines before others", "think", "<think>\n \n</think>\n \nb", " ", " \nb"),
    Case("begun always", "deepseek_r1", "Rain?\n</think>\n\nNo.", "Rain?", "No.", True),
    Case("of Mistral's", "mistral", "[THINK]Rain?[/THINK]No.", "Rain?", "No."),
    Case("of Seed-OSS", "seed_oss", "<seed:think>\nRain?\n</seed:think>No.", "Rain?", "No."),
    Case("of Gemma", "gemma4", "<|channel>thought\nRain?\n<channel|>No.", "Rain?", "No."),
    Case("of Gemma, none", "gemma4", "No.", "", "No."),
    Case("of Command", "cohere", "<|START_THINKING|>Rain?<|END_THINKING|><|START_TEXT|>No.<|END_TEXT|>", "Rain?",
         "No."),
    Case("of Command, none", "cohere", "<|START_RESPONSE|> No. <|END_RESPONSE|>", "", " No. "),
    Case("of Command, and a call", "cohere", "Rain?<|END_THINKING|><|START_TEXT|>So.<|END_TEXT|><|START_ACTION|>[{"
         '"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}]<|END_ACTION|>', "Rain?", "So.",
         True, "cohere", (PARIS,)),
    Case("of Granite", "granite", "Here is my thought process:\nRain?\n\nHere is my response:\nNo.", "Rain?", "No."),
    Case("of harmony", "harmony", "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>final"
         "<|message|>No.", "Rain?", "No."),
    Case("a call", "think", f"<think>\nRain?\n</think>\n\nSo.\n{CALL}", "Rain?", "So.", False, "hermes", (PARIS,)),
    Case("a call in it is none", "think", f"<think>{CALL}</think>{CALL}", CALL, "", False, "hermes", (PARIS,)),
    Case("a call in reasoning that does not end", "think", f"<think>Rain?\n{CALL}\n", "Rain?", "", False, "hermes",
         (PARIS,)),
    Case("two such calls, and text", "think", f"Rain?\n{CALL}\nand\n{CALL} so", "Rain?\nand so", "", True, "hermes",
         (PARIS, PARIS)),
    Case("a draft of a call", "think", f"Maybe {CALL}\nor not\n</think>\n\nNo.", f"Maybe {CALL}\nor not", "No.", True,
         "hermes"),
    Case("a draft, and a call", "think", f"Maybe {CALL}\n</think>\n{CALL}", f"Maybe {CALL}", "", True, "hermes",
         (PARIS,)),
    Case("no call in reasoning", "think", "a <tool_call> b {c} ", "a <tool_call> b {c} ", "", True, "hermes"),
    Case("a call that is cut in reasoning", "think", f"a\n{CALL[:60]}", f"a\n{CALL[:60]}", "", True, "hermes"),
    Case("a call of tags in reasoning", "think", "a\n<tool_call>weather<arg_key>city</arg_key><arg_value>Paris"
         "</arg_value></tool_call>", "a", "", True, "glm47", (PARIS,)),
    Case("a call of harmony's", "harmony", "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>"
         'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}', "Rain?", "", False,
         "harmony", (PARIS,)),
]  # fmt: skip


def parser_of(case: Case) -> ReasoningParser:
    inner, probe = (make_parser(case.inner) if case.inner else None for _ in range(2))
    return ReasoningParser(find_reasoning_format(case.format), inner, case.is_begun, probe=probe)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_reasoning_and_content_however_they_are_cut(case: Case) -> None:
    expected = Seen(case.content, case.reasoning, case.calls, False, case.calls)
    assert read(parser_of(case), [case.text]) == expected
    assert read(parser_of(case), case.text) == expected
    for at in range(len(case.text)):
        assert read(parser_of(case), [case.text[:at], case.text[at:]]) == expected, at


@settings(max_examples=300, deadline=None)
@given(
    bits=st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "\n", " ", "a", "é", CALL]), max_size=12),
    is_begun=st.booleans(),
)
def test_scraps_of_reasoning_are_read_the_same_however_they_are_cut(bits: list[str], is_begun: bool) -> None:
    case = Case("", "think", "".join(bits), "", "", is_begun, "hermes")
    whole = read(parser_of(case), [case.text])
    assert read(parser_of(case), case.text) == read(parser_of(case), bits) == whole
    assert is_begun or whole.reasoning or whole.calls or "<think>" in case.text or whole.content == case.text


def test_reasoning_is_given_as_it_comes_up_to_a_call_in_it() -> None:
    parser = parser_of(Case("", "think", "", "", "", True, "hermes"))
    fed = [
        "Rain",
        "? <to",
        "ol> <tool_call>",
        '{"name": "weather", "arguments": {"city": "Paris"}}',
        "</tool_call>",
        " so",
    ]
    assert [parser.feed(text).reasoning for text in fed] == ["Rain", "?", " <tool>", "", "", ""]
    last = parser.finish()
    assert (last.reasoning, [(call.index, call.name, call.arguments) for call in last.calls]) == (
        " so",
        [(0, "weather", '{"city": "Paris"}')],
    )
    assert [call.id for call in parser.calls] == [call.id for call in last.calls]


def test_where_one_call_is_asked_for_reasoning_has_one() -> None:
    inner, probe = make_parser("hermes"), make_parser("hermes")
    parser = ReasoningParser(find_reasoning_format("think"), inner, True, probe=probe, max_calls=1)
    assert not parser.feed(f"{CALL}{CALL}").calls
    assert len(parser.finish().calls) == len(parser.calls) == 1


def test_a_piece_is_given_as_soon_as_it_is_certain() -> None:
    parser = parser_of(Case("", "think", "", "", ""))
    fed = ["<think>", "\n", "Rain", "?\n", "\n", "No", "\n</", "think>", "\n\n", "It", " is"]
    pieces = [parser.feed(text) for text in fed]
    assert [piece.reasoning for piece in pieces] == ["", "", "Rain", "?", "", "\n\nNo", "", "", "", "", ""]
    assert [piece.content for piece in pieces] == ["", "", "", "", "", "", "", "", "", "It", " is"]


@pytest.mark.parametrize(
    ("name", "prompt", "is_begun"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", True),
        ("think", "<|im_start|>assistant\n", False),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
        ("mistral", "[/INST][THINK]", True),
        ("harmony", "<|start|>assistant", False),
    ],
)
def test_a_prompt_may_have_begun_the_reasoning(name: str, prompt: str, is_begun: bool) -> None:
    assert find_reasoning_format(name).is_begun_by_prompt(prompt) is is_begun


@pytest.mark.parametrize(
    ("name", "before", "message", "is_begun"),
    [
        ("think", "<|im_start|>assistant\n", "<think>\nhm", True),
        ("think", "<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nIt", False),
        ("think", "What is <think>?<|im_start|>assistant\n", "It", False),
        ("think", "<think>a</think><|im_start|>assistant\n<think>\n", "hm", True),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\nhm", True),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "It", False),
        ("think", "<|im_start|>assistant\n<think>\n", " ", True),
        ("deepseek_r1", "<｜Assistant｜>", "It", False),
        ("deepseek_r1", "<｜Assistant｜>", "<think>hm", True),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nhm", True),
    ],
)
def test_an_answer_that_goes_on_with_a_message_begins_where_that_ends(
    name: str, before: str, message: str, is_begun: bool
) -> None:
    assert find_reasoning_format(name).is_begun_by_message(before + message, message) is is_begun


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|im_start|>assistant\\n<think>\\n' }}{{ content.split('</think>')[-1] }}", "think"),
        ("{% set content = content.split('</think>')[-1] %}{{ '<｜Assistant｜>' + content }}", "deepseek_r1"),
        ("{{ '[THINK]' + chunk.thinking + '[/THINK]' }}", "mistral"),
        ("{{ '<seed:think>' + message.reasoning_content + '</seed:think>' }}", "seed_oss"),
        ("Write your thoughts after 'Here is my thought process:' and ...", "granite"),
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", "harmony"),
        ("{% set content = content.split('</think>')[-1] %}{{ '<|im_start|>' + content }}", "think"),
        ("{{ '<|channel>thought\\n' + thinking_text + '\\n<channel|>' }}", "gemma4"),
        ("{{ '<|START_THINKING|>' + message.tool_plan + '<|END_THINKING|>' }}", "cohere"),
        ("{{ message.content }}", None),
        ("{{ '<think></think>' }}{{ '[THINK]' }}", None),
    ],
)
def test_a_template_tells_its_reasoning_where_that_is_certain(template: str, name: str | None) -> None:
    assert detect_reasoning_format(template) == name


def test_a_format_is_its_two_markers_and_an_unknown_one_is_refused() -> None:
    seen = read(ReasoningParser(ReasoningFormat("mine", "(", ")"), None, False), "(a)b")
    assert (seen.reasoning, seen.content) == ("a", "b")
    with pytest.raises(ConfigError, match="did you mean 'think'"):
        find_reasoning_format("thinks")
