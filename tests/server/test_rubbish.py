"""Clients that send rubbish hear a 4xx that says so, everybody else is served, and no log shows a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import few
from server.conftest import each_adapter
from server.hostile import Adapter, Answer, Target, chat, completion, heard_errors, served

from aioengine.server.schema import ChatRequest, CompletionRequest

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(max_tokens=1),
    "/v1/completions": completion(max_tokens=1),
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [100, 200]},
    "/abort": {"request_id": "nobody"},
}
PATIENCE_S = 20.0


@contextlib.asynccontextmanager
async def unharmed(adapter: Adapter) -> AsyncIterator[Target]:
    """A server that at the end still serves, and has logged no traceback."""
    with heard_errors(without=["aiohttp.server"]) as errors:  # logs what is no HTTP, at length
        async with served(adapter) as target:
            with anyio.fail_after(PATIENCE_S):
                yield target
                assert (await target.ask("/v1/completions", completion(max_tokens=1))).status == 200
        assert [record.getMessage() for record in errors] == []


def assert_refused(answer: Answer) -> None:
    assert 400 <= answer.status < 500, answer
    assert answer.error["type"] == "invalid_request_error"


# Rubbish that is no HTTP

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SMUGGLED = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
rng = random.Random(5)

NO_HTTP = {
    "random": [rng.randbytes(size) + b"\r\n\r\n" for size in (1, 10, 100, 1000, 10_000)],
    "no such version": [b"GET / HTTP/9.9\r\nhost: x\r\n\r\n", b"GET / HTTX/1.1\r\nhost: x\r\n\r\n"],
    "http-2": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    "tls": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400)],
    "no method": [b"/ HTTP/1.1\r\nhost: x\r\n\r\n", b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n"],
    "bad chunk sizes": [
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + size + b"\r\n{}\r\n0\r\n\r\n"
        for size in (b"zz", b"-2", b"0x2", b"F" * 17, b"F" * 100)
    ],
    "bad lengths": [
        HEAD + b"content-length: " + length + b"\r\n\r\n{}"
        for length in (b"-2", b"two", b"2, 3", b"0x2", b"9" * 30, b"2\r\ncontent-length: 3")
    ],
    "length and chunks": [
        HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + SMUGGLED,
    ],
    "unknown codings": [
        HEAD + b"transfer-encoding: " + coding + b"\r\n\r\n0\r\n\r\n" + SMUGGLED
        for coding in (b"xchunked", b"chunked, identity", b"chunked\r\ntransfer-encoding: identity")
    ],
    "bad headers": [
        b"GET /health HTTP/1.1\r\n" + line + b"\r\n\r\n"
        for line in (b"no colon", b": no name", b"a b: c", b"host : x", b"a: \x00", b" folded: x", b"a: b\rc: d")
    ],
    "bad paths": [
        b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n" for path in (b"/\x00", b"/a b", b"", b"\x7f", b"/\xff")
    ],
}


@each_adapter
@pytest.mark.parametrize("kind", NO_HTTP)
async def test_what_is_no_http_is_refused_or_cut(adapter: Adapter, kind: str) -> None:
    async with unharmed(adapter) as target:
        for data in NO_HTTP[kind]:
            with await target.connect() as client:
                with contextlib.suppress(ConnectionError):
                    await client.send(data)
                    client.leave("half")
                said = await client.read_to_end()
                statuses = [int(status) for status in re.findall(rb"HTTP/\d\.\d (\d{3}) ", said)]
                assert all(400 <= status < 500 for status in statuses), (data[:200], said)
                assert len(statuses) <= 1, f"two answers to {data[:200]!r}: {said!r}"


# HTTP that is unusual


@each_adapter
async def test_a_request_of_http_0_9_ends_its_connection(adapter: Adapter) -> None:
    async with unharmed(adapter) as target, target.client() as client:
        await client.send(b"GET /health\r\n\r\n")
        assert len(re.findall(rb"HTTP/\d\.\d \d{3} ", await client.read_to_end())) == 1


@each_adapter
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/%00", 404),
        ("/v1/models/%00", 404),
        ("/v1/models/" + "x" * 5000, 404),
        ("/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("/v1/../v1/models/../../etc/passwd", 404),
        ("//v1/models", 404),
        ("/%ff%fe", 404),
        ("/%ed%a0%80", 404),
        ("/%", 404),
        ("/%zz", 404),
        ("/%0d%0ax-evil:%201", 404),
        ("/health?%ff=%00&&&=", 200),
        ("/%68ealth", 200),
        ("/health#fragment", 200),
    ],
)
async def test_strange_paths_are_paths(adapter: Adapter, path: str, status: int) -> None:
    async with unharmed(adapter) as target:
        answer = await target.ask(path)
        assert answer.status == status
        if status != 200:
            assert_refused(answer)
            assert "x-evil" not in answer.headers


@each_adapter
async def test_strange_headers_are_passed_over(adapter: Adapter) -> None:
    strange = ("é", "\xff" * 100, "x" * 5000, "", "[]", '"', "a,b", "Bearer")
    async with unharmed(adapter) as target:
        for name in ("x-request-id", "authorization", "traceparent", "accept", "accept-encoding", "origin", "cookie"):
            for value in strange:
                assert (await target.ask("/health", **{name: value or " "})).status == 200


# Bodies that are no JSON

GOOD = json.dumps(BODIES["/v1/completions"]).encode()

NO_JSON = {
    "empty": b"",
    "text": b"Hello",
    "half": GOOD[:-5],
    "twice": GOOD + GOOD,
    "form": b"prompt=Hi&max_tokens=1",
    "a list": b"[1, 2]",
    "null": b"null",
    "a number": b"1e999",
    "a text": b'"prompt"',
    "utf-16": GOOD.decode().encode("utf-16"),
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "bom": b"\xef\xbb\xbf" + GOOD,
    "nul": b"\x00" * 100,
    "raw control": b'{"prompt": "a\x00b"}',
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "nested in a field": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "nested in messages": b'{"messages": ' + b'[{"content":' * 5_000 + b"1" + b"}]" * 5_000 + b"}",
    "nested in an unsupported field": b'{"prompt": "a", "guided_json": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "nested where it is small": b'{"prompt": "a", "guided_json": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "comments": b'{"prompt": "a" /* hi */}',
    "trailing comma": b'{"prompt": "a",}',
    "bytes of no character": b'{"prompt": "\xc3\x28 \xed\xa0\x80"}',
}


@each_adapter
async def test_what_is_no_json_is_refused(adapter: Adapter) -> None:
    async with unharmed(adapter) as target:
        for kind, data in NO_JSON.items():
            for path in PATHS:
                answer = await target.ask(path, data)
                assert answer.status == 400, (kind, path, answer)
                assert_refused(answer)


@each_adapter
async def test_other_content_types_are_refused_unread(adapter: Adapter) -> None:
    async with unharmed(adapter) as target:
        form, several = "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
        for kind in ("text/plain", form, several, "json", "a", "é", "/", ""):
            for path in PATHS:
                answer = await target.ask(path, BODIES[path], content_type=kind)
                assert answer.status == 415
                assert_refused(answer)
                assert answer.error["code"] == "unsupported_media_type"
                assert "-H 'Content-Type: application/json'" in answer.error["message"]
                assert kind.partition(";")[0] in answer.error["message"] or not kind.isascii()


async def test_of_a_field_that_comes_twice_the_last_one_counts() -> None:
    async with unharmed("serve") as target:
        body = b'{"prompt": "a", "max_tokens": 1, "prompt": "b", "max_tokens": 2, "ignore_eos": true}'
        assert (await target.ask("/v1/completions", body)).json()["usage"]["completion_tokens"] == 2


# Values that are none


ANY_JSON: tuple[bytes, ...] = (
    b'"\\ud800"', b'"\\udfff and more"', b'["\\ud800"]', b'{"\\ud800": 1}', b'"\\u0000"', b'""',
    b'"' + b"x" * 3000 + b'"', b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" + b"0" * 400,
    b"-1" + b"0" * 400, b"18446744073709551616", b"9223372036854775808", b"-9223372036854775809",
    b"1e400000000000000000000", b"1e-400", b"-0", b"0.5", b"-1", b"1e3", b"true", b"[]", b"[null]", b"[[]]",
    b'[1, "a"]', b"[-1]", b"[1e999]", b"{}", b'{"a": [1]}', b'{"1": 1e999}', b'{"-1": 1}',
    b'{"99999999999999999999": 1}', b'{"type": "text"}',
)  # fmt: skip
"""JSON of any kind as it is written, and what no encoder of Python's would write."""


ALL_FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "tokens", "request_ids"})


def with_fields(body: dict[str, Any], fields: dict[str, bytes]) -> bytes:
    """A body, with these fields as they are written."""
    written = {**{name: json.dumps(value).encode() for name, value in body.items()}, **fields}
    return b"{%b}" % b",".join(b'"%b": %b' % (name.encode(), value) for name, value in written.items())


async def check_taken_or_refused(path: str, bodies: Iterable[bytes]) -> None:
    async with unharmed("serve") as target, target.client() as client:
        for body in bodies:
            await client.post(path, body)
            answer = await client.answer()
            if answer.status != 200:
                assert_refused(answer)


@pytest.mark.nightly
@pytest.mark.parametrize("path", few(["/v1/chat/completions"], of=PATHS))
async def test_no_value_of_any_field_is_more_than_a_4xx(path: str) -> None:
    good = BODIES[path]
    await check_taken_or_refused(path, (with_fields(good, {name: value}) for name in ALL_FIELDS for value in ANY_JSON))


@pytest.mark.parametrize("name", ["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "other"])
async def test_no_value_in_a_message_is_more_than_a_4xx(name: str) -> None:
    messages = (b'[{"role": "user", "content": "Hi", "%b": %b}]' % (name.encode(), value) for value in ANY_JSON)
    path = "/v1/chat/completions"
    await check_taken_or_refused(path, (with_fields(BODIES[path], {"messages": value}) for value in messages))


# Good requests, mutated


MARKS = (b"", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\ud800", b"e999", b"-")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(mutated) + 1)
        mutated[place : place + rng.randint(0, 8)] = rng.choice((*MARKS, rng.randbytes(rng.randint(1, 4))))
    return bytes(mutated)


RICH: dict[str, dict[str, Any]] = {
    **BODIES,
    "/v1/chat/completions": chat(
        max_tokens=2, n=2, temperature=0.7, stop=["END"], logprobs=True, top_logprobs=2, logit_bias={"5": 1.5},
        stream=True, stream_options={"include_usage": True},
        messages=[{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
    ),
    "/v1/completions": completion(
        max_tokens=2, prompt=["a", "b"], logprobs=1, echo=True, stop="E", allowed_token_ids=[5, 6, 7], bad_words=["c"],
    ),
    "/tokenize": {"messages": [{"role": "user", "content": "Hi"}], "return_token_strs": True},
}  # fmt: skip


@pytest.mark.nightly
def test_no_mutation_of_a_good_request_is_more_than_a_4xx() -> None:
    with asyncio.Runner() as runner, heard_errors() as errors:
        serving = served("serve")
        target: Target = runner.run(serving.__aenter__())
        num_refused = 0

        async def ask(path: str, data: bytes) -> Answer:
            with anyio.fail_after(PATIENCE_S):
                return await target.ask(path, data)

        @settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(
            st.sampled_from(PATHS),
            st.dictionaries(st.sampled_from(ALL_FIELDS), st.sampled_from(ANY_JSON), max_size=3),
            st.randoms(use_true_random=False),
        )
        def mutated(path: str, fields: dict[str, bytes], rng: random.Random) -> None:
            nonlocal num_refused
            data = with_fields(RICH[path], fields)
            answer = runner.run(ask(path, data if fields else mutate_bytes(data, rng)))
            if answer.status != 200:
                num_refused += 1
                assert_refused(answer)

        for path, body in RICH.items():
            assert runner.run(ask(path, json.dumps(body).encode())).status == 200
        mutated()
        assert num_refused > 100
        assert runner.run(ask("/v1/completions", GOOD)).status == 200
        assert runner.run(serving.__aexit__(None, None, None)) is not True
        assert [record.getMessage() for record in errors] == []
