"""`aioengine serve` as a user runs it: a process of its own, real clients, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest
from cli.conftest import COMMAND, DEADLINE_S, ENVIRONMENT, CallMain
from click.testing import CliRunner, Result
from nightly import nightly

from aioengine.cli.serve import Service, serve_command

STORY = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of its own, since the paths of sockets are short."""
    made = Path(tempfile.mkdtemp(prefix="serve-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


pytestmark = pytest.mark.usefixtures("no_stray_process")


class Command:
    """`aioengine ARGS`, running; a context manager that ends it."""

    def __init__(self, log: Path, *args: str, **environment: str) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*COMMAND, *args],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**ENVIRONMENT, **environment},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def says(self) -> str:
        """Its next line on stdout; empty at its end."""
        guard = threading.Timer(DEADLINE_S, self.process.kill)
        guard.start()
        try:
            assert self.process.stdout is not None
            return self.process.stdout.readline().rstrip("\n")
        finally:
            guard.cancel()
            guard.join()

    def serves(self) -> str:
        """Where, once it does."""
        line = self.says()
        name, _, url = line.removeprefix("serving ").partition(" at ")
        assert name == "demo", line + self.stderr
        return url

    def end(self) -> int:
        """Its exit code; nothing of it is left then."""
        stdout, _ = self.process.communicate(timeout=DEADLINE_S)
        assert stdout == ""
        assert "\nTraceback" not in f"\n{self.stderr}", self.stderr
        assert "Warning" not in self.stderr, self.stderr
        return self.process.returncode

    @property
    def stderr(self) -> str:
        return self.log.read_text()


def serve(folder: Path, *args: str, **environment: str) -> Command:
    """`aioengine serve ARGS`; its log goes to the folder."""
    return Command(folder / "log", "serve", *args, **environment)


@contextmanager
def story(client: httpx.Client, num_tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    """A stream of so many tokens; its first piece has come."""
    with client.stream("POST", "/v1/completions", json={**STORY, "max_tokens": num_tokens}) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        pieces = (json.loads(line) for line in lines if line != "[DONE]")
        next(pieces)
        yield pieces


def ending_of(pieces: Iterator[dict[str, Any]]) -> tuple[str, str]:
    """The text that still came, and how it ended: a connection that was cut would raise."""
    choices = [piece["choices"][0] for piece in pieces]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def refuses(port: int) -> bool:
    with socket.socket() as late:
        return late.connect_ex(("127.0.0.1", port)) != 0


def test_over_tcp_it_answers_those_with_a_key_and_sigterm_lets_a_stream_end(tmp_path: Path) -> None:
    keys = {"AIOENGINE_API_KEY": "first-key, second-key"}
    with serve(tmp_path, "--port", "0", "--log-format", "json", **keys) as server:
        url = server.serves()
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/v1/models").status_code == 401
        key = {"authorization": "Bearer second-key"}
        with httpx.Client(base_url=url, headers=key, timeout=DEADLINE_S) as client, httpx.Client() as idle:
            assert idle.get(f"{url}/health").json()["status"] == "ALIVE"
            assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
            with story(client, 300) as pieces:
                server.process.send_signal(signal.SIGTERM)
                while not refuses(int(url.rpartition(":")[2])):
                    assert server.process.poll() is None
                text, reason = ending_of(pieces)
                assert reason == "length"
                assert len(text) > 200
        assert server.end() == 0
        records = [json.loads(line) for line in server.stderr.splitlines()]
        assert any(record["message"].startswith("draining for ") for record in records)
        (streamed,) = [record for record in records if record.get("completion_tokens")]
        assert (streamed["status"], streamed["outcome"], streamed["completion_tokens"]) == (200, "ok", 300)
        assert "second-key" not in server.stderr


@pytest.mark.nightly
def test_at_a_unix_socket_the_drain_ends_at_its_deadline_and_the_client_hears_it(folder: Path) -> None:
    path = folder / "api.sock"
    with serve(folder, "--uds", str(path), "--drain-timeout-s", "0.1") as server:
        assert server.serves() == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with (
            httpx.Client(transport=transport, base_url="http://x", timeout=DEADLINE_S) as client,
            story(client, 1000) as pieces,
        ):
            server.process.send_signal(signal.SIGTERM)
            assert ending_of(pieces)[1] == "abort"
        assert server.end() == 0
        assert "aborting what still runs; connections: 1" in server.stderr
    assert os.listdir(folder) == ["log"]


@pytest.mark.nightly
def test_over_tls_a_second_ctrl_c_aborts_at_once(tmp_path: Path) -> None:
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem -days 2"
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make.split(), *name], cwd=tmp_path, check=True, capture_output=True)
    files = ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
    trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    with serve(tmp_path, "--port", "0", *files) as server:
        url = server.serves()
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=url, verify=trust, timeout=DEADLINE_S) as client, story(client, 1000) as pieces:
            rebound = client.get("/v1/models", headers={"host": "evil.example:8000"})  # as of a page in a browser
            assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
            server.process.send_signal(signal.SIGINT)
            while not refuses(int(url.rpartition(":")[2])):
                assert server.process.poll() is None
            assert "choices" in next(pieces)  # the first one has aborted nothing
            server.process.send_signal(signal.SIGINT)
            assert ending_of(pieces)[1] == "abort"
        assert server.end() == 130


@pytest.mark.nightly
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_with_the_engine_in_a_process_its_death_is_the_servers(tmp_path: Path, log_format: str) -> None:
    with serve(tmp_path, "--port", "0", "--process", "--log-format", log_format) as server:
        url = server.serves()
        (child,) = psutil.Process(server.process.pid).children()
        began = time.monotonic()
        second = CliRunner().invoke(serve_command, ["--port", url.rpartition(":")[2]])
        assert "Address already in use" in str(second.exception)
        assert time.monotonic() - began < 2  # before any model was loaded
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as client, story(client, 1000) as pieces:
            child.send_signal(signal.SIGKILL)
            last = list(pieces)[-1]
            assert last["error"]["code"] == "engine_dead"
        assert server.end() == 1
        told = [line for line in server.stderr.splitlines() if "was killed by SIGKILL" in line]
        if log_format == "text":
            assert sum(line.startswith("aioengine: ") for line in told) == 1
        else:
            assert {json.loads(line)["level"] for line in told} == {"ERROR"}
        assert not child.is_running()


@pytest.mark.nightly
def test_an_engine_elsewhere_is_served_and_serves_on(folder: Path) -> None:
    address = f"ipc://{folder}/engine.sock"
    with Command(folder / "engine.log", "engine", address) as engine:
        assert engine.says() == f"serving at {address}"
        with serve(folder, "--port", "0", "--connect", address) as server:
            with httpx.Client(base_url=server.serves(), timeout=DEADLINE_S) as client, story(client, 20) as pieces:
                assert ending_of(pieces)[1] == "length"
            server.process.send_signal(signal.SIGTERM)
            assert server.end() == 0
        assert engine.process.poll() is None


def test_told_to_stop_while_the_engine_starts_it_ends(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{folder}/engine.sock")
        silent.listen()
        silent.settimeout(DEADLINE_S)
        connect = ["--connect", f"ipc://{folder}/engine.sock"]
        with serve(folder, "--port", "0", *connect) as server, silent.accept()[0]:
            server.process.send_signal(signal.SIGTERM)
            assert server.end() == 0
            assert "told to stop while the engine was starting" in server.stderr


def invoke(*args: str) -> Result:
    return CliRunner().invoke(serve_command, list(args), env={"AIOENGINE_API_KEY": None})


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--tensor-parallel-size", "one device: give --replicas for one on each"),
        ("--tool-call-parser", "give --tool-format"),
        ("--reasoning-parser", "give --reasoning-format"),
        ("--enable-auto-tool-choice", "tools need no setting; else leave it out"),
        ("--swap-space", "it has no effect here; else leave it out"),
        ("--disable-log-requests", "give --log-requests;"),
        ("--use-tqdm-on-load", "give --no-show-progress;"),
        ("--tokenizer", "that of the model's folder"),
        ("--n-gpu-layers", "did you mean --device?"),
    ],
)
def test_flags_of_other_servers_are_refused_with_what_to_do_here(call_main: CallMain, flag: str, hint: str) -> None:
    status, _, err = call_main("serve", flag, "1")
    assert status == 2
    assert f"No such option {flag}: " in err
    assert hint in err
    assert call_main("serve", "--quantization", "awq")[2].endswith("read from its files: leave quantization out\n")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--unknown-fields", "warn"), "'warn': none of the choices; choose one of 'ignore', 'refuse'"),
        (("a", "--model", "b"), "the argument names the model 'a', and --model 'b'"),
        (("--keys", "x"), "--keys and --client are for --connect"),
        (("--connect", "ipc:///x", "--max-num-seqs", "3"), "--max-num-seqs is for an engine that is started here"),
        (("--connect", "ipc:///x", "--process"), "--process is for an engine that is started here"),
        (("--max-headers", "0"), "Invalid value for '--max-headers'"),
        (("--port", "65536"), "Invalid value for '--port'"),
        (("--uds", "/x.sock", "--port", "8000"), "--uds is instead of a port: leave --port out"),
        (("--uds", "/x.sock", "--host", "127.0.0.1"), "--uds is instead of a port: leave --host out"),
        (("--ssl-certfile", "/nowhere.pem", "--port", "0"), "/nowhere.pem: No such file"),
        (("--uds", "/nowhere/at/all.sock"), "no file can be made in /nowhere/at: it is not there"),
        (("--host", "192.0.2.1"), "cannot serve at http://192.0.2.1:8000: Cannot assign requested address"),
        (("--max-num-batched-tokens", "1"), "raise the first or lower the second"),
        (("--api-servers", "0"), "Invalid value for '--api-servers'"),
        (("--connect", "ipc:///x", "--replicas", "2"), "--replicas is for an engine that is started here"),
        (("--connect", "ipc:///x", "--external-lb"), "--external-lb starts its engines itself"),
        (("--external-lb", "--api-servers", "2"), "one server for each replica: leave --api-servers out"),
        (("--external-lb",), "say in --replicas how many"),
        (("--external-lb", "--replicas", "2", "--uds", "/x.sock"), "--external-lb serves at ports: leave --uds out"),
        (("--external-lb", "--replicas", "2", "--balance", "load"), "--balance is for replicas behind one port"),
        (("--external-lb", "--replicas", "tcp://a:1,tcp://b:1"), "say in --replicas how many"),
        (("--replicas", "tcp://a:1,b:1"), "'b:1' is no address: give tcp://HOST:PORT"),
        (("--replicas", "tcp://a:1", "--max-num-seqs", "3"), "max_num_seqs: give it to the engines at tcp://a:1"),
        (("--replicas", "0"), "Invalid value for '--replicas'"),
        (("--external-lb", "--replicas", "2", "--process"), "leave --process out"),
        (("--connect", "cluster+ipc:///x/c", "--keys", "k", "--port", "0"), "leave keys out"),
        (("--connect", "cluster+tcp://127.0.0.1:1", "--port", "0"), "give cluster+ipc:///path"),
        (("--replicas", "2", "--cluster-address", "tcp://127.0.0.1:5571"), "give an ipc:///path"),
        (("--external-lb", "--replicas", "2", "--port", "65535"), "--external-lb needs ports up to 65536"),
        (("--allowed-origins", "app.example"), "'app.example' is no origin; write scheme://host"),
        (("--allowed-hosts", "http://x"), "'http://x' is no name of a host"),
    ],
)
def test_what_cannot_be_served_is_said_before_a_model_is_loaded(
    call_main: CallMain, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], says: str
) -> None:
    monkeypatch.delenv("AIOENGINE_API_KEY", raising=False)
    code, _, stderr = call_main("serve", *args)
    assert (code, says in stderr, "weights" in stderr) == (2, True, False), stderr


def test_the_log_says_whether_a_key_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    def logged(*args: str) -> str:
        """What is logged by a server that finds no engine."""
        result = invoke("--port", "0", *args, "--connect", "ipc:///nowhere/a.sock")
        assert "no engine serves" in str(result.exception)
        return result.stderr + capfd.readouterr().err

    assert "INFO aioengine: no API key is asked for" in logged()
    assert "can be reached from other machines, and asks for no key" in logged("--host", "0.0.0.0")
    with_key = logged("--api-keys", "a-long-secret")
    assert "INFO aioengine: asking for an API key" in with_key
    assert "a-long-secret" not in with_key


NO_ENGINE = ("--connect", "ipc:///nowhere/a.sock")
BAD_KEY = "aioengine: api_keys: each key needs at least 8 characters\n"


@pytest.mark.parametrize(
    ("args", "variable", "code", "says"),
    [
        (("/nowhere/model",), None, 1, "/nowhere/model"),
        *nightly(
            (NO_ENGINE, None, 1, "no engine serves"),
            (("--host", "192.0.2.1"), None, 2, "cannot serve"),
            (("--api-keys", "tooshrt"), None, 2, BAD_KEY),
        ),
        ((), "tooshrt", 2, BAD_KEY),
        *nightly(((), " , ", 2, "AIOENGINE_API_KEY is set, and holds no key: give one, or unset it")),
    ],
)
def test_it_ends_with_the_code_that_its_help_tells_and_shows_no_key(
    tmp_path: Path, args: tuple[str, ...], variable: str | None, code: int, says: str
) -> None:
    environment = {"AIOENGINE_API_KEY": variable} if variable is not None else {}
    with serve(tmp_path, "--port", "0", *args, **environment) as server:
        assert server.end() == code
        assert server.stderr.splitlines()[-1].startswith("aioengine: ")
        assert says in server.stderr
        assert "tooshrt" not in server.stderr


def test_in_json_its_last_words_are_json_too(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0", "--log-format", "json", *NO_ENGINE) as server:
        assert server.end() == 1
        last = json.loads(server.stderr.splitlines()[-1])
        assert (last["level"], "serve" in last["message"]) == ("ERROR", True)


@pytest.mark.parametrize(
    ("args", "hosts"),
    [
        ((), {"localhost", "127.0.0.1", "::1"}),
        (("--host", "127.0.0.2"), {"localhost", "127.0.0.1", "::1", "127.0.0.2"}),
        (("--allowed-hosts", "fox.example"), {"fox.example"}),
        (("--api-keys", "a-long-secret"), None),
        (("--host", "0.0.0.0"), None),
    ],
)
def test_at_this_machine_alone_and_without_keys_it_answers_to_its_own_names(
    args: tuple[str, ...], hosts: set[str] | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def reach(service: Service) -> None:
        raise Reached(service.config)

    monkeypatch.setattr(Service, "run", reach)
    result = invoke("--port", "0", *args)
    assert isinstance(result.exception, Reached)
    (config,) = result.exception.args
    assert (config.allowed_hosts and set(config.allowed_hosts)) == hosts
    on_socket = invoke("--uds", str(folder / "a.sock")).exception
    assert isinstance(on_socket, Reached)
    assert on_socket.args[0].allowed_hosts is None
