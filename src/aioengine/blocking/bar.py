"""Progress on the terminal while prompts are completed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aioengine.outputs import RequestOutput

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """Requests done, and output tokens a second. Made by `progress_bar`."""

    def __init__(self, bar: Progress, num_requests: int) -> None:
        self._bar = bar
        self._task = bar.add_task("generating", total=num_requests, rate=0.0)
        self._began_at = time.monotonic()
        self._num_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """A request has ended; shown with the next refresh."""
        self._num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self._bar.advance(self._task)

    def refresh(self, num_tokens: int) -> None:
        """Show it as it is now, with so many tokens since the beginning."""
        seconds = max(time.monotonic() - self._began_at, 1e-9)
        self._bar.update(self._task, rate=num_tokens / seconds)
        self._bar.refresh()

    def end(self) -> None:
        self.refresh(self._num_tokens)


@contextlib.contextmanager
def progress_bar(num_requests: int, *, is_shown: bool | None) -> Iterator[Bar | None]:
    """Show a bar on stderr until the block ends, and leave its last state there; None shows it on a terminal.

    It has no thread: whoever has the loop refreshes it.
    """
    if not num_requests or not (sys.stderr.isatty() if is_shown is None else is_shown):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        bar = Bar(progress, num_requests)
        try:
            yield bar
        finally:
            bar.end()
