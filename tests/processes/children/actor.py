"""A child that does what its arguments say. It says "ready" when it has come there, and ends on SIGTERM."""

import itertools
import os
import signal
import subprocess
import sys
import time

from aioengine.processes.own_side import die_with_parent, log_to_parent


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def serve() -> None:
    say("ready")
    while True:
        signal.pause()


def be_silent() -> None:
    """Nothing is written, so that no broken pipe ends it."""
    while True:
        signal.pause()


def end_with(code: int) -> None:
    say(f"at {time.monotonic()}")
    sys.exit(code)


def fail() -> None:
    try:
        raise ValueError("no such model")
    except ValueError:
        sys.excepthook(*sys.exc_info())
        sys.exit(3)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve()


def have_descendants() -> None:
    """Two in the own group, one without its environment; one in a session of its own; one whose parent has ended.

    They hold the pipes open.
    """
    sleeper = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]
    daemon = f"import subprocess; print(subprocess.Popen({sleeper!r}, start_new_session=True).pid)"
    pids = [subprocess.Popen(sleeper).pid, subprocess.Popen(sleeper, env={}).pid]
    pids.append(subprocess.Popen(sleeper, start_new_session=True).pid)
    # Without its stderr: the one between must not be waited for by whoever reads its stdout to the end.
    between = subprocess.Popen([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True)
    assert between.stdout is not None
    pids.append(int(between.stdout.readline()))
    between.wait()
    say("pids " + " ".join(map(str, pids)))
    serve()


def leave_the_pipe_open() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    say(f"pids {sleeper.pid}")
    os._exit(0)


def say_much_and_die() -> None:
    """As much as a pipe holds, at once."""
    os.write(2, b"x" * 60_000 + b"\nRuntimeError: these are my last words")
    os._exit(1)


def flood() -> None:
    say("ready")
    while True:
        os.write(2, b"a short line\n" * 5000)


def log() -> None:
    import logging

    logging.getLogger("aioengine").debug("unheard")
    logging.getLogger("aioengine").warning("hot")
    logging.getLogger("aioengine.x").error("several\nlines")
    logging.getLogger("somebody").info("unheard")
    logging.getLogger("some body: else").warning("strange")
    print("to stdout")
    serve()


def show_devices() -> None:
    say(f"devices {os.environ.get('CUDA_VISIBLE_DEVICES')!r}")
    serve()


def stop_itself() -> None:
    say("ready")
    os.kill(os.getpid(), signal.SIGSTOP)
    serve()


def be_busy_in_c() -> None:
    say("ready")
    print(sum(itertools.repeat(1)))  # never lets go of the interpreter


ACTS = {
    "serve": serve, "silent": be_silent, "exit": lambda code: end_with(int(code)), "fail": fail,
    "ignore": ignore_sigterm, "descendants": have_descendants, "leave": leave_the_pipe_open, "die": say_much_and_die,
    "flood": flood, "log": log, "devices": show_devices, "stop": stop_itself, "busy": be_busy_in_c,
}  # fmt: skip

if __name__ == "__main__":
    die_with_parent()
    log_to_parent()
    ACTS[sys.argv[1]](*sys.argv[2:])
