"""The folder of what is made once a machine: native kernels, and what is known of a GPU's."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/aioengine``, or ``~/.cache/aioengine``; it need not be there.

    Raises:
        FileNotFoundError: there is no home directory.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache_home.startswith("~"):
        raise FileNotFoundError("there is no home directory to keep kernels in; set XDG_CACHE_HOME")
    return Path(cache_home) / "aioengine"


def keep(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, whatever other processes do.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
