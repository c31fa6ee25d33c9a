"""A bar on the terminal, or in a notebook, while a model loads, and one while its CUDA graphs are captured."""

from __future__ import annotations

import builtins
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

OnProgress = Callable[..., None]
"""(done, total, what): told from any thread how far something is; of ``what``, in words, or of the weights' bytes."""

LOADING = ""
BAR_CHARS, NOTEBOOK_INTERVAL_S = 40, 0.2


@contextlib.contextmanager
def loading_bar(title: str, *, is_shown: bool | None) -> Iterator[OnProgress | None]:
    """Show a bar on stderr until the block ends, or below a notebook's cell; None shows it if stderr is a terminal."""
    if not (sys.stderr.isatty() if is_shown is None else is_shown):
        yield None
        return
    shell: Any = getattr(builtins, "get_ipython", lambda: None)()
    if hasattr(shell, "kernel"):
        with _notebook_bar(title) as show_there:
            yield show_there
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


@contextlib.contextmanager
def _notebook_bar(title: str) -> Iterator[OnProgress]:
    """Show a line of text that is replaced: rich's own bar needs ipywidgets."""
    from IPython.display import display
    from rich.filesize import decimal

    handle = display({"text/plain": title}, raw=True, display_id=True)
    shown_at_s = 0.0

    def show(done: int, total: int, what: str = LOADING) -> None:
        nonlocal shown_at_s
        if done < total and time.monotonic() < shown_at_s + NOTEBOOK_INTERVAL_S:
            return
        shown_at_s = time.monotonic()
        bar = "█" * (BAR_CHARS * done // max(total, 1))
        amount = f"{done}/{total}" if what else f"{decimal(done)}/{decimal(total)}"
        handle.update({"text/plain": f"{what or title} {bar:░<{BAR_CHARS}} {amount}"}, raw=True)

    try:
        yield show
    finally:
        handle.update({"text/plain": ""}, raw=True)
