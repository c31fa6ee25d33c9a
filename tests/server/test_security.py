"""API keys cover every path but ``/health``, on both adapters, before anything else is looked at."""

from __future__ import annotations

import base64
import hmac
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from server.conftest import (
    ADAPTERS,
    all_ended,
    app_of,
    both_adapters,
    fake_engine,
    plain_client,
    serving_app,
    serving_fake,
)

from aioengine.server import ServerConfig
from aioengine.server.errors import ApiError
from aioengine.server.exchange import read_headers
from aioengine.server.security import ApiKeys, host_name

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = ("first-secret-key", "schlüssel-12 mit:allem")

PATHS: list[tuple[str, str, Any]] = [
    ("GET", "/", None),
    ("GET", "/metrics", None),
    ("GET", "/version", None),
    ("GET", "/load", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/demo", None),
    ("HEAD", "/version", None),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("POST", "/abort", {"request_id": "a"}),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("POST", "/v1/responses", {"input": "a", "max_output_tokens": 1}),
]
OTHERS = [
    ("GET", "/nothing", None), ("POST", "/health//", {}), ("GET", "/healthy", None), ("GET", "//health", None),
    ("GET", "/HEALTH", None), ("DELETE", "/v1/models", None), ("OPTIONS", "/v1/completions", None),
    ("POST", "/v1/completions", {"zzz": 1}), ("GET", "/v1/completions", None), ("GET", "/health/../metrics", None),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ADAPTERS)
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    config = ServerConfig(api_keys=KEYS)
    async with (
        fake_engine() as (engine, _),
        serving_app(app_of(engine, request.param, config, prefix="/ai"), prefix="/ai") as url,
    ):
        yield url


@pytest_asyncio.fixture(loop_scope="module")
async def locked(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with all_ended(), plain_client(url) as client:
        yield client


def with_header(value: bytes) -> dict[bytes, bytes]:
    return {b"authorization": value}


def bearer(key: str) -> dict[bytes, bytes]:
    return with_header(b"Bearer " + key.encode())


def basic(key: str, user: str = "me") -> dict[bytes, bytes]:
    return with_header(b"Basic " + base64.b64encode(f"{user}:{key}".encode()))


@pytest.mark.parametrize(("method", "path", "body"), PATHS, ids=lambda value: value if isinstance(value, str) else "")
async def test_every_path_opens_with_a_key_and_not_without(
    locked: httpx.AsyncClient, method: str, path: str, body: Any
) -> None:
    async def status(headers: dict[bytes, bytes]) -> int:
        answer = await locked.request(method, path, json=body, headers=headers)
        if answer.status_code == 401:
            asked = 'Basic realm="aioengine", charset="UTF-8"' if path == "/" else "Bearer"  # of a person, or a program
            assert answer.headers["www-authenticate"] == asked
            assert answer.headers["x-request-id"]
            assert method == "HEAD" or answer.json()["error"]["code"] == "invalid_api_key"
        return answer.status_code

    for key in KEYS:
        assert await status(bearer(key)) == 200
        assert await status(basic(key)) == 200
        assert await status(basic(key, user="")) == 200
    assert await status({}) == 401
    assert await status(bearer("wrong-secret-key")) == 401


async def test_a_key_is_asked_for_before_anything_is_said_of_a_path(locked: httpx.AsyncClient) -> None:
    for method, path, body in OTHERS:
        answer = await locked.request(method, path, json=body)
        assert answer.status_code == 401, path
        answer = await locked.request(method, path, json=body, headers=bearer(KEYS[0]))
        assert answer.status_code in (200, 400, 404, 405), path


async def test_health_is_open(locked: httpx.AsyncClient) -> None:
    for headers in ({}, bearer("wrong-secret-key")):
        for path in ("/health", "/health/", "/ping"):
            assert (await locked.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        b"", b"Bearer", b"first-secret-key", b"Bearer first-secret-ke", b"Bearer first-secret-keyy",
        b"Bearer FIRST-SECRET-KEY", b"Token first-secret-key", b"Basic", b"Basic !!!", b"Basic Zmlyc3Q=",
        b"Basic " + base64.b64encode(b"first-secret-key"), b"Basic " + base64.b64encode(b"first-secret-key:"),
        b"Bearer " + b"x" * 5000, b"Bearer \xff\xfe", b"Bearer first-secret-key, Bearer first-secret-key",
        b"Bearer " + "schlüssel-12 mit:allem".encode("latin-1"), b"Basic Og==", b"Bearer first-secret-key x",
    ],
    ids=lambda header: repr(header[:30]),
)  # fmt: skip
async def test_what_is_no_key_does_not_open(locked: httpx.AsyncClient, header: bytes) -> None:
    answer = await locked.get("/version", headers=with_header(header))
    assert answer.status_code == 401


async def test_a_scheme_has_no_case_and_a_key_in_the_query_is_none(locked: httpx.AsyncClient) -> None:
    for scheme in (b"bearer", b"BEARER", b"Bearer  "):
        answer = await locked.get("/version", headers=with_header(scheme + b" first-secret-key"))
        assert answer.status_code == 200
    assert (await locked.get("/version", params={"api_key": KEYS[0]})).status_code == 401


async def test_all_keys_are_compared_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    keys = ApiKeys(["first-secret-key", "second-key", "third-key-that-is-long"])
    monkeypatch.setattr("aioengine.server.security.hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    keys.check({"authorization": "Bearer first-secret-key"})
    keys.check({"x-api-key": "second-key"})
    assert compared == [(32, 32)] * 12, "in both headers, whichever has it"
    with pytest.raises(ApiError):
        keys.check({"authorization": "Bearer x"})
    assert compared == [(32, 32)] * 18


@both_adapters
async def test_a_name_that_is_not_ours_is_refused_where_ours_are_known(adapter: Any) -> None:
    config = ServerConfig(allowed_hosts=("localhost", "127.0.0.1", "::1"))
    async with serving_fake(adapter, config) as (*_, client):
        for ours in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"):
            assert (await client.get("/v1/models", headers={"host": ours})).status_code == 200
        for other in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil", "[::2]", "localhost.."):
            refused = await client.post("/v1/completions", json={"prompt": "a"}, headers={"host": other})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
            assert (await client.get("/health", headers={"host": other})).status_code == 200
        refused = await client.get("/v1/models", headers={"host": "[::1].evil.example"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "malformed_request")


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"), ("LocalHost.:8000", "localhost"), ("127.0.0.1:", "127.0.0.1"),
        ("[::1]", "::1"), ("[0:0:0:0:0:0:0:1]:80", "::1"), (" a-b_c.example ", "a-b_c.example"),
        ("[::1].evil.example", None), ("[::1]evil", None), ("[::1", None), ("::1", None), ("[127.0.0.1]", None),
        ("[::1%25lo]", None), ("localhost@evil.example", None), ("evil@localhost", None), ("localhost:80:80", None),
        ("localhost:evil", None), ("localhost:8\u00b2", None), ("localhost:123456", None), ("localhost, evil", None),
        ("localhost/evil", None), ("http://localhost", None), ("localhost evil", None), ("", None), (":80", None),
    ],
)  # fmt: skip
async def test_a_host_header_is_read_whole_or_not_at_all(header: str, name: str | None) -> None:
    assert host_name(header) == name


async def test_of_a_header_that_comes_twice_neither_value_counts_alone() -> None:
    headers = read_headers([(b"X-Api-Key", b"first-secret-key"), (b"a", b"1"), (b"x-api-key", b"first-secret-key")])
    assert headers == {"x-api-key": "first-secret-key, first-secret-key", "a": "1"}
    with pytest.raises(ApiError):
        ApiKeys(KEYS).check(headers)
