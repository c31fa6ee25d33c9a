"""Bodies and events that are made of outputs: whatever the tokens are, a stream adds up to the whole answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import few
from server.conftest import ADAPTERS, Adapter, events_of, openai_client, plain_client, serving, texts_of

from aioengine import Engine
from aioengine.outputs import CompletionDelta, CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from aioengine.server.answers import ChatAnswer, CompletionAnswer, Extras, TextPlace, usage_of
from aioengine.testing import FakeExecutor

HEAD: dict[str, object] = {"id": "cmpl-1", "created": 1_700_000_000, "model": 'a "model"\n'}

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
scores = st.floats(max_value=0.0, allow_nan=False)


class Token(NamedTuple):
    """A sampled token: its part of the text, which may be held back, and its line."""

    text: str
    line: TokenLogprobs


@st.composite
def lines(draw: st.DrawFn) -> TokenLogprobs:
    """The sampled token first, then the likeliest ones by rank; the sampled one is among them or not."""
    num_top = draw(st.integers(0, 3))
    sampled = draw(st.integers(0, 9))
    rank = draw(st.integers(1, 9))
    line = {sampled: Logprob(draw(scores), rank, draw(texts))}
    for place in range(1, num_top + 1):
        if place != rank:
            line[10 + place] = Logprob(draw(scores), place, draw(texts))
    return line


@st.composite
def choices(draw: st.DrawFn, index: int) -> tuple[CompletionOutput, list[CompletionDelta]]:
    """A choice, whole and in deltas that are cut anywhere; some have tokens and no text, the last one may have none."""
    tokens = [Token(draw(texts), draw(lines())) for _ in range(draw(st.integers(0, 6)))]
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=3)))
    reason: FinishReason = draw(st.sampled_from(["stop", "length", "abort"]))
    end = {"finish_reason": reason, "stop_reason": draw(st.none() | st.integers(0, 9) | texts.filter(bool))}

    def of(part: list[Token]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(token.text for token in part),
            "token_ids": [next(iter(token.line)) for token in part],
            "logprobs": [token.line for token in part],
        }

    parts = [tokens[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    *deltas, last = [CompletionDelta(**of(part)) for part in parts]
    return CompletionOutput(**of(tokens), **end), [*deltas, msgspec.structs.replace(last, **end)]


class Run(NamedTuple):
    """Prompts, each with as many choices; and the deltas as they came, with the numbers of their choices."""

    prompts: list[str]
    outputs: list[RequestOutput]
    deltas: list[tuple[int, CompletionDelta]]
    num_choices: int


@st.composite
def runs(draw: st.DrawFn, max_prompts: int = 1) -> Run:
    num_choices = draw(st.integers(1, 3))
    prompts, outputs, queues = [], [], []
    for place in range(draw(st.integers(1, max_prompts))):
        made = [draw(choices(index)) for index in range(num_choices)]
        prompt_lines = draw(st.lists(lines(), min_size=1, max_size=3))
        prompts.append(draw(texts))
        outputs.append(
            RequestOutput(
                request_id="1",
                prompt=prompts[-1],
                prompt_token_ids=[1, *(next(iter(line)) for line in prompt_lines)],
                outputs=[whole for whole, _ in made],
                finished=True,
                num_cached_tokens=draw(st.integers(0, 1)),
                prompt_logprobs=[None, *prompt_lines],
            )
        )
        queues += [(place * num_choices + index, list(parts)) for index, (_, parts) in enumerate(made)]
    deltas = []
    while queues:
        number, queue = draw(st.sampled_from(queues))
        deltas.append((number, queue.pop(0)))
        queues = [(number, queue) for number, queue in queues if queue]
    return Run(prompts, outputs, deltas, num_choices)


def token_bytes(token_ids: list[int], *, is_start: bool, skip_special_tokens: bool) -> list[bytes]:
    return [bytes([token_id, is_start]) for token_id in token_ids]


def streamed(answer: Any, run: Run) -> list[Any]:
    """The events of a run, decoded."""

    async def relay() -> bytes:
        parts = [answer.opening(run.outputs, None, ())]
        echoed = set()
        for number, delta in run.deltas:
            if answer.has_echo and number not in echoed:
                echoed.add(number)
                parts.append(await answer.echo(number, run.outputs[number // run.num_choices], None))
            parts.append(answer.event(number, delta))
        return b"".join([*parts, answer.closing(run.outputs)])

    return events_of(asyncio.run(relay()))


def check_heads(bodies: list[Any], kind: str) -> None:
    for body in bodies:
        assert HEAD.items() <= body.items()
        assert body["object"] == kind
        assert body["system_fingerprint"].startswith("aioengine-")


def check_endings(events: list[Any], whole: Any) -> None:
    """Each choice's last event, and no other, has its reason; ``usage`` is last, if anywhere."""
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]


@unhurried
@given(runs(), st.none() | st.integers(0, 3), st.booleans())
def test_a_chats_events_add_up_to_its_answer(run: Run, top: int | None, has_usage: bool) -> None:
    def answer() -> ChatAnswer:
        return ChatAnswer(HEAD, token_bytes, Extras(top_logprobs=top, has_usage=has_usage))

    whole = json.loads(asyncio.run(answer().whole(run.outputs)))
    check_heads([whole], "chat.completion")
    details = {"completion_tokens_details": {"reasoning_tokens": 0}}
    assert whole["usage"] == {**usage_of(run.outputs), **details}
    events = streamed(answer(), run)
    check_heads(events, "chat.completion.chunk")
    if has_usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in events)
    else:
        assert all("usage" not in event for event in events)
    check_endings(events, whole)
    for choice, output in zip(whole["choices"], run.outputs[0].outputs, strict=True):
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert all("role" not in part["delta"] for part in parts[1:])
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert choice["message"] == {"role": "assistant", "content": output.text, "refusal": None}
        told = [position for part in parts if part["logprobs"] for position in part["logprobs"]["content"]]
        if top is None:
            assert choice["logprobs"] is None
            assert told == []
        else:
            assert told == choice["logprobs"]["content"]
            check_positions(told, output, top)


def check_positions(told: list[Any], output: CompletionOutput, top: int) -> None:
    """Each position has the sampled token, and of the likeliest ones as many as were asked for, in order."""
    assert output.logprobs is not None
    for place, (position, line) in enumerate(zip(told, output.logprobs, strict=True)):
        token_id, sampled = next(iter(line.items()))
        assert position["token"] == sampled.decoded_token
        assert position["logprob"] == max(sampled.logprob, -9999.0)
        assert position["bytes"] == [token_id, place == 0]
        ranked = sorted((entry.rank, entry.decoded_token) for entry in line.values() if entry.rank <= top)
        assert [other["token"] for other in position["top_logprobs"]] == [name for _, name in ranked]


@unhurried
@given(runs(max_prompts=2), st.none() | st.integers(0, 3), st.booleans(), st.sampled_from(["none", "echo", "alone"]))
def test_a_completions_events_add_up_to_its_answer(run: Run, top: int | None, has_usage: bool, echo: str) -> None:
    def answer() -> CompletionAnswer:
        return CompletionAnswer(
            HEAD,
            token_bytes,
            Extras(top_logprobs=top, has_usage=has_usage),
            num_choices=run.num_choices,
            prompt_texts=() if echo == "none" else run.prompts,
            is_echo_alone=echo == "alone",
        )

    whole = json.loads(asyncio.run(answer().whole(run.outputs)))
    check_heads([whole], "text_completion")
    usage = answer().usage(run.outputs)
    assert whole["usage"] == usage
    assert echo != "alone" or usage["completion_tokens"] == 0
    events = streamed(answer(), run)
    check_heads(events, "text_completion")
    if has_usage:
        assert events.pop()["usage"] == whole["usage"]
    check_endings(events, whole)
    outputs = [part for output in run.outputs for part in output.outputs]
    for choice, output in zip(whole["choices"], outputs, strict=True):
        prompt = "" if echo == "none" else run.prompts[choice["index"] // run.num_choices]
        assert choice["text"] == prompt + ("" if echo == "alone" else output.text)
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        if top is None:
            assert choice["logprobs"] is None
            continue
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = [item for part in parts if part["logprobs"] for item in part["logprobs"][column]]
            assert told == choice["logprobs"][column]
        check_columns(choice["logprobs"])


def check_columns(logprobs: Any) -> None:
    """All columns are of one length; no number is out of JSON's reach."""
    assert len({len(column) for column in logprobs.values()}) == 1
    for token, score, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert (score is None) == (top is None)
        if score is not None:
            assert -9999.0 <= score <= 0.0
            assert top[token] == score


BOS, EOS = 0, 1


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text, and its UTF-8 cut anywhere: most tokens hold whole characters, some begin or end within one."""
    text = draw(st.text(st.sampled_from("ab ,é日😊"), max_size=8))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)))))
    return text, [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if begin < end]


@unhurried
@given(cut_texts(), cut_texts(), st.booleans(), st.booleans())
def test_text_offsets_are_where_tokens_begin_in_the_text(
    prompt: tuple[str, list[bytes]], said: tuple[str, list[bytes]], echo: bool, skips_special: bool
) -> None:
    """In characters of the choice's text; a token that goes on with a character has the place of that."""
    vocabulary = [b"<s>", b"</s>", *prompt[1], *said[1]]

    def bytes_of(token_ids: list[int], *, is_start: bool, skip_special_tokens: bool) -> list[bytes]:
        return [b"" if skip_special_tokens and i in (BOS, EOS) else vocabulary[i] for i in token_ids]

    prompt_ids = [BOS, *range(2, 2 + len(prompt[1]))]
    ids = [EOS, *range(2 + len(prompt[1]), len(vocabulary)), EOS]
    text = said[0] if skips_special else f"</s>{said[0]}</s>"
    entries = [Logprob(-1.0, 1, piece.decode(errors="replace")) for piece in vocabulary]
    lines: list[TokenLogprobs] = [{i: entries[i]} for i in ids]
    choice = CompletionOutput(index=0, text=text, token_ids=ids, logprobs=lines, finish_reason="stop")
    output = RequestOutput(
        request_id="1",
        prompt=prompt[0],
        prompt_token_ids=prompt_ids,
        outputs=[choice],
        finished=True,
        prompt_logprobs=[None, *({i: entries[i]} for i in prompt_ids[1:])],
    )

    def answer() -> CompletionAnswer:
        texts = [prompt[0]] if echo else []
        options: dict[str, Any] = {"num_choices": 1, "prompt_texts": texts, "skips_special": skips_special}
        return CompletionAnswer(HEAD, bytes_of, Extras(top_logprobs=0), **options)

    def places(begin: int, pieces: list[bytes]) -> list[int]:
        """By the text alone: so many whole characters are before each piece."""
        return [begin + len(b"".join(pieces[:end]).decode(errors="ignore")) for end in range(len(pieces))]

    special = 0 if skips_special else len("</s>")
    begin = len(prompt[0]) if echo else 0
    expected = [begin, *places(begin + special, said[1]), begin + special + len(said[0])]
    if echo:
        expected = [0, *places(0, prompt[1]), *expected]
    whole = json.loads(asyncio.run(answer().whole([output])))["choices"][0]
    assert whole["text"] == (prompt[0] if echo else "") + text
    assert whole["logprobs"]["text_offset"] == expected
    deltas = [
        (0, CompletionDelta(index=0, text="", token_ids=[i], logprobs=[line]))
        for i, line in zip(ids, lines, strict=True)
    ]
    deltas.append((0, CompletionDelta(index=0, text=text, token_ids=[], logprobs=[], finish_reason="stop")))
    events = streamed(answer(), Run([prompt[0]], [output], deltas, 1))
    told = [event["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert [offset for part in told for offset in part] == expected


def test_half_a_character_is_one_of_the_text_where_nothing_completes_it() -> None:
    pieces = [b"a", b"\xf0\x9f", b"b", b"\xe6", b"\xe6\x97\xa5", b"c"]
    place = TextPlace(lambda ids, **_: [pieces[i] for i in ids])
    text = b"".join(pieces).decode(errors="replace")
    offsets = [place.move(i, "") for i in range(len(pieces))]
    assert offsets == [0, 1, 2, 3, 4, 5]
    assert [text[at] for at in offsets] == ["a", "\ufffd", "b", "\ufffd", "日", "c"]


def test_a_prompt_has_no_space_before_it_and_its_special_tokens_once() -> None:
    """As of sentencepiece: words have the space before them, which is not shown; a BOS is added to one in the text."""
    pieces = [b"<s>", b" Hi", b" you", b",", b" "]

    def bytes_of(ids: list[int], *, skip_special_tokens: bool, **_: Any) -> list[bytes]:
        return [b"" if skip_special_tokens and i == 0 else pieces[i] for i in ids]

    for prompt, ids, expected in (
        ("Hi you,", [0, 1, 2, 3], [0, 0, 3, 6]),
        ("<s>Hi you", [0, 0, 1, 2], [0, 3, 3, 6]),
        ("Hi  you", [0, 1, 4, 2], [0, 0, 2, 4]),
    ):
        place = TextPlace(bytes_of, prompt)
        shown = ["<s>", "Hi", "you", ",", ""]
        assert [place.move(i, shown[i]) for i in ids] == expected


# Any text at all, over a socket

HARD = [
    "one\ntwo\n\nthree\r\nfour\rfive",
    "data: [DONE]\n\ndata: {}\n\n",
    "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei",
    "👩‍👩‍👧‍👦 🦊 é ﷽ \U0010ffff \u200b",
    '"\\u0041" \\ </script> \x00\x01\x7f',
    "日本語" * 20,
]


def some_texts() -> list[str]:
    rng = random.Random(20261121)
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    return [*HARD, *("".join(chr(rng.choice(points)) for _ in range(30)) for _ in range(4))]


def saying(ids: list[int]) -> Callable[[list[int], Any], int]:
    """A device that says these tokens after a prompt of any length, which ends with the token 1."""

    def sample(token_ids: list[int], _: Any) -> int:
        return ids[len(token_ids) - 1 - max(place for place, token_id in enumerate(token_ids) if token_id == 1)]

    return sample


@pytest.mark.parametrize("adapter", few(["starlette"], of=ADAPTERS))
async def test_any_text_comes_through_whole(adapter: Adapter) -> None:
    script: list[int] = []
    executor = FakeExecutor(vocab_size=2048, max_model_len=1024, num_blocks=256, sampler=saying(script))
    async with (
        Engine(seed=1, executor=executor) as engine,
        serving(engine, adapter) as served,
        openai_client(served.url) as client,
        plain_client(served.url) as http,
    ):
        for text in some_texts():
            script[:] = await engine.tokenize(text)
            asked: dict[str, Any] = {"model": "demo", "prompt": [1], "max_tokens": len(script), "logprobs": 0}
            asked["extra_body"] = {"ignore_eos": True, "skip_special_tokens": False}
            whole = await client.completions.create(**asked)
            assert whole.choices[0].text == text
            stream = await client.completions.create(**asked, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == text
            body = {"prompt": [1], "max_tokens": len(script), "stream": True, "ignore_eos": True}
            raw = await http.post("/v1/completions", json=body)
            assert texts_of(raw.content) == {0: text}
            # Many read a line at a time, and some take more than the standard does for the end of one.
            assert raw.text.splitlines() == raw.content.decode().removesuffix("\n").split("\n")


LONG = {"stream": True, "max_tokens": 400, "seed": 1, "ignore_eos": True}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_that_was_not_read_for_long_tells_all_log_probabilities_then(path: str) -> None:
    """All of it is made before anything is told: one delta, or two, and many events."""
    asked: dict[str, Any] = {"prompt": [1, 2, 3], "logprobs": 5}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 5}
    executor = FakeExecutor(vocab_size=2048, max_model_len=4096, num_blocks=1024)
    async with (
        Engine(seed=1, executor=executor, stream_interval=400) as engine,
        serving(engine, "starlette") as served,
        plain_client(served.url) as client,
    ):
        answer = await client.post(path, json=LONG | asked)
    choices = [event["choices"][0] for event in events_of(answer.content)]
    assert len(choices) >= 5  # no more than 500 log-probabilities are encoded in a turn
    if "chat" in path:
        told = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        told = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        offsets = [at for choice in choices if choice["logprobs"] for at in choice["logprobs"]["text_offset"]]
        assert offsets == [len("".join(told[:place])) for place in range(400)]
    assert len(told) == 400
