"""Progress on the terminal while prompts are completed."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from aioengine.outputs import RequestOutput


@contextlib.contextmanager
def progress_bar(
    outputs: Mapping[int, RequestOutput], num_requests: int, *, is_shown: bool | None
) -> Iterator[Callable[[int], None] | None]:
    """A bar of requests done and output tokens a second on stderr; its last state stays there.

    Args:
        outputs: of the requests that are done; read when the bar is shown, in the thread that shows it.
        is_shown: None: on a terminal, in the main thread, so that a server's threads write nothing there.
    Yields:
        what shows the bar as it is now, given the number of tokens since the beginning; None if it is not to be shown.
        A block that ends without an error shows it, too.
    """
    if is_shown is None:
        is_shown = sys.stderr.isatty() and threading.current_thread() is threading.main_thread()
    if not num_requests or not is_shown:
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
    progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    task = progress.add_task("generating", total=num_requests, rate=0.0)
    began_at = time.monotonic()

    def show(num_tokens: int) -> None:
        progress.start()
        progress.update(task, completed=len(outputs), rate=num_tokens / max(time.monotonic() - began_at, 1e-9))
        progress.refresh()

    try:
        yield show
        show(sum(len(choice.token_ids) for output in outputs.values() for choice in output.outputs))
    finally:
        if progress.live.is_started:
            progress.stop()
