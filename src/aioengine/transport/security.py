"""The peers that may connect: CURVE keys in files (RFC 26), and the decision at each connection (ZAP, RFC 27).

The keys of an engine are a folder, made by `aioengine keys`::

    FOLDER/server.key                  public: every client's machine needs it
    FOLDER/server.key_secret           the server's machine only
    FOLDER/clients/NAME.key            public: clients with one here may connect
    FOLDER/clients/NAME.key_secret     that client's machine only
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import zmq
import zmq.auth
from zmq.utils import z85

from aioengine.errors import ConfigError
from aioengine.transport.channel import Channel

ZAP_ENDPOINT = "inproc://zeromq.zap.01"

SERVER = "server"
CLIENTS = "clients"
PUBLIC = ".key"
SECRET = ".key_secret"

_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class KeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """A CURVE key pair, each 40 characters of Z85 (RFC 32). Its repr hides the secret."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"

    @classmethod
    def make(cls) -> Self:
        """A new pair, which is in no file."""
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file with a secret key.

        Raises:
            ConfigError: it is missing or damaged, or can be read by others.
        """
        path = Path(path)
        public, secret = _read(path)
        _check_mode(path, 0o077, "is secret and can be read by others", "chmod 600")
        is_pair = False
        with contextlib.suppress(ValueError, zmq.ZMQError):  # it is no key
            is_pair = secret is not None and zmq.curve_public(secret) == public
        if secret is None or not is_pair:
            raise ConfigError(f"{path} is damaged: it has no pair of keys that belong together; make new ones")
        return cls(public=public, secret=secret)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


class ServerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a server.

    Attributes:
        clients: the public keys of the clients that may connect, each 32 bytes, as ZAP shows them.
    """

    pair: KeyPair
    clients: frozenset[bytes]

    @classmethod
    def admitting(cls, pair: KeyPair, *public: bytes) -> Self:
        """The keys of a server for these clients, whose public keys have 40 characters."""
        return cls(pair=pair, clients=frozenset(map(z85.decode, public)))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Read a folder of `make_keys`. The secret keys of clients are not needed.

        Raises:
            ConfigError: a file is missing or damaged, a secret can be read by others, or there is no client.
        """
        root = Path(folder)
        pair = KeyPair.load(root / f"{SERVER}{SECRET}")
        _check_not_writable(root)
        clients = [_read_public(path) for path in (root / CLIENTS).glob(f"*{PUBLIC}")]
        if not clients:
            raise ConfigError(
                f"{root / CLIENTS} has no client's key, so that no client could connect; make one with "
                f"`aioengine keys {root} --client NAME`, or copy a client's NAME{PUBLIC} there"
            )
        return cls.admitting(pair, *clients)

    def apply_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not bound yet admit these clients only, by `decide`, and none while that is not asked.

        Without ``ZMQ_ZAP_ENFORCE_DOMAIN`` libzmq admits every CURVE key while nothing is bound at `ZAP_ENDPOINT`.
        """
        socket.curve_server = True
        self.pair.apply(socket)
        socket.zap_domain = b"aioengine"
        socket.setsockopt(zmq.SocketOption.ZAP_ENFORCE_DOMAIN, 1)

    def decide(self, frames: Sequence[bytes]) -> list[bytes]:
        """Answer a request at `ZAP_ENDPOINT` without its envelope (https://rfc.zeromq.org/spec/27/); each has one."""
        match frames:
            case [b"1.0", _, _, _, _, b"CURVE", key] if len(key) == _KEY_BYTES:
                status, reason = (b"200", b"OK") if key in self.clients else (b"400", b"credentials refused")
            case [b"1.0", _, _, _, _, mechanism, *_] if mechanism != b"CURVE":
                status, reason = b"400", b"mechanism refused"
            case _:
                status, reason = b"500", b"malformed request"
        return [b"1.0", frames[1] if len(frames) > 1 else b"", status, reason, b"", b""]

    async def admit(self, zap: Channel) -> None:
        """Answer all requests of a context's ROUTER socket at `ZAP_ENDPOINT`."""
        while True:
            for peer, delimiter, *request in await zap.receive():
                zap.send([peer, delimiter, *self.decide(request)])


class ClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a client: the server's public key (40 characters) and its own pair."""

    server: bytes
    pair: KeyPair

    @classmethod
    def load(cls, folder: str | os.PathLike[str], name: str | None = None) -> Self:
        """Read ``server.key`` and one client's secret key; ``name`` may be left out where there is one.

        Raises:
            ConfigError: a file is missing or damaged, a secret can be read by others, or it is not clear which client.
        """
        pair = KeyPair.load(client_secret(folder, name))
        return cls(server=_read_public(Path(folder) / f"{SERVER}{PUBLIC}"), pair=pair)

    def apply_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not connected yet speak to this server only."""
        socket.curve_serverkey = self.server
        self.pair.apply(socket)


def make_keys(folder: str | os.PathLike[str], clients: Sequence[str]) -> list[Path]:
    """Make the server's pair unless it is there, and a pair for each client. → the files that were written.

    Nothing is ever overwritten, and nothing is written where anything is in the way.

    Raises:
        ConfigError: a name cannot be one of a file, a client has a key already, or the folder cannot be written to.
    """
    root = Path(folder)
    for name in clients:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"a client's name has letters, digits, '.', '_' and '-'; {name!r} does not do")
        for path in filter(os.path.lexists, _files(root / CLIENTS, name)):
            raise ConfigError(f"{path} exists and is never overwritten; choose another name, or delete both files")
    servers = [*filter(os.path.lexists, _files(root, SERVER))]
    if len(servers) == 1:
        raise ConfigError(
            f"{root} has {servers[0].name} without the other half of the pair; this may be a client's copy: choose "
            "another folder, or delete it"
        )
    try:
        _make_private(root)
        _make_private(root / CLIENTS)
        written = [] if servers else _make_pair(root, SERVER)
        return written + [path for name in dict.fromkeys(clients) for path in _make_pair(root / CLIENTS, name)]
    except OSError as error:
        raise ConfigError(f"cannot write keys to {root}: {error.strerror} ({error.filename})") from None


def shared_pair(path: str | os.PathLike[str]) -> KeyPair:
    """The pair in a file, which is made unless it is there, with the folder around it.

    Several threads or processes may call this at once: the first pair holds.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    path = Path(path)
    try:
        # Without its parents: a late thread must not make them again after all was removed.
        _make_private(path.parent, parents=False)
        with tempfile.TemporaryDirectory(dir=path.parent) as fresh:
            if not path.exists():
                secret, _ = _make_pair(Path(fresh), path.stem)
                with contextlib.suppress(FileExistsError):  # another one was faster
                    os.link(secret, path)  # a link is there as a whole, since others may be reading
    except OSError as error:
        raise ConfigError(f"cannot write keys to {path}: {error.strerror} ({error.filename})") from None
    return KeyPair.load(path)


def _files(folder: Path, name: str) -> tuple[Path, Path]:
    """The two files of a pair: with the secret, and without it."""
    return folder / f"{name}{SECRET}", folder / f"{name}{PUBLIC}"


def _make_private(folder: Path, *, parents: bool = True) -> None:
    folder.mkdir(mode=0o700, parents=parents, exist_ok=True)
    _check_mode(folder, 0o077, "can be entered by others", "chmod 700")


def _make_pair(folder: Path, name: str) -> list[Path]:
    pair, files = KeyPair.make(), _files(folder, name)
    public = f'metadata\ncurve\n    public-key = "{pair.public.decode()}"\n'  # as zmq.auth reads it
    contents = f'{public}    secret-key = "{pair.secret.decode()}"\n', public
    for path, content, mode in zip(files, contents, (0o600, 0o644), strict=True):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(content)
    return [*files]


def client_secret(folder: str | os.PathLike[str], name: str | None = None) -> Path:
    """The file of a client's secret key in a folder of keys; ``name`` may be left out where there is one client.

    Raises:
        ConfigError: there is no such client, or it is not clear which one.
    """
    root = Path(folder)
    names = [path.stem for path in sorted((root / CLIENTS).glob(f"*{SECRET}"))]
    if name in names or (name is None and len(names) == 1):
        return root / CLIENTS / f"{name or names[0]}{SECRET}"
    there = ", ".join(names) or "none"
    if name is None and names:
        raise ConfigError(f"{root / CLIENTS} has keys for several clients; say which to use: {there}")
    wanted = "a client" if name is None else repr(name)
    raise ConfigError(
        f"{root / CLIENTS} has no secret key for {wanted} (there: {there}); make one with `aioengine keys` where the "
        f"server runs, and copy its NAME{SECRET} here"
    )


def _read_public(path: Path) -> bytes:
    public, _ = _read(path)
    _check_not_writable(path)
    _check_not_writable(path.parent)
    return public


def _check_not_writable(path: Path) -> None:
    """Others that write there could admit themselves, or stand in for the server."""
    _check_mode(path, 0o022, "can be written to by others", "chmod go-w")


def _check_mode(path: Path, forbidden: int, problem: str, remedy: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & forbidden:
        raise ConfigError(f"{path} {problem} (mode {mode:o}); close it: {remedy} {path}")


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError, IndexError) as error:  # the last where a line has no "="
        reason = getattr(error, "strerror", None) or "it is damaged"
        if not path.exists() and path.name == f"{SERVER}{PUBLIC}":
            reason = "copy it from where the server runs"
        elif not path.exists():
            reason = f"make keys with `aioengine keys {path.parent}`, or name the folder that has them"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    try:
        num_bytes = len(z85.decode(public))
    except Exception:  # what it raises depends on the character: KeyError, struct.error, …
        num_bytes = 0
    if num_bytes != _KEY_BYTES:
        raise ConfigError(f"{path} is damaged: its public key is none; copy it again or make new ones")
    return public, secret
