"""What the log says of requests: once each, never a secret, never a forged line, and never at the loop's cost."""

import io
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from server.conftest import record_of, serving_fake

from aioengine.outputs.metrics import RequestMetrics
from aioengine.server import ServerConfig
from aioengine.server.access_log import (
    FIELDS,
    JsonFormatter,
    OffLoopHandler,
    TextFormatter,
    log_request,
    logging_off_loop,
)


@pytest.fixture
def kept() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("aioengine.server")
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


class Stuck(io.StringIO):
    """A stream that is not read until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.is_reached = threading.Event()
        self.is_told = threading.Event()
        """Set when it has got the line about what was dropped."""

    def write(self, text: str) -> int:
        self.is_reached.set()
        assert self.gate.wait(30), "it was never read"
        num_chars = super().write(text)
        if "were dropped" in text:
            self.is_told.set()
        return num_chars


@contextmanager
def stuck_handler(max_queued: int) -> Iterator[tuple[OffLoopHandler, Stuck]]:
    """A handler whose thread hangs in its first write, with nothing else queued; at the end it has written all."""
    stream = Stuck()
    handler = OffLoopHandler(stream=stream, max_queued=max_queued)
    handler.handle(plain("the first"))
    assert stream.is_reached.wait(30)
    try:
        yield handler, stream
    finally:
        stream.gate.set()
        handler.close()


def plain(message: str, *args: Any, name: str = "test", exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, __file__, 1, message, args, exc_info)


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def exc_info_of(error: BaseException) -> Any:
    return type(error), error, error.__traceback__


# Request ids


# Records


def test_a_request_is_one_record_with_all_it_is_known_by(kept: list[logging.LogRecord]) -> None:
    log_request(
        record_of(
            model="fox",
            prompt_tokens=7,
            completion_tokens=12,
            finish_reasons=("stop", "length"),
            metrics=RequestMetrics(arrival_time=1.0, time_to_first_token_s=0.125),
        )
    )
    (record,) = kept
    assert record.levelno == logging.INFO
    assert {name: getattr(record, name) for name in FIELDS} == {
        "request_id": "req-1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "duration_s": 0.25,
        "client": "127.0.0.1",
        "model": "fox",
        "prompt_tokens": 7,
        "completion_tokens": 12,
        "finish_reasons": ["stop", "length"],
        "time_to_first_token_s": 0.125,
        "outcome": "ok",
        "error_code": None,
        "error_param": None,
    }
    message = "127.0.0.1 POST /v1/completions 200 ok, in 0.250 s, 7+12 tokens, first after 0.125 s, stop/length [req-1]"
    assert record.getMessage() == message
    shown = json.loads(JsonFormatter().format(record))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", shown.pop("time"))
    known = {name: getattr(record, name) for name in FIELDS if not name.startswith("error_")}
    assert shown == {"level": "INFO", "logger": "aioengine.server", "message": message, **known}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"status": 0, "outcome": "client_gone", "client": ""}, "- POST /v1/completions - client_gone"),
        ({"path": "/health", "status": 503, "outcome": "error"}, "127.0.0.1 POST /health 503 error"),
        ({"path": "/x 200 ok, in", "status": 404}, "127.0.0.1 POST /x%20200%20ok,%20in 404 ok"),
    ],
    ids=["gone before any answer", "a probe that is told what is wrong", "a path that pretends to be more"],
)
def test_what_is_no_error_is_a_line_of_information(
    fields: dict[str, Any], message: str, kept: list[logging.LogRecord]
) -> None:
    log_request(record_of(**fields))
    assert (kept[0].getMessage(), kept[0].levelno) == (f"{message}, in 0.250 s [req-1]", logging.INFO)


def test_a_refusal_says_which_field_was_wrong_and_how_and_no_more(kept: list[logging.LogRecord]) -> None:
    wrong = raised(ValueError("temperature=secret: no number"))
    log_request(
        record_of(
            status=400, outcome="refused", error=wrong, error_code="invalid_value", error_param="messages[0].content"
        )
    )
    log_request(record_of(status=401, outcome="refused", error_code="invalid_api_key"))
    first, second = kept
    assert " 400 refused (messages[0].content: invalid_value), in " in first.getMessage()
    assert " 401 refused (invalid_api_key), in " in second.getMessage()
    shown = json.loads(JsonFormatter().format(first))
    assert (shown["error_code"], shown["error_param"]) == ("invalid_value", "messages[0].content")
    assert "error_param" not in json.loads(JsonFormatter().format(second))
    assert "secret" not in JsonFormatter().format(first)


@pytest.mark.parametrize("param", ["my prompt", "x) 200 ok, in", "a\n", "é", "", "a" * 101, "0", "\u202e"])
def test_an_unknown_fields_name_is_the_clients_and_is_shown_only_if_it_is_one(
    param: str, kept: list[logging.LogRecord]
) -> None:
    log_request(record_of(status=400, outcome="refused", error_code="unknown_parameter", error_param=param))
    assert " 400 refused (unknown_parameter), in " in kept[0].getMessage()
    assert kept[0].error_param is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("status", "outcome", "is_failure"),
    [
        (500, "error", True),
        (200, "error", True),
        (503, "ok", True),
        (400, "refused", False),
        (503, "shed", False),
        (200, "client_gone", False),
        (200, "cut", False),
    ],
)
def test_failures_of_the_server_and_no_others_are_errors_with_their_traceback(
    status: int, outcome: Any, is_failure: bool, kept: list[logging.LogRecord]
) -> None:
    log_request(record_of(status=status, outcome=outcome, error=raised(ZeroDivisionError("how could it"))))
    (record,) = kept
    assert record.levelno == (logging.ERROR if is_failure else logging.INFO)
    text = TextFormatter().format(record)
    for said in ("ZeroDivisionError: how could it", "in raised"):
        assert (said in text) is is_failure


def test_a_log_that_is_not_wanted_costs_nothing(kept: list[logging.LogRecord]) -> None:
    logging.getLogger("aioengine.server").setLevel(logging.WARNING)
    log_request(record_of(request_id=None))  # would not survive being described
    assert kept == []


FORGERIES = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\x1b[2K", "\x00", "\u202e"]


@pytest.mark.parametrize("forged", FORGERIES)
@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_no_client_can_forge_a_line(forged: str, formatter: logging.Formatter, kept: list[logging.LogRecord]) -> None:
    said = f"/x{forged}2026-01-01 00:00:00.000 ERROR aioengine: all keys are public"
    log_request(record_of(path=said, request_id=said, client=said, method=said, model=said))
    text = formatter.format(kept[0])
    assert len(text.splitlines()) == 1
    assert forged not in text
    assert text.isprintable()
    log_request(record_of(path="/" + "x" * 100_000))
    assert len(kept[1].getMessage()) < 400


@pytest.mark.parametrize("forged", [*FORGERIES, "\ud800"])
def test_no_other_logger_can_forge_a_line_of_json(forged: str) -> None:
    text = JsonFormatter().format(plain("said %s", f"a{forged}b"))
    assert len(text.splitlines()) == 1
    text.encode()
    assert json.loads(text)["message"].startswith("said a")


def test_further_lines_of_a_message_are_set_in() -> None:
    text = TextFormatter().format(plain("one\ntwo\r\x1b[31mthree"))
    first, second = text.splitlines()
    assert first.endswith("INFO test: one")
    assert second == "    two\\u000d\\u001b[31mthree"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_of_several_servers_each_record_tells_which_one_made_it(log_format: str) -> None:
    stream = io.StringIO()
    with logging_off_loop(log_format, stream=stream, server=3):
        logging.getLogger("aioengine").info("said %s", "so")
    told = stream.getvalue()
    if log_format == "json":
        assert (json.loads(told)["server"], json.loads(told)["message"]) == (3, "said so")
    else:
        assert told.endswith(" INFO aioengine: HTTP server 3: said so\n")


# Off the loop


def test_a_stream_that_is_not_read_drops_what_is_too_much_and_says_so_once() -> None:
    with stuck_handler(max_queued=100) as (handler, stream):
        for place in range(1000):
            handler.handle(plain("number %d", place))
        assert handler.num_dropped == 900
        stream.gate.set()
        assert stream.is_told.wait(30), "the flood was not told of"
        handler.handle(plain("one more"))
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "number" in line] == [
        line for line in lines if re.search(r" INFO test: number \d\d?$", line)
    ]
    (told,) = [line for line in lines if "dropped" in line]
    assert told.endswith(
        "WARNING aioengine.server: 900 log records were dropped: they came faster than they could be written"
    )
    assert len(lines) == 103, "the first, those that had room, one about the others, and one more"
    assert lines[-1].endswith("one more")


def test_what_no_record_comes_after_is_told_of_at_the_end() -> None:
    with stuck_handler(max_queued=1) as (handler, stream):
        for _ in range(20):
            handler.handle(plain("again"))
    last = stream.getvalue().splitlines()[-1]
    assert last.endswith("19 log records were dropped: they came faster than they could be written")
    assert not handler._thread.is_alive()
    handler.handle(plain("too late"))
    assert handler.num_dropped == 20


def test_a_message_is_as_it_was_when_it_was_logged_also_where_its_arguments_do_not_fit() -> None:
    with stuck_handler(max_queued=10) as (handler, stream):
        names, record = ["fox"], plain("names: %s", None)
        record.args = (names,)
        handler.handle(record)
        names.append("hen")
        handler.handle(plain("two: %s %s", "one"))
    assert "names: ['fox']\n" in stream.getvalue()
    assert record.args == (names,), "other handlers get it as it was"
    assert "two: %s %s 1 arguments that do not fit" in stream.getvalue()


def test_only_so_many_tracebacks_wait() -> None:
    with stuck_handler(max_queued=1000) as (handler, stream):
        for _ in range(300):
            handler.handle(plain("broke", exc_info=exc_info_of(raised(ValueError("inside")))))
    assert stream.getvalue().count("ValueError: inside") == OffLoopHandler.MAX_TRACEBACKS
    more = 300 - OffLoopHandler.MAX_TRACEBACKS
    assert stream.getvalue().count("broke (with a traceback, one too many to keep)") == more


def test_a_stream_of_ascii_gets_what_it_can_take() -> None:
    raw = io.BytesIO()
    with OffLoopHandler(stream=io.TextIOWrapper(raw, "ascii")) as handler:
        handler.handle(plain("füchse"))
    assert b"f\\xfcchse\n" in raw.getvalue()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_command_line_logs_everything_through_one_handler_and_leaves_none(log_format: Any) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    before = root.level, list(root.handlers)
    with logging_off_loop(log_format, stream=stream):
        log_request(record_of())
        logging.getLogger("elsewhere").warning("careful")
    assert (root.level, root.handlers) == before
    first, second = stream.getvalue().splitlines()
    assert "[req-1]" in first
    assert "careful" in second
    if log_format == "json":
        assert [json.loads(line)["logger"] for line in (first, second)] == ["aioengine.server", "elsewhere"]


@pytest.mark.parametrize("log_probes", [False, True])
async def test_probes_and_the_pages_polls_leave_the_log_alone_unless_they_fail(
    log_probes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioengine.server")
    probes = ["/health", "/ping", "/metrics", "/load", "/version"]
    config = ServerConfig(api_keys=("first-key",), log_probes=log_probes)
    async with serving_fake("starlette", config) as (*_, http):
        for path in [*probes, "/v1/models"]:
            answer = await http.get(path, headers={"x-api-key": "first-key"})
            assert answer.status_code == 200
        await http.get("/metrics")  # without its key
    paths = [record.path for record in caplog.records if record.name == "aioengine.server"]  # type: ignore[attr-defined]
    assert paths == [*(probes if log_probes else []), "/v1/models", "/metrics"]


STUCK_AT_EXIT = """
import logging, os
from aioengine.server.access_log import OffLoopHandler

reading, writing = os.pipe()  # which is not read
OffLoopHandler.CLOSE_TIMEOUT_S = 0.01
logger = logging.getLogger("aioengine.server")
with OffLoopHandler(stream=os.fdopen(writing, "w")) as handler:
    logger.addHandler(handler)
    for _ in range(2_000):
        logger.warning("x" * 100)
os._exit(3) if not handler._thread.is_alive() else logging.shutdown()
os._exit(0)
"""


def test_a_stream_that_is_not_read_does_not_hold_the_programs_exit() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK_AT_EXIT], timeout=30, check=False)
    assert done.returncode == 0
