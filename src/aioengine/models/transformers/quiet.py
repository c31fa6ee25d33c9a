"""transformers' progress bars and log, kept from the user's terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_num_quiet = 0
_before: tuple[bool, int] = (True, 0)
"""Progress bars and the log's level as the first of several blocks found them; the last one restores them."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Run a block without transformers' progress bars, which have a thread, and without its log; also a decorator.

    For calls whose outcome is checked here. Of a config transformers warns with advice for its author, and whatever
    does not fit raises, or fails our own checks. Of loaded weights it reports what the loader makes errors of. It holds
    for all threads, until the last of several blocks has ended.
    """
    global _num_quiet, _before
    from transformers.utils import logging

    with _lock:
        if not _num_quiet:
            _before = logging.is_progress_bar_enabled(), logging.get_verbosity()
            logging.disable_progress_bar()
            logging.set_verbosity(logging.CRITICAL)
        _num_quiet += 1
    try:
        yield
    finally:
        with _lock:
            _num_quiet -= 1
            if not _num_quiet:
                had_bars, verbosity = _before
                logging.set_verbosity(verbosity)
                if had_bars:
                    logging.enable_progress_bar()
