"""The process above several HTTP servers: what it makes of a server that says nothing, or ends while it is asked."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import anyio
import pytest
from server.test_group_numbers import counter
from server.test_siblings import SETTINGS
from waiting import Tasks, turns

from aioengine.server.group.server_process import STALL_TIMEOUT_S, Hub, ServerProcess
from aioengine.server.group.siblings import (
    Counted,
    Question,
    ReadNumbers,
    ServerGroup,
    decode_families,
    encode_families,
)

pytestmark = pytest.mark.virtual_clock


def make_hub() -> Hub:
    return Hub(None, "vllm:", lambda: ServerGroup(2, 2))


async def test_a_server_is_given_up_when_it_says_nothing_and_not_for_what_its_parent_has_slept() -> None:
    server = ServerProcess(SETTINGS, make_hub())
    scope = anyio.CancelScope()
    async with Tasks() as tasks:
        watching = tasks.start(server._watch(scope))
        await anyio.sleep(10 * STALL_TIMEOUT_S)
        assert not scope.cancel_called, "before it serves it has another deadline"
        server._take(Counted(b"\x90"))
        asyncio.get_running_loop()._now += 10 * STALL_TIMEOUT_S  # type: ignore[attr-defined]  # as by SIGSTOP
        await turns(5)
        assert not scope.cancel_called
        server._take(Counted(b"\x90"))  # what lay in the socket
        heard_at = anyio.current_time()
        await tasks.end(watching)
        assert scope.cancel_called
        assert STALL_TIMEOUT_S < anyio.current_time() - heard_at <= 1.5 * STALL_TIMEOUT_S
        assert "has said nothing for 30 s" in server.describe_exit()


class Answering:
    """In place of a server's `Peer`: answers that it has served so many requests, after a while."""

    def __init__(self, num_requests: int, delay_s: float) -> None:
        self.body, self.delay_s = encode_families([counter("requests", num_requests)]), delay_s

    async def ask(self, question: Question, timeout_s: float = math.inf) -> bytes:
        await anyio.sleep(self.delay_s)
        return self.body


async def test_what_an_ended_server_has_answered_before_is_not_counted_again() -> None:
    hub = make_hub()
    peers: Any = hub.peers
    peers.update({0: Answering(7, 0.1), 1: Answering(1, 0.9)})
    hub.numbers.note(0, decode_families(peers[0].body))
    async with Tasks() as tasks:
        scrape = tasks.start(hub.answer(1, ReadNumbers()))
        await anyio.sleep(0.5)
        del peers[0]
        hub.on_exit(0, True)
        (body,) = await tasks.end(scrape)
    assert isinstance(body, bytes)
    (requests,) = [each for each in decode_families(body) if each.name == "requests"]
    assert requests.samples[0].value == 8
