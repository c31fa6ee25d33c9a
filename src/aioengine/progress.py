"""A bar on the terminal while a model loads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

OnProgress = Callable[[int, int], None]
"""(bytes done, bytes in all), from any thread."""


@contextlib.contextmanager
def loading_bar(title: str, *, is_shown: bool | None) -> Iterator[OnProgress | None]:
    """Show a bar on stderr until the block ends; None shows it if stderr is a terminal."""
    if not (sys.stderr.isatty() if is_shown is None else is_shown):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
