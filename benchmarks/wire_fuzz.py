"""Does a broken or hostile message do harm? Valid ones, mutated by the million, for every reader and a live server.

    python benchmarks/wire_fuzz.py [--frames 1000000] [--seed 1] [--live-share 0.05]

Each message begins as a valid one (`tests/transport/wire_samples.py`) and is mutated once or a few times: bits flipped,
frames cut, joined, inserted, doubled, dropped or exchanged, random bytes, lengths declared that nothing follows, deep
nesting. Most go to the readers of all four directions and to what makes use of what they accept. The live share goes
through sockets to an engine server, in sessions of peers with bare sockets, while a front end that behaves generates
and compares every token. Harm is anything but a refusal: another exception, a reader that has moved on from what was
due, a server that is gone or holds on to something, a wrong token, memory that grows. Any of it: exit code 1.
"""

# ruff: noqa: E402 - some imports need a path that is set here
from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil

_HERE, _TESTS = Path(__file__).resolve().parent, Path(__file__).resolve().parents[1] / "tests"
# Not this folder: a benchmark in it has the name of the tests' folder, and would be taken for it.
sys.path[:] = [str(_TESTS), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]

from transport.siege import Siege, besieged, request
from transport.wire_samples import CONTROLS, DIRECTIONS, FROM_FRONT_END, Sample, frames_of

from aioengine.core import control as c
from aioengine.errors import InvalidRequest, WireError
from aioengine.scheduler.sequence import Request
from aioengine.transport import handshake, wire
from aioengine.transport.wire import OutOfTurn, Reader, WireMessage, to_error

WARM_UP = 5_000
MAX_GROWTH_MIB = 64.0
SLOW_S = 0.5
SESSION = 400
"""Messages of one live session."""
BATCH = 50
"""Of those, sent before others get a turn."""

HARMLESS = (c.IsSleeping, c.SupportedTasks, c.DropWeights, c.CollectiveRpc, c.ResetPrefixCache)
"""Control calls that a front end may make without others noticing; the live server hears no others."""

Frames = list[bytes]


class Mutator:
    """Makes broken messages of valid ones, the same for the same seed."""

    def __init__(self, rng: random.Random, pool: list[Frames]) -> None:
        self._rng = rng
        self._pool = pool
        self._mutations: list[Callable[[Frames], None]] = [
            self._flip, self._flip, self._flip, self._cut, self._cut, self._splice, self._insert, self._double,
            self._drop, self._exchange, self._scramble, self._declare, self._declare, self._nest, self._append,
        ]  # fmt: skip

    def __call__(self, frames: Frames) -> Frames:
        """A broken copy; now and then it is still a valid message, or the same."""
        frames = list(frames)
        for _ in range(self._rng.choice((1, 1, 1, 2, 4))):
            self._rng.choice(self._mutations)(frames)
        return frames

    def _place(self, frames: Frames) -> int:
        # The header is where most can go wrong.
        return 0 if self._rng.random() < 0.7 or not frames else self._rng.randrange(len(frames))

    def _change(self, frames: Frames, change: Callable[[bytearray], Any]) -> None:
        if frames:
            place = self._place(frames)
            frame = bytearray(frames[place])
            change(frame)
            frames[place] = bytes(frame)

    def _flip(self, frames: Frames) -> None:
        def flip(frame: bytearray) -> None:
            for _ in range(self._rng.choice((1, 1, 2, 8))):
                if frame:
                    frame[self._rng.randrange(min(len(frame), 400))] ^= 1 << self._rng.randrange(8)

        self._change(frames, flip)

    def _cut(self, frames: Frames) -> None:
        self._change(frames, lambda frame: frame.__delitem__(slice(self._rng.randrange(len(frame) + 1), None)))

    def _append(self, frames: Frames) -> None:
        self._change(frames, lambda frame: frame.extend(self._rng.randbytes(self._rng.randrange(1, 9))))

    def _scramble(self, frames: Frames) -> None:
        def scramble(frame: bytearray) -> None:
            frame[:] = self._rng.randbytes(self._rng.choice((0, 1, 3, 40)))

        self._change(frames, scramble)

    def _splice(self, frames: Frames) -> None:
        """The beginning of one header and the end of another."""
        other = self._rng.choice(self._pool)[0]

        def splice(frame: bytearray) -> None:
            frame[self._rng.randrange(len(frame) + 1) :] = other[self._rng.randrange(len(other)) :]

        self._change(frames, splice)

    def _declare(self, frames: Frames) -> None:
        """A text, some bytes, an array or a map of a length that nothing follows."""
        kind = self._rng.choice((b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"))
        length = self._rng.choice((2**16, 2**24, 2**31 - 1, 2**32 - 1)).to_bytes(4, "big")

        def declare(frame: bytearray) -> None:
            place = self._rng.randrange(len(frame) + 1)
            frame[place : place + 5] = kind + length

        self._change(frames, declare)

    def _nest(self, frames: Frames) -> None:
        def nest(frame: bytearray) -> None:
            place = self._rng.randrange(len(frame) + 1)
            frame[place:place] = self._rng.choice((b"\x91", b"\x81\xa0", b"\xdc\xff\xff")) * self._rng.choice((3, 2000))

        self._change(frames, nest)

    def _insert(self, frames: Frames) -> None:
        frames.insert(self._rng.randrange(len(frames) + 1), self._rng.choice(self._rng.choice(self._pool)))

    def _double(self, frames: Frames) -> None:
        if frames:
            frames.insert(place := self._rng.randrange(len(frames)), frames[place])

    def _drop(self, frames: Frames) -> None:
        if frames:
            del frames[self._rng.randrange(len(frames))]

    def _exchange(self, frames: Frames) -> None:
        self._rng.shuffle(frames)


class Tally:
    """What has become of the messages, and what harm they did."""

    def __init__(self) -> None:
        self.num_messages = self.num_frames = 0
        self.num_good = 0
        """Requests of the front end that behaves, all of which brought the right tokens."""
        self.outcomes: Counter[str] = Counter()
        self.harm: list[str] = []
        self.slowest_s = 0.0

    def note(self, frames: Frames, outcome: str) -> None:
        self.num_messages += 1
        self.num_frames += len(frames)
        self.outcomes[outcome] += 1

    def note_harm(self, what: str, frames: Frames) -> None:
        shown = [frame[:200].hex() for frame in frames[:8]]
        self.harm.append(f"{what}\n    frames (hex): {shown}")


def kind_of(error: WireError) -> str:
    """Why it was refused, without the particulars."""
    if isinstance(error, OutOfTurn):
        return "refused: out of turn"
    text = str(error)
    for part, kind in (
        ("malformed message", "refused: malformed"),
        ("one is a message", "refused: no frame, or several"),
        ("bytes, which are no", "refused: an output of odd size"),
    ):
        if part in text:
            return kind
    return "refused: else"


def use(body: WireMessage) -> None:
    """What is done with a message that was accepted.

    Raises:
        WireError, InvalidRequest: it makes no sense after all.
    """
    if isinstance(body, wire.AddRequest):
        wire.unpack_request(body.request, Request)
    elif isinstance(body, wire.CallControl):
        wire.unpack_control(body.control)
    elif isinstance(body, wire.StepOutputsMessage):
        for failed in body.failed:
            to_error(failed.fault)
    else:
        fault = getattr(body, "fault", None)
        if fault is not None:
            to_error(fault)


class Readers:
    """All four directions, read without sockets."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        self._rng = rng
        self._tally = tally
        self._lanes = []
        for kinds, samples in DIRECTIONS.values():
            pool = [frames_of(sample) for sample in samples]
            reader: Reader[WireMessage] = Reader(kinds)
            self._lanes.append((reader, pool, Mutator(rng, pool)))
        self._hellos = [frames_of(sample) for sample in DIRECTIONS["handshake_from_engine"][1]]

    def feed(self, count: int) -> None:
        """So many messages; now and then a valid one between, which must be read."""
        for index in range(count):
            reader, pool, mutate = self._lanes[index % len(self._lanes)]
            frames = mutate(self._rng.choice(pool))
            begin = time.perf_counter()
            self._tally.note(frames, self._read(reader, frames))
            took_s = time.perf_counter() - begin
            self._tally.slowest_s = max(self._tally.slowest_s, took_s)
            if index % 97 == 0:
                self._check(reader, self._rng.choice(pool))
                self._shake_hands(frames)

    def _read(self, reader: Reader[WireMessage], frames: Frames) -> str:
        reader.due = 0
        try:
            body = reader.read(frames)
        except WireError as error:
            if reader.due != 0:
                self._tally.note_harm("a refused message was counted", frames)
            return kind_of(error)
        except BaseException:
            self._tally.note_harm(f"a crash in a reader: {traceback.format_exc()}", frames)
            return "CRASHED"
        return self._use(body, frames)

    def _use(self, body: WireMessage, frames: Frames) -> str:
        try:
            use(body)
        except WireError as error:
            return kind_of(error)
        except InvalidRequest:
            return "accepted: a bad request, which fails alone"
        except BaseException:
            self._tally.note_harm(f"a crash with a {type(body).__name__}: {traceback.format_exc()}", frames)
            return "CRASHED"
        return "accepted"

    def _check(self, reader: Reader[WireMessage], frames: Frames) -> None:
        reader.due = 0
        try:
            reader.read(frames)
        except WireError as error:
            self._tally.note_harm(f"a valid message was refused: {error}", frames)

    def _shake_hands(self, frames: Frames) -> None:
        """A stranger's broken message, and an engine's, to one who waits for engines."""
        init = handshake.Init(wire.PROTOCOL_VERSION)
        machine = handshake.Welcome(
            name="engine 0", make_init=lambda: init, token="secret", now=0.0, start_timeout_s=9.0
        )
        try:
            for peer in (b"stranger", b"engine"):
                machine.on_message(peer, frames)
                for hello in self._hellos[:2]:
                    machine.on_message(peer, hello)
                machine.on_message(peer, frames)
        except BaseException:
            self._tally.note_harm(f"a crash in a handshake: {traceback.format_exc()}", frames)


class Live:
    """Sessions of peers that send broken messages to a server through sockets."""

    def __init__(self, rng: random.Random, tally: Tally, siege: Siege) -> None:
        self._rng = rng
        self._tally = tally
        self._siege = siege
        self._samples = _live_samples()
        self._mutate = Mutator(rng, [frames_of(sample) for sample in self._samples])
        self.num_sessions = 0
        self.num_expected = 0
        """Messages that the server is to refuse, as the same reader here has refused them."""
        self.num_unsure = 0
        """Acknowledgements: it depends on what the server had sent by then whether it refuses them."""

    async def feed(self, count: int) -> None:
        while count > 0:
            count -= await self._one_session(min(count, SESSION))
            # The fake device keeps all that it was told.
            self._siege.executor.plans.clear()
            self._siege.executor.events.clear()

    async def _one_session(self, count: int) -> int:
        peer = self._siege.peer(name="fuzz")
        await peer.join()
        self.num_sessions += 1
        twin: Reader[WireMessage] = Reader(wire.FromFrontEnd)  # decides what the server's does
        twin.due = 1
        sent = 0
        while sent < count:
            frames = self._mutate(frames_of(self._rng.choice(self._samples), twin.due)) or [b""]
            peer.say_raw(frames)
            sent += 1
            is_over, outcome = self._outcome(twin, frames)
            self._tally.note(frames, f"live: {outcome}")
            if is_over:
                break
            if sent % BATCH == 0:
                await asyncio.sleep(0)
        peer.writer.number = twin.due
        if not is_over:
            peer.say(request(2**30, max_tokens=3))
            await peer.read_until(lambda: 2**30 in peer.ended)
        await self._heard_out(is_over)
        peer.vanish()
        self._siege.peers.remove(peer)
        return sent

    async def _heard_out(self, is_over: bool) -> None:
        """Wait until the server has taken in what was sent: the session's last request was answered, or it is over."""
        with anyio.move_on_after(30):
            while is_over and self._siege.num_sessions:  # noqa: ASYNC110 - the server sets no event for this
                await asyncio.sleep(0)
        expected, refused = self.num_expected, self._siege.num_refused
        if not expected <= refused <= expected + self.num_unsure:
            self._tally.note_harm(f"{expected} (and {self.num_unsure}) were to be refused, and {refused} were", [])
        self.num_expected, self.num_unsure = refused, 0

    def _outcome(self, twin: Reader[WireMessage], frames: Frames) -> tuple[bool, str]:
        try:
            body = twin.read(frames)
        except WireError as error:
            self.num_expected += 1
            return isinstance(error, OutOfTurn) and error.is_gap, kind_of(error)
        if isinstance(body, wire.Attach):
            self.num_expected += 1
            return False, "refused: not now"
        if isinstance(body, wire.Acknowledge):
            self.num_unsure += 1
            return False, "accepted, or refused: an acknowledgement"
        return isinstance(body, wire.Detach), "accepted"


def _live_samples() -> list[Sample]:
    safe = {f"control_{type(control).__name__}" for control in CONTROLS if isinstance(control, HARMLESS)}
    left_out = {"acknowledge", "stage"}  # the first depends on what the server has sent
    return [
        sample
        for sample in FROM_FRONT_END
        if sample.name not in left_out and (not sample.name.startswith("control_") or sample.name in safe)
    ]


async def fuzz_live(rng: random.Random, tally: Tally, count: int) -> Live | None:
    """Send so many messages to a live server. What `besieged` finds at the end is harm, too."""
    live: Live | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            async with besieged(f"ipc://{folder}/engine") as siege:
                live = Live(rng, tally, siege)
                await live.feed(count)
                tally.num_good += siege.num_good
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            raise
        tally.note_harm(f"the server, or the one who behaves, was harmed: {traceback.format_exc()}", [])
    return live


class Report(msgspec.Struct):
    """What a run has found."""

    tally: Any
    seed: int
    duration_s: float
    messages_a_second: float
    rss_before_mib: float
    rss_after_mib: float


def fuzz(num_messages: int, *, seed: int, live_share: float) -> Report:
    """Run it all."""
    rng, tally = random.Random(seed), Tally()
    readers = Readers(rng, tally)
    readers.feed(min(WARM_UP, num_messages // 4))
    num_live = round(live_share * num_messages)
    asyncio.run(fuzz_live(rng, tally, num_live // 4))
    gc.collect()
    process = psutil.Process()
    before_mib, begin = process.memory_info().rss / 2**20, time.perf_counter()
    num_before = tally.num_messages
    asyncio.run(fuzz_live(rng, tally, num_live - num_live // 4))
    readers.feed(num_messages - tally.num_messages)
    duration_s = time.perf_counter() - begin
    gc.collect()
    after_mib = process.memory_info().rss / 2**20
    if after_mib - before_mib > MAX_GROWTH_MIB:
        tally.note_harm(f"memory grew from {before_mib:.0f} to {after_mib:.0f} MiB", [])
    if tally.slowest_s > SLOW_S:
        tally.note_harm(f"a message took {tally.slowest_s:.2f} s", [])
    rate = (tally.num_messages - num_before) / duration_s
    return Report(tally, seed, duration_s, rate, before_mib, after_mib)


def print_report(report: Report) -> None:
    tally = report.tally
    print(f"seed {report.seed}: {tally.num_messages:,} messages of {tally.num_frames:,} frames")
    for outcome, count in sorted(tally.outcomes.items()):
        print(f"  {count:>10,}  {outcome}")
    print(f"{tally.num_good:,} requests of the front end that behaves, each token right")
    print(f"{report.messages_a_second:,.0f} messages a second, {report.duration_s:.1f} s after warming up")
    print(f"the slowest to read took {1000 * tally.slowest_s:.1f} ms")
    print(f"memory {report.rss_before_mib:.0f} MiB after warming up, {report.rss_after_mib:.0f} MiB at the end")
    print(f"harm: {len(tally.harm) or 'none'}")
    for harm in tally.harm[:20]:
        print(f"- {harm}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=100_000, help="messages in all, each of one frame or more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--live-share", type=float, default=0.05, help="how many of them go to a live server")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    logging.getLogger("aioengine").setLevel(logging.CRITICAL)
    report = fuzz(options.frames, seed=options.seed, live_share=options.live_share)
    print_report(report)
    if options.json is not None:
        figures = msgspec.structs.asdict(report) | {"tally": vars(report.tally)}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    return 1 if report.tally.harm else 0


if __name__ == "__main__":
    sys.exit(main())
