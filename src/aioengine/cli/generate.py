"""`aioengine generate`: complete one prompt and show it as it comes."""

from __future__ import annotations

import sys
from typing import Any

import click

from aioengine.cli.loop import run
from aioengine.cli.options import given, options_of
from aioengine.config import EngineConfig
from aioengine.engine import ChatMessage, Engine
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams


@click.command()
@click.argument("prompt")
@click.option("--chat", "is_chat", is_flag=True, help="take PROMPT as a user's message, by the model's chat template")
@click.option("--system", help="a system message before it; implies --chat")
@click.option("--stats", "shows_stats", is_flag=True, help="say afterwards, on stderr, how it ended and how fast")
@options_of(SamplingParams)
@options_of(EngineConfig)
def generate(prompt: str, is_chat: bool, system: str | None, shows_stats: bool, **flags: Any) -> None:
    """Complete PROMPT ("-": read it from stdin), streaming the text to stdout."""
    if prompt == "-":
        prompt = sys.stdin.read()
    messages: list[ChatMessage] | None = None
    if is_chat or system is not None:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
    echo = None if messages else prompt
    run(_generate(messages or prompt, echo, shows_stats, given(EngineConfig, flags), given(SamplingParams, flags)))


async def _generate(
    prompt: str | list[ChatMessage],
    echo: str | None,
    shows_stats: bool,
    config: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    SamplingParams(**sampling)  # bad flags are refused before the model is loaded
    async with Engine(**config) as engine:
        click.echo(engine.describe(), err=True)
        async with engine.stream(prompt, **sampling) as stream:
            if echo is not None:
                _write(echo)
            async for delta in stream:
                _write(delta.text)
            _write("\n")
        if shows_stats:
            click.echo(_summary(stream.result), err=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _summary(output: RequestOutput) -> str:
    completion = output.outputs[0]
    reason = f"{completion.finish_reason}" + (f" ({completion.stop_reason})" if completion.stop_reason else "")
    return f"{len(output.prompt_token_ids)} prompt tokens, {len(completion.token_ids)} output tokens, ended by {reason}"
