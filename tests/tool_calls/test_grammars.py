"""What the grammars admit, by llguidance, over the bundled model's tokens: calls that parsers read, and no others."""

from __future__ import annotations

import functools
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from nightly import nightly
from tool_calls.answers import (
    CLOCK,
    DSML,
    DSML_END,
    KIMI_ALL,
    KIMI_END,
    LFM2,
    LFM2_END,
    MINIMAX,
    MINIMAX_END,
    OLMO3,
    OLMO3_END,
    TOOLS,
    WEATHER,
    counted_ids,
    dsml_call,
    glm_call,
    kimi_call,
    minimax_call,
    read,
    seed_call,
)

import aioengine
from aioengine.errors import InternalError
from aioengine.tool_calls.calls import Tool, ToolChoice
from aioengine.tool_calls.formats import find_tool_format
from aioengine.tool_calls.named_json import ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR

NUM_TOKENS = 2048
EOS = 2
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "granite": ("<|tool_call|>",),
    "phi4_mini": ("<|tool_call|>", "<|/tool_call|>"),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "xlam": ("<|python_tag|>",),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v4": ("｜DSML｜",),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "llama3_json": ("<|python_tag|>",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "lfm2": (LFM2, LFM2_END),
    "olmo3": (OLMO3, OLMO3_END),
    "kimi_k2": (
        KIMI_ALL,
        KIMI_END,
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "mistral_args": ("[TOOL_CALLS]", "[ARGS]"),
    "deepseek_v3": (ALL_BEGIN, BEGIN, SEPARATOR, END, ALL_END),
    "deepseek_v31": (ALL_BEGIN, BEGIN, SEPARATOR, END, ALL_END),
    "harmony": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
}
FORMATS = tuple(MARKERS)

REQUIRED, AUTO = ToolChoice("required"), ToolChoice("auto")


@cache
def tokenizer(name: str, special: bool = True) -> LLTokenizer:
    """The bundled model's without its own markers of calls, with a token for each marker of the format if ``special``:
    special ones, but for [ARGS]."""
    path = Path(aioengine.__file__).parent / "models" / "demo" / "tokenizer.json"
    described = json.loads(path.read_text())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["special"]]
    described["added_tokens"] += [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text != "[ARGS]",
        }
        for text, number in token_ids(name, special).items()
    ]
    return LLTokenizer(json.dumps(described), n_vocab=NUM_TOKENS + len(MARKERS[name]), eos_token=[EOS])


def token_ids(name: str, special: bool = True) -> dict[str, int]:
    return {text: NUM_TOKENS + number for number, text in enumerate(MARKERS[name]) if special}


def matcher(
    name: str, tools: tuple[Tool, ...], choice: ToolChoice, *, parallel: bool = True, special: bool = True
) -> LLMatcher:
    lark = find_tool_format(name).grammar(tools, choice, parallel=parallel, token_ids=token_ids(name, special))
    made = LLMatcher(tokenizer(name, special), LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not made.is_error(), f"{made.get_error()}\n{lark}"
    return made


def tokens_of(name: str, text: str, *, special: bool = True) -> list[int]:
    """The text's tokens; its markers are tokens of their own if ``special``."""
    ids = token_ids(name, special)
    pieces, rest = [], text
    while rest:
        starts = {marker: rest.find(marker) for marker in ids if marker in rest}
        marker = min(starts, key=starts.__getitem__, default="")
        at = starts.get(marker, len(rest))
        pieces += tokenizer(name, special).tokenize_str(rest[:at])
        pieces += [ids[marker]] if marker else []
        rest = rest[at + len(marker) :]
    return pieces


def admits(made: LLMatcher, tokens: list[int]) -> bool:
    """Whether each token is in the mask when its turn comes, and the end is at the end."""
    made = made.deep_copy()
    for token in [*tokens, EOS]:
        if not is_allowed(made.compute_bitmask(), token):
            return False
        made.consume_token(token)
    return True


def is_allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


def calls(name: str, *pairs: tuple[str, dict[str, Any]]) -> str:
    """Calls as a model of the format writes them."""

    def dumped(arguments: dict[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False)

    def value(given: Any) -> str:
        return given if isinstance(given, str) else json.dumps(given)

    lists = {
        "mistral": ("[TOOL_CALLS]", ""),
        "granite": ("<|tool_call|>", ""),
        "phi4_mini": ("<|tool_call|>", "<|/tool_call|>"),
        "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
        "xlam": ("", ""),
    }
    if name == "cohere":
        objects = [
            f'    {{"tool_call_id": "{number}", "tool_name": "{tool}", "parameters": {dumped(arguments)}}}'
            for number, (tool, arguments) in enumerate(pairs)
        ]
        return "<|START_ACTION|>[\n" + ",\n".join(objects) + "\n]<|END_ACTION|>"
    if name in ("hermes", "llama3_json", *lists):
        key = "parameters" if name == "llama3_json" else "arguments"
        objects = [f'{{"name": "{tool}", "{key}": {dumped(arguments)}}}' for tool, arguments in pairs]
        if name == "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        if name in lists:
            begin, end = lists[name]
            return f"{begin}[{', '.join(objects)}]{end}"
        return "; ".join(objects)
    if name == "qwen3_coder":
        return "\n".join(
            f"<tool_call>\n<function={tool}>\n"
            + "".join(f"<parameter={key}>\n{value(given)}\n</parameter>\n" for key, given in arguments.items())
            + "</function>\n</tool_call>"
            for tool, arguments in pairs
        )
    tagged = {
        "seed_oss": ("", "", "\n", seed_call),
        "minimax_m2": (MINIMAX, MINIMAX_END, "", minimax_call),
        "glm45": ("", "", "\n", functools.partial(glm_call, "\n")),
        "glm47": ("", "", "", functools.partial(glm_call, "")),
        "deepseek_v32": (DSML, DSML_END, "", dsml_call),
        "deepseek_v4": (DSML.replace("function", "tool"), DSML_END.replace("function", "tool"), "", dsml_call),
    }
    if name in tagged:
        begin, end, between, call = tagged[name]
        mark = "~" if call is dsml_call else ""
        texts = [
            call(tool, **{key: ("" if isinstance(one, str) else mark) + value(one) for key, one in arguments.items()})
            for tool, arguments in pairs
        ]
        return begin + between.join(texts) + end
    if name in ("pythonic", "lfm2", "olmo3"):
        begin, end, between = {
            "pythonic": ("[", "]", ", "),
            "lfm2": (f"{LFM2}[", f"]{LFM2_END}", ", "),
            "olmo3": (OLMO3, OLMO3_END, "\n"),
        }[name]
        lines = [
            f"{tool}(" + ", ".join(f"{key}={given!r}".replace("'", '"') for key, given in arguments.items()) + ")"
            for tool, arguments in pairs
        ]
        return begin + between.join(lines) + end
    if name == "kimi_k2":
        numbered = enumerate(pairs)
        return KIMI_ALL + "".join(kimi_call(tool, dumped(one), number) for number, (tool, one) in numbered) + KIMI_END
    if name in ("gemma4", "function_gemma"):
        begin, end, quote = MARKERS[name]

        def marked(given: Any) -> str:
            return f"{quote}{given}{quote}" if isinstance(given, str) else json.dumps(given)

        texts = []
        for tool, arguments in pairs:
            inner = ",".join(f"{key}:{marked(one)}" for key, one in arguments.items())
            texts.append(f"{begin}call:{tool}{{{inner}}}{end}")
        return "".join(texts)
    if name == "mistral_args":
        return "".join(f"[TOOL_CALLS]{tool}[ARGS]{dumped(arguments)}" for tool, arguments in pairs)
    if name == "deepseek_v3":
        return (
            ALL_BEGIN
            + "\n".join(
                f"{BEGIN}function{SEPARATOR}{tool}\n```json\n{dumped(arguments)}\n```{END}" for tool, arguments in pairs
            )
            + ALL_END
        )
    if name == "deepseek_v31":
        return (
            ALL_BEGIN
            + "".join(f"{BEGIN}{tool}{SEPARATOR}{dumped(arguments)}{END}" for tool, arguments in pairs)
            + ALL_END
        )
    [(tool, arguments)] = pairs
    return f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{dumped(arguments)}"


PARIS = ("weather", {"city": "Paris"})
FULL = ("weather", {"city": 'São "東京" 🗼'.replace('"', ""), "days": 3, "place": {"at": [1.5, -2]}, "unit": "F"})
NOW = ("clock", {})
WRONG = {
    "a wrong type": ("weather", {"city": "Paris", "days": [1]}),
    "too much": ("weather", {"city": "Paris", "days": 10}),
    "none of the choices": ("weather", {"city": "Paris", "unit": "K"}),
    "nothing of what is required": ("weather", {"days": 1}),
    "a parameter of another": ("clock", {"city": "Paris"}),
    "a wrong element": ("weather", {"city": "Paris", "place": {"at": ["x"]}}),
    "an unknown name": ("launch", {}),
    "a name that begins a tool's": ("cloc", {}),
}
SPECIAL = pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])


@SPECIAL
@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_admits_the_calls_of_its_format(name: str, special: bool) -> None:
    required = matcher(name, TOOLS, REQUIRED, special=special)
    for pair in (PARIS, FULL, NOW, ("clock_note", {"text": "x"})):
        assert admits(required, tokens_of(name, calls(name, pair), special=special)), pair


@SPECIAL
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_refuses_what_is_wrong(name: str, wrong: str, special: bool) -> None:
    for choice in (REQUIRED, AUTO):
        made = matcher(name, TOOLS, choice, special=special)
        assert not admits(made, tokens_of(name, calls(name, WRONG[wrong]), special=special))


def test_json_stays_on_one_line() -> None:
    made = matcher("hermes", TOOLS, REQUIRED)
    call = calls("hermes", FULL)
    assert admits(
        made, tokens_of("hermes", call.replace('": ', '":').replace('name":', 'name": ').replace('s":', 's": '))
    )
    assert not admits(made, tokens_of("hermes", call.replace(', "days"', ',\n"days"')))
    assert not admits(made, tokens_of("hermes", call.replace(', "days"', ',  "days"')))


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_required_is_not_left_away(name: str) -> None:
    made = matcher(name, TOOLS, REQUIRED)
    assert not admits(made, tokens_of(name, ""))
    assert not admits(made, tokens_of(name, "It rains."))


@SPECIAL
@pytest.mark.parametrize("name", FORMATS)
def test_text_may_come_before_a_call_that_is_free(name: str, special: bool) -> None:
    made = matcher(name, TOOLS, AUTO, special=special)
    call = calls(name, PARIS)
    before = {
        "llama3_json": "Hm. <|python_tag|>",
        "xlam": "Hm. <|python_tag|>",
        "pythonic": "Hm. <|python_start|>",
        "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    }.get(name, "Hm. ")
    text = "<|channel|>final<|message|>It rains." if name == "harmony" else "It rains. <a [b]"
    assert admits(made, tokens_of(name, call, special=special))
    assert admits(made, tokens_of(name, before + call, special=special))
    assert admits(made, tokens_of(name, text, special=special))
    assert not admits(made, tokens_of(name, (before + call)[:-3], special=special))


@SPECIAL
@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony"}))
def test_several_calls_are_admitted_where_they_may_be_parallel(name: str, special: bool) -> None:
    tokens = tokens_of(name, calls(name, PARIS, NOW, PARIS), special=special)
    for choice in (REQUIRED, AUTO):
        assert admits(matcher(name, TOOLS, choice, special=special), tokens)
        assert not admits(matcher(name, TOOLS, choice, parallel=False, special=special), tokens)
    assert not admits(matcher(name, TOOLS, ToolChoice("tool", ("weather",)), special=special), tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_a_choice_of_names_admits_no_other(name: str) -> None:
    for choice in (ToolChoice("tool", ("clock",)), ToolChoice("required", ("clock",)), ToolChoice("auto", ("clock",))):
        made = matcher(name, TOOLS, choice)
        assert admits(made, tokens_of(name, calls(name, NOW)))
        assert not admits(made, tokens_of(name, calls(name, PARIS)))
        assert not admits(made, tokens_of(name, calls(name, ("clock_note", {"text": "x"}))))


@pytest.mark.parametrize("name", FORMATS)
def test_without_a_tool_that_may_be_called_there_is_no_grammar(name: str) -> None:
    with pytest.raises(InternalError):
        find_tool_format(name).grammar(TOOLS, ToolChoice("none"), parallel=True)


REFERRING: dict[str, dict[str, Any]] = {
    "a tree": {
        "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name"],
    },
    "a list": {
        "$defs": {"Node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }},
        "properties": {"first": {"$ref": "#/$defs/Node"}},
        "required": ["first"],
    },
    "another argument's": {
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "array", "items": {"$ref": "#/properties/a"}}},
        "required": ["a", "b"],
    },
    "definitions of old": {
        "definitions": {"At": {"type": "integer", "maximum": 9}},
        "properties": {"at": {"$ref": "#/definitions/At"}, "on": {"anyOf": [{"$ref": "#/definitions/At"}]}},
        "required": ["at", "on"],
    },
}  # fmt: skip
"""Schemas with references, by what they say."""
ADMITTED: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a tree": (
        [{"name": "a"}, {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}]}],
        [{"name": "a", "children": [[], [[]]]}, {"name": "a", "children": [{"children": []}]}],
    ),
    "a list": ([{"first": {"v": 1, "next": {"v": 2, "next": None}}}], [{"first": {"v": 1, "next": 2}}]),
    "another argument's": ([{"a": "x", "b": ["y", "x"]}], [{"a": "x", "b": ["z"]}]),
    "definitions of old": ([{"at": 9, "on": 1}], [{"at": 10, "on": 1}, {"at": 9, "on": 10}]),
}
"""Arguments that these admit, and some that they do not."""


@pytest.mark.parametrize("title", REFERRING)
@pytest.mark.parametrize("name", FORMATS)
def test_references_mean_what_they_mean_in_the_tools_schema(name: str, title: str) -> None:
    schema = {"type": "object", "additionalProperties": False, **REFERRING[title]}
    made = matcher(name, (Tool("refer", schema, strict=True),), REQUIRED)
    admitted, refused = ADMITTED[title]
    for arguments in (*admitted, *refused):
        assert (arguments in admitted) == (not list(jsonschema.Draft202012Validator(schema).iter_errors(arguments)))
        tokens = tokens_of(name, calls(name, ("refer", arguments)).replace("None", "null"))
        assert admits(made, tokens) == (arguments in admitted), arguments


# Walks


LISTED = Tool(
    "plan",
    {
        "$defs": {"Kind": {"enum": ["walk", "ride"], "type": "string"}},
        "type": "object",
        "properties": {
            "kind": {"$ref": "#/$defs/Kind"},
            "who": {"type": "string", "maxLength": 12},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "steps": {"type": "array", "items": {"$ref": "#/$defs/Kind"}, "maxItems": 3},
            "fast": {"type": "boolean"},
            "count": {"type": ["integer", "null"]},
        },
        "required": ["steps", "fast"],
        "additionalProperties": False,
    },
    strict=True,
)
WALKED = (WEATHER, CLOCK, LISTED)
MAX_STEPS = 2000
SEEDS = range(6)
CLOSERS = ('"', "}", "]", ")", ", ", "\n</parameter>\n", "</parameter>\n", "</｜DSML｜parameter>\n")
"""What brings a walk nearer to its end, where any token may be drawn: half of all steps try one of these."""


def walk(made: LLMatcher, name: str, special: bool, draw: random.Random) -> str:
    """A text by tokens drawn from the mask."""
    tokens: list[int] = []
    beginning = calls(name, ("weather", {})).partition("weather")[0]
    hints = [tokens_of(name, text, special=special) for text in (*CLOSERS, *MARKERS[name], beginning, beginning)]
    while len(tokens) < MAX_STEPS:
        mask = made.compute_bitmask()
        allowed = [token for token in range(len(mask) * 8) if is_allowed(mask, token)]
        hint = draw.choice(hints)
        if EOS in allowed and draw.random() < 0.1:
            return text_of(name, tokens, special)
        step = hint if draw.random() < 0.5 and made.validate_tokens(hint) == len(hint) else [draw.choice(allowed)]
        if step == [EOS]:
            return text_of(name, tokens, special)
        assert made.consume_tokens(step), made.get_error()
        tokens += step
    raise AssertionError(f"a walk without an end: {text_of(name, tokens, special)}")


def text_of(name: str, tokens: list[int], special: bool) -> str:
    ids = {number: text.encode() for text, number in token_ids(name, special).items()}
    text = b"".join(ids.get(token) or tokenizer(name, special).decode_bytes([token]) for token in tokens)
    return text.decode()


@SPECIAL
@pytest.mark.parametrize("mode", [*nightly("auto"), "tool", *nightly("required")])
@pytest.mark.parametrize("name", FORMATS)
def test_walks_through_a_grammar_end_in_calls_that_the_parser_reads(name: str, mode: Any, special: bool) -> None:
    choice = ToolChoice(mode, ("plan",) if mode == "tool" else None)
    made = matcher(name, WALKED, choice, special=special)
    schemas = {tool.name: tool.parameters for tool in WALKED}
    num_calls = 0
    for seed in SEEDS:
        text = walk(made.deep_copy(), name, special, random.Random(seed))
        seen = read(find_tool_format(name).make_strict_parser(WALKED, counted_ids()), [text])
        assert not seen.is_cut, (seed, text)
        for tool, arguments in seen.calls:
            jsonschema.validate(json.loads(arguments), schemas[tool])
        if mode != "auto":
            assert seen.calls, (seed, text)
            assert name == "harmony" or not seen.content, (seed, text)
        if mode == "tool":
            assert [tool for tool, _ in seen.calls] == ["plan"], (seed, text)
        num_calls += len(seen.calls)
    assert num_calls
