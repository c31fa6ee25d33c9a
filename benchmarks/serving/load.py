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

from aioengine.cli.bench import Range, Reads
from serving.events import EventCounter

Floats = NDArray[np.float64]

TEXT = """
a and are as at be big blue but by cat day dog fish fox from garden go good green had has he her hill his house in is it
lake like little moon not of old on one red river sea she small snow sun that the they time to tree two was we wind with
"""
WORDS = TEXT.split()
"""Each is a token or two in most vocabularies."""
KEEPALIVE_S = 2.0
"""An idle connection is used again for so long: servers close theirs after 5 s and more, and a request that meets the
closing is lost."""
READ_BYTES = 2**20


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and the requests that it gets.

    Attributes:
        url: of the API, such as http://127.0.0.1:8000/v1.
        prompt_tokens: about; prompts are so many common words, drawn anew for each.
        max_tokens: of an answer.
    """

    url: str
    model: str
    endpoint: Literal["chat", "completions"] = "chat"
    api_key: str | None = None
    prompt_tokens: int = 64
    max_tokens: Range = Range(64, 64)
    ignore_eos: bool = False

    @property
    def path(self) -> str:
        return self.url.rstrip("/") + ("/chat/completions" if self.endpoint == "chat" else "/completions")

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def bodies(self, seed: int) -> Iterator[bytes]:
        """Requests without an end, the same ones for a seed."""
        random = np.random.default_rng([seed, 2])
        while True:
            prompt = " ".join(random.choice(WORDS, self.prompt_tokens).tolist())
            body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
            body["max_tokens"] = int(random.integers(self.max_tokens.low, self.max_tokens.high, endpoint=True))
            if self.endpoint == "chat":
                body["messages"] = [{"role": "user", "content": prompt}]
            else:
                body["prompt"] = prompt
            if self.ignore_eos:
                body["ignore_eos"] = True
            yield msgspec.json.encode(body)


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """The course of one request. Times are seconds since the run began.

    Latencies count from when it was to be sent, not from when it was: whatever made the generator late would have kept
    a user waiting, too, and leaving that out flatters exactly the moments that were bad (coordinated omission).

    Attributes:
        scheduled_at: when it was to be sent. sent_at: when it was.
        kind: "shed" is a 503 with Retry-After. error: its kind.
        answered_at: when all of the answer was there.
    """

    scheduled_at: float
    sent_at: float = math.nan
    kind: Literal["ok", "shed", "error", "unfinished"] = "unfinished"
    error: str = ""
    answered_at: float = math.nan
    counter: EventCounter = dataclasses.field(default_factory=EventCounter)

    @property
    def reads(self) -> Reads:
        """The reads that brought text, with events for tokens."""
        return Reads(self.scheduled_at, self.counter.read_at, self.counter.num_events)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None: there was but one."""
        num_later = self.counter.num_tokens - 1
        return (self.counter.read_at[-1] - self.counter.read_at[0]) / num_later if num_later > 0 else None

    @property
    def longest_gap_s(self) -> float:
        """Between two reads that brought text; 0 where one brought all."""
        return float(self.reads.gaps_s.max(initial=0.0))


class Run(msgspec.Struct, kw_only=True):
    """A load, and what became of it.

    Attributes:
        num_dropped: requests that were not sent, since ``max_open`` were open.
        seconds: until the last answer was there.
        client_s, server_s: CPU time of the generator and of the server; nan without a ``server_pid``.
    """

    records: list[Record] = []
    num_dropped: int = 0
    seconds: float = 0.0
    client_s: float = 0.0
    server_s: float = math.nan


def cpu_s(pid: int | None) -> float:
    """CPU seconds so far of a process and of its children; nan without a pid."""
    if pid is None:
        return math.nan
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def arrival_times(rate: float, seconds: float, num_requests: int, seed: int) -> Floats:
    """Seconds from the beginning at which requests are sent: a Poisson process; at rate inf ``num_requests`` at 0."""
    if math.isinf(rate):
        return np.zeros(num_requests)
    random = np.random.default_rng([seed, 1])
    # Given their number, the arrivals of a Poisson process are spread uniformly.
    return np.sort(random.random(random.poisson(rate * seconds))) * seconds


async def generate(
    target: Target,
    times: Floats,
    *,
    seed: int = 0,
    max_open: int = 4096,
    timeout_s: float = 120.0,
    linger_s: float = 30.0,
    server_pid: int | None = None,
) -> Run:
    """Send a request at each of these times, and record each one's course.

    Args:
        max_open: with so many open requests one more is not sent.
        timeout_s: for one answer.
        linger_s: for those that are open when the last one has been sent; then they are cut off, and unfinished.
        server_pid: whose CPU time counts.
    """
    run = Run()
    bodies = target.bodies(seed)
    # Prompts are drawn before the clock runs: drawing one takes longer than sending it.
    requests = [(float(at), next(bodies)) for at in times]
    async with _open_session(target, timeout_s) as session:
        before_s = time.process_time(), cpu_s(server_pid)
        begin = time.perf_counter()
        open_requests: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            for at, body in requests:
                delay = at - (time.perf_counter() - begin)
                if delay > 0.0:
                    await asyncio.sleep(delay)
                if len(open_requests) >= max_open:
                    run.num_dropped += 1
                    continue
                record = Record(at)
                run.records.append(record)
                task = group.create_task(_send(session, target.path, body, record, begin))
                open_requests.add(task)
                task.add_done_callback(open_requests.discard)
            if open_requests:
                await asyncio.wait(open_requests, timeout=linger_s)
            for task in list(open_requests):
                task.cancel()
        run.seconds = time.perf_counter() - begin
        run.client_s, run.server_s = time.process_time() - before_s[0], cpu_s(server_pid) - before_s[1]
    return run


async def _send(session: aiohttp.ClientSession, url: str, body: bytes, record: Record, begin: float) -> None:
    """Send one request and read all of its answer."""
    record.sent_at = time.perf_counter() - begin
    counter = record.counter
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                await response.read()
                is_shed = response.status == 503 and "Retry-After" in response.headers
                record.kind, record.error = ("shed", "") if is_shed else ("error", f"status {response.status}")
            elif not response.content_type.startswith("text/event-stream"):
                record.kind, record.error = "error", f"an answer in {response.content_type}"
            else:
                async for data in response.content.iter_any():
                    counter.feed(data, time.perf_counter() - begin)
                counter.finish()
                record.error = _name_fault(counter)
                record.kind = "error" if record.error else "ok"
    except TimeoutError:
        record.kind, record.error = "error", "timeout"
    except (aiohttp.ClientError, OSError) as error:
        record.kind, record.error = "error", type(error).__name__
    record.answered_at = time.perf_counter() - begin


def _name_fault(counter: EventCounter) -> str:
    if counter.error is not None:
        return "error event"
    if not counter.is_done:
        return "no [DONE]"
    return "" if counter.read_at else "no text"


def _open_session(target: Target, timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=target.headers,
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=READ_BYTES,
    )


async def find_model(target: Target) -> Target:
    """The target with the first model that its server lists."""
    async with (
        _open_session(target, 30.0) as session,
        session.get(target.url.rstrip("/") + "/models") as response,
    ):
        response.raise_for_status()
        return msgspec.structs.replace(target, model=str((await response.json())["data"][0]["id"]))
