"""Choices of launch parameters for one GPU: measured once, kept in a file, within a bound on the time of a start.

A `Tuner` knows neither torch nor Triton: what it is given measures. On a GPU that is a few launches between two CUDA
events, so that nothing may be picked while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from aioengine.errors import InternalError

logger = logging.getLogger("aioengine")

Key = tuple[int | str, ...]

FORMAT = 1
"""Of the file; others are ignored."""
MAX_CANDIDATES = 8
"""Each is compiled, for 0.1 to 2 s; more than these belong into a benchmark."""
MAX_CHOICES = 512
"""In a file; the oldest go first."""
MAX_FILE_BYTES = 2**20


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to launch a kernel.

    Attributes:
        num_warps, num_stages: as Triton means them.
        constants: the kernel's constants that may be chosen, such as (("N", 64),), by name.
    """

    num_warps: int = 4
    num_stages: int = 2
    constants: tuple[tuple[str, int], ...] = ()


Measure = Callable[[str, Key, Choice], float]
"""Compiles the kernel of that name for the key and launches it; seconds of a launch. It may raise."""


class _Stored(msgspec.Struct, kw_only=True):
    """What the file holds: choices by kernel and key, the oldest first."""

    format: int
    choices: dict[str, Choice]


def choice_file(folder: Path, *, gpu: str, triton: str, package: str) -> Path:
    """Where the choices for a GPU, a Triton and a version of this package lie: none of them says much of another."""
    plain = [re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") for name in (gpu, triton, package)]
    return folder / f"{plain[0]}-triton-{plain[1]}-{plain[2]}.json"


class Tuner:
    """Picks launch parameters. It belongs to one thread; other processes may use the same file.

    Args:
        cache_path: the file; None: nothing is kept. One that is damaged is ignored, and replaced by the next choice.
        deadline_s: of measuring in all, which is what a start is longer for; the candidate that is being measured then
            is measured to its end.
        measure: see `Measure`.
        clock: seconds.
    """

    def __init__(
        self,
        cache_path: Path | None,
        deadline_s: float = 20.0,
        *,
        measure: Measure,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = cache_path
        self._left_s = deadline_s
        self._measure = measure
        self._clock = clock
        self._stored = {} if cache_path is None else _read(cache_path)
        self._picked: dict[str, Choice] = {}

    def pick(self, kernel_name: str, key: Key, candidates: Sequence[Choice]) -> Choice:
        """The fastest of the candidates for a key: a choice for good, as far as this tuner goes.

        It is remembered, else in the file, else measured. With the deadline spent it is the fastest of those measured
        until then, or the first; what is not fully measured is not kept for the next start. A candidate that cannot be
        measured is passed over, as one that does not compile; if none can be it is the first.

        Args:
            key: all that the choice depends on, such as head size, group and dtype.
            candidates: the default first.
        Raises:
            InternalError: no candidates, or more than `MAX_CANDIDATES`.
        """
        if not 1 <= len(candidates) <= MAX_CANDIDATES:
            raise InternalError(f"{kernel_name}: {len(candidates)} candidates; 1 to {MAX_CANDIDATES} are needed")
        name = msgspec.json.encode([kernel_name, *key]).decode()
        if name not in self._picked:
            stored = self._stored.get(name)
            # Those of another revision of the same version may have been others.
            if stored is None or stored not in candidates:
                stored = self._fastest(name, kernel_name, key, candidates)
            self._picked[name] = stored
        return self._picked[name]

    def _fastest(self, name: str, kernel_name: str, key: Key, candidates: Sequence[Choice]) -> Choice:
        if len(candidates) == 1:
            return candidates[0]
        seconds: dict[Choice, float] = {}
        for candidate in candidates:
            if self._left_s <= 0:
                break
            begin = self._clock()
            try:
                measured = self._measure(kernel_name, key, candidate)
            except Exception as error:  # whatever a compiler makes of it: too little shared memory, a bug of its own
                logger.debug("%s: %s cannot be measured: %s", name, candidate, error)
                measured = math.inf
            seconds[candidate] = measured if measured > 0 else math.inf  # NaN, too
            self._left_s -= self._clock() - begin
        best = min(seconds, key=seconds.__getitem__, default=candidates[0])
        if math.isinf(seconds.get(best, math.inf)):
            return candidates[0]
        if len(seconds) == len(set(candidates)) and self._path is not None:
            _add(self._path, name, best)
        return best


def _read(path: Path) -> dict[str, Choice]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        stored = msgspec.json.decode(content, type=_Stored)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        logger.debug("the choices in %s are ignored: %s", path, error)
        return {}
    return stored.choices if stored.format == FORMAT else {}


def _add(path: Path, name: str, choice: Choice) -> None:
    """Put a choice into the file, beside those that other processes have put there meanwhile.

    Of two that write at once the later may lose the other's choice, which is then measured again by the next start: no
    harm that a lock would be worth. A file that cannot be written is none.
    """
    choices = _read(path)
    choices.pop(name, None)
    choices[name] = choice
    kept = dict(list(choices.items())[-MAX_CHOICES:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(_Stored(format=FORMAT, choices=kept))) + b"\n")
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:
        logger.debug("the choice for %s is not kept: %s", name, error)
