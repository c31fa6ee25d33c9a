"""From what a load saw to figures: percentiles, goodput, and how it went over time."""

from __future__ import annotations

import math
from array import array
from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.cli.load import Summary, summary_of
from serving.load import Record, Run

Floats = NDArray[np.float64]

MAX_LATENESS_MS = 10.0
"""Of a request in a hundred: a generator that sends later than that measures itself."""
MAX_BUSY = 0.9
"""Share of a core: above it the generator is slow to read what came."""


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must keep to be goodput.

    Attributes:
        stall_ms: of the longest gap between two reads. A mean forgives an answer that froze for seconds, and whoever
            reads it does not.
    """

    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0
    stall_ms: float = 500.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests that were to be sent in ``seconds`` seconds.

    Attributes:
        rate: requests/s that were to be sent on average; None: all at once.
        num_scheduled: requests that were to be sent, ``num_dropped`` included.
        num_dropped: not sent, since too many were open.
        num_unfinished: cut off at the end of the run.
        errors: how many of each kind; shed ones are none.
        requests_per_s: that were answered whole, by when they were sent.
        tokens_per_s: read in this time, whoever they belong to.
        tokens_per_event: of the answers that were whole.
        goodput_per_s: of ``requests_per_s``, those that kept the objectives.
        ttft_ms, e2el_ms: over the requests that were answered whole, from when they were to be sent until their first
            text, and their last, was read; None: there are no samples.
        tpot_ms: over the same, (last - first) / (tokens - 1).
        itl_ms: over the gaps between two reads with text, each once and whole, however many tokens came after it:
            divided by those, a freeze with a burst behind it would look like a steady stream.
        stall_ms: over the same requests, the longest such gap of each.
        shed_ms: from when a request was to be sent to its whole 503.
        lateness_ms: of the generator: from when a request was to be sent to when it was.
        client_busy, server_busy: CPU seconds a second; None where nobody looked.
        client_us, server_us: µs of CPU a token.
        num_open: requests that were open, on average.
    """

    rate: float | None
    seconds: float
    num_scheduled: int
    num_ok: int
    num_shed: int
    num_dropped: int
    num_unfinished: int
    errors: dict[str, int]
    requests_per_s: float
    tokens_per_s: float
    tokens_per_event: float | None
    goodput_per_s: float
    shed_share: float
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    stall_ms: Summary | None
    e2el_ms: Summary | None
    shed_ms: Summary | None
    lateness_ms: Summary | None
    client_busy: float | None
    server_busy: float | None
    client_us: float | None
    server_us: float | None
    num_open: float
    mean_prompt_tokens: float
    mean_output_tokens: float

    @property
    def doubts(self) -> list[str]:
        """Why these figures may be the generator's own, if there is a reason."""
        doubts = []
        is_burst = self.rate is None  # some are the last ones to be sent
        if not is_burst and self.lateness_ms is not None and self.lateness_ms.p99 > MAX_LATENESS_MS:
            doubts.append(f"the generator was late: p99 {self.lateness_ms.p99:.1f} ms")
        if self.client_busy is not None and self.client_busy > MAX_BUSY:
            doubts.append(f"the generator used {self.client_busy:.0%} of a core")
        if self.num_dropped:
            doubts.append(f"{self.num_dropped:,} requests were not sent: too many were open")
        return doubts


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a run: requests by when they were to be sent, tokens by when they were read."""

    at: float
    seconds: float
    num_scheduled: int
    goodput_per_s: float
    tokens_per_s: float
    shed_share: float
    ttft_ms: Summary | None
    itl_ms: Summary | None


def figures_of(run: Run, begin: float, end: float, *, rate: float | None, slo: Slo) -> Figures:
    """The figures of the requests that were to be sent from ``begin`` until before ``end``."""
    seconds = end - begin
    records = [record for record in run.records if begin <= record.scheduled_at < end]
    ok = [record for record in records if record.kind == "ok"]
    shed = [record for record in records if record.kind == "shed"]
    num_dropped = sum(begin <= at < end for at in run.dropped_at)
    num_scheduled = len(records) + num_dropped
    num_tokens = sum(record.counter.num_tokens for record in ok)
    num_read = tokens_between(run.records, begin, end)
    client_s, server_s, _ = run.cpu.between(begin, end)
    at = np.array(run.cpu.at)
    num_open = np.array(run.num_open)[(at >= begin) & (at < end)]
    return Figures(
        rate=rate,
        seconds=seconds,
        num_scheduled=num_scheduled,
        num_ok=len(ok),
        num_shed=len(shed),
        num_dropped=num_dropped,
        num_unfinished=sum(record.kind == "unfinished" for record in records),
        errors=dict(Counter(record.error for record in records if record.kind == "error")),
        requests_per_s=len(ok) / seconds,
        tokens_per_s=num_read / seconds,
        tokens_per_event=num_tokens / sum(sum(record.counter.num_events) for record in ok) if ok else None,
        goodput_per_s=sum(keeps(record, slo) for record in ok) / seconds,
        shed_share=len(shed) / num_scheduled if num_scheduled else 0.0,
        ttft_ms=summary_of([record.reads.ttft_s for record in ok]),
        tpot_ms=summary_of([record.tpot_s for record in ok if record.tpot_s is not None]),
        itl_ms=summary_of(gaps_of(ok)),
        stall_ms=summary_of([record.longest_gap_s for record in ok]),
        e2el_ms=summary_of([record.reads.e2e_s for record in ok]),
        shed_ms=summary_of([record.answer_s for record in shed]),
        lateness_ms=summary_of([record.lateness_s for record in records if not math.isnan(record.sent_at)]),
        client_busy=_number(client_s / seconds),
        server_busy=_number(server_s / seconds),
        client_us=_number(1e6 * client_s / num_read) if num_read else None,
        server_us=_number(1e6 * server_s / num_read) if num_read else None,
        num_open=float(num_open.mean()) if len(num_open) else 0.0,
        mean_prompt_tokens=sum(record.counter.num_prompt_tokens for record in ok) / len(ok) if ok else 0.0,
        mean_output_tokens=num_tokens / len(ok) if ok else 0.0,
    )


def bins_of(run: Run, end: float, *, seconds: float, slo: Slo) -> list[Bin]:
    """The run until ``end`` in pieces of about so many seconds."""
    edges = np.linspace(0.0, end, max(1, round(end / seconds)) + 1)
    sent: list[list[Record]] = [[] for _ in edges[1:]]
    for record in run.records:
        place = int(np.searchsorted(edges, record.scheduled_at, "right")) - 1
        if 0 <= place < len(sent):
            sent[place].append(record)
    times, tokens, gaps_s = _reads_of(run.records)
    bins = []
    for begin, stop, records in zip(edges[:-1].tolist(), edges[1:].tolist(), sent, strict=True):
        ok = [record for record in records if record.kind == "ok"]
        is_here = (times >= begin) & (times < stop)
        follows = is_here & ~np.isnan(gaps_s)
        bins.append(
            Bin(
                at=begin,
                seconds=stop - begin,
                num_scheduled=len(records),
                goodput_per_s=sum(keeps(record, slo) for record in ok) / (stop - begin),
                tokens_per_s=float(tokens[is_here].sum()) / (stop - begin),
                shed_share=sum(record.kind == "shed" for record in records) / len(records) if records else 0.0,
                ttft_ms=summary_of([record.reads.ttft_s for record in ok]),
                itl_ms=summary_of(gaps_s[follows]),
            )
        )
    return bins


def keeps(record: Record, slo: Slo) -> bool:
    """Whether a request that was answered whole kept the objectives."""
    return (
        record.reads.ttft_s * 1e3 <= slo.ttft_ms
        and (record.tpot_s or 0.0) * 1e3 <= slo.tpot_ms
        and record.longest_gap_s * 1e3 <= slo.stall_ms
    )


def recovered_after(bins: list[Bin], calm_until: float, overload_until: float, *, num_steady: int = 2) -> float | None:
    """Seconds from the end of an overload until time to first token is as before it; None: it never was.

    That is when the medians of ``num_steady`` pieces in a row are no worse than the worst one of the calm before, and
    nothing is shed. The first of those pieces has to be over, so that the answer is never less than its length.
    """
    calm = [piece.ttft_ms.p50 for piece in bins if piece.at + piece.seconds <= calm_until + 1e-9 and piece.ttft_ms]
    if not calm:
        return None
    worst = max(calm)
    after = [piece for piece in bins if piece.at >= overload_until - 1e-9 and piece.num_scheduled]
    is_calm = [piece.shed_share == 0.0 and piece.ttft_ms is not None and piece.ttft_ms.p50 <= worst for piece in after]
    for i in range(len(after) - num_steady + 1):
        if all(is_calm[i : i + num_steady]):
            return after[i].at + after[i].seconds - overload_until
    return None


def gaps_of(records: list[Record]) -> Floats:
    """Seconds between reads that brought text."""
    _, _, gaps_s = _reads_of(records)
    return gaps_s[~np.isnan(gaps_s)]


def tokens_between(records: list[Record], begin: float, end: float) -> float:
    """Tokens that were read from ``begin`` until before ``end``."""
    times, tokens, _ = _reads_of(records)
    return float(tokens[(times >= begin) & (times < end)].sum())


def _reads_of(records: list[Record]) -> tuple[Floats, Floats, Floats]:
    """Of all reads that brought text: when, tokens, and seconds since the one before (nan for the first)."""
    times, tokens, gaps_s = array("d"), array("d"), array("d")
    for record in records:
        counter = record.counter
        if not counter.read_at:
            continue
        read_at, num_events = np.frombuffer(counter.read_at), np.array(counter.num_events, np.float64)
        each = counter.num_tokens / num_events.sum() if counter.num_tokens else 1.0
        num_tokens = num_events * each
        gaps = np.insert(record.reads.gaps_s, 0, np.nan)
        times.frombytes(read_at.tobytes())
        tokens.frombytes(num_tokens.tobytes())
        gaps_s.frombytes(gaps.tobytes())
    return tuple(np.array(column, np.float64) for column in (times, tokens, gaps_s))  # type: ignore[return-value]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
