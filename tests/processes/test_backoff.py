"""The pause before what has ended is started again."""

from __future__ import annotations

from aioengine.processes.backoff import Backoff


def test_it_doubles_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.failed(0.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.num_failures == 5


def test_a_long_life_begins_anew() -> None:
    backoff = Backoff(0.5, 30.0, steady_s=60.0)
    assert [backoff.failed(lived_s) for lived_s in (0.0, 60.0, 61.0, 1.0)] == [0.5, 1.0, 0.5, 1.0]
    assert backoff.num_failures == 2


def test_a_life_is_long_by_the_pause_before_it() -> None:
    backoff = Backoff(0.5, 30.0)
    assert [backoff.failed(lived_s) for lived_s in (0.0, 9.0, 21.0)] == [0.5, 1.0, 0.5]
