"""What stands in for the child process that compiles native kernels, which would take a core for a minute."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from aioengine.kernels.native import compilation, library

COMPILER = """
import fcntl, msgspec, os, signal, sys
from pathlib import Path
kept, gate, outcome = {kept!r}, {gate!r}, {outcome!r}
folder = Path(os.environ.get("XDG_CACHE_HOME", "/dev/null")) / "aioengine"
unfinished = folder / f"kernels.{{os.getpid()}}"
unkept = dict()
try:
    folder.mkdir(exist_ok=True)
    unfinished.write_bytes(b"half")
except OSError as error:
    print(error, file=sys.stderr)
    parts = sys.argv[4:] if outcome == "works" else ()
    unkept = {{part: Path(kept.replace("*", part)).read_bytes()[{digest_bytes}:] for part in parts}}
with open(gate) as file:
    fcntl.flock(file, fcntl.LOCK_EX)
if outcome == "raises":
    raise RuntimeError("numba knows no such processor")
if outcome == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if not unkept:
    unfinished.unlink()
for file in Path(kept).parent.glob(Path(kept).name) if outcome == "works" and not unkept else ():
    part = folder / f"{{file.name}}.part"
    part.write_bytes(file.read_bytes())
    part.rename(folder / file.name)
with open(int(sys.argv[3]), "wb") as file:
    file.write(msgspec.msgpack.encode(unkept))
"""
"""It brings the files that the session has compiled."""


class HeldCompiler:
    """Replaces the compiler, over a cache that is empty: it waits until it may go on, then works, or does not.

    Args:
        outcome: "works", "raises", "is killed", or "brings nothing".
        cache_home: absent: an empty folder.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, outcome: str = "works", cache_home: Path | None = None
    ) -> None:
        self.kept = library.library_path("common").parent
        kept = str(library.library_path("common")).removesuffix("common.o") + "*.o"
        self.cache_home = cache_home or folder / "cache"
        self._gate = (folder / "gate").open("w")
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        if cache_home is None:
            self.cache_home.mkdir()
        program = COMPILER.format(kept=kept, gate=self._gate.name, outcome=outcome, digest_bytes=library.DIGEST_BYTES)
        monkeypatch.setattr(compilation, "_COMPILE", program)
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.cache_home))

    def go_on(self) -> None:
        """Let it go on, and wait for the end of its processes; the engine hears of it all the same."""
        self._gate.close()
        for child in self.processes():
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    def processes(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]

    def num_descriptors(self) -> int:
        """Of files that this process has open, but for what holds the compiler."""
        return len(os.listdir("/proc/self/fd")) - (not self._gate.closed)

    def files(self) -> set[str]:
        return {file.name for file in (self.cache_home / "aioengine").iterdir()}
