"""What becomes of the sequences of a replica that has died; pure.

A sequence goes on elsewhere, from the tokens that were handed out. One that has brought its replica down would bring
down the next one, too, so that blame is found by elimination: a *strike* is a death with the sequence on a row, and a
token that comes later clears it. With the second strike in a row a sequence goes on *alone*: nothing else is where it
is computed until it is cleared. With the second death in a row at which nothing else was there it fails. So what merely
ran beside a poisonous request is never taken for it, and what ran where a replica was killed from outside would have
to be alone, twice in a row and for the moment that its first token takes.

Where replicas without it have died, too, another cause is likelier, and to compute many sequences one by one would take
long: it goes on alone with the fourth strike only, and fails with the third death alone. A crash in the very moment in
which a sequence takes its row is faster than the news of that: what was not heard to have one goes on alone two deaths
later than what was.
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
WAITING_FACTOR = 4
"""So many times ``max_attempts`` may a sequence lose its replica in all, also where it only waited."""


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
    num_with_row: int = 0
    """Those before which it had a row."""
    sent_at: float = -math.inf
    """When it was sent to where it is; in the time of `Death.silent_since`."""
    num_tokens: int = 0
    """Output tokens that it had at the last death."""
    # Of deaths in a row, without a token in between:
    num_in_row: int = 0
    first_death: int = 0
    """The number of the first one of them."""
    strikes: int = 0
    """With it on a row, or with nothing else there that could have brought it down."""
    num_alone: int = 0
    """Strikes with nothing else there."""
    is_to_be_alone: bool = False
    is_to_blame: bool = False


def needs_solitude(sequence: Sequence) -> bool:
    """Whether it may only go on where nothing else is; not while it is not computed, since its reader is behind."""
    breaks: Breaks | None = sequence.breaks
    if breaks is None or not breaks.is_to_be_alone:
        return False
    is_live = sequence.listener is not None
    return is_live and _has_stood_still(sequence, breaks) and not _waits_for_reader(sequence)


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
    sequence = orphan.sequence
    breaks.reasons.append(death.reason)
    if not _has_stood_still(sequence, breaks):
        breaks.num_in_row = breaks.strikes = breaks.num_alone = 0
        breaks.is_to_be_alone = False
    breaks.num_tokens = len(sequence.output_ids)
    breaks.num_with_row += orphan.has_started
    is_computed = orphan.has_started or not _waits_for_reader(sequence)
    if orphan.is_innocent or breaks.sent_at > death.silent_since or not is_computed:
        return
    if not breaks.num_in_row:
        breaks.first_death = death.number
    breaks.num_in_row += 1
    if orphan.has_started or not is_any_known:
        breaks.strikes += 1
        breaks.num_alone += is_alone
    has_other_cause = death.number - breaks.first_death + 1 > breaks.num_in_row
    most = MAX_STRIKES if has_other_cause else STRIKES
    breaks.is_to_be_alone = breaks.strikes >= most or breaks.num_in_row >= most + STRIKES
    breaks.is_to_blame = breaks.num_alone >= STRIKES + has_other_cause


def _judge(breaks: Breaks, death: Death, max_attempts: int) -> AioEngineError | None:
    """The error that ends a sequence, if one does."""
    if breaks.is_to_blame:
        return StepFailed(
            f"this request brings down what computes it, {breaks.strikes} replicas in a row, and is not tried again: "
            f"{'; '.join(breaks.reasons[-breaks.strikes :])}"
        )
    if breaks.num_with_row > max_attempts or len(breaks.reasons) > WAITING_FACTOR * max_attempts:
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
