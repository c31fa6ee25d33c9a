"""No request makes others wait, and no thousand of them: a callback is due each millisecond while a client elsewhere
sends the worst it can; and each turn of the loop is short while many ask or leave at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import multiprocessing
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nightly import nightly
from server.hostile import GONE, Client, Target, Ticker, chat, completion, heard_errors, request_of, send_all, served
from turn_probe import LONGEST_S, TurnProbe

from aioengine.models.folder import DEMO_MODEL
from aioengine.server import ServerConfig

MIB = 2**20
MAX_MODEL_LEN = 8192
LARGE = ServerConfig(max_body_bytes=32 * MIB)
DEFAULT = ServerConfig()


def longest_hold_s(config: ServerConfig) -> float:
    """Bodies of the default limit hold the loop for up to 14 ms; those of 20 MB, where allowed, for 20 to 60."""
    return 0.25 if config is LARGE else 0.06


class Case(NamedTuple):
    """Something to send, to a server of that config, and the statuses that it may bring."""

    path: str
    body: Callable[[], bytes | dict[str, Any]]
    statuses: tuple[int, ...]
    config: ServerConfig = DEFAULT
    at_once: int = 1


def raw(**fields: bytes | str | int | bool) -> bytes:
    """JSON whose fields are JSON already where they are bytes: what is large is not to be encoded first."""
    given = {name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in fields.items()}
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in given.items())


def listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def message(content: bytes) -> bytes:
    return b'{"role":"user","content":%b}' % content


COMPLETIONS, CHATS, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
WORDS = b"the fox and the hare "
BIAS = b"{" + b",".join(b'"%d":1' % token_id for token_id in range(100_000)) + b"}"
MARKS = b'{{\\"},:[]\\n'


def text_of(num_bytes: int, piece: bytes = WORDS) -> bytes:
    return b'"' + piece * (num_bytes // len(piece)) + b'"'


def with_prompt(prompt: bytes, **fields: Any) -> bytes:
    return raw(prompt=prompt, max_tokens=1, ignore_eos=True, **fields)


USER = message(b'"a"')


def with_calls(calls: bytes) -> bytes:
    """A message with tool calls."""
    return USER[:-1] + b',"tool_calls":[{"a":%b}]}' % calls


def a_million(name: str, item: bytes) -> bytes:
    return raw(**{name: listed(item, 1_000_000)})


CHOICES: dict[str, Any] = {"n": 128, "temperature": 1.0, "logprobs": 20, "max_tokens": 50}
ARGUMENTS = b'"{\\"a\\":[%b1]}"' % (b"[]," * 300_000)


def of_messages(item: bytes, count: int = 1, **fields: Any) -> bytes:
    return raw(messages=listed(item, count), max_tokens=1, **fields)


PARTS = b'{"type":"text","text":"a"}'
NAMES = ("tools", "functions", "documents", "audio", "metadata", "store")
CALLED = USER[:-1] + b',"tool_calls":[{"function":{"arguments":%b}}]}'
PROPERTIES = b",".join(b'"a%d":{"type":"string"}' % place for place in range(50))
TOOL = b'{"function":{"name":"f%d","description":%b,"parameters":{"type":"object","properties":{%b}}}}'
TOOLS = b"[" + b",".join(TOOL % (place, text_of(6000), PROPERTIES) for place in range(120)) + b"]"
USES = b'{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f",' + (
    b'"input":{"a":%b}}]},{"role":"user","content":"b"}'
)
LONG_TEXT = listed(b"100", MAX_MODEL_LEN - 1)
REFUSED_LARGE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "20 MB of text": (COMPLETIONS, lambda: with_prompt(text_of(20 * MIB))),
    "20 MB of ids": (COMPLETIONS, lambda: with_prompt(listed(b"100", 5 * MIB))),
    "20 MB in a message": (CHATS, lambda: of_messages(message(text_of(20 * MIB)))),
    "20 MB in text parts": (CHATS, lambda: of_messages(message(listed(PARTS, 700_000)))),
    "20 MB of spaces": (COMPLETIONS, lambda: b"{" + b" " * 20 * MIB + b"}"),
    "20 MB of fields": (COMPLETIONS, lambda: b"{" + b",".join([b'"a":1'] * 3_000_000) + b"}"),
    "100,000 messages": (CHATS, lambda: of_messages(USER, 100_000)),
    "4 MB of braces, quotes and commas": (CHATS, lambda: of_messages(message(text_of(4 * MIB, MARKS)))),
    "2,048 tool calls of 10 KB": (CHATS, lambda: of_messages(with_calls(listed(b"[]", 3000)), 2048)),
    "logit_bias of 100,000": (COMPLETIONS, lambda: with_prompt(b'"a"', logit_bias=BIAS)),
    "5,000,000 ids to /detokenize": (DETOKENIZE, lambda: raw(tokens=listed(b"100", 5 * MIB))),
    **{
        f"a million of {item.decode()} in {name}": (path, functools.partial(a_million, name, item))
        for path, name, item in (
            (COMPLETIONS, "prompt", b'"a"'),
            (COMPLETIONS, "prompt", b"[1]"),
            (COMPLETIONS, "stop", b'"a"'),
            (COMPLETIONS, "allowed_token_ids", b"5"),
            (COMPLETIONS, "logits_processors", b"[]"),
            (CHATS, "messages", b"{}"),
            (CHATS, "tools", b"{}"),
            (RESPONSES, "input", b"{}"),
            (RESPONSES, "include", b'"a"'),
            (RESPONSES, "metadata", b"{}"),
            (MESSAGES, "messages", b"{}"),
            (MESSAGES, "system", b"{}"),
            (DETOKENIZE, "tokens", b"5"),
            ("/abort", "request_ids", b'"a"'),
        )
    },
}
REFUSED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "1 MB, by default": (COMPLETIONS, lambda: with_prompt(text_of(MIB - 1000))),
    "10,000 long stop strings": (COMPLETIONS, lambda: with_prompt(b'"a"', stop=listed(text_of(80), 10_000))),
    "10,000 bad words": (COMPLETIONS, lambda: with_prompt(b'"a"', bad_words=listed(b'"abc"', 10_000))),
    "tool calls of 250 KB": (CHATS, lambda: of_messages(with_calls(listed(b"[]", 80_000)))),
    "template variables of 250 KB": (
        CHATS,
        lambda: of_messages(USER, chat_template_kwargs=b'{"a":%b}' % listed(b"[]", 80_000)),
    ),
    "logit_bias of 250 KB": (
        COMPLETIONS,
        lambda: with_prompt(b'"a"', logit_bias=BIAS[: BIAS.rfind(b",", 0, 250_000)] + b"}"),
    ),
    "16,000 parts of text in a response": (RESPONSES, lambda: raw(input=listed(message(listed(PARTS, 16_000)), 1))),
    "16,000 blocks of text": (MESSAGES, lambda: of_messages(message(listed(PARTS, 16_000)))),
    "16,000 blocks of a system prompt": (MESSAGES, lambda: of_messages(USER, system=listed(PARTS, 16_000))),
    "16,000 parts of text": (CHATS, lambda: of_messages(message(listed(PARTS, 16_000)))),
    "refused fields of 80 KB each": (CHATS, lambda: of_messages(USER, **dict.fromkeys(NAMES, listed(b"[]", 27_000)))),
    "20,000 tools": (
        CHATS,
        lambda: of_messages(USER, tools=listed(b'{"name":"what it does, and why, and when"}', 20_000)),
    ),
    "12,000 ids to /abort": ("/abort", lambda: raw(request_ids=listed(b'"a"', 12_000))),
}
TAKEN: dict[str, tuple[str, Callable[[], bytes | dict[str, Any]]]] = {
    "arguments of 900 KB": (CHATS, lambda: of_messages(CALLED % ARGUMENTS)),
    "tool calls with texts of 900 KB": (CHATS, lambda: of_messages(with_calls(text_of(900_000, MARKS)))),
    "as many tool calls as may be": (CHATS, lambda: of_messages(with_calls(listed(b"[]", 8000)))),
    "inputs of tools of 900 KB": (COUNT, lambda: raw(messages=listed(USES % listed(b"[]", 300_000), 1))),
    "1 MB to /tokenize": (TOKENIZE, lambda: raw(prompt=text_of(MIB - 1000))),
    "1 MB of one word to /tokenize": (TOKENIZE, lambda: raw(prompt=text_of(MIB - 1000, b"x"))),
    "token strings": (TOKENIZE, lambda: raw(prompt=text_of(20_000), return_token_strs=True)),
    "65,536 ids to /detokenize": (DETOKENIZE, lambda: raw(tokens=listed(b"100", 2**16))),
    "echo of all with 20 logprobs": (COMPLETIONS, lambda: with_prompt(LONG_TEXT, echo=True, logprobs=20)),
    "echo of all with 20 logprobs, streamed": (
        COMPLETIONS,
        lambda: with_prompt(LONG_TEXT, echo=True, logprobs=20, stream=True),
    ),
    "a response with 20 logprobs, streamed": (
        RESPONSES,
        lambda: {
            "input": "a",
            "top_logprobs": 20,
            "max_output_tokens": 2000,
            "ignore_eos": True,
            "stream": True,
        },
    ),
    "prompt_logprobs of all": (COMPLETIONS, lambda: with_prompt(LONG_TEXT, prompt_logprobs=20, return_token_ids=True)),
    "128 choices with 20 logprobs": (COMPLETIONS, lambda: completion(**CHOICES)),
    "128 choices with 20 logprobs, streamed": (COMPLETIONS, lambda: completion(**CHOICES, stream=True)),
    "128 chats with 20 logprobs": (CHATS, lambda: chat(**{**CHOICES, "logprobs": True, "top_logprobs": 20})),
}
CASES: dict[str, Case] = {
    **{name: Case(*given, (400,), LARGE) for name, given in REFUSED_LARGE.items()},
    **{name: Case(*given, (400,)) for name, given in REFUSED.items()},
    **{name: Case(*given, (200,)) for name, given in TAKEN.items()},
    "2 MB to /tokenize": Case(TOKENIZE, lambda: raw(prompt=text_of(2 * MIB)), (200,), LARGE),
    "64 times 20 MB, by default": Case(COMPLETIONS, lambda: with_prompt(text_of(20 * MIB)), (413, 503), at_once=64),
    "8,000 unknown fields": Case(
        COMPLETIONS, lambda: raw(**{f"u{place}": 0 for place in range(8000)}), (400, 503), at_once=64
    ),
    "64 times 1 MB, by default": Case(COMPLETIONS, lambda: with_prompt(text_of(MIB - 1000)), (400, 503), at_once=64),
    "as many tools as may be": Case(CHATS, lambda: of_messages(USER, tools=TOOLS), (200, 400)),
    "2,048 messages": Case(CHATS, lambda: of_messages(USER, 2048), (200, 400)),
    "2,048 long messages": Case(CHATS, lambda: of_messages(message(text_of(400)), 2048), (200, 400)),
    "128 long prompts": Case(COMPLETIONS, lambda: with_prompt(listed(text_of(8000), 128)), (200, 400, 503)),
    "128 long prompts of ids": Case(
        COMPLETIONS, lambda: with_prompt(listed(listed(b"100", 8000), 128)), (200, 400, 503), LARGE
    ),
    "4 times 1 MB to /tokenize": Case(TOKENIZE, lambda: raw(prompt=text_of(MIB - 1000)), (200,), at_once=4),
    "32 times 65,536 ids to /detokenize": Case(
        DETOKENIZE, lambda: raw(tokens=listed(b"100", 2**16)), (200, 503), at_once=32
    ),
}


async def check(case: Case, target: Target) -> None:
    """Send a case from elsewhere: the answers' statuses are its own, and no callback here comes late."""
    request = request_of("POST", case.path, case.body())
    loop = asyncio.get_running_loop()
    # A process of its own: what a client does is not on the server's loop, and not under its GIL.
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
            await loop.run_in_executor(elsewhere, int)  # it has started
            with collected(), Ticker() as ticker:
                answers = await loop.run_in_executor(elsewhere, send_all, target.port, request, case.at_once)
                await target.until_idle_slowly()
    finally:
        # A process of multiprocessing's own, which would stay a child of this one, among those that other tests count.
        resource_tracker._resource_tracker._stop()
    assert {status for status, _ in answers} <= set(case.statuses), answers
    assert max(ticker.held_s) < longest_hold_s(case.config)


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """What the test's process holds beside the server is not to be looked through by the collector meanwhile."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.asynccontextmanager
async def loaded(config: ServerConfig, model: str | None = None) -> AsyncIterator[Target]:
    device = {"max_model_len": MAX_MODEL_LEN, "num_blocks": 8192, "block_size": 16}
    limits = {"max_n": 128, "max_num_seqs": 128, "max_waiting": 256, "max_logprobs": 20, "tool_format": "hermes"}
    async with served("serve", config, model=model, engine=limits, **device) as target:
        # The first chat of a process imports what renders it.
        assert (await target.ask(CHATS, raw(messages=listed(USER, 1), max_tokens=1))).status < 500
        yield target


EACH_TIME = ("64 times 20 MB, by default", "128 choices with 20 logprobs, streamed")
"""One of what comes and one of what goes; the others are for the night."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EACH_TIME else pytest.mark.nightly) for name in CASES]
)
async def test_the_loop_stays_free(name: str) -> None:
    async with loaded(CASES[name].config) as target:
        await check(CASES[name], target)


BOMB = "{% for a in messages %}{% for b in messages %}{{ b.role[:1] }}{% endfor %}{% endfor %}"


@pytest.mark.nightly
async def test_a_template_that_takes_long_holds_up_no_other(tmp_path: Path) -> None:
    model = tmp_path / "bomb"
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(BOMB)
    async with loaded(LARGE, str(model)) as target:
        case = Case(CHATS, lambda: of_messages(USER, 1000), (200, 400), LARGE)
        await check(case, target)


# Many at once

MANY = ServerConfig(max_concurrent_requests=1000)
JAPANESE = "昔々あるところに小さな狐と賢い兎が住んでいて毎朝川のほとりで話をしました。"
ROOMY: dict[str, Any] = {"max_model_len": 8192, "num_blocks": 2048, "engine": {"max_waiting": 1000, "max_num_seqs": 64}}
NESTED = [[[["a"] * 4] * 4] * 16] * 16


def japanese(number: int) -> dict[str, Any]:
    return completion(prompt=f"{number}{JAPANESE * 27}"[:1000], max_tokens=1)


def nested(number: int) -> dict[str, Any]:
    user = {"role": "user", "content": "Hi"}
    return {"messages": [user], "max_tokens": 1, "chat_template_kwargs": {"a": NESTED}}


def refused(number: int) -> dict[str, Any]:
    return completion(top_p=7.0)


async def ask_at_once(port: int, path: str, bodies: list[dict[str, Any]]) -> list[Client]:
    """All requests lie in the server's sockets before it reads the first one."""
    clients = [await Client.connect(port) for _ in bodies]
    requests = [request_of("POST", path, json.dumps(body, ensure_ascii=False).encode()) for body in bodies]
    for client, request in zip(clients, requests, strict=True):
        assert client._socket.send(request) == len(request)
    return clients


@pytest.mark.parametrize(
    ("path", "body", "count", "status"),
    [*nightly((COMPLETIONS, japanese, 200, 200)), (CHATS, nested, 50, 200), *nightly((COMPLETIONS, refused, 400, 400))],
)
async def test_no_turn_is_long_however_many_ask(
    path: str, body: Callable[[int], dict[str, Any]], count: int, status: int
) -> None:
    async with served("serve", MANY, **ROOMY) as target:
        await target.ask(CHATS, {**nested(0), "chat_template_kwargs": {}})  # imports what renders chats
        clients = await ask_at_once(target.port, path, [body(i) for i in range(count)])
        with TurnProbe() as probe:
            answers = await asyncio.gather(*[client.answer() for client in clients])
        for client in clients:
            client.leave()
    assert {answer.status for answer in answers} == {status}
    assert max(probe.cpu_s) < LONGEST_S


@pytest.mark.nightly
async def test_no_turn_is_long_however_many_leave() -> None:
    count = 600
    async with served("serve", MANY, **ROOMY) as target:
        await target.engine.pause()
        clients = await ask_at_once(target.port, COMPLETIONS, [completion(stream=True) for _ in range(count)])
        await target.until(lambda: target.runtime.core.num_unstarted == count)
        with TurnProbe() as probe, heard_errors() as errors:
            for client in clients:
                client.leave("reset")
            await target.until(lambda: target.is_idle)
        assert not errors
        await target.engine.resume()
        await target.until_told(GONE, count)
    assert max(probe.cpu_s) < LONGEST_S
