"""An open-loop load on a server that speaks OpenAI's API: requests go out when their time has come, and no later.

Nothing waits for an answer before it sends the next request: a slow server gets no easier load by being slow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from aioengine.cli.load import Range, Reads
from serving.events import EventCounter

Floats = NDArray[np.float64]

TEXT = """
a and are as at be big blue but by cat day dog fish fox from garden go good green had has he her hill his house in is it
lake like little moon not of old on one red river sea she small snow sun that the they time to tree two was we wind with
"""
WORDS = TEXT.split()
"""Of a token or two in most vocabularies."""
KEEPALIVE_S = 2.0
"""An idle connection is used again for so long: servers close theirs after 5 s and more, and a request that meets the
closing is lost."""
SAMPLE_S = 0.1
"""Between two looks at the CPU clocks."""
READ_BYTES = 2**20


class Phase(msgspec.Struct, frozen=True):
    """So many requests a second on average, for so long; at an infinite rate ``num_requests`` come at its beginning."""

    rate: float
    seconds: float
    num_requests: int = 0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where to send requests, and which ones.

    Attributes:
        url: of the API, such as http://127.0.0.1:8000/v1.
        prompt_tokens: about; prompts are so many common words, drawn anew for each.
        max_tokens: of an answer.
        asks_usage: for a usage block at the end, without which tokens are as many as events.
    """

    url: str
    model: str
    endpoint: Literal["chat", "completions"] = "chat"
    api_key: str | None = None
    prompt_tokens: int = 64
    max_tokens: Range = Range(64, 64)
    ignore_eos: bool = False
    asks_usage: bool = True

    @property
    def path(self) -> str:
        return self.url.rstrip("/") + ("/chat/completions" if self.endpoint == "chat" else "/completions")

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **authorization(self.api_key)}

    def bodies(self, seed: int) -> Iterator[bytes]:
        """Requests without an end, the same ones for a seed."""
        random = np.random.default_rng([seed, 2])
        while True:
            prompt = " ".join(random.choice(WORDS, self.prompt_tokens).tolist())
            asked: dict[str, Any] = {"model": self.model, "stream": True}
            asked["max_tokens"] = int(random.integers(self.max_tokens.low, self.max_tokens.high, endpoint=True))
            if self.endpoint == "chat":
                asked["messages"] = [{"role": "user", "content": prompt}]
            else:
                asked["prompt"] = prompt
            if self.ignore_eos:
                asked["ignore_eos"] = True
            if self.asks_usage:
                asked["stream_options"] = {"include_usage": True}
            yield msgspec.json.encode(asked)


Kind = Literal["ok", "shed", "error", "unfinished"]


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """How one request went. Times are seconds since the run began.

    Latencies count from when it was to be sent, not from when it was: whatever made the generator late would have kept
    a user waiting, too, and leaving that out flatters exactly the moments that were bad (coordinated omission).

    Attributes:
        scheduled_at: when it was to be sent. sent_at: when it was.
        kind: "shed" is a 503 with Retry-After. error: says what kind of one.
        answered_at: when all of the answer was there.
    """

    scheduled_at: float
    sent_at: float = math.nan
    kind: Kind = "unfinished"
    error: str = ""
    answered_at: float = math.nan
    counter: EventCounter = dataclasses.field(default_factory=EventCounter)

    @property
    def lateness_s(self) -> float:
        return self.sent_at - self.scheduled_at

    @property
    def reads(self) -> Reads:
        """The reads that brought text, with events for tokens."""
        return Reads(self.scheduled_at, self.counter.read_at, self.counter.num_events)

    @property
    def answer_s(self) -> float:
        """To the end of the answer, whatever it was."""
        return self.answered_at - self.scheduled_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None: there was but one."""
        num_later = self.counter.num_tokens - 1
        return (self.counter.read_at[-1] - self.counter.read_at[0]) / num_later if num_later > 0 else None

    @property
    def longest_gap_s(self) -> float:
        """Between two reads that brought text; 0 where one brought all."""
        return float(self.reads.gaps_s.max(initial=0.0))


class CpuSamples(msgspec.Struct):
    """CPU seconds so far, now and then: of the generator, of the server, and of everybody on the cores of both."""

    at: list[float] = []
    client: list[float] = []
    server: list[float] = []
    cores: list[float] = []

    def between(self, begin: float, end: float) -> tuple[float, float, float]:
        """CPU seconds of generator, server and everybody in this time; nan where nobody looked."""
        if len(self.at) < 2:
            return math.nan, math.nan, math.nan
        edges = [np.interp([begin, end], self.at, line) for line in (self.client, self.server, self.cores)]
        client, server, cores = (float(line[1] - line[0]) for line in edges)
        return client, server, cores


class Run(msgspec.Struct, kw_only=True):
    """All that was seen of a load.

    Attributes:
        dropped_at: when requests were to be sent that were not, since ``max_open`` were open.
        open_at: how many requests were open, whenever the CPU clocks were looked at.
    """

    records: list[Record] = []
    dropped_at: list[float] = []
    cpu: CpuSamples = msgspec.field(default_factory=CpuSamples)
    num_open: list[int] = []


class CpuClock:
    """CPU time of a process and of the children that it has by now; without a pid nan."""

    def __init__(self, pid: int | None) -> None:
        self._processes: list[psutil.Process] = []
        if pid is not None:
            process = psutil.Process(pid)
            self._processes = [process, *process.children(recursive=True)]
        self._seconds = [0.0] * len(self._processes)

    def read(self) -> float:
        for i, process in enumerate(self._processes):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue  # it keeps what it had
            self._seconds[i] = times.user + times.system
        return sum(self._seconds) if self._processes else math.nan


def busy_s(cores: tuple[int, ...]) -> float:
    """CPU seconds so far of everybody on these cores; of none nan."""
    if not cores:
        return math.nan
    times = psutil.cpu_times(percpu=True)
    return float(sum(sum(times[core]) - times[core].idle - getattr(times[core], "iowait", 0.0) for core in cores))


def authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def arrival_times(phases: list[Phase], seed: int) -> Floats:
    """Seconds from the beginning at which requests are sent: a Poisson process whose rate changes with the phases."""
    random = np.random.default_rng([seed, 1])
    times, begin = [], 0.0
    for phase in phases:
        if math.isinf(phase.rate):
            times.append(np.full(phase.num_requests, begin))
        else:
            # Given their number, the arrivals of a Poisson process are spread uniformly.
            count = random.poisson(phase.rate * phase.seconds)
            times.append(begin + np.sort(random.random(count)) * phase.seconds)
        begin += phase.seconds
    return np.concatenate(times)


async def generate(
    target: Target,
    times: Floats,
    *,
    seed: int = 0,
    max_open: int = 4096,
    timeout_s: float = 120.0,
    linger_s: float = 30.0,
    server_pid: int | None = None,
    cores: tuple[int, ...] = (),
) -> Run:
    """Send a request at each of these times, and note how each goes.

    Args:
        max_open: with so many open requests one more is not sent: it is counted as dropped, here.
        timeout_s: for one answer.
        linger_s: for those that are open when the last one has been sent; then they are cut off, and unfinished.
        server_pid, cores: whose CPU time is to be looked at, and where.
    """
    run = Run()
    bodies = target.bodies(seed)
    # Prompts are drawn before the clock runs: drawing one takes longer than sending it.
    requests = [(float(at), next(bodies)) for at in times]
    async with open_session(target, timeout_s) as session:
        clock = Clock(time.perf_counter())
        open_requests: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(_sample(run, clock, CpuClock(server_pid), cores, open_requests))
            for at, body in requests:
                delay = at - clock.now()
                if delay > 0.0:
                    await asyncio.sleep(delay)
                if len(open_requests) >= max_open:
                    run.dropped_at.append(at)
                    continue
                record = Record(at)
                run.records.append(record)
                task = group.create_task(_send(session, target.path, body, record, clock))
                open_requests.add(task)
                task.add_done_callback(open_requests.discard)
            if open_requests:
                await asyncio.wait(open_requests, timeout=linger_s)
            for task in list(open_requests):
                task.cancel()
            sampling.cancel()
    return run


class Clock:
    """Seconds since a run began."""

    def __init__(self, begin: float) -> None:
        self._begin = begin

    def now(self) -> float:
        return time.perf_counter() - self._begin


async def _send(session: aiohttp.ClientSession, url: str, body: bytes, record: Record, clock: Clock) -> None:
    """Send one request and read all of its answer."""
    record.sent_at = clock.now()
    counter = record.counter
    try:
        async with session.post(url, data=body) as response:
            if response.status != 200:
                await response.read()
                is_shed = response.status == 503 and "Retry-After" in response.headers
                record.kind, record.error = ("shed", "") if is_shed else ("error", f"status {response.status}")
            elif not response.content_type.startswith("text/event-stream"):
                record.kind, record.error = "error", f"an answer in {response.content_type}"
            else:
                async for data in response.content.iter_any():
                    counter.feed(data, clock.now())
                counter.finish()
                record.error = _what_is_wrong(counter)
                record.kind = "error" if record.error else "ok"
    except TimeoutError:
        record.kind, record.error = "error", "timeout"
    except (aiohttp.ClientError, OSError) as error:
        record.kind, record.error = "error", type(error).__name__
    record.answered_at = clock.now()


def _what_is_wrong(counter: EventCounter) -> str:
    if counter.error is not None:
        return "error event"
    if not counter.is_done:
        return "no [DONE]"
    return "" if counter.read_at else "no text"


async def _sample(
    run: Run, clock: Clock, server: CpuClock, cores: tuple[int, ...], open_requests: set[asyncio.Task[None]]
) -> None:
    def look() -> None:
        run.cpu.at.append(clock.now())
        run.cpu.client.append(time.process_time())
        run.cpu.server.append(server.read())
        run.cpu.cores.append(busy_s(cores))
        run.num_open.append(len(open_requests))

    try:
        while True:
            look()
            await asyncio.sleep(SAMPLE_S)
    finally:
        look()


def open_session(target: Target, timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=target.headers,
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=READ_BYTES,
    )


async def first_model(url: str, api_key: str | None) -> str:
    """The name of the first model that a server lists."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0)) as session,
        session.get(url.rstrip("/") + "/models", headers=authorization(api_key)) as response,
    ):
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])
