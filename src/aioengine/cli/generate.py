"""`aioengine generate`: complete one prompt and show it as it comes."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec

from aioengine import Engine
from aioengine.cli.command import add_flags, choose_model, read_flags, run
from aioengine.config import EngineConfig
from aioengine.errors import ModelLoadError
from aioengine.models.folder import DEMO_MODEL, ModelFolder
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine.structured.constraints import Choice, Constraint, Json, Regex, read_schema


@click.command()
@click.argument("arguments", nargs=-1, metavar="[MODEL] PROMPT")
@click.option("--chat", "is_chat", is_flag=True, help="take PROMPT as a user's message, by the model's chat template")
@click.option("--system", help="a system message before it; implies --chat")
@click.option(
    "--json-schema",
    metavar="SCHEMA",
    help='the text is JSON that this schema admits: a file, "-" for stdin, or the schema itself, {...}',
)
@click.option("--regex", metavar="PATTERN", help="the text is one that this regular expression matches as a whole")
@click.option("--choice", "choices", multiple=True, metavar="TEXT", help="the text is one of these (repeatable)")
@click.option("--json", "is_json", is_flag=True, help="print the whole output as JSON when it is there, not the text")
@click.option("--stats", "shows_stats", is_flag=True, help="say afterwards, on stderr, how it ended and how fast")
@add_flags(SamplingParams, absent="the model's, or {}")
@add_flags(EngineConfig)
def generate(
    arguments: tuple[str, ...],
    is_chat: bool,
    system: str | None,
    json_schema: str | None,
    regex: str | None,
    choices: tuple[str, ...],
    is_json: bool,
    shows_stats: bool,
    **flags: Any,
) -> None:
    """Complete PROMPT ("-": read it from stdin, but for a newline at its end) by MODEL (absent: the bundled one),
    streaming the text to stdout.

    A text is shown with what follows it; of a chat, and where the text has a shape (--json-schema, --regex, --choice),
    what follows is shown alone. With --n, the choices are shown when all have ended, one after the other, each under a
    line with its number.
    """
    if len(arguments) not in (1, 2):
        raise click.UsageError("give the PROMPT as one argument, in quotes; a MODEL before it is another one")
    *models, prompt = arguments
    flags["model"] = choose_model(models[0] if models else None, flags["model"])
    if prompt == json_schema == "-":
        raise click.UsageError("stdin holds one thing: give either the prompt or the schema another way")
    prompt = _decode(sys.stdin.buffer.read()).removesuffix("\n") if prompt == "-" else _decode(os.fsencode(prompt))
    sampling = read_flags(SamplingParams, flags)
    if (shape := read_constraint(json_schema, regex, choices)) is not None:
        sampling["structured"] = shape
        # It is compiled for the bundled model's tokens first: one that cannot be enforced is refused before any load.
        from aioengine.structured.guidance import Vocabulary

        tokenizer = (DEMO_MODEL / "tokenizer.json").read_text("utf-8")
        Vocabulary(tokenizer, 1, ModelFolder.read(DEMO_MODEL).eos_token_ids).compile(shape)
    SamplingParams(**sampling)  # bad flags are refused before the model is loaded
    messages = make_messages(prompt, system) if is_chat or system is not None else None
    if not is_json:
        refuse_what_no_text_shows(sampling, "give --json with it")
    try:
        run(_generate(messages or prompt, is_json, shows_stats, read_flags(EngineConfig, flags), sampling))
    except ModelLoadError as error:
        is_word = bool(models) and not Path(models[0]).exists()
        raise error.with_hint("is it a word of the PROMPT? That stands in quotes" if is_word else "") from None


def read_constraint(json_schema: str | None, regex: str | None, choices: tuple[str, ...]) -> Constraint | None:
    """Return the constraint that the flags put on the text.

    Raises:
        click.UsageError: there are several, or no schema is where one should be.
        InvalidRequest: it is none that can be enforced.
    """
    asked = {"--json-schema": json_schema, "--regex": regex, "--choice": choices or None}
    names = [name for name, value in asked.items() if value is not None]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} are several shapes for one text: give one")
    if json_schema is not None:
        if not json_schema.lstrip().startswith("{"):
            try:
                raw = sys.stdin.buffer.read() if json_schema == "-" else Path(json_schema).read_bytes()
            except OSError as error:
                raise click.UsageError(f"--json-schema {json_schema}: {error.strerror or error}") from None
            json_schema = _decode(raw, "the schema")
        return Json(read_schema(json_schema))
    if regex is not None:
        return Regex(regex)
    return Choice(choices) if choices else None


def refuse_what_no_text_shows(sampling: dict[str, Any], advice: str) -> None:
    """Raise a usage error for flags whose effect is not in the text."""
    for name in ("logprobs", "logprobs_mode", "logprob_token_ids", "prompt_logprobs"):
        if name in sampling:
            raise click.UsageError(f"--{name.replace('_', '-')} shows nothing in a text: {advice}")
    if not sampling.get("detokenize", True):
        raise click.UsageError(f"--no-detokenize leaves no text to show: {advice}")


def make_messages(prompt: str, system: str | None) -> list[dict[str, Any]]:
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
            _write_text(msgspec.json.encode(output).decode() + "\n")
        else:
            output = await show_output(engine, prompt, sampling)
        if "structured" in sampling and any(choice.finish_reason == "length" for choice in output.outputs):
            raise click.ClickException("the answer was cut, and has not the shape: give a larger --max-tokens")
        is_empty = all(choice.finish_reason == "stop" and not choice.text for choice in output.outputs)
        if is_empty and isinstance(prompt, str) and not is_json:
            click.echo("the model ended at once: it goes on with a text, and --chat asks it a question", err=True)
        if shows_stats:
            _show_stats(output, time.perf_counter() - started)


async def show_output(engine: Engine, prompt: str | list[dict[str, Any]], sampling: dict[str, Any]) -> RequestOutput:
    """Complete the prompt on stdout; a text is shown with what follows it, of a chat or a shape the answer alone."""
    echo = prompt if isinstance(prompt, str) and "structured" not in sampling else ""
    async with engine.stream(prompt, **sampling) as stream:
        if sampling.get("n", 1) > 1:  # they come interleaved, and text on a terminal cannot
            choices = (await stream.finish()).outputs
            for number, choice in enumerate(choices, 1):
                _write_text(f"--- choice {number} of {len(choices)}\n{echo}{choice.text}\n")
        else:
            _write_text(echo)
            async for delta in stream:
                _write_text(delta.text)
            _write_text("\n")
    return stream.result


def _decode(raw: bytes, what: str = "the prompt") -> str:
    """Decode UTF-8, whatever the locale is."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show_stats(output: RequestOutput, seconds: float) -> None:
    reasons = Counter(
        f"{choice.finish_reason}" + (f" ({choice.stop_reason!r})" if choice.stop_reason is not None else "")
        for choice in output.outputs
    )
    ended = ", ".join(f"{reason} × {count}" if len(output.outputs) > 1 else reason for reason, count in reasons.items())
    num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
    rate = f"{seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s"
    counts = f"prompt tokens: {len(output.prompt_token_ids)}, output tokens: {num_tokens}"
    click.echo(f"{counts}, ended by {ended}; {rate}", err=True)
