"""Decides how the sequences of a replica that has died go on; pure.

A sequence goes on at another replica, from the tokens that were handed out. One that brings its replica down would
bring down the next one, too, so that each sequence counts the deaths at which it was running since its newest token.
After two it runs *isolated*: nothing else is where it runs, until its next token. A third death, in isolation, fails
it. So a sequence that merely ran beside the one at fault is isolated for a moment, and ends well.

A sequence may crash its replica in the step in which it starts, before the front end hears of the start. So a death
counts half for a sequence that was not known to run where others were, and whole where none was. One death in isolation
does not fail such a sequence, but a second one does: most have only waited, and many may wait for isolation in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from aioengine.core.protocol import InFlightSequence
from aioengine.errors import AioEngineError, StepFailed
from aioengine.scheduler.sequence import Sequence

ISOLATED_AFTER, FAILED_AFTER = 2, 3
"""Deaths in a row after which a sequence is isolated, and after which it fails."""
WAITING_FACTOR = 4
"""So many times ``max_attempts`` may a sequence lose its replica in all, also where it only waited."""


@dataclass(slots=True)
class Deaths:
    """The deaths of replicas that a sequence has been through."""

    reasons: list[str] = field(default_factory=list)
    num_running: int = 0
    """Deaths at which it was known to run."""
    num_tokens: int = 0
    """Output tokens that it had at the last death."""
    num_in_row: float = 0.0
    """Deaths since its newest token, each whole or half."""
    num_alone: int = 0
    """Deaths at which its replica had no other sequence."""


class Recovery:
    """Decides which sequences go on, and which of them run isolated.

    Args:
        max_attempts: as `ReplicaOptions.max_attempts`.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._deaths: WeakKeyDictionary[Sequence, Deaths] = WeakKeyDictionary()

    def reasons_of(self, sequence: Sequence) -> list[str]:
        """The reasons of the deaths that a sequence has been through."""
        deaths = self._deaths.get(sequence)
        return [] if deaths is None else deaths.reasons

    def is_implicated(self, sequence: Sequence) -> bool:
        """Whether a sequence may have brought down replicas, as far as was known at the last death."""
        deaths = self._deaths.get(sequence)
        return deaths is not None and deaths.num_in_row >= ISOLATED_AFTER

    def must_be_isolated(self, sequence: Sequence) -> bool:
        """Whether a sequence may only run where nothing else does.

        False while it is not computed, since its reader is behind.
        """
        deaths = self._deaths.get(sequence)
        if deaths is None or deaths.num_in_row < ISOLATED_AFTER or sequence.listener is None:
            return False
        return len(sequence.output_ids) == deaths.num_tokens and not _waits_for_reader(sequence)

    def on_death(
        self, in_flight: Iterable[InFlightSequence], reason: str
    ) -> list[tuple[Sequence, AioEngineError | None]]:
        """Take in the death of a replica.

        Returns:
            its sequences, each with the error that ends it, or None if it goes on elsewhere.
        """
        in_flight = list(in_flight)
        is_any_known = any(each.was_running for each in in_flight)
        verdicts: list[tuple[Sequence, AioEngineError | None]] = []
        for sequence, was_running, is_unaffected in in_flight:
            deaths = self._deaths.setdefault(sequence, Deaths())
            deaths.reasons.append(reason)
            deaths.num_running += was_running
            if len(sequence.output_ids) > deaths.num_tokens:
                deaths.num_tokens, deaths.num_in_row, deaths.num_alone = len(sequence.output_ids), 0.0, 0
            if not is_unaffected and (was_running or not _waits_for_reader(sequence)):
                weight = 1.0 if was_running or not is_any_known else 0.5
                is_alone = len(in_flight) == 1
                deaths.num_alone += is_alone
                may_fail = is_alone and (was_running or deaths.num_alone > 1)
                deaths.num_in_row = min(deaths.num_in_row + weight, FAILED_AFTER if may_fail else ISOLATED_AFTER)
            verdicts.append((sequence, self._judge(deaths, reason)))
        return verdicts

    def _judge(self, deaths: Deaths, reason: str) -> AioEngineError | None:
        """The error that ends a sequence, if one does."""
        if deaths.num_in_row >= FAILED_AFTER:
            return StepFailed(
                "this request brings down what computes it, and is not tried again; replicas that ended while it ran: "
                f"{'; '.join(deaths.reasons[-FAILED_AFTER:])}"
            )
        if deaths.num_running > self._max_attempts or len(deaths.reasons) > WAITING_FACTOR * self._max_attempts:
            return StepFailed(
                f"{len(deaths.reasons)} replicas in turn ended before this request did (max_attempts), the last one: "
                f"{reason}"
            )
        return None


def _waits_for_reader(sequence: Sequence) -> bool:
    return sequence.listener is not None and len(sequence.output_ids) >= sequence.listener.num_allowed
