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
from aioengine.cli.conversation import COMMAND_NAMES, Ask, Conversation, Effect, Leave, Save, TurnEnd
from aioengine.cli.generate import refuse_what_no_text_shows
from aioengine.cli.terminal import Interrupts, Lines, PipedLines, Screen, TypedLines
from aioengine.config import EngineConfig
from aioengine.errors import AioEngineError, EngineClosed, EngineDead
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
        with Interrupts() as interrupts:
            await ChatShell(engine, conversation, lines, screen, interrupts).talk()
    if interrupts.signal is signal.SIGINT:
        raise KeyboardInterrupt
    if interrupts.signal is not None:
        sys.exit(128 + interrupts.signal)


class ChatShell:
    """Does what a conversation says is to be done."""

    def __init__(
        self, engine: Engine, conversation: Conversation, lines: Lines, screen: Screen, interrupts: Interrupts
    ) -> None:
        self._engine = engine
        self._conversation = conversation
        self._lines = lines
        self._screen = screen
        self._interrupts = interrupts

    async def talk(self) -> None:
        """Until the user leaves.

        Raises:
            EngineDead, EngineClosed: there will be no more answers.
        """
        while (line := await self._lines.read()) is not None:
            effect = self._conversation.take(line)
            if isinstance(effect, Leave):
                return
            if effect is not None:
                await self._do(effect)

    async def _do(self, effect: Effect) -> None:
        if isinstance(effect, Ask):
            await self._answer()
        elif isinstance(effect, Save):
            self._screen.note(await anyio.to_thread.run_sync(_save, effect))
        elif not isinstance(effect, Leave):
            self._screen.note(effect.text)

    async def _answer(self) -> None:
        """Stream the answer; however it ends, the conversation and the user are told."""
        stream: Stream | None = None
        texts: list[str] = []
        try:
            with self._screen.writing(), self._interrupts.stoppable() as scope:
                async with self._engine.stream(self._conversation.prompt(), **self._conversation.sampling) as stream:
                    async for delta in stream:
                        texts.append(delta.text)
                        self._screen.write(delta.text)
        except (EngineDead, EngineClosed):
            raise
        except AioEngineError as error:
            self._end_line(texts)
            self._screen.note(self._conversation.failed(error))
            return
        self._end_line(texts)
        end = TurnEnd.STOPPED if scope.cancelled_caught or stream is None else self._end_of(stream)
        note = self._conversation.answered("".join(texts), end)
        if note:
            self._screen.note(f"[{note}]")

    def _end_line(self, texts: list[str]) -> None:
        """End the line, of an empty answer, too: programs that read answers from a pipe count lines."""
        if not "".join(texts).endswith("\n"):
            self._screen.write("\n")

    def _end_of(self, stream: Stream) -> TurnEnd:
        result = stream.result
        answer = result.outputs[0]
        if answer.finish_reason != "length":
            return TurnEnd.WHOLE
        num_tokens = len(result.prompt_token_ids) + len(answer.token_ids)
        return TurnEnd.FULL if num_tokens >= self._engine.info.max_model_len else TurnEnd.MAX_TOKENS


def _save(effect: Save) -> str:
    """Write the file; returns what to tell."""
    path = Path(effect.path).expanduser()
    existed = path.exists()
    try:
        with path.open("w" if effect.may_overwrite else "x", encoding="utf-8") as file:
            file.write(effect.text)
    except FileExistsError:
        return f"{path} exists and is left as it is; /save! {effect.path} overwrites it"
    except OSError as error:
        return f"not saved: {error}"
    count = f"{effect.num_messages} message{'' if effect.num_messages == 1 else 's'}"
    return f"{count} saved in {path}{', which was overwritten' if existed else ''}"
