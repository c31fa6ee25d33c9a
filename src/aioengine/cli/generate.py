"""`aioengine generate`: complete one prompt and show it as it comes."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from typing import Any

import click
import msgspec

from aioengine import Engine
from aioengine.cli.command import given, options_of, run
from aioengine.config import EngineConfig
from aioengine.outputs import CompletionOutput, RequestOutput
from aioengine.sampling_params import SamplingParams


@click.command()
@click.argument("prompt")
@click.option("--chat", "is_chat", is_flag=True, help="take PROMPT as a user's message, by the model's chat template")
@click.option("--system", help="a system message before it; implies --chat")
@click.option("--json", "is_json", is_flag=True, help="print the whole output as JSON when it is there, not the text")
@click.option("--stats", "shows_stats", is_flag=True, help="say afterwards, on stderr, how it ended and how fast")
@options_of(SamplingParams, absent="the model's, or {}")
@options_of(EngineConfig)
def generate(prompt: str, is_chat: bool, system: str | None, is_json: bool, shows_stats: bool, **flags: Any) -> None:
    """Complete PROMPT ("-": read it from stdin, but for a newline at its end), streaming the text to stdout.

    With --n, the choices are shown when all have ended, one after the other, each under a line with its number.
    """
    prompt = _decode(sys.stdin.buffer.read()).removesuffix("\n") if prompt == "-" else _decode(os.fsencode(prompt))
    sampling = given(SamplingParams, flags)
    SamplingParams(**sampling)  # bad flags are refused before the model is loaded
    messages = as_messages(prompt, system) if is_chat or system is not None else None
    if not is_json:
        refuse_what_no_text_shows(sampling, "give --json with it")
    run(_generate(messages or prompt, is_json, shows_stats, given(EngineConfig, flags), sampling))


def refuse_what_no_text_shows(sampling: dict[str, Any], advice: str) -> None:
    """Raise a usage error for flags whose effect is not in the text."""
    for name in ("logprobs", "logprob_token_ids", "prompt_logprobs"):
        if name in sampling:
            raise click.UsageError(f"--{name.replace('_', '-')} shows nothing in a text: {advice}")
    if not sampling.get("detokenize", True):
        raise click.UsageError(f"--no-detokenize leaves no text to show: {advice}")


def as_messages(prompt: str, system: str | None) -> list[dict[str, Any]]:
    """The chat in which ``prompt`` is the user's message."""
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": prompt}]


async def _generate(
    prompt: str | list[dict[str, Any]],
    is_json: bool,
    shows_stats: bool,
    config: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not know every character
    async with Engine(**config) as engine:
        click.echo(engine.describe(), err=True)
        started = time.perf_counter()
        if is_json:
            output = await engine.generate(prompt, **sampling)
            _write(msgspec.json.encode(output).decode() + "\n")
        else:
            output = await show(engine, prompt, sampling)
        if shows_stats:
            click.echo(_summary(output, time.perf_counter() - started), err=True)


async def show(engine: Engine, prompt: str | list[dict[str, Any]], sampling: dict[str, Any]) -> RequestOutput:
    """Complete the prompt on stdout; a text is shown with what follows it, of a chat the answer alone."""
    echo = prompt if isinstance(prompt, str) else ""
    async with engine.stream(prompt, **sampling) as stream:
        if sampling.get("n", 1) > 1:  # they come interleaved, and text on a terminal cannot
            choices = (await stream.finish()).outputs
            for number, choice in enumerate(choices, 1):
                _write(f"--- choice {number} of {len(choices)}\n{echo}{choice.text}\n")
        else:
            _write(echo)
            async for delta in stream:
                _write(delta.text)
            _write("\n")
    return stream.result


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
    reasons = Counter(_ending(choice) for choice in output.outputs)
    ended = ", ".join(f"{reason} × {count}" if len(output.outputs) > 1 else reason for reason, count in reasons.items())
    num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
    return (
        f"prompt tokens: {len(output.prompt_token_ids)}, output tokens: {num_tokens}, ended by {ended}; "
        f"{seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s"
    )


def _ending(choice: CompletionOutput) -> str:
    reason = str(choice.finish_reason)
    return reason if choice.stop_reason is None else f"{reason} ({choice.stop_reason!r})"
