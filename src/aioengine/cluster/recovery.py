"""What becomes of the sequences of a replica that has died; pure.

A sequence goes on elsewhere, from the tokens that were handed out. One that has brought its replica down would bring
down the next one, too, so that blame is found by elimination: a *strike* is a death with the sequence on a row, and a
token that comes later clears it. What has a strike that no token has cleared is a *suspect*. With the second strike in
a row a sequence goes on *alone*: nothing else is where it is computed until it is cleared. What dies alone with the
second strike, or a later one, has brought its replica down, and fails. So what merely ran beside a poisonous request is
never taken for it, and a poisonous one has one death more, at most, than those that it shares with others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aioengine.core.protocol import Orphan
from aioengine.errors import AioEngineError, StepFailed
from aioengine.scheduler.sequence import Sequence

STRIKES = 2
"""In a row, with which a sequence fails if it was alone, and goes on alone if it was not."""


@dataclass(slots=True)
class Breaks:
    """What a cluster remembers of the deaths that a sequence has been through."""

    strikes: int = 0
    """Deaths in a row with it on a row, and no token in between."""
    num_tokens: int = 0
    """Output tokens that it had at the last death."""
    num_without_row: int = 0
    """Deaths in a row before which it was not heard to have a row."""
    reasons: list[str] = field(default_factory=list)
    """Of all deaths."""


def is_suspect(sequence: Sequence) -> bool:
    """Whether it lives, had a row when its replica died, and no token has come since."""
    breaks: Breaks | None = sequence.breaks
    is_live = sequence.listener is not None
    return is_live and breaks is not None and breaks.strikes > 0 and _has_stood_still(sequence, breaks)


def needs_solitude(sequence: Sequence) -> bool:
    """Whether it may only go on where nothing else is."""
    return is_suspect(sequence) and sequence.breaks.strikes >= STRIKES


def on_death(
    orphans: Iterable[Orphan], reason: str, *, max_attempts: int
) -> list[tuple[Sequence, AioEngineError | None]]:
    """A replica has died for ``reason``.

    Returns:
        its sequences, each with the error that ends it, or None if it goes on elsewhere.
    """
    orphans = list(orphans)
    is_any_known = any(orphan.has_started for orphan in orphans)
    is_alone = len({id(orphan.sequence.request) for orphan in orphans}) == 1
    return [
        (orphan.sequence, _judge(orphan, reason, max_attempts, is_any_known=is_any_known, is_alone=is_alone))
        for orphan in orphans
    ]


def _judge(
    orphan: Orphan, reason: str, max_attempts: int, *, is_any_known: bool, is_alone: bool
) -> AioEngineError | None:
    sequence = orphan.sequence
    breaks = sequence.breaks = sequence.breaks or Breaks()
    breaks.reasons.append(reason)
    if not _has_stood_still(sequence, breaks):
        breaks.strikes = breaks.num_without_row = 0
    breaks.num_tokens = len(sequence.output_ids)
    # A crash in the very moment in which it takes its row is faster than the news of that.
    if orphan.has_started or not is_any_known or breaks.num_without_row >= STRIKES:
        breaks.strikes += 1
    else:
        breaks.num_without_row += 1
    if is_alone and breaks.strikes >= STRIKES:
        return StepFailed(
            f"this request brings down what computes it, {breaks.strikes} replicas in a row, and is not tried again: "
            f"{'; '.join(breaks.reasons[-breaks.strikes :])}"
        )
    if len(breaks.reasons) > max_attempts:
        return StepFailed(
            f"{len(breaks.reasons)} replicas in turn ended before this request did (max_attempts), the last one: "
            f"{reason}"
        )
    return None


def _has_stood_still(sequence: Sequence, breaks: Breaks) -> bool:
    """Whether it has no token more than at the last death."""
    return len(sequence.output_ids) == breaks.num_tokens
