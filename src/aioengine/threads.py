"""Threads with stacks of their own size, for C and Rust code that recurses."""

from __future__ import annotations

import threading

_lock = threading.Lock()
"""The size is the interpreter's: of two that set it at once the second would take the first one's for the usual."""


def start_with_stack(thread: threading.Thread, num_bytes: int) -> None:
    """Start a thread with a stack of so many bytes; 0: of the usual size.

    Raises:
        RuntimeError: there are too many threads.
    """
    with _lock:
        before = threading.stack_size(num_bytes) if num_bytes else 0
        try:
            thread.start()
        finally:
            if num_bytes:
                threading.stack_size(before)
