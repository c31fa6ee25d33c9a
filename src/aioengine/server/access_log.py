"""One log record a request, as a line for a person or as JSON, and a handler that never holds the event loop.

What a record says is in its attributes (``request_id``, ``status``, ``outcome``, ...), so that any handler of the host
program has them, too. It holds no prompts, no texts, no keys and no query strings. What a client chose (its id, its
path) cannot begin a line of its own, nor colour a terminal.
"""

from __future__ import annotations

import copy
import logging
import queue
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Literal, Self, TextIO

import msgspec

from aioengine.errors import EngineClosed, EngineDead
from aioengine.frontend.prompt import make_id
from aioengine.server.record import RequestRecord

LOGGER_NAME = "aioengine.server"
MAX_ID_CHARS = 128
MAX_SHOWN_CHARS = 256
"""Of a path or a name in the log: they are the client's."""

LogFormat = Literal["text", "json"]

logger = logging.getLogger(LOGGER_NAME)

_FIT_ID = re.compile(f"[!-~]{{1,{MAX_ID_CHARS}}}")
_FIT_PARAM = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,99}")
"""A field's name, or a place in one. Of an unknown field the name is the client's own words."""
# Control characters, among them those of 8 bits and the line ends that only Unicode knows; marks that turn the
# direction of writing; and halves of surrogate pairs, which no encoding can write.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
FIELDS = (
    "request_id",
    "method",
    "path",
    "status",
    "duration_s",
    "client",
    "model",
    "prompt_tokens",
    "completion_tokens",
    "finish_reasons",
    "time_to_first_token_s",
    "outcome",
    "error_code",
    "error_param",
)
"""The attributes of a request's log record."""


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's ``X-Request-Id``, if that is 1 to 128 visible ASCII characters; else one that is made up.

    Args:
        headers: with names in lower case.
    """
    given = headers.get("x-request-id")
    return given if given is not None and is_fit_id(given) else make_id()


def is_fit_id(request_id: str) -> bool:
    """Whether it can stand in a header and in a line of the log: 1 to 128 visible ASCII characters."""
    return _FIT_ID.fullmatch(request_id) is not None


def log_request(record: RequestRecord) -> None:
    """The request is over; its record is complete. Failures of the server come with their traceback."""
    # A dead engine has told of its death once, and a closed one is meant to be: requests that hear of it are no news.
    # Where nothing was raised, as at a /health that says what is wrong, there is nothing to look into either.
    is_news = record.is_failure and not isinstance(record.error, EngineDead | EngineClosed | None)
    level = logging.ERROR if is_news else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {name: getattr(record, name) for name in FIELDS}
    for name in ("request_id", "method", "path", "client", "model"):
        fields[name] = _shown(fields[name])
    fields["finish_reasons"] = list(record.finish_reasons)
    fields["duration_s"] = round(record.duration_s, 6)
    fields["time_to_first_token_s"] = record.first_token_s
    if record.error_param is not None and not _FIT_PARAM.fullmatch(record.error_param):
        fields["error_param"] = None
    error = record.error if is_news else None
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    logger.log(level, _line(fields), extra=fields, exc_info=exc_info)


def _line(fields: Mapping[str, Any]) -> str:
    path = fields["path"].replace(" ", "%20")  # a path with spaces could pretend to be the words after it
    why = ": ".join(fields[name] for name in ("error_param", "error_code") if fields[name] is not None)
    outcome = f"{fields['outcome']} ({why})" if why else fields["outcome"]
    said = [
        f"{fields['client'] or '-'} {fields['method']} {path} {fields['status'] or '-'} {outcome}",
        f"in {fields['duration_s']:.3f} s",
    ]
    if fields["completion_tokens"] is not None:
        said.append(f"{fields['prompt_tokens'] or 0}+{fields['completion_tokens']} tokens")
    if fields["time_to_first_token_s"] is not None:
        said.append(f"first after {fields['time_to_first_token_s']:.3f} s")
    if fields["finish_reasons"]:
        said.append("/".join(fields["finish_reasons"]))
    return f"{', '.join(said)} [{fields['request_id']}]"


def _shown(value: str | None) -> str | None:
    """A client's text on one line, and not a long one."""
    if value is None:
        return None
    cut = value if len(value) <= MAX_SHOWN_CHARS else f"{value[:MAX_SHOWN_CHARS]}…"
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", cut)


# How it looks


class TextFormatter(logging.Formatter):
    """``2026-03-01 12:00:00.123 INFO aioengine.server: ...``; a traceback's lines are set in, as no record's first."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        # What a message or a traceback quotes may hold line ends and control characters.
        first, *more = super().format(record).split("\n")
        return "\n".join([_escape(first), *(f"    {_escape(line)}" for line in more)])


class JsonFormatter(logging.Formatter):
    """An object a line: time (UTC), level, logger, message, then what a request's record has; errors as ``error``."""

    def __init__(self) -> None:
        super().__init__()
        self._encoder = msgspec.json.Encoder(enc_hook=repr)

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if hasattr(record, "request_id"):
            shown.update((name, value) for name in FIELDS if (value := getattr(record, name, None)) is not None)
        if record.exc_info:
            shown["error"] = self.formatException(record.exc_info)
        if record.stack_info:
            shown["stack"] = self.formatStack(record.stack_info)
        try:
            encoded = self._encoder.encode(shown)
        except UnicodeEncodeError:  # half a surrogate pair, of another logger's message
            encoded = self._encoder.encode({name: _writable(value) for name, value in shown.items()})
        return _escape(encoded.decode())  # JSON leaves U+0085 and U+2028 as they are, which end lines for some readers


def _escape(line: str) -> str:
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] == "\t" else f"\\u{ord(match[0]):04x}", line)


def _writable(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


# Where it goes


class OffLoopHandler(QueueHandler):
    """Writes log records in a thread: a stderr that is not read stalls that thread, and not the loop.

    At most ``max_queued`` records wait; with so many waiting newer ones are dropped, counted, and told of in a line
    once there is room. Formatting is the thread's work, too, so that a flood costs the loop a few µs a record.

    Args:
        formatter: `TextFormatter` unless given.
        stream: the process's stderr unless given.
        max_queued: records that wait.
    """

    CLOSE_TIMEOUT_S = 1.0
    MAX_TRACEBACKS = 100
    """Of the records that wait so many may have one: it holds all that its functions held, prompts included."""

    def __init__(
        self, formatter: logging.Formatter | None = None, stream: TextIO | None = None, *, max_queued: int = 10_000
    ) -> None:
        self._records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        super().__init__(self._records)
        self._max_queued = max_queued
        self._is_closed = False
        # Each is changed on one side only. (Two threads that log at the same moment may count one for two.)
        self.num_dropped = 0
        """Records dropped so far."""
        self._num_tracebacks_queued = 0
        self.setFormatter(formatter or TextFormatter())
        self.writer = _Writer(self._records, self, sys.stderr if stream is None else stream)
        self.writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def createLock(self) -> None:  # noqa: N802 - logging's name
        """None: the queue is safe by itself, and the loop waits for no lock."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """As any handler does it, but without a lock, which Python 3.13 takes for granted."""
        passed: object = self.filter(record)
        if isinstance(passed, logging.LogRecord):  # a filter may give another record, since Python 3.12
            record = passed
        if passed:
            self.emit(record)
        return bool(passed)

    @property
    def has_room(self) -> bool:
        """The queue is less than half full."""
        return self._records.qsize() < self._max_queued // 2

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_closed or self._records.qsize() >= self._max_queued:
            self.num_dropped += 1
        else:
            super().emit(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record as it is now: what its message is made of may change until the thread gets to it."""
        num_tracebacks = self._num_tracebacks_queued - self.writer.num_tracebacks
        is_one_too_many = bool(record.exc_info) and num_tracebacks >= self.MAX_TRACEBACKS
        if record.args or is_one_too_many:
            record = copy.copy(record)  # other handlers get it as it was
            try:
                record.msg = record.getMessage()
            except Exception:  # arguments that do not fit: the bug is elsewhere, and the message is still worth having
                record.msg = f"{record.msg} {len(record.args or ())} arguments that do not fit"
            record.args = None
        if is_one_too_many:
            record.exc_info = record.exc_text = None
            record.msg += " (with a traceback, one too many to keep)"
        self._num_tracebacks_queued += bool(record.exc_info)
        return record

    def close(self) -> None:
        """Write what waits and end the thread; idempotent. What cannot be written within a second is given up.

        It waits: call it when the loop has ended, or in a thread.
        """
        if not self._is_closed:
            self._is_closed = True
            self.writer.end(self.CLOSE_TIMEOUT_S)
        super().close()


class _Writer(QueueListener):
    """The thread of an `OffLoopHandler`. It is no handler itself: logging's own, which end with the interpreter, would
    wait there for a write that hangs.
    """

    def __init__(self, records: queue.SimpleQueue[logging.LogRecord | None], source: OffLoopHandler, stream: TextIO):
        super().__init__(records)
        self._source = source
        self._stream = stream
        self.num_told = 0
        """Dropped records that were told of."""
        self.num_tracebacks = 0
        """Records with one that were taken from the queue."""

    def end(self, timeout_s: float) -> None:
        """As `stop`, which would wait for ever."""
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def handle(self, record: logging.LogRecord) -> None:
        self.num_tracebacks += bool(record.exc_info)
        self._write(record)
        if self._source.has_room:
            self._tell_dropped()

    def dequeue(self, block: bool) -> Any:
        record: object = super().dequeue(block)
        if record is None:  # the end
            self._tell_dropped()
        return record

    def _tell_dropped(self) -> None:
        count = self._source.num_dropped - self.num_told
        if count:
            self.num_told += count
            message = "%d log records were dropped: they came faster than they could be written"
            self._write(logging.LogRecord(LOGGER_NAME, logging.WARNING, __file__, 0, message, (count,), None))

    def _write(self, record: logging.LogRecord) -> None:
        try:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"  # which may be ASCII
            line = f"{self._source.format(record)}\n"
            self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            pass  # the stream is closed, or not read any more: there is nowhere left to say so
        except Exception:
            self._source.handleError(record)


@contextmanager
def logging_off_loop(
    log_format: LogFormat = "text", level: int = logging.INFO, stream: TextIO | None = None
) -> Iterator[OffLoopHandler]:
    """All of this process's log records go through an `OffLoopHandler` while the block runs; for the command line."""
    root = logging.getLogger()
    level_before = root.level
    with OffLoopHandler(JsonFormatter() if log_format == "json" else TextFormatter(), stream) as handler:
        root.addHandler(handler)
        root.setLevel(level)
        try:
            yield handler
        finally:
            root.setLevel(level_before)
            root.removeHandler(handler)
