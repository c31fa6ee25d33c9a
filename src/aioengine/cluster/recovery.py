"""What becomes of the sequences of a replica that has died; pure.

A sequence goes on elsewhere, from the tokens that were handed out. One that has brought its replica down would bring
down the next one, too, so that blame is found by elimination: a *strike* is a death with the sequence on a row, and a
token that comes later clears it. What has a strike that no token has cleared is a *suspect*. With the second strike in
a row a sequence goes on *alone*: nothing else is where it is computed until it is cleared. With the second death in a
row at which nothing else was there it fails. So what merely ran beside a poisonous request is never taken for it, and
what ran where a replica was killed from outside would have to be alone, twice in a row and for the moment that its
first token takes.

Where replicas without it have died, too, since its first strike, another cause is likelier, and to compute many
suspects one by one would take long: it goes on alone with the fourth strike only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from aioengine.core.protocol import Orphan
from aioengine.errors import AioEngineError, StepFailed
from aioengine.scheduler.sequence import Sequence

STRIKES = 2
"""In a row, with which a sequence goes on alone; and those alone with which it fails."""
MAX_STRIKES = 4
"""The first of these where replicas die without it."""


class Death(NamedTuple):
    """The end of a replica.

    Attributes:
        reason: for a person.
        number: counts the deaths of a cluster's replicas.
        silent_since: what was sent to it later has not brought it down: it did nothing more by then.
        is_shared: other front ends may have had sequences there, so that none of this one's was alone.
    """

    reason: str
    number: int
    silent_since: float = math.inf
    is_shared: bool = False


@dataclass(slots=True)
class Breaks:
    """What a cluster remembers of the deaths that a sequence has been through."""

    reasons: list[str] = field(default_factory=list)
    """Of all deaths."""
    sent_at: float = -math.inf
    """When it was sent to where it is; in the time of `Death.silent_since`."""
    num_tokens: int = 0
    """Output tokens that it had at the last death."""
    # Of deaths in a row, without a token in between:
    strikes: int = 0
    """With it on a row, as far as is known."""
    num_alone: int = 0
    """Strikes with nothing else there."""
    num_without_row: int = 0
    """Deaths before which it was not heard to have a row."""
    first_death: int = 0
    """The number of the first one that struck it."""
    is_to_be_alone: bool = False


def is_suspect(sequence: Sequence) -> bool:
    """Whether it lives, had a row when its replica died, and no token has come since."""
    breaks: Breaks | None = sequence.breaks
    is_live = sequence.listener is not None
    return is_live and breaks is not None and breaks.strikes > 0 and _has_stood_still(sequence, breaks)


def needs_solitude(sequence: Sequence) -> bool:
    """Whether it may only go on where nothing else is; not while it is not computed, since its reader is behind."""
    return is_suspect(sequence) and sequence.breaks.is_to_be_alone and not _waits_for_reader(sequence)


def note_sent(sequence: Sequence, now: float) -> None:
    """It is sent to a replica."""
    if sequence.breaks is not None:
        sequence.breaks.sent_at = now


def on_death(
    orphans: Iterable[Orphan], death: Death, *, max_attempts: int
) -> list[tuple[Sequence, AioEngineError | None]]:
    """What becomes of the sequences of a replica that has died.

    Returns:
        its sequences, each with the error that ends it, or None if it goes on elsewhere.
    """
    orphans = list(orphans)
    is_any_known = any(orphan.has_started for orphan in orphans)
    is_alone = not death.is_shared and len({id(orphan.sequence.request) for orphan in orphans}) == 1
    verdicts: list[tuple[Sequence, AioEngineError | None]] = []
    for orphan in orphans:
        sequence = orphan.sequence
        breaks = sequence.breaks = sequence.breaks or Breaks()
        _note(orphan, breaks, death, is_any_known=is_any_known, is_alone=is_alone)
        verdicts.append((sequence, _judge(breaks, death, max_attempts)))
    return verdicts


def _note(orphan: Orphan, breaks: Breaks, death: Death, *, is_any_known: bool, is_alone: bool) -> None:
    """Take in a death."""
    breaks.reasons.append(death.reason)
    if not _has_stood_still(orphan.sequence, breaks):
        breaks.strikes = breaks.num_alone = breaks.num_without_row = 0
        breaks.is_to_be_alone = False
    breaks.num_tokens = len(orphan.sequence.output_ids)
    if orphan.is_innocent or breaks.sent_at > death.silent_since:
        return
    if not orphan.has_started:
        if _waits_for_reader(orphan.sequence):
            return
        # A crash in the very moment in which it takes its row is faster than the news of that.
        if is_any_known and breaks.num_without_row < STRIKES:
            breaks.num_without_row += 1
            return
    if not breaks.strikes:
        breaks.first_death = death.number
    breaks.strikes += 1
    breaks.num_alone += is_alone
    num_without_it = death.number - breaks.first_death + 1 - breaks.strikes
    breaks.is_to_be_alone = breaks.strikes >= (MAX_STRIKES if num_without_it else STRIKES)


def _judge(breaks: Breaks, death: Death, max_attempts: int) -> AioEngineError | None:
    """The error that ends a sequence, if one does."""
    if breaks.num_alone >= STRIKES:
        return StepFailed(
            f"this request brings down what computes it, {breaks.strikes} replicas in a row, and is not tried again: "
            f"{'; '.join(breaks.reasons[-breaks.strikes :])}"
        )
    if len(breaks.reasons) > max_attempts:
        return StepFailed(
            f"{len(breaks.reasons)} replicas in turn ended before this request did (max_attempts), the last one: "
            f"{death.reason}"
        )
    return None


def _waits_for_reader(sequence: Sequence) -> bool:
    return sequence.listener is not None and len(sequence.output_ids) >= sequence.listener.num_allowed


def _has_stood_still(sequence: Sequence, breaks: Breaks) -> bool:
    """Whether it has no token more than at the last death."""
    return len(sequence.output_ids) == breaks.num_tokens
