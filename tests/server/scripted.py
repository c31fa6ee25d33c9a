"""A served model that says what a test has written for it, so that what clients hear of it can be written down, too.

Its template shows all that it is told, and its prompts are kept: what a request's items have become is read there.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from server.conftest import NO_TLS, Adapter, openai_client, plain_client, serving

from aioengine import Engine
from aioengine.models.folder import DEMO_MODEL
from aioengine.scheduler.plan import RowSampling
from aioengine.server import ServerConfig
from aioengine.text.tokenizer import Tokenizer
from doubles.fake_executor import FakeExecutor

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{%- if message.tool_call_id %}{{ ' (of ' + message.tool_call_id + ')' }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if enable_thinking is defined %}{{ 'enable_thinking: ' + (enable_thinking | string) + '\\n' }}{% endif %}
{%- if reasoning_effort is defined %}{{ 'reasoning_effort: ' + reasoning_effort + '\\n' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TOKENIZER = Tokenizer.load(DEMO_MODEL)
IM_END = 2
ANSWER_BEGINS = "<|im_start|>assistant\n"

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
THINKING = "<think>\nI look it up.\n</think>\n\n"
LOOKS_UP = f"{THINKING}Let me see.\n{CALL % 'Paris'}\n{CALL % 'Rome'}"
"""Reasoning, a text and two calls."""
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
"""As ``/v1/responses`` has tools."""
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

SOME_JSON: tuple[Any, ...] = (
    None, True, 0, -1, 2, 1.0, 0.5, "", "a", "user", [], [1], [[]], ["a"], {}, {"a": 1}, {"type": "a"}, {"type": []},
    [{}], [{"type": "text"}], [{"type": "text", "text": "a"}], {"format": {"type": 5}}, {"effort": "max"}, "\u2028",
)  # fmt: skip
"""Values that a field may or may not take."""


def named(**fields: Any) -> ServerConfig:
    return ServerConfig(served_model_name=("demo",), **fields)


class Script:
    """What the model says: one answer after the other, each to another prompt.

    Attributes:
        prompts: that were answered, as texts.
    """

    def __init__(self, *answers: str) -> None:
        self._mark = TOKENIZER.encode(ANSWER_BEGINS, add_special_tokens=False)
        self._answers = [TOKENIZER.encode(answer, add_special_tokens=False) for answer in answers]
        self._of_prompts: dict[tuple[int, ...], list[int]] = {}
        self.prompts: list[str] = []

    def sample(self, token_ids: list[int], sampling: RowSampling) -> int:
        size = len(self._mark)
        end = next(at for at in range(len(token_ids), 0, -1) if token_ids[at - size : at] == self._mark)
        prompt = tuple(token_ids[:end])
        if prompt not in self._of_prompts:
            self._of_prompts[prompt] = self._answers.pop(0)
            self.prompts.append(TOKENIZER.decode(list(prompt), skip_special_tokens=False))
        answer, place = self._of_prompts[prompt], len(token_ids) - end
        return answer[place] if place < len(answer) else IM_END


class Scripted(NamedTuple):
    """A scripted model that is served, and clients of it."""

    script: Script
    engine: Engine
    executor: FakeExecutor
    url: str
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def scripted(
    folder: Path,
    *answers: str,
    adapter: Adapter = "starlette",
    config: ServerConfig | None = None,
    is_manual: bool = False,
    **options: Any,
) -> AsyncIterator[Scripted]:
    """Serve a model that says this, and writes calls and reasoning in markers.

    Args:
        folder: an empty one, for the model's files.
        options: of the engine.
    """
    model = folder / "model"
    await asyncio.to_thread(_write_model, model)
    script = Script(*answers)
    executor = FakeExecutor(
        vocab_size=2048, num_blocks=256, max_model_len=2048, sampler=script.sample, is_manual=is_manual
    )
    formats = {"tool_format": "hermes", "reasoning_format": "think"}
    config = config or ServerConfig(served_model_name=("demo",))
    async with (
        Engine(str(model), seed=1, executor=executor, **{**formats, **options}) as engine,
        serving(engine, adapter, config) as served,
        openai_client(served.url) as client,
        anthropic_client(served.url) as messages,
        plain_client(served.url) as http,
    ):
        yield Scripted(script, engine, executor, served.url, client, messages, http)


def _write_model(model: Path) -> None:
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(TEMPLATE)


@contextlib.asynccontextmanager
async def anthropic_client(url: str, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's own client of what is served at ``url``, which tries nothing twice unless told to."""
    given = {"api_key": "not-needed", "max_retries": 0, "timeout": 20.0, **options}
    inner = anthropic.DefaultAsyncHttpxClient(verify=NO_TLS)
    async with anthropic.AsyncAnthropic(base_url=url, http_client=inner, **given) as client:
        yield client


def sse_events(body: bytes) -> list[tuple[str, str]]:
    """A stream's events, each with its name and its data; comments are left out."""
    text = body.decode()
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        assert name.startswith("event: "), block
        assert data.startswith("data: "), block
        events.append((name.removeprefix("event: "), data.removeprefix("data: ")))
    return events
