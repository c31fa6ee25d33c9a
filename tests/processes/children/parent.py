"""A process that has a child: ``stage module *args``. It says which pids descend from it, then "ready", then waits.

The stage "at once" kills it as soon as the child is started, "way out" has it end the child and say what is left.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from contextlib import aclosing

import psutil

from aioengine.processes.child import Child
from aioengine.processes.own_side import die_with_parent

PR_SET_CHILD_SUBREAPER = 36


class UntilReady(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.is_ready = asyncio.Event()
        self.pids: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().removeprefix("child: ")
        if message.startswith("pids "):
            self.pids = [int(pid) for pid in message.removeprefix("pids ").split()]
        elif message == "ready":
            self.is_ready.set()


async def have_a_child(stage: str, module: str, *args: str) -> None:
    handler = UntilReady()
    logging.getLogger("aioengine").addHandler(handler)
    logging.getLogger("aioengine").setLevel(logging.INFO)
    async with aclosing(Child("child", module, *args, env={}, terminate_s=5.0, on_exit=lambda: None)) as child:
        pid = child.pid
        if stage == "at once":
            os.write(1, f"pids {pid}\nready\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        if stage == "importing":  # hold the FIFO open that the child reads
            os.open(args[0], os.O_RDWR)
        await handler.is_ready.wait()
        print("pids", pid, *handler.pids, flush=True)
        print("ready", flush=True)
        if stage != "way out":
            await asyncio.Event().wait()
    print("left", *(process.pid for process in psutil.Process().children(recursive=True)), flush=True)


def main() -> None:
    stage, module, *args = sys.argv[1:]
    die_with_parent()
    if stage == "way out":  # as for the first process of a container, to whom orphans come
        assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    asyncio.run(have_a_child(stage, module, *args))


if __name__ == "__main__":
    main()
