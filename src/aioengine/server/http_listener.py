"""The sockets that servers listen on: TCP, or a Unix socket that only its owner can use; and https's certificate.

Several servers of one port have a socket each, all bound to it (SO_REUSEPORT): the kernel spreads connections evenly,
by their addresses. With one socket for all, the server that wakes first takes whole bursts: of 256 connections at once
four servers had 1, 11, 243 and 1, and with a socket each 60 to 70. The process that has started the servers holds the
sockets, too: connections that a dead server had not accepted wait for the one that is started in its place. Unix
sockets cannot be shared so: all servers have the same one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Annotated, Self

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from aioengine.errors import ConfigError
from aioengine.server.config import ServerConfig
from aioengine.transport.addresses import MAX_SOCKET_PATH_BYTES, check_free, remove_stale

BACKLOG = 2048
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
KEYFILE_PASSWORD_VARIABLE = "AIOENGINE_SSL_KEYFILE_PASSWORD"


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address to serve at, and its certificate."""

    host: Annotated[str, Meta(description="IP address, or name: it is served at each of its addresses")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0: any that is free")] = 8000
    uds: Annotated[str, Meta(description="serve at a Unix socket instead, which only you can use")] | None = None
    ssl_certfile: Annotated[str, Meta(description="serve https with this certificate (PEM and chain)")] | None = None
    ssl_keyfile: Annotated[str, Meta(description="its key (PEM); absent: it is in the same file")] | None = None
    ssl_keyfile_password: Annotated[str, Meta(description=f"the key's; or {KEYFILE_PASSWORD_VARIABLE}")] | None = None


class HttpListener:
    """The sockets of an address to serve at. All methods may block: call them off the loop.

    TCP ports are bound at once, and refuse clients until `listen`: errors come before a model is loaded.

    Args:
        num_servers: servers that are to listen there, each in a process of its own.
    Attributes:
        shares: the sockets of each server; a Unix socket is one share for all.
    Raises:
        ConfigError: the address cannot be bound, or the certificate is not usable.
    """

    def __init__(self, where: ServerAddress, num_servers: int = 1) -> None:
        self.where = where
        self.shares: list[list[socket.socket]] = []
        self._port = where.port
        self._file: tuple[int, int] | None = None
        """Device and inode of the socket's file."""
        self.ssl = _ssl_context(where)
        with self._naming_errors():
            if where.uds is not None:
                _check_path(where.uds)
                return
            self.shares = [_bind_tcp(where.host, where.port, is_shared=False)]
            self._port = self.sockets[0].getsockname()[1]
            try:
                for each in self.sockets if num_servers > 1 else ():
                    # Set after binding: another program's port, shared or not, is refused as it is for one server.
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                for _ in range(1, num_servers):
                    self.shares.append(_bind_tcp(where.host, self._port, is_shared=True))
            except BaseException:
                self.close()
                raise

    @classmethod
    def inherited(cls, where: ServerAddress, descriptors: Sequence[int]) -> Self:
        """One server's share of the sockets that another process holds; for that server. Closing it removes no file.

        Args:
            descriptors: bound sockets, which this process owns from now on.
        """
        listener = cls.__new__(cls)
        listener.where, listener._port, listener._file = where, where.port, None
        listener.shares = [[socket.socket(fileno=each) for each in descriptors]]
        if where.uds is None:
            listener._port = listener.sockets[0].getsockname()[1]
        listener.ssl = _ssl_context(where)
        return listener

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets of the first share."""
        return self.shares[0] if self.shares else []

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Raise ConfigError with the address in place of an OSError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"cannot serve at {self.url}: {error.strerror or error}") from None

    @property
    def url(self) -> str:
        """The address as a client would write it; with the real port once there is one."""
        if self.where.uds is not None:
            return f"unix:{self.where.uds}"
        host = f"[{self.where.host}]" if ":" in self.where.host else self.where.host
        return f"{'http' if self.ssl is None else 'https'}://{host}:{self._port}"

    @property
    def is_local(self) -> bool:
        """No other machine can reach the sockets."""
        addresses = (each.getsockname()[0] for each in self.sockets if each.family != socket.AF_UNIX)
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)

    def with_names(self, config: ServerConfig) -> ServerConfig:
        """The config; a local server without keys and ``allowed_hosts`` allows only the names of this machine.

        Else any page in a browser here could reach the server, by a name of its own that resolves to this machine.
        """
        if config.api_keys or config.allowed_hosts is not None or self.where.uds is not None or not self.is_local:
            return config
        return replace(config, allowed_hosts=tuple(dict.fromkeys((*LOCAL_HOSTS, self.where.host))))

    def bind(self) -> None:
        """Make the Unix socket, if the address is one. All sockets exist then, for other processes to listen on.

        Raises:
            ConfigError: the address was taken meanwhile.
        """
        path = self.where.uds
        if path is None or self.shares:
            return
        with self._naming_errors():
            _check_path(path)
            remove_stale(path)
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.shares = [[made]]
            # Linux makes the file with the socket's own mode: it never has another one.
            os.fchmod(made.fileno(), 0o600)
            made.bind(path)
            self._file = _file_at(path)

    def listen(self) -> None:
        """Listen at the sockets of the first share: clients can connect.

        Raises:
            ConfigError: the address was taken meanwhile.
        """
        self.bind()
        with self._naming_errors():
            for each in self.sockets:
                each.listen(BACKLOG)

    def refuse(self) -> None:
        """Refuse clients at the ports, in all processes that hold the sockets, until one of them listens again.

        The sockets stay bound. Connections not accepted yet are reset. Unix sockets are not changed.
        """
        for share in self.shares:
            for each in share:
                if each.family != socket.AF_UNIX:
                    with contextlib.suppress(OSError):  # it does not listen, or is closed
                        each.shutdown(socket.SHUT_RD)

    def let_go(self) -> None:
        """Close this process's sockets at once; clients are refused when all servers that inherited them have, too.

        Idempotent; to be followed by `close`.
        """
        for share in self.shares:
            for each in share:
                each.close()

    def close(self) -> None:
        """Refuse clients, and remove the socket's file. Idempotent."""
        self.let_go()
        if self.where.uds is not None and self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                if _file_at(self.where.uds) == self._file:  # not one that another server has put there
                    os.unlink(self.where.uds)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file_at(path: str) -> tuple[int, int]:
    """Device and inode."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _bind_tcp(host: str, port: int, *, is_shared: bool) -> list[socket.socket]:
    """One socket for each address of the host, all at the same port.

    Args:
        is_shared: the port is shared with sockets that this process has bound already.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, _, _, address in dict.fromkeys(found):
            # The protocol is named, since asyncio looks at it before it sets TCP_NODELAY.
            made = socket.socket(family, kind, socket.IPPROTO_TCP)
            sockets.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Probe idle clients: one that waits for its answer sends nothing, also if its machine is gone. What the
            # socket accepts inherits these.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, name):
                    made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if port == 0 and len(sockets) > 1:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            if is_shared:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with contextlib.ExitStack() as finding:
                if address[1] == 0:  # found by its number: a port that Linux assigns is lost when listening stops
                    finder = finding.enter_context(socket.socket(family, kind, socket.IPPROTO_TCP))
                    finder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # both may be bound: neither listens
                    finder.bind(address)
                    address = (address[0], finder.getsockname()[1], *address[2:])
                made.bind(address)
    except BaseException:
        for made in sockets:
            made.close()
        raise
    return sockets


def _check_path(path: str) -> None:
    """Raise ConfigError if a Unix socket cannot be made here, or another process serves at it."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"unix:{path}: the path has {num_bytes} bytes; {MAX_SOCKET_PATH_BYTES} are possible")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "you may not write to it" if os.path.isdir(folder) else "it is not there"
        raise ConfigError(f"cannot serve at unix:{path}: no file can be made in {folder}: {why}")
    check_free(path, f"unix:{path}")


def _ssl_context(where: ServerAddress) -> ssl.SSLContext | None:
    if where.ssl_certfile is None:
        if where.ssl_keyfile is not None:
            raise ConfigError("ssl_keyfile is for ssl_certfile: give both, or neither")
        return None
    if where.uds is not None:
        raise ConfigError("TLS is for a port: a Unix socket needs none")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    files = " and ".join(filter(None, (where.ssl_certfile, where.ssl_keyfile)))
    try:
        # A password is never asked for on the terminal, where a service would wait for ever.
        context.load_cert_chain(where.ssl_certfile, where.ssl_keyfile, password=where.ssl_keyfile_password or "")
    except ssl.SSLError as error:
        why = error.reason.lower().replace("_", " ") if error.reason else "unreadable, or its key needs a password"
        raise ConfigError(f"{files}: no certificate and key that fit together: {why}") from None
    except OSError as error:
        raise ConfigError(f"{files}: {error.strerror or error}") from None
    return context
