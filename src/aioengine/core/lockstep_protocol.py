"""The interface of an engine core to the group of engines that run each step together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec


class LockstepPlace(msgspec.Struct, frozen=True, array_like=True):
    """An engine's place in a group.

    Attributes:
        rank: from 0 up to ``num_ranks``.
        store: path of a file that is not there yet, where the ranks meet; alone in its folder, which goes then.
        timeout_s: for all to come there.
    """

    rank: int
    num_ranks: int
    store: str
    timeout_s: float = 600.0


class Lockstep(Protocol):
    """Decides when a step may be launched, and when a step without work must be: see `cluster.lockstep`.

    Attributes:
        grace_s: a core whose step has failed waits so long before it ends: where another engine's death is the cause,
            it is ended from outside, where that is known.
        on_news: called on the loop when `may_launch` or `is_running` may be another.
        on_report: called on the loop when the group needs ``wave`` and ``is_running``, which each beat has.
    """

    grace_s: float
    on_news: Callable[[], None]
    on_report: Callable[[], None]

    @property
    def wave(self) -> int: ...

    @property
    def is_running(self) -> bool:
        """Whether others compute: a core that has nothing to launch launches a dummy step."""

    @property
    def may_launch(self) -> bool: ...

    def on_launch(self, has_work: bool) -> None:
        """A step was launched, of work or a dummy; ``has_work``: whether there is any that could go on."""

    def on_start(self, wave: int) -> None:
        """START_WAVE, from the group's coordinator.

        Raises:
            InvalidRequest: the group cannot have come so far.
        """
