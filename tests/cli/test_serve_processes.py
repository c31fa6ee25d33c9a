"""`aioengine serve` with several processes, as a user runs it: servers of one port, and a replica a port."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from cli.conftest import DEADLINE_S
from cli.test_serve import Command, ending_of, refuses, serve, story

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("no_stray_process")]

SERVER, REPLICA = "aioengine.server.group.child", "aioengine.transport.child"


def descendants(command: Command, module: str) -> list[psutil.Process]:
    found = []
    with suppress(psutil.NoSuchProcess):  # the command has ended
        for each in psutil.Process(command.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ends now
                if module in each.cmdline():
                    found.append(each)
    return found


def ask(url: str, method: str, path: str, **options: object) -> httpx.Response:
    """One request on a connection of its own, so that any server may get it."""
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        return client.request(method, path, **options)  # type: ignore[arg-type]


def wait_until(is_so: object, command: Command) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline, command.stderr
        assert command.process.poll() is None, command.stderr


def is_whole(url: str, num_servers: int) -> bool:
    return bool(ask(url, "GET", "/health").json()["servers"]["serving"] == num_servers)


def test_servers_and_replicas_die_and_streams_of_others_go_on(tmp_path: Path) -> None:
    keys = {"AIOENGINE_API_KEY": "first-key-of-all"}
    args = ("--port", "0", "--api-servers", "2", "--replicas", "2", "--log-format", "json")
    with serve(tmp_path, *args, **keys) as server, ExitStack() as stack:
        url = server.serves()
        port = int(url.rpartition(":")[2])
        key = {"authorization": "Bearer first-key-of-all"}
        processes = [*descendants(server, SERVER), *descendants(server, REPLICA)]
        assert len(processes) == 4
        assert not any("first-key" in " ".join(each.cmdline()) for each in processes)
        assert ask(url, "GET", "/v1/models").status_code == 401

        def open_story() -> Iterator[dict[str, object]]:
            client = stack.enter_context(httpx.Client(base_url=url, headers=key, timeout=DEADLINE_S))
            return stack.enter_context(story(client, 900))

        pieces = [open_story() for _ in range(4)]
        descendants(server, REPLICA)[0].kill()
        assert {ending_of(each)[1] for each in pieces} == {"length"}

        descendants(server, SERVER)[0].kill()
        restarts = "\naioengine:api_server_restarts_total 1.0\n"
        wait_until(lambda: restarts in ask(url, "GET", "/metrics", headers=key).text, server)
        wait_until(lambda: is_whole(url, 2), server)

        pieces = [open_story(), open_story()]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses(port), server)
        assert {ending_of(each)[1] for each in pieces} == {"length"}
        assert server.end() == 0
        records = [json.loads(line) for line in server.stderr.splitlines()]
        assert {record.get("server") for record in records if record.get("completion_tokens")} <= {0, 1}
        assert not any(each.is_running() for each in processes)


def test_killed_the_parent_leaves_no_process(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0", "--api-servers", "2") as server:
        server.serves()
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) == 3
        server.process.kill()
        assert psutil.wait_procs(processes, timeout=DEADLINE_S)[1] == []


def test_a_server_that_does_not_start_ends_all_with_the_reason(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0", "--api-servers", "2") as server:
        wait_until(lambda: descendants(server, SERVER), server)
        descendants(server, SERVER)[0].kill()
        assert server.end() == 1
        last = server.stderr.splitlines()[-1]
        assert last.startswith("aioengine: an HTTP server could not be started: HTTP server ")
        assert "was killed by SIGKILL" in last


def test_ctrl_c_ends_all_and_says_so_by_its_exit_code(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0", "--api-servers", "2") as server:
        server.serves()
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 130


def test_at_a_unix_socket_all_servers_accept(tmp_path: Path) -> None:
    path = f"/tmp/aio-{tmp_path.name}.sock"
    with serve(tmp_path, "--uds", path, "--api-servers", "2") as server:
        assert server.serves() == f"unix:{path}"
        seen = set()
        while len(seen) < 2:
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=path), base_url="http://x", timeout=DEADLINE_S
            ) as client:
                answer = client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1})
                seen.add(answer.json()["id"].removeprefix("resp_")[:2])
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert not Path(path).exists()


def test_a_replica_a_port_is_each_a_server_alone(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0", "--replicas", "2", "--external-lb") as server:
        urls = [server.serves(), server.serves()]
        assert len(set(urls)) == 2
        for number, url in enumerate(urls):
            for _ in range(number + 1):
                assert ask(url, "POST", "/v1/completions", json={"prompt": "Once", "max_tokens": 3}).status_code == 200
        counted = [ask(url, "GET", "/metrics").text for url in urls]
        tokens = 'vllm:generation_tokens_total{engine="0",model_name="demo"} '
        assert [f"{tokens}{3 * (number + 1)}.0" in text for number, text in enumerate(counted)] == [True, True]
        assert descendants(server, REPLICA) == []
        victim = descendants(server, SERVER)[0]
        victim.kill()

        def is_back() -> bool:
            try:
                return all(ask(url, "GET", "/health").status_code == 200 for url in urls)
            except httpx.TransportError:
                return False

        ports = [int(url.rpartition(":")[2]) for url in urls]
        wait_until(lambda: sum(map(refuses, ports)) == 1, server)  # the dead one's, which a balancer is to hear
        psutil.wait_procs([victim], timeout=DEADLINE_S)
        wait_until(is_back, server)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
