"""What becomes of the sequences of a replica that has died; pure.

A sequence goes on elsewhere, from the tokens that were handed out. One that has brought its replica down would bring
down the next one, too, so that blame is found by elimination: a *strike* is a death with the sequence on a row, and a
token that comes later clears it. A sequence with a strike that no token has cleared is a *suspect*. If the only suspect
of a replica is struck a second time in a row it fails. Of several that are struck together each goes on where no other
suspect runs, until one of them is alone with the third death, or all are cleared: what merely ran beside a poisonous
request is never taken for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aioengine.core.protocol import Orphan
from aioengine.errors import AioEngineError, StepFailed
from aioengine.scheduler.sequence import Sequence

STRIKES = 2
"""In a row, with which the only suspect fails."""


@dataclass(slots=True)
class Breaks:
    """What a cluster remembers of the deaths that a sequence has been through."""

    strikes: int = 0
    """Deaths in a row with it on a row, and no token in between."""
    num_tokens: int = 0
    """Output tokens that it had at the last strike."""
    reasons: list[str] = field(default_factory=list)
    """Of all deaths."""


def is_suspect(sequence: Sequence) -> bool:
    """Whether it had a row when its replica died, and no token has come since."""
    breaks: Breaks | None = sequence.breaks
    return (
        breaks is not None
        and breaks.strikes > 0
        and len(sequence.output_ids) == breaks.num_tokens
        and not sequence.has_ended
    )


def needs_solitude(sequence: Sequence) -> bool:
    """Whether it may only go on where no other suspect runs."""
    return is_suspect(sequence) and sequence.breaks.strikes >= STRIKES


def on_death(
    orphans: Iterable[Orphan], reason: str, *, max_attempts: int
) -> list[tuple[Sequence, AioEngineError | None]]:
    """A replica has died for ``reason``.

    Returns:
        its sequences, each with the error that ends it, or None if it goes on elsewhere.
    """
    orphans = list(orphans)
    suspects = [orphan.sequence for orphan in orphans if orphan.has_started and is_suspect(orphan.sequence)]
    verdicts: list[tuple[Sequence, AioEngineError | None]] = []
    for sequence, has_started in orphans:
        breaks = sequence.breaks = sequence.breaks or Breaks()
        breaks.reasons.append(reason)
        if has_started:
            breaks.strikes = breaks.strikes + 1 if is_suspect(sequence) else 1
            breaks.num_tokens = len(sequence.output_ids)
        error: AioEngineError | None = None
        if has_started and breaks.strikes >= STRIKES and suspects == [sequence]:
            error = StepFailed(
                f"this request brings down what computes it, {breaks.strikes} replicas in a row, and is not tried "
                f"again: {'; '.join(breaks.reasons[-breaks.strikes :])}"
            )
        elif len(breaks.reasons) > max_attempts:
            error = StepFailed(
                f"{len(breaks.reasons)} replicas in turn ended before this request did (max_attempts), the last one: "
                f"{reason}"
            )
        verdicts.append((sequence, error))
    return verdicts
