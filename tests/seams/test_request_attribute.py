"""A request attribute that nobody has thought of: from a caller's keyword to the scheduler, here and over the wire.

It is a field of two structs, the options of a call and the request, and no other code knows it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import pytest
from msgspec import Meta
from transport.life_scripts.serving import served
from transport.siege import pack_request
from waiting import until

from aioengine import Engine, InvalidRequest
from aioengine.core.engine_core import EngineCore
from aioengine.frontend.call_options import CallOptions
from aioengine.scheduler.sequence import Request
from aioengine.transport import wire
from aioengine.transport.server import EngineServer
from doubles.fake_executor import FakeExecutor

PROMPT = [5, 6, 7]
MAX_NOTE_CHARS = 8

Note = Annotated[str, Meta(max_length=MAX_NOTE_CHARS)]


class NotedRequest(Request, frozen=True, kw_only=True):
    note: Note = ""


class NotedOptions(CallOptions, frozen=True, kw_only=True):
    request_type: ClassVar[type[Request]] = NotedRequest
    note: Note | None = None


class NotedEngine(Engine):
    options_type = NotedOptions


class NotedServer(EngineServer):
    request_type = NotedRequest


def notes_at(core: EngineCore) -> list[str]:
    """The notes that the scheduler has, in the order in which their requests came."""
    return [getattr(sequence.request, "note", "none") for sequence in core.scheduler.sequences()]


async def test_it_reaches_the_scheduler_of_this_process() -> None:
    async with NotedEngine(executor=FakeExecutor(is_manual=True)) as engine:
        core = engine._here().core
        assert isinstance(core, EngineCore)
        async with engine.stream(PROMPT, note="urgent"), engine.stream(PROMPT):  # type: ignore[call-arg]
            assert notes_at(core) == ["urgent", ""]


@pytest.fixture
def socket(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('s')}/engine"


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_it_reaches_the_scheduler_of_an_engine_behind_sockets(scheme: str, socket: str) -> None:
    address = socket if scheme == "ipc" else "tcp://127.0.0.1:*"
    async with (
        served(address, FakeExecutor(is_manual=True), kind=NotedServer) as server,
        await NotedEngine.connect(server.address) as engine,
        engine.stream(PROMPT, note="urgent"),  # type: ignore[call-arg]
        engine.stream(PROMPT),
    ):
        await until(lambda: notes_at(server.core) == ["urgent", ""])


async def test_an_engine_that_does_not_know_it_serves_the_request_without_it(socket: str) -> None:
    async with (
        served(socket, FakeExecutor()) as server,
        await NotedEngine.connect(server.address) as engine,
    ):
        output = await engine.generate(PROMPT, max_tokens=3, ignore_eos=True, note="urgent")  # type: ignore[call-arg]
        assert len(output.outputs[0].token_ids) == 3


async def test_a_bad_one_is_refused_at_the_call_and_on_the_wire() -> None:
    async with NotedEngine(executor=FakeExecutor()) as engine:
        with pytest.raises(InvalidRequest, match="note") as refused:
            engine.stream(PROMPT, note="x" * (MAX_NOTE_CHARS + 1))  # type: ignore[call-arg]
        assert refused.value.param == "note"
    with pytest.raises(InvalidRequest, match=f"length <= {MAX_NOTE_CHARS}"):
        wire.unpack_request(pack_request(note="x" * (MAX_NOTE_CHARS + 1)), NotedRequest)
