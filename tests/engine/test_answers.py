"""What an answer to a chat consists of: calls, reasoning and content, told apart as they come, and held to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from engine.conftest import Serve, Served
from nightly import nightly

from aioengine import ConfigError, Engine, EngineConfig, InvalidRequest, Json, SamplingParams
from aioengine.frontend.answer_format import AnswerFormats, AnswerOptions, template_variables
from aioengine.frontend.request_state import ParsedAnswer
from aioengine.models.folder import DEMO_MODEL
from aioengine.text.tokenizer import Tokenizer
from aioengine.tool_calls.calls import Tool, read_tools, told_tools
from aioengine.tool_calls.formats import find_tool_format

CHAT = [{"role": "user", "content": "What is 8 + 7?"}]
FORMATS = {"tool_format": "hermes", "reasoning_format": "think"}


class Sum(msgspec.Struct):
    sum: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["utc", "local"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [add, CLOCK]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 8, "b": 7}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>'
SHAPE = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


MALFORMED: list[dict[str, Any]] = [
    {"required": 5},
    {"required": [[1]]},
    {"minProperties": "x"},
    {"oneOf": 5},
    {"properties": {"day": {"format": "date", "pattern": "a", "allOf": 5}}},
    {"properties": {"host": {"format": "hostname", "maxLength": "x"}}},
]


def tool(parameters: dict[str, Any], **others: Any) -> dict[str, Any]:
    function = {"name": "made", "parameters": {"type": "object", **parameters}, **others}
    return {"type": "function", "function": function}


def say(
    served: Served, text: str, tools: Sequence[Any] = (), chat: list[dict[str, Any]] = CHAT, **variables: Any
) -> None:
    """The model's answer to a chat with these tools."""
    tokenizer = served.tokenizer
    told = list(told_tools(tools, read_tools(tools)))
    prompt = tokenizer.render_chat(chat, **({"tools": told} if told else {}), **variables)
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    served.say(tokenizer.encode(prompt, add_special_tokens=False), [*tokenizer.encode(text), *end])


@pytest.mark.virtual_clock
async def test_calls_are_told_from_content(serve: Serve) -> None:
    async with serve(config=FORMATS) as served:
        say(served, f"I add.\n{CALL}\n{OTHER_CALL}", TOOLS)
        out = await served.engine.generate(CHAT, tools=TOOLS, max_tokens=200)
        assert out.text == "I add."
        assert [(call.name, call.arguments) for call in out.tool_calls] == [
            ("add", '{"a": 8, "b": 7}'),
            ("clock", '{"zone": "utc"}'),
        ]
        assert len({call.id for call in out.tool_calls}) == 2
        assert out.outputs[0].finish_reason == "stop"
        json.dumps(out.to_dict())


@pytest.mark.virtual_clock
@pytest.mark.parametrize("interval", [1, 3, 50])
async def test_a_stream_brings_the_pieces_of_what_the_whole_has(serve: Serve, interval: int) -> None:
    async with serve(config=FORMATS) as served:
        say(served, f"<think>\nEight and seven.\n</think>\n\nI add.\n{CALL}", TOOLS)
        async with served.engine.stream(CHAT, tools=TOOLS, max_tokens=200, stream_interval=interval) as stream:
            deltas = [delta async for delta in stream]
        out = stream.result
        assert "".join(delta.text for delta in deltas) == out.text == "I add."
        assert "".join(delta.reasoning for delta in deltas) == out.reasoning == "Eight and seven."
        pieces = [piece for delta in deltas for piece in delta.tool_calls]
        assert (pieces[0].name, pieces[0].id) == ("add", out.tool_calls[0].id)
        assert all(piece.name is None for piece in pieces[1:])
        assert "".join(piece.arguments for piece in pieces) == '{"a": 8, "b": 7}'
        if interval == 1:
            assert len(pieces) > 3, "arguments come as they are written"


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        (f"<think>\nI add.\n{CALL}\n{OTHER_CALL}", "I add.", "", 2),
        (f"<think>\nI might\n{CALL}\n</think>\n\nNo.", f"I might\n{CALL}", "No.", 0),
    ],
)
async def test_a_call_in_reasoning_is_one_if_the_reasoning_does_not_end(
    serve: Serve, text: str, reasoning: str, content: str, num_calls: int
) -> None:
    async with serve(config=FORMATS) as served:
        say(served, text, TOOLS)
        for is_parallel in (True, False):
            options: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": is_parallel, "max_tokens": 200}
            async with served.engine.stream(CHAT, **options, stream_interval=3) as stream:
                deltas = [delta async for delta in stream]
            out = stream.result
            assert (out.reasoning, out.text) == (reasoning, content)
            assert len(out.tool_calls) == (num_calls if is_parallel else min(num_calls, 1))
            assert "".join(delta.reasoning for delta in deltas) == reasoning
            begun = [piece.name for delta in deltas for piece in delta.tool_calls]
            assert begun == [call.name for call in out.tool_calls]


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("user", "begun", "text", "reasoning", "content"),
    [
        ("2+2?", "<think>\nhm", " so\n</think>\n\nFour.", " so", "Four."),
        ("2+2?", "<think>\nhm\n</think>\n\nIt", " is four.", "", " is four."),
        ("What is <think>?", "It", " is a mark.", "", " is a mark."),
    ],
)
async def test_an_answer_goes_on_in_the_reasoning_or_behind_it(
    serve: Serve, user: str, begun: str, text: str, reasoning: str, content: str
) -> None:
    chat = [{"role": "user", "content": user}, {"role": "assistant", "content": begun}]
    async with serve(config=FORMATS) as served:
        options = {"add_generation_prompt": False, "continue_final_message": True}
        say(served, text, chat=chat, **options)
        out = await served.engine.generate(chat, chat_template_kwargs=options, max_tokens=200)
        assert (out.reasoning or "", out.text) == (reasoning, content)


@pytest.mark.virtual_clock
async def test_text_that_a_strict_tools_grammar_admits_is_no_call(serve: Serve) -> None:
    call = '{"name": "add", "arguments": {"a": "eight", "b": 7}}'
    async with serve(config=FORMATS) as served:
        for is_strict in (False, True):
            tools = [tool({"properties": {"a": {"type": "integer"}}}, strict=is_strict)]
            tools[0]["function"]["name"] = "add"
            say(served, call, tools)
            out = await served.engine.generate(CHAT, tools=tools, max_tokens=200)
            assert (out.text, len(out.tool_calls)) == ((call, 0) if is_strict else ("", 1))


@pytest.mark.virtual_clock
async def test_a_call_that_is_cut_is_none(serve: Serve) -> None:
    async with serve(config=FORMATS) as served:
        say(served, CALL, TOOLS)
        num_tokens = len(served.tokenizer.encode(CALL)) - 12
        out = await served.engine.generate(CHAT, tools=TOOLS, max_tokens=num_tokens)
        assert out.outputs[0].finish_reason == "length"
        assert (out.text, out.tool_calls, out.outputs[0].has_cut_call) == ("", [], True)


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("formats", [("hermes", "none"), ("qwen3_coder", "none"), ("hermes", "think")])
def test_special_tokens_are_text_where_a_marker_is_one(
    formats: tuple[str, str], is_special: bool, tmp_path: Path
) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "model" / "tokenizer.json"
    described = json.loads(path.read_text())
    markers = [token for token in described["added_tokens"] if token["content"] in ("<tool_call>", "<think>")]
    assert markers
    for token in markers:
        token["special"] = is_special
    path.write_text(json.dumps(described))
    config = EngineConfig(tool_format=formats[0], reasoning_format=formats[1])
    answers = AnswerFormats(config, Tokenizer.load(tmp_path / "model"))
    options = AnswerOptions.of(None if formats[1] == "think" else TOOLS, None, None)
    assert answers.plan(options, SamplingParams(), "").keeps_special_tokens == is_special


def test_what_the_token_that_ends_a_call_has_begun_is_not_of_an_answer_of_one_call() -> None:
    parser = find_tool_format("mistral").make_parser([Tool("clock")], lambda: "0")
    answer = ParsedAnswer(parser, ends_at_call=True)
    answer.read(['Now. [TOOL_CALLS][{"name": "clock", "arguments": {}', '}, {"na'], is_over=True)
    assert (answer.whole().content, len(parser.calls), parser.is_cut) == ("Now.", 1, False)


@pytest.mark.virtual_clock
async def test_reasoning_is_split_off_chats_alone_and_where_a_format_is_named(serve: Serve) -> None:
    text = "<think>\nSo.\n</think>\n\n15."
    async with serve(config=FORMATS) as served:
        say(served, text)
        out = await served.engine.generate(CHAT, max_tokens=100)
        assert (out.reasoning, out.text) == ("So.", "15.")
        prompt = served.tokenizer.render_chat(CHAT)
        out = await served.engine.generate(served.tokenizer.encode(prompt, add_special_tokens=False), max_tokens=100)
        assert (out.reasoning, out.text) == (None, text)
    async with serve(config={**FORMATS, "reasoning_format": "none"}) as served:
        say(served, text)
        out = await served.engine.generate(CHAT, max_tokens=100)
        assert (out.reasoning, out.text) == (None, text)


@pytest.mark.virtual_clock
async def test_each_choice_has_an_answer_of_its_own(serve: Serve) -> None:
    async with serve(config=FORMATS) as served:
        say(served, f"Yes.\n{CALL}", TOOLS)
        out = await served.engine.generate(CHAT, tools=TOOLS, max_tokens=200, n=3, temperature=0)
        assert [choice.text for choice in out.outputs] == ["Yes."] * 3
        assert [len(choice.tool_calls) for choice in out.outputs] == [1, 1, 1]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("depth", [*nightly(1), 2])
@pytest.mark.parametrize("seed", [0, *nightly(1, 2, 3)])
async def test_a_call_that_is_required_comes_whatever_the_model_would_say(serve: Serve, depth: int, seed: int) -> None:
    schemas = {"clock": CLOCK["function"]["parameters"], "add": {"required": ["a", "b"]}}
    async with serve(depth=depth, config=FORMATS, num_blocks=400, max_model_len=512) as served:
        call: dict[str, Any] = {"tools": TOOLS, "seed": seed, "parallel_tool_calls": False, "max_tokens": 400}
        call["max_thinking_tokens"] = 20
        for choice, names in (
            ("required", {"add", "clock"}),
            ("clock", {"clock"}),
            ({"type": "any"}, {"add", "clock"}),
        ):
            out = await served.engine.generate(CHAT, tool_choice=choice, **call)
            if out.outputs[0].finish_reason == "stop":
                (made,) = out.tool_calls
                assert made.name in names
                jsonschema.validate(json.loads(made.arguments), schemas[made.name])
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"name": "clock"}]}}
        out = await served.engine.generate(CHAT, tool_choice=allowed, **call)
        assert [made.name for made in out.tool_calls] == ["clock"]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("seed", range(4))
async def test_with_a_schema_the_answer_is_of_it_or_a_call(serve: Serve, seed: int) -> None:
    async with serve(config=FORMATS, num_blocks=400, max_model_len=512) as served:
        out = await served.engine.generate(CHAT, tools=[CLOCK], structured=SHAPE, seed=seed, max_tokens=400)
        if out.outputs[0].finish_reason == "stop":
            if out.tool_calls:
                assert out.text == ""
            else:
                jsonschema.validate(json.loads(out.text), SHAPE)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("seed", [0, *nightly(1, 2, 3)])
async def test_strict_arguments_are_held_to_in_calls_that_the_model_begins(serve: Serve, seed: int) -> None:
    strict = Tool("clock", CLOCK["function"]["parameters"], strict=True)
    async with serve(config=FORMATS, num_blocks=400, max_model_len=512) as served:
        say(served, '<tool_call>\n{"name": "clock", "arguments": {"zone": "mars"}}\n</tool_call>', [strict])
        out = await served.engine.generate(CHAT, tools=[strict], seed=seed, max_tokens=300)
        assert out.tool_calls
        for made in out.tool_calls:
            assert json.loads(made.arguments)["zone"] in ("utc", "local")


@pytest.mark.virtual_clock
async def test_reasoning_has_no_more_tokens_than_it_may(serve: Serve) -> None:
    open_chat = [*CHAT, {"role": "assistant", "content": "<think>\n"}]
    options: dict[str, Any] = {"chat_template_kwargs": {"continue_final_message": True}, "max_tokens": 60}
    async with serve(config=FORMATS, num_blocks=400, max_model_len=512) as served:
        for budget in (0, 1, 7):
            out = await served.engine.generate(open_chat, max_thinking_tokens=budget, seed=3, **options)
            ids = out.outputs[0].token_ids
            end = served.tokenizer.encode("</think>", add_special_tokens=False)
            assert ids[budget : budget + len(end)] == end
            assert "</think>" not in out.text
        out = await served.engine.generate(open_chat, max_thinking_tokens=5, structured=SHAPE, seed=1, **options)
        jsonschema.validate(json.loads(out.text), SHAPE)


CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n
{%- endfor -%}
<|im_start|>assistant\n"""
BEGINS_WHEN_TOLD = CHAT_TEMPLATE + "{%- if enable_thinking is true -%}<think>\n{%- endif -%}"
ENDS_WHEN_TOLD = CHAT_TEMPLATE + "{%- if enable_thinking is false -%}<think>\n\n</think>\n\n{%- endif -%}"


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("template", "effort", "reasons"),
    [
        (ENDS_WHEN_TOLD, None, True),  # as Qwen3's: its model writes the marker
        (ENDS_WHEN_TOLD, "none", False),
        (BEGINS_WHEN_TOLD, None, False),
        (BEGINS_WHEN_TOLD, "low", True),
    ],
)
async def test_a_shape_comes_behind_reasoning_that_the_template_or_the_model_begins(
    serve: Serve, template: str, effort: str | None, reasons: bool
) -> None:
    async with serve(config=FORMATS) as served:
        tokenizer = served.tokenizer
        tokenizer.chat_template = template
        prompt = tokenizer.render_chat(CHAT, **template_variables(effort))
        begun = "" if prompt.endswith("<think>\n") else "<think>\n"
        end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
        said = tokenizer.encode(f'{begun}Eight and seven.\n</think>\n\n{{"sum": 15}}', add_special_tokens=False)
        served.say(tokenizer.encode(prompt, add_special_tokens=False), [*said, *end])
        out = await served.engine.generate(
            CHAT, structured=SHAPE, reasoning_effort=effort, temperature=0, max_tokens=90
        )
        assert out.reasoning == ("Eight and seven." if reasons else None)
        if reasons:
            assert out.text == '{"sum": 15}'
        else:
            assert out.text.startswith("{")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ reasoning_effort }}", {"minimal": "low", "low": "low", "high": "high", "xhigh": "high", "max": "high"}),
        ("{% if reasoning_effort == 'max' %}", {"minimal": "low", "xhigh": "high", "max": "max"}),
        ('{% if reasoning_effort == "xhigh" %}', {"medium": "medium", "xhigh": "xhigh", "max": "xhigh"}),
        ("{% set efforts = ['minimal'] %}", {"minimal": "minimal", "max": "high"}),
    ],
)
def test_a_template_is_told_an_effort_that_it_knows(template: str, told: dict[str, str]) -> None:
    assert {effort: template_variables(effort, template)["reasoning_effort"] for effort in told} == told
    assert template_variables("none", template) == {"enable_thinking": False, "thinking": False}


@pytest.mark.virtual_clock
async def test_what_cannot_be_is_refused_at_the_call(serve: Serve) -> None:
    async with serve(config=FORMATS) as served:
        for param, prompt, call in (
            ("tools", "text", {"tools": TOOLS}),
            ("tools", CHAT, {"tools": [{"type": "web_search"}]}),
            ("tools", CHAT, {"tools": [add, add]}),
            ("tools", CHAT, {"tools": [tool({"oneOf": 5})], "tool_choice": "required"}),
            *(("tools", CHAT, {"tools": [tool(schema, strict=True)]}) for schema in MALFORMED),
            ("tool_choice", CHAT, {"tools": TOOLS, "tool_choice": "subtract"}),
            ("tool_choice", CHAT, {"tool_choice": "required"}),
            ("parallel_tool_calls", CHAT, {"tools": TOOLS, "parallel_tool_calls": "no"}),
            ("reasoning_effort", CHAT, {"reasoning_effort": "huge"}),
            ("max_thinking_tokens", "text", {"max_thinking_tokens": 5}),
            ("detokenize", CHAT, {"tools": TOOLS, "detokenize": False}),
        ):
            with pytest.raises(InvalidRequest) as raised:
                await served.engine.generate(prompt, **call)
            assert raised.value.param == param
    async with serve(config={"tool_format": "none"}) as served:
        with pytest.raises(InvalidRequest, match="tool_format"):
            await served.engine.generate(CHAT, tools=TOOLS)


async def test_an_answer_of_a_type_may_be_a_call() -> None:
    async with Engine(dtype="float32") as engine:
        chat = [{"role": "user", "content": "Add 123 and 45."}]
        out = await engine.generate(chat, tools=[add], output_type=Sum, temperature=0, max_tokens=100)
        assert [(call.name, call.arguments) for call in out.tool_calls] == [("add", '{"a": 123, "b": 45}')]
        assert out.parsed is None
        forced = await engine.generate(chat, tools=[add], tool_choice="add", output_type=Sum, temperature=0)
        assert (forced.parsed, forced.text, len(forced.tool_calls)) == (None, "", 1)
        out = await engine.generate(chat, tools=[add], tool_choice="none", output_type=Sum, temperature=0)
        assert isinstance(out.parsed, Sum)


@pytest.mark.virtual_clock
async def test_what_a_channel_of_its_own_holds_is_not_asked_for_beside_tools(serve: Serve) -> None:
    async with serve(config={"tool_format": "harmony", "reasoning_format": "harmony"}) as served:
        for param, value in (("structured", SHAPE), ("max_thinking_tokens", 5)):
            with pytest.raises(InvalidRequest, match="harmony") as raised:
                await served.engine.generate(CHAT, tools=TOOLS, **{param: value})
            assert raised.value.param == param


async def test_an_engine_in_a_process_of_its_own_keeps_to_the_same() -> None:
    open_chat = [*CHAT, {"role": "assistant", "content": "<think>\n"}]
    texts = []
    for process in (False, True):
        async with Engine(process=process, dtype="float32", **FORMATS) as engine:
            continued: dict[str, Any] = {"chat_template_kwargs": {"continue_final_message": True}}
            thought = await engine.generate(
                open_chat, max_thinking_tokens=4, structured=Json(SHAPE), temperature=0, max_tokens=60, **continued
            )
            jsonschema.validate(json.loads(thought.text), SHAPE)
            called = await engine.generate(CHAT, tools=TOOLS, tool_choice="clock", temperature=0, max_tokens=200)
            calls = [(call.name, call.arguments) for call in called.tool_calls]
            texts.append((thought.reasoning, thought.text, called.reasoning, called.text, calls))
    assert texts[0] == texts[1]


async def test_a_format_that_is_not_known_keeps_an_engine_from_starting() -> None:
    for name in ("tool_format", "reasoning_format"):
        with pytest.raises(ConfigError, match=r"hermes|think"):
            async with Engine(**{name: "herms"}):
                pass
