"""``/openapi.json`` and ``/docs``: what is there is there, with the fields that bodies are decoded into."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from server.conftest import Adapter, both_adapters, serving_fake

from aioengine.server import ServerConfig
from aioengine.server.pages import make_document, make_page
from aioengine.server.schema import ChatRequest, Generation


def with_refs(document: dict[str, Any], name: str) -> Draft202012Validator:
    """Judges values by one of the document's schemas."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})


@both_adapters
async def test_the_document_has_every_path_and_the_fields_of_its_body(adapter: Adapter) -> None:
    async with serving_fake(adapter) as (*_, http):
        document = (await http.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            for method in operations:
                answer = await http.request(method, path.replace("{id}", "demo"), json={})
                assert answer.status_code != 405, (method, path)
                assert answer.status_code != 404 or "{id}" in path or path == "/tokenizer_info", (method, path)
    refs = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert refs <= set(document["components"]["schemas"])
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = [operation["operationId"] for operations in document["paths"].values() for operation in operations.values()]
    assert len(names) == len(set(names)) > 20
    chat = document["components"]["schemas"]["ChatRequest"]
    assert set(chat["properties"]) == set(ChatRequest.__struct_fields__) > set(Generation.__struct_fields__)
    assert chat["required"] == ["messages"]
    judge = with_refs(document, "ChatRequest")
    hello = [{"role": "user", "content": "Hi"}]
    assert judge.is_valid({"messages": hello, "max_tokens": 5, "stream_options": {"include_usage": True}})
    for wrong in ({}, {"messages": "Hi"}, {"messages": hello, "max_tokens": "x"}, {"messages": hello, "n": 1.5}):
        assert not judge.is_valid(wrong), wrong


async def test_the_document_is_valid() -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    for config in (ServerConfig(), ServerConfig(api_keys=("first-key",), root_path="/ai")):
        async with serving_fake("starlette", config) as (*_, http):
            document = (await http.get("/openapi.json", headers={"x-api-key": "first-key"})).json()
        validator.validate(document)
        assert document["servers"] == [{"url": config.root_path or "."}]
        assert ("security" in document["paths"]["/v1/models"]["get"]) == bool(config.api_keys)
        assert "security" not in document["paths"]["/health"]["get"]


async def test_the_page_fetches_nothing_and_keys_are_asked_for() -> None:
    async with serving_fake("starlette", ServerConfig(api_keys=("first-key",))) as (*_, http):
        assert (await http.get("/openapi.json")).status_code == 401
        refused = await http.get("/docs")
        assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
        page = await http.get("/docs", auth=("me", "first-key"))
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<code>POST /v1/chat/completions</code>" in page.text
    assert "&quot;max_completion_tokens&quot;" in page.text
    assert not re.search(r"<script|src=|https?://", page.text)


def test_a_path_is_text_in_the_page() -> None:
    document = make_document([("GET", "/<b>", None)], ServerConfig())
    assert b"<b>" not in make_page(document).body
