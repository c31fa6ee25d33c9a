"""An address is refused before a socket exists unless it is its owner's alone, or guarded by keys."""

import contextlib
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from aioengine.errors import ConfigError
from aioengine.transport.addresses import (
    MAX_SOCKET_PATH_BYTES,
    Address,
    PrivateFolder,
    check_bind,
    check_connect,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that only its owner can enter, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="aio", dir="/tmp") as path:
        yield Path(path)


def listen(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def refused(check: Callable[..., Address], address: str, match: str, *, has_keys: bool = False) -> None:
    with pytest.raises(ConfigError, match=match):
        check(address, has_keys=has_keys)


def leave_stale(path: Path) -> None:
    listen(path).close()
    assert stat.S_ISSOCK(path.lstat().st_mode)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("tcp://127.200.3.4:0080", "tcp://127.200.3.4:80"),
        ("tcp://[::1]:5555", "tcp://[::1]:5555"),
        ("tcp://[0:0::0001]:65535", "tcp://[::1]:65535"),
        ("tcp://localhost:5555", "tcp://127.0.0.1:5555"),
    ],
)
def test_loopback_needs_no_keys(address: str, expected: str) -> None:
    assert str(check_bind(address, has_keys=False)) == str(check_connect(address, has_keys=False)) == expected
    assert check_bind(address, has_keys=False).is_ipv6 == ("[" in address)
    assert check_connect("tcp://[::ffff:127.0.0.1]:5555", has_keys=False).is_ipv6


@pytest.mark.parametrize("port", ["0", "*"])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_any_port_can_be_bound_to_and_what_zmq_calls_it_then_connected_to(host: str, port: str) -> None:
    address = check_bind(f"tcp://{host}:{port}", has_keys=False)
    refused(check_connect, str(address), "a port is needed")
    with zmq.Context() as context, context.socket(zmq.PUSH) as bound:
        bound.ipv6 = address.is_ipv6
        bound.bind(str(address))
        named = check_connect(bound.last_endpoint.rstrip(b"\0").decode(), has_keys=False)
        assert (named.host, named.is_ipv6) == (address.host, address.is_ipv6)
        assert named.port > 0


@pytest.mark.parametrize(
    "host",
    [
        *("10.0.0.1", "192.168.1.7", "8.8.8.8", "0.0.0.0", "*", "[::]", "[fe80::1]", "[::ffff:0.0.0.0]"),
        *("[::ffff:10.0.0.1]", "eth0", "lo", "gpu7.example.org", "localhost.localdomain", "LOCALHOST"),
        *("127.1", "127.0.0.01", "2130706433"),
    ],
)
def test_what_other_machines_may_reach_needs_keys_and_no_name_is_looked_up(host: str) -> None:
    for check in (check_bind, check_connect):
        refused(check, f"tcp://{host}:5555", r"needs keys: make them with `aioengine keys FOLDER`")
    assert str(check_bind(f"tcp://{host}:5555", has_keys=True)).endswith(":5555")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_every_interface_is_bound_to_where_it_is_asked_for_and_never_connected_to(host: str) -> None:
    assert str(check_bind(f"tcp://{host}:0", has_keys=True)) == f"tcp://{host}:*"
    refused(check_connect, f"tcp://{host}:5555", "every interface", has_keys=True)


@pytest.mark.parametrize(
    "rest",
    [
        *("", ":", ":5555", "127.0.0.1", "127.0.0.1:"),
        *("127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:+5", "127.0.0.1:a"),
        *("127.0.0.1:٥", "127.0.0.1: 5", "127.0.0.1:1_0", "127.0.0.1:000080", "::1:5555", "[::1]", "[::1]5555", "[]:5"),
        *("[127.0.0.1]:5", "[*]:5", "[localhost]:5", "[::1:5", "::1]:5", "a;b:5", "1.1.1.1:1;127.0.0.1:5", "a b:5"),
        *("user@host:5", "host/path:5", "-x:5", "a\0:5", "a\n:5", "тест:5"),
    ],
)
def test_a_malformed_tcp_address_is_refused_also_with_keys(rest: str) -> None:
    for check in (check_bind, check_connect):
        refused(check, f"tcp://{rest}", re.escape(repr(f"tcp://{rest}")), has_keys=True)


@pytest.mark.parametrize(
    "address",
    ["", "engine", "/run/x", "ipc:/run/x", "inproc://x", "udp://127.0.0.1:5", "pgm://x", "ws://x", "TCP://[::1]:5"],
)
def test_any_other_scheme_is_refused_with_what_is_possible(address: str) -> None:
    for check in (check_bind, check_connect):
        refused(check, address, r"possible are ipc:///.* tcp://127\.0\.0\.1:PORT .*aioengine keys")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("@engine", "abstract"),
        ("", "absolute"),
        ("*", "absolute"),
        ("run/engine", "absolute"),
        ("/", "absolute"),
        ("/run/aioengine/", "absolute"),
        ("/run/aioengine/..", "absolute"),
        ("/run/a\0b", "printable"),
        ("/run/a\nb", "printable"),
        ("/run/\udc80", "printable"),
        ("/" + "é" * (MAX_SOCKET_PATH_BYTES // 2), f"{MAX_SOCKET_PATH_BYTES + 1 - MAX_SOCKET_PATH_BYTES % 2} bytes"),
    ],
)
def test_a_path_that_cannot_hold_a_socket_of_ones_own_is_refused(path: str, message: str) -> None:
    if message.endswith("bytes"):
        path += "é"
        message = f"{len(path.encode())} bytes"
    for check in (check_bind, check_connect):
        refused(check, f"ipc://{path}", message)


def test_the_longest_path_can_be_bound_to(folder: Path) -> None:
    path = f"{folder}/".ljust(MAX_SOCKET_PATH_BYTES, "x")
    address = check_bind(f"ipc://{path}", has_keys=False)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        bound.bind(str(address))


def test_missing_folders_are_made_for_their_owner_only_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        check_bind(f"ipc://{folder}/a/b/engine", has_keys=False)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((folder / name).stat().st_mode) for name in ("a", "a/b")] == [0o700, 0o700]
    check_bind(f"ipc://{folder}/a/b/engine", has_keys=False)


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o704, 0o750, 0o755, 0o777, 0o1777])
def test_a_folder_that_others_can_enter_is_refused_with_what_to_do(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    message = f"others can enter .*mode {mode:o}.*mkdir -m 700 {folder}/aioengine, .*ipc://{folder}/aioengine/engine"
    refused(check_bind, f"ipc://{folder}/engine", message)
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert list(folder.iterdir()) == []


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    refused(check_bind, f"ipc://{folder}/engine", "another user's; make one that only you can enter, mkdir -m 700")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("link/engine", "not a folder"),
        ("dangling/engine", "not a folder"),
        ("file/engine", "not a folder"),
        ("file/below/engine", r"cannot serve at ipc://.*Not a directory.*choose another"),
        ("file", "is not a socket; it is not overwritten"),
        ("real", "is not a socket; it is not overwritten"),
        ("dangling", "is not a socket; it is not overwritten"),
        ("link to a socket", "is not a socket; it is not overwritten"),
    ],
)
def test_what_is_not_a_socket_or_no_folder_is_left_alone(folder: Path, name: str, message: str) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "file").write_text("precious")
    leave_stale(folder / "stale")
    (folder / "link to a socket").symlink_to(folder / "stale")
    before = {path: path.lstat()[:7] for path in folder.rglob("*")}
    refused(check_bind, f"ipc://{folder}/{name}", message)
    assert {path: path.lstat()[:7] for path in folder.rglob("*")} == before


@pytest.mark.parametrize("is_backlog_full", [False, True])
def test_a_socket_that_is_in_use_is_left_alone(folder: Path, is_backlog_full: bool) -> None:
    path = folder / "engine"
    with listen(path) as server, contextlib.ExitStack() as clients:
        before = path.lstat().st_ino
        if is_backlog_full:
            server.listen(0)
            for _ in range(4):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect_ex(str(path))
        refused(check_bind, f"ipc://{path}", "in use")
        assert path.lstat().st_ino == before


def test_what_a_killed_server_left_is_removed_and_nothing_else(folder: Path) -> None:
    for name in ("engine", "engine2"):
        leave_stale(folder / name)
    (folder / "engine.8").touch()
    with listen(folder / "engine.9"):
        check_bind(f"ipc://{folder}/engine", has_keys=False)
    left = {path.name for path in folder.iterdir()}
    assert left == {"engine2", "engine.8", "engine.9"}


def test_nobody_serves_where_nothing_is(folder: Path) -> None:
    (folder / "file").touch()
    leave_stale(folder / "stale")
    for name in ("missing", "missing/engine", "file", "file/engine", "stale", "."):
        refused(check_connect, f"ipc://{folder}/{name}", r"no engine serves at ipc://|absolute path")
    assert (folder / "stale").exists(), "looking for a server changes nothing"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_server_in_a_folder_that_others_write_to_is_not_trusted(folder: Path, mode: int) -> None:
    with listen(folder / "engine"):
        folder.chmod(mode)
        refused(check_connect, f"ipc://{folder}/engine", "any user may serve there")


def test_a_server_of_another_user_is_trusted_by_root_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = folder.stat().st_uid
    with listen(folder / "engine"):
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        refused(check_connect, f"ipc://{folder}/engine", "any user may serve there")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        check_connect(f"ipc://{folder}/engine", has_keys=False)


@pytest.mark.parametrize("has_other_files", [False, True])
def test_a_private_folder_is_its_owners_and_goes_with_its_sockets_unless_other_files_lie_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_other_files: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with PrivateFolder() as private, PrivateFolder() as other:
        assert Path(private.path).parent == folder
        assert private.path != other.path
        assert stat.S_IMODE(os.stat(private.path).st_mode) == 0o700
        address = private.address("engine")
        assert check_bind(str(address), has_keys=False) == address
        leave_stale(Path(address.path))
        leave_stale(Path(f"{address.path}.7"))
        if has_other_files:
            Path(private.path, "notes").write_text("precious")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes"] * has_other_files
    assert os.path.exists(private.path) == has_other_files
    private.remove()


@pytest.mark.parametrize("kind", ["missing", "relative", "too long", "open to others", "another user's", "a file"])
def test_a_runtime_folder_of_no_use_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    runtime = folder / ("x" * 80 if kind == "too long" else "runtime")
    if kind == "a file":
        runtime.touch(mode=0o600)
    elif kind != "missing":
        runtime.mkdir(mode=0o700)
    if kind == "open to others":
        runtime.chmod(0o755)
    if kind == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "runtime" if kind == "relative" else str(runtime))
    (folder / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    with PrivateFolder() as private:
        assert Path(private.path).parent == folder / "temporary"


def test_a_name_too_long_for_a_private_folder_is_refused() -> None:
    with PrivateFolder() as private, pytest.raises(ConfigError, match="bytes"):
        private.address("x" * MAX_SOCKET_PATH_BYTES)
