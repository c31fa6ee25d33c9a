"""Where a conversation's lines come from and its words go, a terminal or pipes; and what a signal stops."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import anyio
import click

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

STDIN = 0
READ_BYTES = 65536

_CONTROL_CHARACTERS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)
}
"""A model's text must not move the cursor, or worse."""


class Screen:
    """Where words go: answers to stdout, notes beside them on a terminal and else to stderr."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def write(self, text: str) -> None:
        """Show some of an answer at once."""
        sys.stdout.write(text.translate(_CONTROL_CHARACTERS) if self._is_terminal else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Show what is not the model's answer, as a line."""
        self.think(text + "\n")

    def think(self, text: str) -> None:
        """Show some of what is not its answer at once: its reasoning."""
        color = False if os.environ.get("NO_COLOR") else None
        shown = text.translate(_CONTROL_CHARACTERS) if self._is_terminal else text
        click.secho(shown, err=not self._is_terminal, dim=True, nl=False, color=color)


class PipedLines:
    """Lines of stdin that is a pipe or a file, read without a thread; UTF-8, whatever the locale is."""

    def __init__(self) -> None:
        self._pending = b""
        self._is_ended = False

    async def read(self) -> str | None:
        """The next line; None at the end.

        Raises:
            click.UsageError: it is not UTF-8.
        """
        while b"\n" not in self._pending and not self._is_ended:
            with contextlib.suppress(PermissionError):  # epoll takes no files: those can always be read
                await anyio.wait_readable(STDIN)
            chunk = os.read(STDIN, READ_BYTES)
            self._pending += chunk
            self._is_ended = not chunk
        if not self._pending:
            return None
        raw, _, self._pending = self._pending.partition(b"\n")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise click.UsageError(f"stdin is not UTF-8: {error.reason}") from None


class TypedLines:
    """Lines typed at a prompt, with editing, a history and completion of commands.

    Args:
        words: what Tab completes at the beginning of a line.
        on_idle_interrupt: called at Ctrl-C where there is nothing to clear.
    """

    def __init__(self, words: tuple[str, ...], on_idle_interrupt: Callable[[], None]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.shortcuts import CompleteStyle

        keys = KeyBindings()

        @keys.add("c-c")
        def clear(event: KeyPressEvent) -> None:
            """Ctrl-C clears the line; where there is none, the prompt ends, so that a note can be shown above it."""
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt)

        self._on_idle_interrupt = on_idle_interrupt
        self._session: PromptSession[str] = PromptSession(
            [("bold", "> ")],
            completer=WordCompleter([f"{word} " for word in words], sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            key_bindings=keys,
        )

    async def read(self) -> str | None:
        """The next line; None at Ctrl-D."""
        while True:
            try:
                return await self._session.prompt_async(set_exception_handler=False, handle_sigint=False)
            except KeyboardInterrupt:
                self._on_idle_interrupt()
            except EOFError:
                return None


Lines = PipedLines | TypedLines


class Interrupts:
    """Scopes that a signal cancels: SIGINT the block in `stoppable`, or else everything; SIGTERM everything.

    Attributes:
        everything: the scope that a signal cancels.
        signal: what has stopped everything.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.everything = anyio.CancelScope()
        self._stoppable: anyio.CancelScope | None = None

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[anyio.CancelScope]:
        """A block that SIGINT stops, and nothing else with it; the scope's ``cancelled_caught`` is True if it did."""
        with anyio.CancelScope() as scope:
            self._stoppable = scope
            try:
                yield scope
            finally:
                self._stoppable = None

    def receive(self, received: signal.Signals) -> None:
        """Do what a signal asks for, on the loop."""
        if received is signal.SIGINT and self._stoppable is not None:
            self._stoppable.cancel()
        else:
            self.signal = received
            self.everything.cancel()
