"""What transformers says beside its results, kept from the user's terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Without its progress bars, which have a thread, and its log; also as a decorator.

    Around calls whose outcome is checked here: of a config it warns with advice for its author (how to spell a
    rotation's factor), while what does not fit raises, or is refused by our own checks; of loaded weights it reports
    what the loader makes errors of.
    """
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
