"""What this folder's commands share: arguments that are refused before the work, and an end that leaves nothing."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

Number = TypeVar("Number", int, float)
INTERRUPTED = 128 + signal.SIGINT


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """For argparse: a number of this kind above 0, and finite."""

    def parse(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            number = kind("0")
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"a positive number is needed, not {text!r}")
        return number

    return parse


def refuse(message: str) -> NoReturn:
    """End with 2, as argparse does, with a line that says why."""
    print(message, file=sys.stderr)
    raise SystemExit(2)


def check_file(path: Path) -> None:
    """Raises:
    SystemExit: the file cannot be written. What it holds is kept, and none is left where there was none.
    """
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        refuse(f"{path} cannot be written: {error.strerror}")


def check_folder(folder: Path, *names: str) -> None:
    """Make the folder if it is not there.

    Raises:
        SystemExit: it cannot be made, or one of these files not be written in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{folder} cannot be a folder for results: {error.strerror}")
    for name in names:
        check_file(folder / name)


def kill_group(leader: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill a process that was started with ``process_group=0``, and what it has started; to be waited for.

    With a group of their own children hear nothing of Ctrl-C, which would have each of them print a traceback.
    """
    if leader.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)


def run(main: Callable[[], int]) -> NoReturn:
    """Call it and exit with what it returns; at Ctrl-C with 130, after a line that says so."""
    # Their default ends a process without its finally blocks, and children in groups of their own would stay.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        code = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
