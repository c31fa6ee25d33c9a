"""`aioengine chat`: a conversation in the terminal, or through pipes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import click

from aioengine import Engine, Stream
from aioengine.cli.command import given, options_of, run
from aioengine.cli.conversation import COMMAND_NAMES, Conversation, Todo, TurnEnd
from aioengine.cli.generate import refuse_what_no_text_shows
from aioengine.cli.terminal import Interrupts, Lines, PipedLines, Screen, TypedLines
from aioengine.config import EngineConfig
from aioengine.errors import AioEngineError, EngineClosed, EngineDead
from aioengine.outputs import RequestOutput
from aioengine.own_process import asked_by_signals
from aioengine.sampling_params import SamplingParams

GREETING = "/help lists the commands, Ctrl-D leaves"


@click.command()
@click.option("--system", help="a system message to begin with")
@click.option(
    "--history",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="file that keeps the lines you type, for the next time; absent: none",
)
@options_of(SamplingParams, absent="the model's, or {}")
@options_of(EngineConfig)
def chat(system: str | None, history: Path | None, **flags: Any) -> None:
    """Talk with the model; the answers stream to stdout.

    On a terminal, lines are edited and remembered. From a pipe, each line of stdin is a message or a command, and all
    but the answers goes to stderr. /help lists the commands.
    """
    sampling = given(SamplingParams, flags)
    if SamplingParams(**sampling).n > 1:  # bad flags are refused before the model is loaded
        raise click.UsageError("a chat has one answer to a message: leave --n out")
    refuse_what_no_text_shows(sampling, "leave it out of a chat")
    if history is not None and not history.parent.is_dir():
        raise click.UsageError(f"--history {history}: there is no folder {history.parent}")
    run(_chat(Conversation(system=system or None, sampling=sampling), history, given(EngineConfig, flags)))


async def _chat(conversation: Conversation, history: Path | None, config: dict[str, Any]) -> None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not know every character
    screen = Screen(is_terminal=is_terminal)
    async with Engine(**config) as engine:
        screen.note(engine.describe())
        lines: Lines
        if is_terminal:
            screen.note(GREETING)
            lines = TypedLines(COMMAND_NAMES, history, lambda: screen.note("Ctrl-D or /exit leaves"))
        else:
            lines = PipedLines()
        interrupts = Interrupts()
        with asked_by_signals(interrupts.receive), interrupts.everything:
            await talk(engine, conversation, lines, screen, interrupts)
    if interrupts.signal is signal.SIGINT:
        raise KeyboardInterrupt
    if interrupts.signal is not None:
        sys.exit(128 + interrupts.signal)


async def talk(
    engine: Engine, conversation: Conversation, lines: Lines, screen: Screen, interrupts: Interrupts
) -> None:
    """Do what a conversation says is to be done, until the user leaves.

    Raises:
        EngineDead, EngineClosed: there will be no more answers.
    """
    while (line := await lines.read()) is not None:
        effect = await anyio.to_thread.run_sync(conversation.take, line)
        if effect is Todo.LEAVE:
            return
        if effect is Todo.ASK:
            effect = await _answer(engine, conversation, screen, interrupts)
        if effect:
            screen.note(effect)


async def _answer(engine: Engine, conversation: Conversation, screen: Screen, interrupts: Interrupts) -> str:
    """Stream the answer; however it ends, the conversation is told. Returns what to tell the user of that."""
    stream: Stream | None = None
    text, told = "", ""
    try:
        with screen.writing(), interrupts.stoppable() as scope:
            async with engine.stream(conversation.prompt(), **conversation.sampling) as stream:
                async for delta in stream:
                    text += delta.text
                    screen.write(delta.text)
    except (EngineDead, EngineClosed):
        raise
    except AioEngineError as error:
        told = conversation.failed(error)
    else:
        is_stopped = scope.cancelled_caught or stream is None
        end = TurnEnd.STOPPED if is_stopped else _end_of(stream.result, engine.info.max_model_len)
        if note := conversation.answered(text, end):
            told = f"[{note}]"
    if not text.endswith("\n"):  # of an empty answer, too: programs that read answers from a pipe count lines
        screen.write("\n")
    return told


def _end_of(result: RequestOutput, max_model_len: int) -> TurnEnd:
    answer = result.outputs[0]
    if answer.finish_reason != "length":
        return TurnEnd.WHOLE
    num_tokens = len(result.prompt_token_ids) + len(answer.token_ids)
    return TurnEnd.FULL if num_tokens >= max_model_len else TurnEnd.MAX_TOKENS
