"""`aioengine generate`: complete one prompt and show it as it comes."""

from __future__ import annotations

import os
import sys
import time
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
@options_of(SamplingParams, absent="the model's, or {}")
@options_of(EngineConfig)
def generate(prompt: str, is_chat: bool, system: str | None, shows_stats: bool, **flags: Any) -> None:
    """Complete PROMPT ("-": read it from stdin), streaming the text to stdout."""
    prompt = _decode(sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt))
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
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not know every character
    async with Engine(**config) as engine:
        click.echo(engine.describe(), err=True)
        started = time.perf_counter()
        async with engine.stream(prompt, **sampling) as stream:
            if echo is not None:
                _write(echo)
            async for delta in stream:
                _write(delta.text)
            _write("\n")
        if shows_stats:
            click.echo(_summary(stream.result, time.perf_counter() - started), err=True)


def _decode(raw: bytes) -> str:
    """UTF-8, whatever the locale says."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt is not UTF-8: {error.reason} at byte {error.start}") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _summary(output: RequestOutput, seconds: float) -> str:
    completion = output.outputs[0]
    reason = str(completion.finish_reason)
    if completion.stop_reason is not None:
        reason += f" ({completion.stop_reason!r})"
    num_tokens = len(completion.token_ids)
    return (
        f"prompt tokens: {len(output.prompt_token_ids)}, output tokens: {num_tokens}, ended by {reason}; "
        f"{seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s"
    )
