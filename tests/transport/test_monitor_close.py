"""A monitor that is closed never waits for ZMQ's thread, whatever that has to tell at this moment."""

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from aioengine.transport.channel import Monitor


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        context.linger = 0
        yield context


async def test_zmq_is_told_to_stop_while_somebody_can_still_hear_its_news(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = context.socket(zmq.PUSH)
    monitor = Monitor(watched)
    news = monitor._channel.socket
    was_heard: list[bool] = []
    stop = type(watched).disable_monitor

    def note(socket: Any) -> None:
        was_heard.append(not news.closed)
        stop(socket)

    monkeypatch.setattr(type(watched), "disable_monitor", note)

    monitor.close()
    monitor.close()

    assert was_heard == [True]
    assert news.closed
    watched.close()
