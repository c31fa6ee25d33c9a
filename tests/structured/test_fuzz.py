"""Constraints of chance: they compile or are refused, in bounded time, and a server is there for others throughout."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nightly import seeds
from structured import chance
from structured.conftest import NUM_TOKENS, vocabulary

from aioengine import InvalidRequest, Json, Regex
from aioengine.structured.trials import is_to_be_tried

NUM_BY_DAY = 40
LONGEST_S = 3.0
"""Of compiling, of a mask and of a token in seconds that a thread computes. The GIL is held for the last one."""
LONGEST_TOKEN_S = 0.1

FUZZ_S = float(os.environ.get("AIOENGINE_FUZZ_S", "90"))
NUM_CLIENTS = 4
LONGEST_HEALTH_S = 0.1
LONGEST_CHAT_S = 5.0
MAX_GROWTH_BYTES = 2 * 2**30


@pytest.mark.parametrize("seed", seeds(100))
def test_a_constraint_of_chance_takes_bounded_time(seed: int) -> None:
    rng = random.Random(f"fuzz {seed}")
    mask, slowest = np.zeros(NUM_TOKENS // 32, np.int32), [0.0] * 3

    def timed(number: int, function: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*given)
        finally:
            slowest[number] = max(slowest[number], time.thread_time() - began)

    for _ in range(NUM_BY_DAY):
        try:
            is_schema = rng.random() < 0.8
            constraint = (
                Json(chance.schema(rng), lenient=rng.random() < 0.3) if is_schema else Regex(chance.expression(rng))
            )
            if is_to_be_tried(constraint):
                continue
            matcher = timed(0, vocabulary().compile, constraint).matcher()
        except InvalidRequest:
            continue
        for _ in range(20):
            timed(1, matcher.fill, mask)
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if matcher.problem or not len(ids):
                break
            timed(2, matcher.forced)
            timed(2, matcher.consume, [int(rng.choice(ids))])
    assert max(slowest[:2]) < LONGEST_S, f"seed {seed}: {slowest}"
    assert slowest[2] < LONGEST_TOKEN_S, f"seed {seed}: {slowest}"


class Served:
    """A server process, and what is seen of it from outside."""

    def __init__(self) -> None:
        flags = ("--port", "0", "--tool-format", "qwen3_coder", "--kv-cache-memory-bytes", str(2**24))
        command = [sys.executable, "-m", "aioengine", "serve", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rstrip().rpartition(":")[2])

    def connection(self) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120))

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, float]:
        """The status of an answer, and the seconds until it was read."""
        with self.connection() as connection:
            return ask_over(connection, method, path, body)

    def num_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ask_over(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, float]:
    began = time.perf_counter()
    text = None if body is None else json.dumps(body)
    connection.request(method, path, text, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status, time.perf_counter() - began


class Echo:
    """A process that answers at once. It is late where the machine is busy with other things."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def seconds(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        began = time.perf_counter()
        self.process.stdin.write(b"x")
        assert self.process.stdout.read(1) == b"x"
        return time.perf_counter() - began


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.mark.nightly
def test_a_server_answers_others_while_constraints_of_chance_are_sent() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    server, echo = Served(), Echo()
    ends_at = time.monotonic() + FUZZ_S
    statuses: list[int] = []
    health_s: list[float] = []
    late_s: list[float] = []
    chat_s: list[float] = []
    failures: list[BaseException] = []
    sent: dict[int, Any] = {}

    def each(act: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                while time.monotonic() < ends_at and not failures:
                    act()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def probe() -> None:
        late_s.append(echo.seconds())
        status, took_s = ask_over(kept, "GET", "/health")
        assert status == 200
        health_s.append(took_s)

    def chat() -> None:
        status, took_s = server.ask("POST", "/v1/chat/completions", CHAT)
        assert status == 200
        chat_s.append(took_s)

    def client(number: int) -> Callable[[], None]:
        rng = random.Random(f"{seed} {number}")

        def send() -> None:
            body = {**CHAT, "max_tokens": 30, **chance.bodies(rng)}
            sent[number] = body
            statuses.append(server.ask("POST", "/v1/chat/completions", body)[0])

        return send

    try:
        server.ask("POST", "/v1/chat/completions", {**CHAT, "guided_regex": "[ab]"})  # the vocabulary is read
        before = server.num_bytes()
        with server.connection() as kept:  # one for all probes, which come without a pause: ports would run out
            threads = [each(probe), each(chat), *(each(client(number)) for number in range(NUM_CLIENTS))]
            for thread in threads:
                thread.join()
        grown = server.num_bytes() - before
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    finally:
        server.process.kill()
        server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()
        echo.process.communicate()
    print(f"{len(statuses)} constraints, {statuses.count(200)} answered; health: longest {max(health_s):.3f} s of ")
    print(f"{len(health_s)}, chats: longest {max(chat_s):.3f} s of {len(chat_s)}; grown by {grown >> 20} MiB")
    assert not failures, f"seed {seed}: {failures}; {sent}"
    assert set(statuses) <= {200, 400, 503}, f"seed {seed}"
    assert 200 in statuses
    assert max(health_s) < LONGEST_HEALTH_S + 3 * max(late_s), f"seed {seed}"
    assert max(chat_s) < LONGEST_CHAT_S + 30 * max(late_s), f"seed {seed}"
    assert grown < MAX_GROWTH_BYTES, f"seed {seed}"
