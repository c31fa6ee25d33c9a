"""`aioengine chat`: a conversation in the terminal, or through pipes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread
import click

from aioengine import Engine, Stream
from aioengine.cli.command import add_flags, add_model_argument, read_flags, run
from aioengine.cli.conversation import COMMAND_NAMES, Conversation, Todo, TurnEnd
from aioengine.cli.generate import refuse_what_no_text_shows
from aioengine.cli.terminal import Interrupts, Lines, PipedLines, Screen, TypedLines
from aioengine.cli.tool_file import ToolFile
from aioengine.config import EngineConfig
from aioengine.errors import AioEngineError, EngineClosed, EngineDead
from aioengine.processes.own_process import asked_by_signals
from aioengine.sampling_params import SamplingParams
from aioengine.tool_calls.calls import ToolCall

MAX_ROUNDS = 16
"""Answers to one question that ask for calls; then it is not asked again."""
REFUSED = "error: the user has refused this call"
STOPPED = "error: the user has stopped this call"
GREETING = "/help lists the commands, Ctrl-D leaves"


@click.command()
@click.option("--system", help="a system message to begin with")
@click.option(
    "--tools",
    "tool_path",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="a Python file: the model may call its functions, but those whose names begin with an underscore",
)
@click.option("--yes", "is_trusted", is_flag=True, help="make the calls without asking")
@add_flags(SamplingParams, absent="the model's, or {}")
@add_flags(EngineConfig)
@add_model_argument
def chat(system: str | None, tool_path: Path | None, is_trusted: bool, **flags: Any) -> None:
    """Talk with MODEL (absent: the bundled one); the answers stream to stdout.

    On a terminal, lines are edited and remembered, and reasoning is shown dimmed. From a pipe, each line of stdin is a
    message or a command, and all but the answers goes to stderr. /help lists the commands. With --tools each call that
    the model asks for is shown, and made if the next line is y.
    """
    sampling = read_flags(SamplingParams, flags)
    if SamplingParams(**sampling).n > 1:  # bad flags are refused before the model is loaded
        raise click.UsageError("a chat has one answer to a message: leave --n out")
    refuse_what_no_text_shows(sampling, "leave it out of a chat")
    if is_trusted and tool_path is None:
        raise click.UsageError("--yes is for --tools")
    tools = ToolFile.load(tool_path) if tool_path is not None else None
    conversation = Conversation(system=system or None, sampling=sampling)
    run(_chat(conversation, read_flags(EngineConfig, flags), tools, is_trusted))


async def _chat(conversation: Conversation, config: dict[str, Any], tools: ToolFile | None, is_trusted: bool) -> None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not know every character
    screen = Screen(is_terminal=is_terminal)
    async with Engine(**config) as engine:
        screen.note(engine.describe())
        if tools is not None and not engine.has_tools:
            raise click.UsageError(
                "the format of this model's calls cannot be told from its chat template: --tool-format names one"
            )
        lines: Lines
        if is_terminal:
            screen.note(GREETING)
            lines = TypedLines(COMMAND_NAMES, lambda: screen.note("Ctrl-D or /exit leaves"))
        else:
            lines = PipedLines()
        interrupts = Interrupts()
        with asked_by_signals(interrupts.receive), interrupts.everything:
            await Talk(engine, conversation, lines, screen, interrupts, tools, is_trusted).run()
    if interrupts.signal is signal.SIGINT:
        raise KeyboardInterrupt
    if interrupts.signal is not None:
        sys.exit(128 + interrupts.signal)


class Talk(NamedTuple):
    """A conversation with an engine.

    Attributes:
        tools: that the model may call. is_trusted: without a question to the user.
    """

    engine: Engine
    conversation: Conversation
    lines: Lines
    screen: Screen
    interrupts: Interrupts
    tools: ToolFile | None = None
    is_trusted: bool = False

    async def run(self) -> None:
        """Take lines, and do what they ask for, until the user leaves.

        Raises:
            EngineDead, EngineClosed: there will be no more answers.
        """
        while (line := await self.lines.read()) is not None:
            effect = await anyio.to_thread.run_sync(self.conversation.take_line, line)
            if effect is Todo.LEAVE:
                return
            if effect is Todo.ASK:
                effect = await self._ask()
            if effect:
                self.screen.note(effect)

    async def _ask(self) -> str:
        """Answer the last question, in several rounds where the model calls tools; returns a note for the user."""
        for _ in range(MAX_ROUNDS):
            ended = await self._answer()
            if isinstance(ended, str):
                return ended
            for call in ended:
                await self._make_call(call)
        return f"[{self.conversation.add_answer('', TurnEnd.CALLS)}]"

    async def _make_call(self, call: ToolCall) -> None:
        """Make one call, if the user wants it; the conversation gets its result."""
        assert self.tools is not None, "there are no calls without tools"
        result = REFUSED
        self.screen.note(f"{call.name}({call.arguments}){'' if self.is_trusted else '  call it? [y/N]'}")
        if self.is_trusted or (await self.lines.read() or "").strip().lower() in ("y", "yes"):
            with self.interrupts.stoppable() as scope:
                result = await self.tools.call(call)
            result = STOPPED if scope.cancelled_caught else result
        self.screen.note(f"-> {result}")
        self.conversation.add_result(call, result)

    async def _answer(self) -> str | list[ToolCall]:
        """Stream the answer; however it ends, it becomes part of the conversation.

        Returns:
            a note for the user on how it ended; or the calls that it asks for.
        """
        screen, conversation = self.screen, self.conversation
        stream: Stream | None = None
        text, note, is_thinking = "", "", False
        asked: dict[str, Any] = {"tools": self.tools.tools} if self.tools is not None else {}
        try:
            with self.interrupts.stoppable() as scope:
                async with self.engine.stream(conversation.prompt(), **asked, **conversation.sampling) as stream:
                    async for delta in stream:
                        if delta.reasoning:
                            is_thinking = True
                            screen.think(delta.reasoning)
                        if is_thinking and (delta.text or delta.finish_reason):
                            is_thinking = False
                            screen.think("\n")
                        text += delta.text
                        screen.write(delta.text)
        except (EngineDead, EngineClosed):
            raise
        except AioEngineError as error:
            note = conversation.drop_question(error)
        else:
            is_stopped = scope.cancelled_caught or stream is None
            if stream is not None and not is_stopped and self.tools is not None and (calls := stream.result.tool_calls):
                if text:
                    screen.write("\n")
                conversation.add_calls(text, calls)
                return calls
            end = TurnEnd.STOPPED if is_stopped else TurnEnd.WHOLE
            if end is TurnEnd.WHOLE and (answer := stream.result.outputs[0]).finish_reason == "length":
                num_tokens = len(stream.result.prompt_token_ids) + len(answer.token_ids)
                end = TurnEnd.FULL if num_tokens >= self.engine.info.max_model_len else TurnEnd.MAX_TOKENS
            note = f"[{ended}]" if (ended := conversation.add_answer(text, end)) else ""
        if not text.endswith("\n"):  # of an empty answer, too: programs that read answers from a pipe count lines
            screen.write("\n")
        return note
