"""A served engine, a front end that behaves and uses it all the while, and peers that do not."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from unittest import mock

import anyio
import msgspec
import zmq
from integrity import check_integrity
from transport.life_scripts.serving import served
from transport.wire_samples import Sample, frames_of, int32
from waiting import until

from aioengine import Engine
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import RowSampling
from aioengine.scheduler.sequence import Request
from aioengine.testing import sample_hash
from aioengine.text.tokenizer import Tokenizer
from aioengine.transport import wire
from aioengine.transport.channel import Channel, Monitor
from aioengine.transport.link import NEVER_MS
from aioengine.transport.security import ClientKeys
from aioengine.transport.server import EngineServer, Session
from aioengine.transport.wire import Attached, Fault, Reader, WireMessage, Writer
from doubles.fake_executor import FakeExecutor

VOCAB_SIZE = 2048
PATIENCE_S = 30

_load_once = functools.cache(Tokenizer.load)


def expected_tokens(prompt: Sequence[int], count: int, *, seed: int) -> list[int]:
    """What the device continues a prompt with, whoever else uses it."""
    ids, sampling = list(prompt), RowSampling(seed=seed)
    for _ in range(count):
        ids.append(sample_hash(ids, sampling, vocab_size=VOCAB_SIZE))
    return ids[len(prompt) :]


def params_of(**fields: Any) -> Any:
    return SamplingParams(**{"ignore_eos": True, "detokenize": False, **fields})


def pack_request(**fields: Any) -> msgspec.Raw:
    """A `Request` as it travels, with any values in its fields."""
    prompt = int32(1, 2, 3)
    plain = Request(request_id="r", prompt_token_ids=prompt, params=params_of(), seed=1, max_total_tokens=23)
    given = msgspec.structs.asdict(plain) | {"prompt_token_ids": prompt.tobytes()} | fields
    return msgspec.Raw(msgspec.msgpack.encode(list(given.values())))


def request(number: int, prompt: Sequence[int] = (1, 2, 3), *, max_tokens: int = 20, **fields: Any) -> wire.AddRequest:
    """A request, with these values in fields of the message, or of the `Request` in it."""
    message = {name: fields.pop(name) for name in wire.AddRequest.__struct_fields__ if name in fields}
    plain = {"prompt_token_ids": int32(*prompt).tobytes(), "seed": number, "max_total_tokens": len(prompt) + max_tokens}
    packed = pack_request(**plain | fields)
    return wire.AddRequest(**{"number": number, "request": packed, **message})


async def look_until(monitor: Monitor, is_so: Callable[[], Any]) -> None:
    """Let the monitor take in its socket's news until it is so."""
    with anyio.fail_after(PATIENCE_S):
        while not is_so():
            await monitor.look()


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class Peer:
    """A front end made of bare sockets, which says what it is told to."""

    def __init__(
        self,
        address: str,
        *,
        name: str = "peer",
        hwm: int = 1000,
        routing_id: bytes = b"",
        kinds: Any = wire.FromEngine,
        keys: ClientKeys | None = None,
    ) -> None:
        self.name = name
        self._kinds = kinds
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.linger = 0
        self._socket = self.context.socket(zmq.DEALER)
        self._socket.reconnect_ivl = NEVER_MS
        self._socket.rcvhwm = hwm
        if routing_id:
            self._socket.routing_id = routing_id
        if keys is not None:
            keys.apply_client(self._socket)
        self.monitor = Monitor(self._socket)
        self._socket.connect(address)
        self.channel = Channel(self._socket)
        self.writer = Writer()
        self.reader: Reader[Any] = Reader(kinds)
        self.numbers: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.news: list[WireMessage] = []

    def say(self, body: WireMessage) -> None:
        self.channel.send([self.writer.write(body)])

    def say_raw(self, frames: Sequence[bytes]) -> None:
        self.channel.send(frames)

    def say_what_is_no_message(self, body: WireMessage) -> None:
        """It will be refused as a whole, so that its number is that of the next one."""
        self.say(body)
        self.writer.number -= 1

    async def answer(self) -> WireMessage:
        """What the engine says first."""
        with anyio.fail_after(PATIENCE_S):
            (frames,) = await self.channel.receive(1)
        self.reader = Reader(self._kinds)
        body: WireMessage = self.reader.read(frames)
        return body

    async def join(self) -> Attached:
        self.say(wire.Attach(wire.PROTOCOL_VERSION, self.name))
        attached = await self.answer()
        assert isinstance(attached, Attached), attached
        return attached

    async def read(self) -> None:
        """Take in what the engine has sent; it comes whole and in order, or the reader raises."""
        for frames in await self.channel.receive():
            body = self.reader.read(frames)
            self.news.append(body)
            if isinstance(body, wire.StepOutputsMessage):
                for number, token in zip(body.numbers, body.token_ids, strict=True):
                    self.tokens.setdefault(number, []).append(token)
            if self.reader.due % 32 == 0:
                self.say(wire.Acknowledge(self.reader.due - 1))

    async def read_until(self, is_so: Callable[[], Any]) -> None:
        with anyio.fail_after(PATIENCE_S):
            while not is_so():
                await self.read()

    async def is_served(self, number: int) -> None:
        """A request of this number ends with the tokens that are due."""
        self.say(request(number))
        await self.read_until(lambda: number in self.ended)
        assert self.tokens[number] == expected_tokens([1, 2, 3], 20, seed=number)

    async def hears_the_end(self) -> Fault:
        """Read on to the engine's last words."""
        await self.read_until(lambda: self.news and isinstance(self.news[-1], wire.Shutdown))
        ending = self.news[-1]
        assert isinstance(ending, wire.Shutdown)
        return ending.fault

    @property
    def ended(self) -> dict[int, str]:
        """The sequences that have ended, and why: a reason, or an error's type."""
        ends: dict[int, str] = {}
        for body in self.news:
            if isinstance(body, wire.StepOutputsMessage):
                ends |= {ended.number: ended.finish_reason for ended in body.ended}
                ends |= {failed.number: failed.fault.kind for failed in body.failed}
        return ends

    @property
    def returned(self) -> dict[int, wire.Returned]:
        return {body.call_id: body for body in self.news if isinstance(body, wire.Returned)}

    def vanish(self) -> None:
        self.monitor.close()
        self.channel.close()
        self.context.destroy(linger=0)


class Siege:
    """What a test sees.

    Attributes:
        num_good: requests of the front end that behaves that have ended, with the right tokens.
    """

    good: Engine

    def __init__(self, server: EngineServer, executor: FakeExecutor) -> None:
        self.server = server
        self.executor = executor
        self.num_good = 0
        self.peers: list[Peer] = []

    def peer(self, **options: Any) -> Peer:
        peer = Peer(self.server.address, **options)
        self.peers.append(peer)
        return peer

    def let_all_go(self) -> None:
        """All peers vanish; idempotent."""
        for peer in self.peers:
            peer.vanish()

    @property
    def session(self) -> Session:
        """That of the peer, where there is one."""
        (session,) = (each for each in self.server.sessions.values() if each.name == "peer" and not each.is_over)
        return session

    @property
    def num_refused(self) -> int:
        return self.server.num_refused.total()

    @property
    def num_sessions(self) -> int:
        """That are not over, but for that of the front end that behaves."""
        return sum(not session.is_over for session in self.server.sessions.values()) - 1

    async def is_unharmed(self) -> None:
        """The server goes on: it has done with the peers' messages, and serves the one who behaves."""
        before = self.num_good
        await until(lambda: self.num_good >= before + 2)

    async def generate_always(self) -> None:
        for index in itertools.count():
            prompt = [index % 1000 + 1, 5, 9]
            output = await self.good.generate(prompt, max_tokens=12, seed=index, ignore_eos=True, detokenize=False)
            assert output.outputs[0].token_ids == expected_tokens(prompt, 12, seed=index)
            self.num_good += 1


@contextlib.asynccontextmanager
async def besieged(address: str, *, num_blocks: int = 512, **config: Any) -> AsyncIterator[Siege]:
    """A server on this loop with a good front end. At the end all peers go, and nothing of them must be left."""
    zmq.Frame(bytes(2**17), copy=False)  # with the first one pyzmq starts a thread that it keeps
    fds_before = num_fds()
    executor = FakeExecutor(vocab_size=VOCAB_SIZE, num_blocks=num_blocks, max_model_len=4096)
    with (
        # Loading the tokenizer is most of a start's time; what is refused on purpose need not be printed.
        mock.patch.object(Tokenizer, "load", lambda folder: copy.copy(_load_once(folder))),
        mock.patch.object(logging.getLogger("aioengine"), "propagate", False),
    ):
        async with served(address, executor, **{"heartbeat_interval_s": 0.05, **config}) as server:
            siege = Siege(server, executor)
            try:
                siege.good = await Engine.connect(server.address)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(siege.generate_always)
                    await until(lambda: siege.num_good)
                    yield siege
                    await siege.is_unharmed()
                    siege.let_all_go()
                    await until(lambda: len(server.sessions) == 1)
                    await siege.is_unharmed()
                    tasks.cancel_scope.cancel()
                await _assert_nothing_is_left(server)
                await siege.good.aclose()
                await until(lambda: not server.sessions)
            finally:
                siege.let_all_go()
    await until(lambda: num_fds() <= fds_before)


@contextlib.asynccontextmanager
async def joined(address: str, *, hwm: int = 1000, **config: Any) -> AsyncIterator[tuple[Siege, Peer]]:
    """`besieged`, with a peer that has a session."""
    async with besieged(address, **config) as siege:
        peer = siege.peer(hwm=hwm)
        await peer.join()
        yield siege, peer


async def _assert_nothing_is_left(server: EngineServer) -> None:
    core = server.core
    await until(lambda: not core._live and not core._in_flight)
    (session,) = server.sessions.values()
    assert not session.followers
    assert (session.num_unstarted, len(session.calls)) == (0, 0)
    check_integrity(core.scheduler)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.blocked) == (0, 0, 0)
    assert stats.free_blocks == stats.num_blocks
    assert core.death is None


def attach_frames(number: int = 0, version: int = wire.PROTOCOL_VERSION) -> list[bytes]:
    return frames_of(Sample("", wire.Attach(version, "x")), number)
