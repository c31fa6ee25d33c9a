"""Keys are files that nobody else reads or changes; a server admits those with one."""

import asyncio
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import anyio
import hypothesis.strategies as st
import pytest
import zmq
import zmq.auth
from hypothesis import given
from transport.siege import look_until
from zmq.utils import z85

from aioengine.errors import ConfigError
from aioengine.transport.channel import Channel, Monitor
from aioengine.transport.security import ZAP_ENDPOINT, ClientKeys, KeyPair, ServerKeys, make_keys, shared_pair

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the keys of a server and of two clients, alice and bob."""
    make_keys(tmp_path / "keys", ["alice", "bob"])
    return tmp_path / "keys"


def load(side: str, folder: Path) -> ServerKeys | ClientKeys:
    return ServerKeys.load(folder) if side == "server" else ClientKeys.load(folder, "alice")


# The files


def test_each_side_reads_what_was_made(folder: Path) -> None:
    server = ServerKeys.load(folder)
    alice, bob = ClientKeys.load(folder, "alice"), ClientKeys.load(str(folder), "bob")
    assert alice.server == bob.server == server.pair.public
    assert server.clients == {z85.decode(client.pair.public) for client in (alice, bob)}
    assert zmq.curve_public(server.pair.secret) == server.pair.public
    assert len({server.pair.secret, alice.pair.secret, bob.pair.secret}) == 3


def test_secrets_are_their_owners_whatever_the_umask_and_nothing_else_is_left(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written = make_keys(tmp_path / "deep" / "keys", ["alice"])
    finally:
        os.umask(before)
    found = {str(path.relative_to(tmp_path / "deep/keys")): path for path in (tmp_path / "deep/keys").rglob("*")}
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in found.items()}
    assert modes == {
        "server.key": 0o644,
        "server.key_secret": 0o600,
        "clients": 0o700,
        "clients/alice.key": 0o644,
        "clients/alice.key_secret": 0o600,
    }
    assert stat.S_IMODE((tmp_path / "deep/keys").stat().st_mode) == 0o700
    assert sorted(written) == sorted(path for path in found.values() if path.is_file())
    secret = ServerKeys.load(tmp_path / "deep/keys").pair.secret
    assert secret not in found["server.key"].read_bytes()


def test_of_several_pairs_that_are_made_at_once_the_first_holds(tmp_path: Path) -> None:
    at_once = threading.Barrier(4)

    def make(path: Path) -> KeyPair:
        at_once.wait()
        return shared_pair(path)

    for folder in (tmp_path / str(count) for count in range(20)):
        path = folder / "front_ends.key_secret"
        with ThreadPoolExecutor(4) as threads:
            pair, *others = threads.map(make, [path] * 4)
        assert [*others, KeyPair.load(path)] == [pair] * 4
        assert [each.name for each in folder.iterdir()] == [path.name]
        assert [stat.S_IMODE(each.stat().st_mode) for each in (path, folder)] == [0o600, 0o700]
    late = tmp_path / "was removed" / "keys" / "front_ends.key_secret"
    with pytest.raises(ConfigError, match="cannot write keys to"):
        shared_pair(late)
    assert not late.parent.parent.exists()


def test_one_more_client_changes_nobody_elses_key(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    written = make_keys(folder, ["carol", "carol"])
    assert [path.name for path in written] == ["carol.key_secret", "carol.key"]
    assert {path: path.read_bytes() for path in before} == before
    assert len(ServerKeys.load(folder).clients) == 3


@pytest.mark.parametrize(
    ("clients", "missing", "mode", "said"),
    [
        *(
            (["carol", name], "", 0o700, "a client's name has letters")
            for name in ("", ".", "..", ".hidden", "a/b", "../server", "-x", "a b", "é", "a" * 65, "a\n")
        ),
        (["carol", "alice"], "clients/alice.key_secret", 0o700, "alice.key exists and is never overwritten"),
        (["carol", "alice"], "clients/alice.key", 0o700, "alice.key_secret exists and is never overwritten"),
        (["carol"], "server.key_secret", 0o700, "has server.key without the other half.*choose another folder"),
        (["carol"], "", 0o755, "keys can be entered by others .*chmod 700 "),
    ],
)
def test_where_keys_cannot_be_made_nothing_is_written(
    folder: Path, clients: list[str], missing: str, mode: int, said: str
) -> None:
    if missing:
        (folder / missing).unlink()
    folder.chmod(mode)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=said):
        make_keys(folder, clients)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write keys to .*file"):
        make_keys(tmp_path / "file" / "keys", ["alice"])


@pytest.mark.parametrize(
    ("side", "not_needed", "needed", "said"),
    [
        (
            "client",
            ["server.key_secret", "clients/alice.key", "clients/bob.key", "clients/bob.key_secret"],
            ["server.key"],
            "server.key cannot be read: copy it from where the server runs",
        ),
        (
            "server",
            ["server.key", "clients/alice.key_secret", "clients/bob.key_secret"],
            ["clients/alice.key", "clients/bob.key"],
            "no client could connect; make one with `aioengine keys .* --client NAME`",
        ),
    ],
)
def test_a_side_needs_its_secret_and_public_keys_of_the_other_and_no_more(
    folder: Path, side: str, not_needed: list[str], needed: list[str], said: str
) -> None:
    before = load(side, folder)
    for name in not_needed:
        (folder / name).unlink()
    assert load(side, folder) == before
    for name in needed:
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=said):
        load(side, folder)


def test_a_client_that_is_alone_needs_no_name_and_others_are_told_which_there_are(folder: Path) -> None:
    with pytest.raises(ConfigError, match="several clients; say which to use: alice, bob"):
        ClientKeys.load(folder)
    for name in ("carol", "../server", ""):
        with pytest.raises(ConfigError, match=rf"no secret key for '{name}' \(there: alice, bob\); make one with"):
            ClientKeys.load(folder, name)
    (folder / "clients/bob.key_secret").unlink()
    assert ClientKeys.load(folder) == ClientKeys.load(folder, "alice")


def test_a_folder_without_keys_is_said_with_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"server.key_secret cannot be read: make keys with `aioengine keys {tmp_path}"
    ):
        ServerKeys.load(tmp_path)
    with pytest.raises(
        ConfigError, match=r"no secret key for a client \(there: none\); make one with `aioengine keys`"
    ):
        ClientKeys.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("side", "names", "modes", "said"),
    [
        ("server", ["server.key_secret"], [0o640, 0o604, 0o620, 0o666], "is secret and can be read .*chmod 600"),
        ("client", ["clients/alice.key_secret"], [0o640, 0o604, 0o620, 0o666], "is secret and can be read .*chmod 600"),
        ("server", [".", "clients", "clients/alice.key"], [0o772], "can be written to .*chmod go-w"),
        ("client", [".", "server.key"], [0o727], "can be written to .*chmod go-w"),
    ],
)
def test_keys_that_others_can_read_or_change_are_refused(
    folder: Path, side: str, names: list[str], modes: list[int], said: str
) -> None:
    for path in (folder / name for name in names):
        before = path.stat().st_mode
        for mode in modes:
            path.chmod(mode)
            with pytest.raises(ConfigError, match=f"{path} {said} {path}"):
                load(side, folder)
        path.chmod(before)
    assert load(side, folder)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"public-key", b'public-key = "short"\n', b"public-key = \n"),
        *(b'public-key = "' + key + b'"\n' for key in (b"~" * 40, b"#" * 40, b"\xff" * 40, b"a" * 39, b"a" * 45)),
    ],
)
@pytest.mark.parametrize("name", ["server.key_secret", "clients/alice.key", "server.key", "clients/alice.key_secret"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} .*damaged"):
        load("server" if name in ("server.key_secret", "clients/alice.key") else "client", folder)


def test_halves_of_two_pairs_are_refused(folder: Path) -> None:
    path = folder / "server.key_secret"
    own, foreign = ServerKeys.load(folder).pair, zmq.curve_keypair()
    for secret in (foreign[1], b"~" * 40):
        path.write_bytes(path.read_bytes().replace(own.secret, secret))
        with pytest.raises(ConfigError, match=r"server.key_secret is damaged: it has no pair of keys"):
            ServerKeys.load(folder)
        own = KeyPair(public=own.public, secret=secret)


def test_a_repr_tells_no_secret(folder: Path) -> None:
    for keys in (ServerKeys.load(folder), ClientKeys.load(folder, "alice")):
        assert keys.pair.secret.decode() not in repr(keys)
        assert keys.pair.public.decode() in repr(keys)


# Who is admitted


def request(mechanism: bytes, *shown: bytes, version: bytes = b"1.0") -> list[bytes]:
    return [version, b"id", b"aioengine", b"127.0.0.1", b"", mechanism, *shown]


CURVE = (b"CURVE", KEY)


@pytest.fixture
def keys() -> ServerKeys:
    """Of a server that admits the key."""
    return ServerKeys(pair=KeyPair(public=b"", secret=b""), clients=frozenset([KEY]))


def status(keys: ServerKeys, frames: list[bytes]) -> str:
    answer = keys.decide(frames)
    assert answer == [b"1.0", *(frames[1:2] or [b""]), answer[2], answer[3], b"", b""]
    return answer[2].decode()


@pytest.mark.parametrize(
    ("expected", "frames"),
    [
        ("400", request(b"PLAIN", b"out", b"secret")),
        ("400", request(b"NULL")),
        ("400", request(b"NULL", KEY)),
        ("400", request(b"CURVE", OTHER_KEY)),
        ("400", request(b"GSSAPI", KEY)),
        ("400", request(b"curve", KEY)),
        ("400", request(b"", KEY)),
        ("500", []),
        ("500", [b""]),
        ("500", [b"1.0", b"id"]),
        ("500", [b"1.0", b"id", b"aioengine", b"127.0.0.1", b""]),
        ("500", request(*CURVE, version=b"2.0")),
        ("500", request(*CURVE, version=b"")),
        ("500", request(*CURVE, version=b"1.0\0")),
        ("500", request(b"CURVE")),
        ("500", request(b"CURVE", KEY[:31])),
        ("500", request(b"CURVE", KEY + b"\0")),
        ("500", request(b"CURVE", z85.encode(KEY))),
        ("500", request(*CURVE, KEY)),
    ],
    ids=str,
)
def test_what_is_wrong_or_malformed_is_refused_and_what_is_right_is_good(
    keys: ServerKeys, expected: str, frames: list[bytes]
) -> None:
    assert status(keys, frames) == expected
    assert status(keys, request(*CURVE)) == status(keys, request(*CURVE)) == "200"


@given(st.lists(st.one_of(st.binary(max_size=64), st.sampled_from([b"1.0", b"CURVE", OTHER_KEY])), max_size=10))
def test_no_frames_admit_anybody_without_a_key(frames: list[bytes]) -> None:
    assert status(ServerKeys(pair=KeyPair(public=b"", secret=b""), clients=frozenset([KEY])), frames) in ("400", "500")


# In front of real sockets

Loaded = tuple[ServerKeys, ClientKeys, ClientKeys]
Context = zmq.Context[zmq.Socket[bytes]]
SetUp = Callable[[zmq.Socket[bytes]], None]


def plain(socket: zmq.Socket[bytes]) -> None:
    socket.plain_username, socket.plain_password = b"out", b"secret"


class Guarded:
    """A PUSH socket that admits those with a key."""

    def __init__(self, context: Context, keys: ServerKeys) -> None:
        self._context = context
        self._keys = keys
        self.socket = context.socket(zmq.PUSH)
        keys.apply_server(self.socket)
        self.socket.bind("tcp://127.0.0.1:*")
        self.close = self.socket.close

    async def answer(self) -> None:
        with closing(Channel(self._context.socket(zmq.ROUTER))) as zap:
            zap.socket.bind(ZAP_ENDPOINT)
            await self._keys.admit(zap)

    async def connect(self, set_up: SetUp) -> zmq.Socket[bytes] | None:
        """The socket of a peer that is admitted; None if it is refused."""
        socket = self._context.socket(zmq.PULL)
        socket.reconnect_ivl = -1
        set_up(socket)
        monitor = Monitor(socket)
        socket.connect(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        await look_until(monitor, lambda: monitor.is_refused or monitor.has_connected)
        monitor.close()
        if monitor.has_connected:
            return socket
        socket.close()
        return None


@pytest.fixture
def loaded(folder: Path) -> Loaded:
    """Of the server, alice, bob; the server does not know bob any more."""
    (folder / "clients" / "bob.key").unlink()
    return ServerKeys.load(folder), ClientKeys.load(folder, "alice"), ClientKeys.load(folder, "bob")


async def test_only_the_one_with_the_right_key_and_the_servers_is_served(context: Context, loaded: Loaded) -> None:
    keys, alice, bob = loaded
    public, secret = zmq.curve_keypair()
    stranger = ClientKeys(server=keys.pair.public, pair=KeyPair(public=public, secret=secret))
    misled = ClientKeys(server=bob.pair.public, pair=alice.pair)
    async with anyio.create_task_group() as tasks:
        guarded = Guarded(context, keys)
        tasks.start_soon(guarded.answer)
        for set_up in (stranger.apply_client, bob.apply_client, misled.apply_client, plain, lambda _: None):
            assert await guarded.connect(set_up) is None
        pull = await guarded.connect(alice.apply_client)
        assert pull is not None
        assert guarded.socket.poll(10_000, zmq.POLLOUT)
        for number in range(10):
            guarded.socket.send(bytes([number]), zmq.DONTWAIT)
        assert [(await asyncio.to_thread(pull.recv))[0] for _ in range(10)] == list(range(10))
        pull.close()
        guarded.close()
        tasks.cancel_scope.cancel()


async def test_nothing_is_admitted_while_no_gate_answers(context: Context, loaded: Loaded) -> None:
    with closing(Guarded(context, loaded[0])) as guarded:
        assert await guarded.connect(loaded[1].apply_client) is None
