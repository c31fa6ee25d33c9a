"""A child that is importing, not yet bound to its parent, until the parent lets go of a FIFO; or it stops there."""

import os
import signal
import sys


def import_slowly(until: str) -> None:
    if until == "stop":
        print("ready", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    with open(until) as fifo:  # waits for the parent to open it
        print("ready", file=sys.stderr, flush=True)
        fifo.read()  # until its last writer closes it


if __name__ == "__main__":
    import_slowly(sys.argv[1])

    from aioengine.processes.own_side import die_with_parent

    die_with_parent()
    while True:
        signal.pause()  # without a word: the broken pipe would end it
