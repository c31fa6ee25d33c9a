"""Where a server is reached: ports, Unix sockets, TLS; real clients of each."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import both_loops
from server.small_app import GET, SmallApp, SmallEngine, leave, listener_at, running
from turn_probe import few_a_turn
from waiting import until

from aioengine.errors import ConfigError
from aioengine.server.http_listener import HttpListener, ServerAddress
from aioengine.server.http_server import StopRequest, serve


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem and key.pem for 127.0.0.1, and locked.pem: the key with the password "open"."""
    made = tmp_path_factory.mktemp("tls")
    make_certificate(made)
    lock = ["openssl", "ec", "-aes256", "-in", "key.pem", "-out", "locked.pem", "-passout", "pass:open"]
    subprocess.run(lock, cwd=made, check=True, capture_output=True)
    return made


def make_certificate(folder: Path) -> None:
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem -days 2"
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make.split(), *name], cwd=folder, check=True, capture_output=True)


@both_loops
async def test_a_free_port_is_found_and_told() -> None:
    async with running() as server, httpx.AsyncClient(base_url=server.url) as client:
        assert server.address[1] > 0
        response = await client.post("/echo", content="hello")
        assert response.json()["body"] == "hello"
        assert "date" in response.headers
        assert "server" not in response.headers


@pytest.mark.parametrize("host", ["localhost", "::1"])
async def test_all_addresses_of_a_host_are_served_at_one_port(host: str) -> None:
    async with running(ServerAddress(host=host, port=0)) as server, httpx.AsyncClient() as client:
        assert host == "localhost" or server.url.startswith("http://[::1]:")
        port = int(server.url.rpartition(":")[2])
        for *_, address in set(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
            name = f"[{address[0]}]" if ":" in str(address[0]) else address[0]
            assert (await client.get(f"http://{name}:{port}/health")).status_code == 200


def test_a_client_cannot_connect_before_it_listens(folder: Path) -> None:
    with HttpListener(ServerAddress(port=0)) as listener:
        address = listener.sockets[0].getsockname()
        with socket.socket() as early, pytest.raises(ConnectionRefusedError):
            early.connect(address)
    with HttpListener(ServerAddress(uds=str(folder / "a.sock"))):
        assert os.listdir(folder) == []


def test_what_a_port_accepts_finds_out_that_its_client_is_gone() -> None:
    with HttpListener(ServerAddress(port=0)) as listener:
        listener.listen()
        with socket.create_connection(listener.sockets[0].getsockname()):
            accepted, _ = listener.sockets[0].accept()
            with accepted:
                told = [accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
                options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                told += [accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options]
                assert told == [1, 60, 15, 4]


def test_several_servers_share_a_port_evenly_and_no_other_program_can() -> None:
    with HttpListener(ServerAddress(host="localhost", port=0), 3) as listener:
        port = int(listener.url.rpartition(":")[2])
        assert {each.getsockname()[1] for share in listener.shares for each in share} == {port}
        assert len({len(share) for share in listener.shares}) == 1
        shares = [share[0] for share in listener.shares]
        for each in shares:
            each.listen()
            each.setblocking(False)
        for num_servers in (1, 2):
            with pytest.raises(ConfigError, match="Address already in use"):
                HttpListener(ServerAddress(host="localhost", port=port), num_servers)
        clients = [socket.create_connection(shares[0].getsockname()) for _ in range(90)]
        counts = [len(list(accepted_at(each))) for each in shares]
        assert sum(counts) == 90
        assert min(counts) > 5  # of 30: less has a chance of one in ten million
        for client in clients:
            client.close()


def accepted_at(listening: socket.socket) -> Iterator[None]:
    while True:
        try:
            accepted, _ = listening.accept()
        except BlockingIOError:
            return
        accepted.close()
        yield


def test_what_was_inherited_is_served_at_and_its_file_stays(folder: Path) -> None:
    path = folder / "a.sock"
    with HttpListener(ServerAddress(uds=str(path)), 2) as listener:
        listener.bind()
        assert len(listener.shares) == 1
        for _ in range(2):
            with HttpListener.inherited(listener.where, [os.dup(listener.sockets[0].fileno())]) as inherited:
                inherited.listen()
                assert inherited.url == listener.url
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(path))
            assert path.exists()
        listener.let_go()
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(path))
    assert not path.exists()


def test_a_port_that_refuses_stays_bound_and_may_be_served_at_again() -> None:
    with HttpListener(ServerAddress(port=0)) as listener:
        listener.refuse()  # nothing: it does not listen yet
        address = listener.sockets[0].getsockname()
        for _ in range(2):
            with HttpListener.inherited(listener.where, [os.dup(listener.sockets[0].fileno())]) as inherited:
                inherited.listen()
                listener.listen()
                socket.create_connection(address).close()
                inherited.refuse()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(address)
            assert listener.sockets[0].getsockname() == address
    listener.refuse()  # nothing: it is closed


@both_loops
async def test_a_unix_socket_is_its_owners_alone_and_removed_at_the_end(folder: Path) -> None:
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as left:  # by a server that was killed: it is replaced
        left.bind(str(path))
        left.listen()
    before = os.umask(0)
    try:
        async with running(ServerAddress(uds=str(path))) as server:
            assert server.url == f"unix:{path}"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as client:
                assert (await client.get("http://x/health")).status_code == 200
            with pytest.raises(ConfigError, match="in use: another process serves there"):
                await listener_at(ServerAddress(uds=str(path)))
    finally:
        os.umask(before)
    assert os.listdir(folder) == []


async def test_a_socket_that_another_has_put_in_its_place_is_left_alone(folder: Path) -> None:
    path = str(folder / "a.sock")
    async with running(ServerAddress(uds=path)):
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(path)
    assert os.listdir(folder) == ["a.sock"]


def test_what_cannot_be_served_at_is_said_in_a_line(folder: Path) -> None:
    (folder / "file").write_text("precious")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for where, says in [
            (ServerAddress(port=port), f"cannot serve at http://127.0.0.1:{port}: Address already in use"),
            (ServerAddress(host="192.0.2.1", port=0), "at http://192.0.2.1:0: Cannot assign requested address"),
            (ServerAddress(uds=str(folder / "file")), "file exists and is not a socket; it is not overwritten"),
            (ServerAddress(uds=f"{folder}/none/a.sock"), "no file can be made in .*/none: it is not there"),
            (ServerAddress(uds=f"{folder}/{'a' * 100}"), "bytes; 107 are possible"),
        ]:
            with pytest.raises(ConfigError, match=says) as raised:
                HttpListener(where)
            assert "\n" not in str(raised.value)
    assert (folder / "file").read_text() == "precious"


async def test_a_port_that_is_taken_while_the_model_loads_is_said_too() -> None:
    with HttpListener(ServerAddress(port=0)) as listener, socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(listener.sockets[0].getsockname())
        thief.listen()
        with pytest.raises(ConfigError, match="Address already in use"):
            await serve(SmallApp(SmallEngine()), engine=SmallEngine(), listener=listener, stop=StopRequest())


# TLS


def tls_at(folder: Path, key: str = "key.pem", **options: Any) -> ServerAddress:
    """A free port with the certificate of that folder."""
    return ServerAddress(port=0, ssl_certfile=str(folder / "cert.pem"), ssl_keyfile=str(folder / key), **options)


def trust(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


@both_loops
async def test_https_is_served_with_a_certificate(certificate: Path) -> None:
    for key, password in (("key.pem", None), ("locked.pem", "open")):
        where = tls_at(certificate, key, ssl_keyfile_password=password)
        async with (
            running(where) as server,
            httpx.AsyncClient(base_url=server.url, verify=trust(certificate)) as client,
        ):
            assert server.url.startswith("https://127.0.0.1:")
            assert (await client.post("/echo", content="x" * 10**6)).json()["body"] == "x" * 10**6
            assert server.app.scopes[-1]["scheme"] == "https"


@both_loops
async def test_plain_http_at_a_tls_port_and_rubbish_hurt_no_client(certificate: Path) -> None:
    async with running(tls_at(certificate)) as server:
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"health")
        try:
            assert b"200" not in await reader.read()
        except ConnectionError:
            pass
        await leave(writer)
        async with httpx.AsyncClient(base_url=server.url, verify=trust(certificate)) as client:
            assert (await client.get("/health")).status_code == 200


@both_loops
async def test_over_tls_too_an_app_can_cut_a_client_that_does_not_read(certificate: Path) -> None:
    async with running(tls_at(certificate)) as server:
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust(certificate))
        writer.write(GET % b"flood")
        await reader.readexactly(1000)  # then asyncio stops reading by itself, with its buffer full
        server.app.scopes[0]["extensions"]["aioengine.cut"]()
        await until(lambda: server.app.num_floods_ended == 1)
        await leave(writer)


@both_loops
async def test_over_tls_too_what_is_held_for_later_turns_is_answered_and_by_a_server_that_drains(
    certificate: Path,
) -> None:
    async with running(tls_at(certificate)) as server:
        port = int(server.url.rpartition(":")[2])
        connections = [await asyncio.open_connection("127.0.0.1", port, ssl=trust(certificate)) for _ in range(20)]
        with few_a_turn():
            for is_last in (False, True):
                for _, writer in connections:
                    writer.write(GET % b"health")  # a 503 for what comes when the drain has begun
                if is_last:
                    await asyncio.sleep(0)
                    server.stop.ask()
                for reader, _ in connections:
                    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                    await reader.readuntil(b"}")
        await server.has_ended.wait()
        for _, writer in connections:
            await leave(writer)


def test_a_bad_certificate_is_said_in_a_line(certificate: Path, folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    make_certificate(other)
    (folder / "rubbish.pem").write_text("rubbish")
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    for where, says in [
        (ServerAddress(port=0, ssl_certfile=cert, ssl_keyfile=str(other / "key.pem")), "key values mismatch"),
        (tls_at(certificate, "locked.pem"), "no certificate and key"),
        (ServerAddress(port=0, ssl_certfile=str(folder / "rubbish.pem")), "no certificate and key that fit together"),
        (ServerAddress(port=0, ssl_certfile=str(folder / "none.pem")), "none.pem: No such file"),
        (ServerAddress(port=0, ssl_keyfile=key), "give both, or neither"),
        (ServerAddress(uds=str(folder / "a.sock"), ssl_certfile=cert, ssl_keyfile=key), "a Unix socket needs none"),
    ]:
        with pytest.raises(ConfigError, match=says) as raised:
            HttpListener(where)
        assert "\n" not in str(raised.value)
