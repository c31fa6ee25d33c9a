"""Whether an engine is alive, stalled or dead, judged from its beats, in this process and from another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from aioengine.scheduler.sequence import make_copier
from aioengine.schemas.plain_struct import PlainStruct

HealthStatus = Literal["STARTING", "ALIVE", "STALLED", "DEAD"]


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """How far an engine core has come.

    Attributes:
        step: steps that have ended so far.
        step_age_s: how long the device has been at its present step; 0 if it has none, or is at a call before it.
        running, waiting: sequences of all front ends.
        is_sleeping: whether `Engine.sleep` has taken something that is not back yet.
        num_refused: frames of the wire that were refused as malformed or foreign; 0 in process.
        free_blocks: of the KV cache; -1: unknown.
        is_paused: whether it is held by `Engine.pause`.
        blocked: those of ``waiting`` that wait for something else than a row and blocks.
        call, call_age_s: what the device was asked for longest beside steps and has not answered, such as
            "save_sharded_state", and how long ago; "" and 0 if there is nothing.
        wave, is_wave_running: of an engine in lockstep: the wave that runs, or would be the next; -1 of another.
        idle_age_s: how long sequences could have run while no step was in flight; 0 if that is not so.
    """

    step: int = 0
    step_age_s: float = 0.0
    running: int = 0
    waiting: int = 0
    is_sleeping: bool = False
    num_refused: int = 0
    free_blocks: int = -1
    is_paused: bool = False
    blocked: int = 0
    call: str = ""
    call_age_s: float = 0.0
    wave: int = -1
    is_wave_running: bool = False
    idle_age_s: float = 0.0


class Health(PlainStruct, frozen=True, kw_only=True):
    """The result of `Engine.health`.

    Attributes:
        status: "STARTING": requests wait for that; "ALIVE"; "STALLED": it is there and does not get on; "DEAD": it will
            not come back.
        reason: why it is not alive, for a person; empty if it is.
        step, step_age_s, call, call_age_s, idle_age_s, running, waiting: as in the last beat; ages counted up to now.
        beat_age_s: how old that beat is; 0 in process.
        num_refused: frames that the engine has refused as malformed, foreign or out of turn; 0 in process.
        is_paused, is_sleeping: whether it was paused or put to sleep, by any front end: requests wait until
            `Engine.resume` or `Engine.wake_up`, of any front end.
    """

    status: HealthStatus
    reason: str = ""
    step: int = 0
    step_age_s: float = 0.0
    call: str = ""
    call_age_s: float = 0.0
    idle_age_s: float = 0.0
    running: int = 0
    waiting: int = 0
    beat_age_s: float = 0.0
    num_refused: int = 0
    is_paused: bool = False
    is_sleeping: bool = False


_copy_beat: Callable[..., Health] = make_copier(
    Beat, Health, "status", "reason", "step_age_s", "call_age_s", "idle_age_s", "beat_age_s"
)


def judge(beat: Beat, *, stall_after_s: float, beat_age_s: float = 0.0) -> Health:
    """ALIVE, or STALLED where the device has been at one step, or control call, for longer than ``stall_after_s``, or
    where sequences could run and no step is launched.

    A call may rightly take so long, such as saving weights; only its caller can know.
    """
    # The device works in order: what it was asked first is what it is at.
    what, at_it_s = (beat.call, beat.call_age_s) if beat.call_age_s > beat.step_age_s else ("one step", beat.step_age_s)
    is_stalled = at_it_s > stall_after_s
    reason = f"the device has been at {what} for {at_it_s + beat_age_s:.1f} s, and the loop goes on"
    if beat.idle_age_s > min(stall_after_s, 2.0):  # a bug, from which it will not get on by itself
        is_stalled = True
        num_able = beat.running + beat.waiting - beat.blocked
        reason = f"{num_able} sequences could run, and no step was launched for {beat.idle_age_s + beat_age_s:.1f} s: "
        reason += "a bug of the scheduler, whose state is in the log; please report it"
    return _copy_beat(
        beat,
        status="STALLED" if is_stalled else "ALIVE",
        reason=reason if is_stalled else "",
        step_age_s=beat.step_age_s + beat_age_s if beat.step_age_s else 0.0,
        call_age_s=beat.call_age_s + beat_age_s if beat.call else 0.0,
        idle_age_s=beat.idle_age_s + beat_age_s if beat.idle_age_s else 0.0,
        beat_age_s=beat_age_s,
    )


def dead(reason: str, beat: Beat) -> Health:
    """The health of an engine that will not come back."""
    return Health(status="DEAD", reason=reason, step=beat.step, running=beat.running, waiting=beat.waiting)
