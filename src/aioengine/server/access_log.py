"""One log record a request, as a line for a person or as JSON, and a handler that never holds the event loop.

A record's fields are its attributes (``request_id``, ``status``, ``outcome``, ...), so that any handler of the host
program has them, too. They hold no prompts, no texts, no keys and no query strings. Text that a client chose (an id, a
path) cannot begin a line of its own, nor colour a terminal.
"""

from __future__ import annotations

import copy
import json
import logging
import queue
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal, Self, TextIO

from aioengine.errors import EngineClosed, EngineDead
from aioengine.frontend.call import make_id
from aioengine.server.record import RequestRecord

LOGGER_NAME = "aioengine.server"
MAX_ID_CHARS = 128
MAX_SHOWN_CHARS = 256
"""Most characters of a path or a name in the log: clients choose them."""

LogFormat = Literal["text", "json"]

logger = logging.getLogger(LOGGER_NAME)

_FIT_ID = re.compile(f"[!-~]{{1,{MAX_ID_CHARS}}}")
_FIT_PARAM = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,99}")
"""A field's name, or a place in one. Other names are not logged: an unknown field's name is the client's own text."""
# Control characters, among them those of 8 bits and the line ends that only Unicode knows; marks that turn the
# direction of writing; and halves of surrogate pairs, which no encoding can write.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
FIELDS = (
    "request_id", "method", "path", "status", "duration_s", "client", "model", "prompt_tokens", "completion_tokens",
    "finish_reasons", "time_to_first_token_s", "outcome", "error_code", "error_param",
)  # fmt: skip
"""The attributes of a request's log record."""


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's ``X-Request-Id`` if that is 1 to 128 visible ASCII characters; else a generated id.

    Args:
        headers: with names in lower case.
    """
    given = headers.get("x-request-id")
    return given if given is not None and is_fit_id(given) else make_id()


def is_fit_id(request_id: str) -> bool:
    """Whether an id can stand in a header and in a line of the log: 1 to 128 visible ASCII characters."""
    return _FIT_ID.fullmatch(request_id) is not None


def log_request(record: RequestRecord) -> None:
    """Log the complete record of a request. Failures of the server are logged with their traceback."""
    # A dead engine has logged its death already, and a closed one was closed on purpose: neither is an error here.
    # Without an exception, as when /health reports a failure, there is nothing to look into either.
    is_new = record.is_failure and not isinstance(record.error, EngineDead | EngineClosed | None)
    level = logging.ERROR if is_new else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {name: getattr(record, name) for name in FIELDS}
    for name in ("request_id", "method", "path", "client", "model"):
        if (value := fields[name]) is not None:  # a client's text, on one line
            cut = value if len(value) <= MAX_SHOWN_CHARS else f"{value[:MAX_SHOWN_CHARS]}…"
            fields[name] = _escape(cut, keep="")
    fields["finish_reasons"] = list(record.finish_reasons)
    fields["duration_s"] = round(record.duration_s, 6)
    fields["time_to_first_token_s"] = record.first_token_s
    if record.error_param is not None and not _FIT_PARAM.fullmatch(record.error_param):
        fields["error_param"] = None
    error = record.error if is_new else None
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    logger.log(level, _line(fields), extra=fields, exc_info=exc_info)


def _line(fields: Mapping[str, Any]) -> str:
    path = fields["path"].replace(" ", "%20")  # a path with spaces could pretend to be the words after it
    why = ": ".join(fields[name] for name in ("error_param", "error_code") if fields[name] is not None)
    outcome = f"{fields['outcome']} ({why})" if why else fields["outcome"]
    parts = [
        f"{fields['client'] or '-'} {fields['method']} {path} {fields['status'] or '-'} {outcome}",
        f"in {fields['duration_s']:.3f} s",
    ]
    if fields["completion_tokens"] is not None:
        parts.append(f"{fields['prompt_tokens'] or 0}+{fields['completion_tokens']} tokens")
    if fields["time_to_first_token_s"] is not None:
        parts.append(f"first after {fields['time_to_first_token_s']:.3f} s")
    if fields["finish_reasons"]:
        parts.append("/".join(fields["finish_reasons"]))
    return f"{', '.join(parts)} [{fields['request_id']}]"


# Formatters


class TextFormatter(logging.Formatter):
    """``2026-03-01 12:00:00.123 INFO aioengine.server: ...``; lines after a record's first are indented."""

    default_msec_format = "%s.%03d"

    def __init__(self, server: int | None = None) -> None:
        prefix = "" if server is None else f"HTTP server {server}: "
        super().__init__(f"%(asctime)s %(levelname)s %(name)s: {prefix}%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        # What a message or a traceback quotes may hold line ends and control characters.
        first, *more = super().format(record).split("\n")
        return "\n".join([_escape(first), *(f"    {_escape(line)}" for line in more)])


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time (UTC), level, logger, message, then a request's `FIELDS`; exceptions as ``error``."""

    def __init__(self, server: int | None = None) -> None:
        super().__init__()
        self._server = {} if server is None else {"server": server}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        shown: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._server,
        }
        if hasattr(record, "request_id"):
            shown.update((name, value) for name in FIELDS if (value := getattr(record, name, None)) is not None)
        if record.exc_info:
            shown["error"] = self.formatException(record.exc_info)
        if record.stack_info:
            shown["stack"] = self.formatStack(record.stack_info)
        return json.dumps(shown, default=repr)  # in ASCII: no line end of Unicode's, and no half of a surrogate pair


def _escape(line: str, *, keep: str = "\t") -> str:
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] in keep else f"\\u{ord(match[0]):04x}", line)


# Handler


class OffLoopHandler(logging.Handler):
    """Writes log records in a thread: an unread stderr stalls that thread, and not the loop.

    At most ``max_queued`` records wait; newer ones are dropped, and a line logs their number once the queue is half
    empty. The thread also formats them, so that a flood costs the loop a few µs a record.

    Args:
        formatter: `TextFormatter` unless given.
        stream: the process's stderr unless given.
        max_queued: records that wait.
    """

    CLOSE_TIMEOUT_S = 1.0
    MAX_TRACEBACKS = 256
    """With so many records waiting, a newer one loses its traceback, which keeps the locals of its frames alive,
    prompts included."""

    def __init__(
        self, formatter: logging.Formatter | None = None, stream: TextIO | None = None, *, max_queued: int = 10_000
    ) -> None:
        super().__init__()
        self.setFormatter(formatter or TextFormatter())
        self._stream = sys.stderr if stream is None else stream
        self._max_queued = max_queued
        self._records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._is_closed = False
        self.num_dropped = 0
        """Records dropped so far."""
        self._num_reported = 0
        """Dropped records that a logged line has reported."""
        self._thread = threading.Thread(target=self._write_all, name="aioengine-log", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        num_waiting = self._records.qsize()
        if self._is_closed or num_waiting >= self._max_queued:
            self.num_dropped += 1
            return
        record = copy.copy(record)  # other handlers get it as it was
        try:
            record.msg = record.getMessage()  # now: its arguments may change before the thread formats them
        except Exception:  # arguments that do not fit: the bug is elsewhere, and the message is still worth having
            record.msg = f"{record.msg} {len(record.args or ())} arguments that do not fit"
        record.args = None
        if record.exc_info and num_waiting >= self.MAX_TRACEBACKS:
            record.exc_info = record.exc_text = None
            record.msg += " (with a traceback, one too many to keep)"
        self._records.put(record)

    def close(self) -> None:
        """Write the waiting records and end the thread; idempotent. Records not written within a second are lost.

        Blocks: call it when the loop has ended, or in a thread.
        """
        if not self._is_closed:
            self._is_closed = True
            self._records.put(None)
            self._thread.join(self.CLOSE_TIMEOUT_S)
        super().close()

    # In the thread, which never takes the handler's lock: logging takes that at the interpreter's exit.

    def _write_all(self) -> None:
        while (record := self._records.get()) is not None:
            self._write(record)
            del record  # with its traceback
            if self._records.qsize() < self._max_queued // 2:
                self._report_dropped()
        self._report_dropped()

    def _report_dropped(self) -> None:
        if count := self.num_dropped - self._num_reported:
            self._num_reported += count
            message = f"{count} log records were dropped: they came faster than they could be written"
            self._write(logging.LogRecord(LOGGER_NAME, logging.WARNING, __file__, 0, message, None, None))

    def _write(self, record: logging.LogRecord) -> None:
        try:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"  # which may be ASCII
            line = f"{self.format(record)}\n"
            self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            pass  # the stream is closed, or not read any more: there is nowhere left to report it
        except Exception:
            self.handleError(record)


@contextmanager
def logging_off_loop(
    log_format: LogFormat = "text",
    level: int = logging.INFO,
    stream: TextIO | None = None,
    *,
    server: int | None = None,
) -> Iterator[OffLoopHandler]:
    """Send all log records of this process through an `OffLoopHandler` while the block runs; for the command line.

    Args:
        server: the number of this HTTP server among several, which each line has.
    """
    root = logging.getLogger()
    level_before = root.level
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    with OffLoopHandler(formatter(server), stream) as handler:
        root.addHandler(handler)
        root.setLevel(level)
        try:
            yield handler
        finally:
            root.setLevel(level_before)
            root.removeHandler(handler)
