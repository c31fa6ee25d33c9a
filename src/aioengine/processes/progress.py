"""A bar on the terminal while a model loads, and one while its CUDA graphs are captured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

OnProgress = Callable[..., None]
"""(done, total, what): told from any thread how far something is; of ``what``, in words, or of the weights' bytes."""

LOADING = ""


@contextlib.contextmanager
def loading_bar(title: str, *, is_shown: bool | None) -> Iterator[OnProgress | None]:
    """Show a bar on stderr until the block ends; None shows it if stderr is a terminal."""
    if not (sys.stderr.isatty() if is_shown is None else is_shown):
        yield None
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {LOADING: bar.add_task(title, total=None, amount="")}

        def show(done: int, total: int, what: str = LOADING) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total, amount="")
            amount = f"{done}/{total}" if what else f"{decimal(done)}/{decimal(total)}"
            bar.update(tasks[what], completed=done, total=total, amount=amount)

        yield show
