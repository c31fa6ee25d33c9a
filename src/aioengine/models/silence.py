"""What transformers says beside its results, kept from the user's terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_num_silent = 0
_before: tuple[bool, int] = (True, 0)
"""What the first of those that are silent at once found, and the last puts back: progress bars, and the log's level."""


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Without its progress bars, which have a thread, and its log; also as a decorator.

    Around calls whose outcome is checked here: of a config it warns with advice for its author (how to spell a
    rotation's factor), while what does not fit raises, or is refused by our own checks; of loaded weights it reports
    what the loader makes errors of. It holds for all threads, until the last of several has ended.
    """
    global _num_silent, _before
    from transformers.utils import logging

    with _lock:
        if not _num_silent:
            _before = logging.is_progress_bar_enabled(), logging.get_verbosity()
            logging.disable_progress_bar()
            logging.set_verbosity(logging.CRITICAL)
        _num_silent += 1
    try:
        yield
    finally:
        with _lock:
            _num_silent -= 1
            if not _num_silent:
                had_bars, verbosity = _before
                logging.set_verbosity(verbosity)
                if had_bars:
                    logging.enable_progress_bar()
