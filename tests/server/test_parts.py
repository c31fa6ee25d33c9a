"""Answers that are told part by part: however the text was cut and its deltas merged, each event stream is in order."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

import pytest
from nightly import seeds
from server.scripted import CALL, LOOKS_UP, WEATHER, sse_events

from aioengine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from aioengine.server.answers import parts_in_order
from aioengine.server.anthropic_messages import MessageAnswer
from aioengine.server.responses import ResponseAnswer
from aioengine.tool_calls.calls import Piece, Tool, ToolCall, ToolCallDelta
from aioengine.tool_calls.formats import find_tool_format
from aioengine.tool_calls.reasoning import ReasoningParser, find_reasoning_format

TEXTS = [
    "",
    "Hello.",
    "<think>Only this",
    LOOKS_UP,
    CALL % "Paris",
    f"{CALL % 'Paris'}\n{CALL % 'Rome'}\nand more\n{CALL % 'Oslo'}",
    f"Before. {CALL % 'Paris'} After. {(CALL % 'Rome')[:-20]}",
    (CALL % "Paris").partition("}}")[0] + "}",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city" oops}}\n</tool_call> and more',
    '<think>\u2028 one\u0085\n</think>\n\nü\u2029<tool_call>\n{"name": "get_weather", "arguments": {"city": "\u2028"}}',
]


def token_bytes(token_ids: list[int], *, is_start: bool, skip_special_tokens: bool) -> list[bytes]:
    return [b"x" for _ in token_ids]


def read(text: str, rng: random.Random) -> tuple[RequestOutput, list[CompletionDelta]]:
    """An answer, whole, and in deltas that are cut anywhere, of which some were not read for a while."""
    ids = itertools.count()
    calls = find_tool_format("hermes").make_parser((Tool("get_weather", WEATHER),), lambda: f"call_{next(ids)}")
    parser = ReasoningParser(find_reasoning_format("think"), calls, False)
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(12)))
    pieces = [parser.feed(text[a:b]) for a, b in itertools.pairwise([0, *cuts, len(text)]) if a < b]
    pieces.append(parser.finish())
    ends = sorted({*rng.choices(range(len(pieces)), k=rng.randrange(6)), len(pieces)} - {0})
    groups = [pieces[a:b] for a, b in itertools.pairwise([0, *ends])]
    deltas = [
        CompletionDelta(
            index=0,
            text="".join(piece.content for piece in group),
            reasoning="".join(piece.reasoning for piece in group),
            tool_calls=[call for piece in group for call in piece.calls],
            token_ids=[5],
            finish_reason="stop" if number == len(groups) - 1 else None,
        )
        for number, group in enumerate(groups)
    ]
    choice = CompletionOutput(
        index=0,
        text=_joined(pieces, "content"),
        reasoning=_joined(pieces, "reasoning") or None,
        tool_calls=list(parser.calls),
        token_ids=[5] * len(pieces),
        finish_reason="stop",
    )
    return RequestOutput(request_id="1", prompt="a", prompt_token_ids=[1, 2], outputs=[choice], finished=True), deltas


def _joined(pieces: list[Piece], name: str) -> str:
    return "".join(getattr(piece, name) for piece in pieces)


def streamed(answer: Any, output: RequestOutput, deltas: list[CompletionDelta]) -> list[Any]:
    parts = [
        answer.opening([output], None, ()),
        *(answer.event(0, delta) for delta in deltas),
        answer.closing([output]),
    ]
    data = b"".join(parts)
    assert len(data.decode().splitlines()) == data.count(b"\n")
    return [json.loads(event) for _, event in sse_events(data)]


def check_calls(told: list[tuple[str, str, str]], calls: list[ToolCall]) -> None:
    """All complete calls are told, and at most one that was cut."""
    complete = {call.id: (call.id, call.name, call.arguments) for call in calls}
    assert [call for call in told if call[0] in complete] == list(complete.values())
    assert len(told) - len(complete) <= 1


def test_what_is_open_goes_on_first() -> None:
    calls = [ToolCallDelta(0, None, None, "a}"), ToolCallDelta(1, "id", "f", "{"), ToolCallDelta(1, None, None, "}")]
    delta = CompletionDelta(index=0, text="text", reasoning="reasoning", tool_calls=calls, token_ids=[])
    orders = {part: [name for name, _ in parts_in_order(delta, part)] for part in (None, "reasoning", "text", 0)}
    assert orders == {
        None: ["reasoning", "text", 0, 1, 1],
        "reasoning": ["reasoning", "text", 0, 1, 1],
        "text": ["text", "reasoning", 0, 1, 1],
        0: [0, "reasoning", "text", 1, 1],
    }


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("seed", seeds(30))
def test_a_responses_events_are_in_order(text: str, seed: int) -> None:
    output, deltas = read(text, random.Random(seed))
    kept: list[bytes] = []

    def answer() -> ResponseAnswer:
        keep = lambda body, _: kept.append(body)  # noqa: E731
        return ResponseAnswer({"id": "resp_ab"}, token_bytes, top_logprobs=None, tools={}, keep=keep)

    events = streamed(answer(), output, deltas)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert json.loads(kept[0]) == response
    opened: list[str] = []
    said: dict[str, str] = {}
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert not opened, "the one before has ended"
            assert event["output_index"] == len(said)
            opened.append(event["item"]["id"])
            said[opened[0]] = ""
        elif kind == "response.output_item.done":
            assert opened.pop() == event["item"]["id"]
        else:
            assert event["item_id"] == opened[0]
            said[opened[0]] += event["delta"] if kind.endswith(".delta") else ""
            if kind in ("response.output_text.done", "response.reasoning_text.done"):
                assert event["text"] == said[opened[0]]
    assert not opened
    choice = output.outputs[0]
    items = response["output"]
    assert [item["id"] for item in items] == list(said)
    texts = {"message": "", "reasoning": ""}
    for item in items:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
            assert item["content"][0]["text"] == said[item["id"]]
    assert texts == {"message": choice.text, "reasoning": choice.reasoning or ""}
    calls = [item for item in items if item["type"] == "function_call"]
    check_calls([(item["call_id"], item["name"], item["arguments"]) for item in calls], choice.tool_calls)
    whole_ids = {call.id for call in choice.tool_calls}
    for call in calls:
        assert call["status"] == ("completed" if call["call_id"] in whole_ids else "incomplete")
    if len(calls) == len(whole_ids) and "more" not in text:  # in the order that the whole is told in, too
        whole = json.loads(asyncio.run(answer().whole([output])))
        assert [item["type"] for item in whole["output"] if item["type"] != "function_call"] == [
            kind for kind in ("reasoning", "message") if any(item["type"] == kind for item in items)
        ]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("seed", seeds(30))
def test_a_messages_events_are_in_order(text: str, seed: int) -> None:
    output, deltas = read(text, random.Random(seed))
    events = streamed(MessageAnswer({"id": "msg-1", "model": "demo"}, token_bytes), output, deltas)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open, "the one before has ended"
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "said": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
        elif event["delta"]["type"] != "signature_delta":
            (_, said) = event["delta"].values()
            blocks[-1]["said"] += said
    assert not is_open
    choice = output.outputs[0]
    said_in = {
        kind: "".join(block["said"] for block in blocks if block["type"] == kind) for kind in ("text", "thinking")
    }
    assert said_in == {"text": choice.text, "thinking": choice.reasoning or ""}
    uses = [(block["id"], block["name"], block["said"]) for block in blocks if block["type"] == "tool_use"]
    check_calls(uses, choice.tool_calls)
